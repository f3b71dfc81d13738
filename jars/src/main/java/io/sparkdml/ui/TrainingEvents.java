package io.sparkdml.ui;

import com.fasterxml.jackson.annotation.JsonIgnoreProperties;
import com.fasterxml.jackson.annotation.JsonProperty;
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import org.apache.spark.scheduler.SparkListenerEvent;

/**
 * A batch of training events on Spark's listener bus, and so in the event log. One event a batch,
 * because the log is flushed after each.
 *
 * <p>The events are plain JSON trees: nothing in them names a Java class, so that a text from
 * elsewhere can't choose what is made of it.
 */
@JsonIgnoreProperties(ignoreUnknown = true)
public final class TrainingEvents implements SparkListenerEvent {
  static final int VERSION = 1;

  @JsonProperty("version")
  public int version = VERSION;

  @JsonProperty("events")
  public ArrayNode events = Json.array();

  /** For the reader of event logs. */
  public TrainingEvents() {}

  TrainingEvents(ArrayNode events) {
    this.events = events;
  }

  /** From the text of a JSON list of events. */
  static TrainingEvents parse(String text) {
    JsonNode parsed = Json.parse(text);
    if (!parsed.isArray()) {
      throw new IllegalArgumentException("a batch must be a JSON list of events, not " + parsed.getNodeType());
    }
    return new TrainingEvents((ArrayNode) parsed);
  }

  @Override
  public boolean logEvent() {
    return true;
  }
}
