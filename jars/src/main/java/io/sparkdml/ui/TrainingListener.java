package io.sparkdml.ui;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.Iterator;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.Map;
import java.util.Set;
import org.apache.spark.scheduler.SparkListener;
import org.apache.spark.scheduler.SparkListenerApplicationEnd;
import org.apache.spark.scheduler.SparkListenerEvent;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/** Turns events into runs in the store: at the driver as they come, in the History Server again. */
final class TrainingListener extends SparkListener {
  private static final Logger LOG = LoggerFactory.getLogger(TrainingListener.class);

  private final Runs runs;
  private final boolean live;
  private final TrainingMetrics metrics; // null in the History Server
  private final Runnable afterApplication;
  private final Map<String, RunState> states = new LinkedHashMap<>();
  private boolean complained;

  TrainingListener(Runs runs, boolean live, TrainingMetrics metrics, Runnable afterApplication) {
    this.runs = runs;
    this.live = live;
    this.metrics = metrics;
    this.afterApplication = afterApplication;
  }

  @Override
  public synchronized void onOtherEvent(SparkListenerEvent event) {
    if (!(event instanceof TrainingEvents)) {
      return;
    }
    Set<RunState> changed = new LinkedHashSet<>();
    for (JsonNode told : ((TrainingEvents) event).events) {
      try {
        String id = told.path("run").asText("");
        if (!id.isEmpty()) {
          RunState run = states.computeIfAbsent(Json.cut(id, Limits.TEXT), RunState::new);
          run.apply((int) Json.whole(told, "rank", -1), told);
          changed.add(run);
        }
      } catch (RuntimeException error) {
        complain(error); // the other events of the batch are still good
      }
    }
    for (RunState run : changed) {
      if (live || !run.isOpen()) {
        runs.write(run);
      }
      if (metrics != null) {
        metrics.show(run);
      }
    }
    forgetOld();
  }

  /** Ended runs live on in the store; a few are kept, because a last event may come late. */
  private void forgetOld() {
    Iterator<RunState> oldest = states.values().iterator();
    for (int over = states.size() - Limits.OPEN_RUNS; over > 0 && oldest.hasNext(); over--) {
      RunState run = oldest.next();
      run.abandon();
      runs.write(run);
      oldest.remove();
    }
  }

  private void complain(RuntimeException error) {
    if (!complained) {
      complained = true;
      LOG.warn("A training event could not be read; it is left out of the Training tab", error);
    }
  }

  /** What a replay has held back. */
  synchronized void flush() {
    states.values().forEach(runs::write);
  }

  @Override
  public synchronized void onApplicationEnd(SparkListenerApplicationEnd end) {
    for (RunState run : states.values()) {
      run.abandon();
      runs.write(run);
    }
    states.clear();
    afterApplication.run();
  }
}
