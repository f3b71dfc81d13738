package io.sparkdml.ui;

import java.util.IdentityHashMap;
import java.util.Map;
import org.apache.spark.SparkContext;
import org.apache.spark.scheduler.LiveListenerBus;
import org.apache.spark.status.ElementTrackingStore;

/**
 * Attaches the Training tab, its listener and its metrics to a running SparkContext, once, and posts
 * events to it. Works by late attachment from Python as well as from {@link TrainingPlugin}.
 */
public final class TrainingUi {
  private static final Map<SparkContext, TrainingUi> ATTACHED = new IdentityHashMap<>();

  private final LiveListenerBus bus;
  private final String address;

  private TrainingUi(LiveListenerBus bus, String address) {
    this.bus = bus;
    this.address = address;
  }

  /** The same object for the same context. Fails, having changed nothing, on a Spark that differs. */
  public static TrainingUi attach(SparkContext context) {
    synchronized (ATTACHED) {
      if (context.isStopped()) {
        throw new IllegalStateException("the SparkContext is stopped");
      }
      TrainingUi attached = ATTACHED.get(context);
      if (attached == null) {
        attached = make(context);
        ATTACHED.put(context, attached);
      }
      return attached;
    }
  }

  private static TrainingUi make(SparkContext context) {
    SparkFit.check();
    ElementTrackingStore store = (ElementTrackingStore) context.statusStore().store();
    Runs runs = new Runs(store, context.conf().getInt(Limits.RETAINED_RUNS_KEY, Limits.RETAINED_RUNS));
    TrainingMetrics metrics = new TrainingMetrics();
    LiveListenerBus bus = context.listenerBus();
    TrainingTab tab = context.ui().isEmpty() ? null : new TrainingTab(context.ui().get(), runs, true);
    bus.addToStatusQueue(new TrainingListener(runs, true, metrics, () -> forget(context)));
    context.env().metricsSystem().registerSource(metrics);
    if (tab == null) {
      return new TrainingUi(bus, null); // the event log and the metrics are still there
    }
    tab.attach();
    return new TrainingUi(bus, context.ui().get().webUrl() + "/training/");
  }

  private static void forget(SparkContext context) {
    synchronized (ATTACHED) {
      ATTACHED.remove(context);
    }
  }

  /** Posts a JSON list of events; returns before they are shown. */
  public void post(String events) {
    bus.post(TrainingEvents.parse(events));
  }

  /** Where the tab is; null where the UI is switched off. */
  public String address() {
    return address;
  }
}
