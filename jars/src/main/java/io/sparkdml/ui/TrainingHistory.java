package io.sparkdml.ui;

import org.apache.spark.SparkConf;
import org.apache.spark.scheduler.SparkListener;
import org.apache.spark.status.AppHistoryServerPlugin;
import org.apache.spark.status.ElementTrackingStore;
import org.apache.spark.ui.SparkUI;
import scala.collection.immutable.Seq;
import scala.runtime.BoxedUnit;

/** The tab in the History Server, from the event log of an application. */
public final class TrainingHistory implements AppHistoryServerPlugin {
  @Override
  public Seq<SparkListener> createListeners(SparkConf conf, ElementTrackingStore store) {
    Runs runs = new Runs(store, conf.getInt(Limits.RETAINED_RUNS_KEY, Limits.RETAINED_RUNS));
    TrainingListener listener = new TrainingListener(runs, false, null, () -> {});
    store.onFlush(
        () -> {
          listener.flush();
          return BoxedUnit.UNIT;
        });
    return Scala.list(listener);
  }

  /** Applications that trained nothing get no tab. */
  @Override
  public void setupUI(SparkUI ui) {
    Runs runs = new Runs(ui.store().store(), Limits.RETAINED_RUNS);
    if (!runs.isEmpty()) {
      new TrainingTab(ui, runs, false).attach();
    }
  }
}
