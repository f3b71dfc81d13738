package io.sparkdml.ui;

import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertFalse;
import static org.junit.Assert.assertThrows;
import static org.junit.Assert.assertTrue;

import org.apache.spark.scheduler.SparkListenerEvent;
import org.apache.spark.util.JsonProtocol;
import org.apache.spark.util.JsonProtocol$;
import org.junit.Test;

public class TrainingEventsTest {
  /** By the code that writes and reads Spark's event log. */
  private static SparkListenerEvent throughTheLog(SparkListenerEvent event) {
    String line = JsonProtocol$.MODULE$.sparkEventToJsonString(event);
    assertTrue(line, line.contains("\"Event\":\"io.sparkdml.ui.TrainingEvents\""));
    return JsonProtocol.sparkEventFromJson(line);
  }

  @Test
  public void eventsComeBackFromTheEventLog() {
    TrainingEvents told =
        Told.batch(
            Told.start("r", 1.25),
            Told.steps("r", 2, 1, 3, 0.1234567890123, 10),
            "'kind':'log','run':'r','values':{'a':null,'<script>':1e-300,'ü':'\\u2028'}");
    TrainingEvents back = (TrainingEvents) throughTheLog(told);
    assertEquals(told.events, back.events);
    assertEquals(TrainingEvents.VERSION, back.version);
    assertTrue(back.logEvent());
  }

  @Test
  public void aNewerLogWithMoreFieldsIsRead() {
    TrainingEvents read =
        (TrainingEvents)
            JsonProtocol.sparkEventFromJson(
                "{\"Event\":\"io.sparkdml.ui.TrainingEvents\",\"version\":9,\"more\":{},\"events\":[{\"kind\":\"x\"}]}");
    assertEquals(1, read.events.size());
  }

  @Test
  public void aTypeNameInAnEventIsOnlyText() {
    TrainingEvents told = TrainingEvents.parse("[{\"@class\":\"java.net.URL\",\"@type\":\"x\",\"Event\":\"y\"}]");
    TrainingEvents back = (TrainingEvents) throughTheLog(told);
    assertEquals("java.net.URL", back.events.get(0).get("@class").asText());
  }

  @Test
  public void onlyListsAreBatches() {
    assertThrows(IllegalArgumentException.class, () -> TrainingEvents.parse("{}"));
    assertThrows(IllegalArgumentException.class, () -> TrainingEvents.parse("[1"));
    assertFalse(TrainingEvents.parse("[]").events.iterator().hasNext());
  }

  @Test
  public void entitiesSurviveTheStoresOnDisk() throws Exception {
    var serializer = new org.apache.spark.util.kvstore.KVStoreSerializer();
    StoredRun run = serializer.deserialize(serializer.serialize(new StoredRun("r", 7, "{}")), StoredRun.class);
    assertEquals("r", run.id);
    assertEquals(7, run.startedMillis);
    StoredDetail detail =
        serializer.deserialize(serializer.serialize(new StoredDetail("r", "{\"a\":1}")), StoredDetail.class);
    assertEquals("{\"a\":1}", detail.json);
  }
}
