package io.sparkdml.ui;

import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertNull;
import static org.junit.Assert.assertTrue;

import com.fasterxml.jackson.databind.JsonNode;
import org.apache.spark.scheduler.SparkListenerApplicationEnd;
import org.apache.spark.status.ElementTrackingStore;
import org.junit.After;
import org.junit.Test;

public class TrainingListenerTest {
  private final ElementTrackingStore store = Told.store();
  private final Runs runs = new Runs(store, 100);
  private final TrainingListener listener = new TrainingListener(runs, true, null, () -> {});

  @After
  public void close() {
    store.close();
  }

  @Test
  public void runsAreListedTheNewestFirst() {
    listener.onOtherEvent(Told.batch(Told.start("old", 1), Told.start("new", 2)));
    assertEquals("new", runs.list().at("/0/id").asText());
    assertEquals("old", runs.list().at("/1/id").asText());
    assertEquals("Net", runs.detail("old").at("/plan/model").asText());
    assertNull(runs.detail("none"));
    assertNull(runs.detail(null));
  }

  @Test
  public void theOldestRunsAreDropped() {
    for (int i = 0; i < 250; i++) {
      listener.onOtherEvent(Told.batch(Told.start("r" + i, i), Told.end("r" + i, i + 0.5, "finished")));
    }
    assertEquals(100, runs.list().size());
    assertEquals("r249", runs.list().at("/0/id").asText());
    assertNull(runs.detail("r149"));
    assertEquals("finished", runs.detail("r150").get("state").asText());
  }

  @Test
  public void aBadEventLeavesTheOthers() {
    listener.onOtherEvent(TrainingEvents.parse("[17, null, [], {\"kind\":\"steps\"}, {\"run\":\"r\",\"kind\":\"rank\",\"rank\":0}]"));
    assertEquals(1, runs.list().size());
  }

  @Test
  public void aRunThatNeverEndedIsInterruptedWithItsApplication() {
    listener.onOtherEvent(Told.batch(Told.start("r", 1), Told.steps("r", 4, 1, 1, 0.5, 10)));
    listener.onApplicationEnd(new SparkListenerApplicationEnd(5000, scala.Option.empty()));
    JsonNode run = runs.detail("r");
    assertEquals("interrupted", run.get("state").asText());
    assertEquals(3, run.get("seconds").asDouble(), 0);
  }

  @Test
  public void aReplayWritesWhenItIsFlushed() {
    TrainingListener replay = new TrainingListener(runs, false, null, () -> {});
    replay.onOtherEvent(Told.batch(Told.start("r", 1)));
    assertTrue(runs.isEmpty());
    replay.flush();
    assertEquals("starting", runs.detail("r").get("state").asText());
  }

  @Test
  public void metricsFollowTheNewestRunAndForgetOldOnes() {
    TrainingMetrics metrics = new TrainingMetrics();
    TrainingListener measured = new TrainingListener(runs, true, metrics, () -> {});
    for (int i = 0; i < 7; i++) {
      measured.onOtherEvent(
          Told.batch(
              Told.start("r" + i, i),
              Told.steps("r" + i, i, 1, 1, i, 10),
              Told.rank("r" + i, i, 1, 10, 0.5)));
    }
    var gauges = metrics.metricRegistry().getGauges();
    assertEquals(6.0, gauges.get("loss").getValue());
    assertEquals(80.0, gauges.get("rank.1.rowsPerSecond").getValue());
    assertEquals(5.0, gauges.get("run.r5.loss").getValue());
    assertEquals(0.1, gauges.get("run.r5.rank.1.stepSeconds").getValue());
    assertNull(gauges.get("run.r0.loss"));
    assertNull(gauges.get("run.r0.rank.1.stepSeconds"));
  }

  @Test
  public void aHundredThousandBatchesAreQuick() {
    long begun = System.nanoTime();
    listener.onOtherEvent(Told.batch(Told.start("r", 0)));
    TrainingListener replay = new TrainingListener(runs, false, null, () -> {});
    for (int step = 1; step <= 100_000; step++) {
      replay.onOtherEvent(Told.batch(Told.steps("r", step, 1, step, 1.0 / step, step)));
    }
    replay.flush();
    assertTrue(runs.detail("r").at("/series/loss").size() <= 2000);
    double seconds = (System.nanoTime() - begun) / 1e9;
    assertTrue(seconds + " s", seconds < 30);
  }
}
