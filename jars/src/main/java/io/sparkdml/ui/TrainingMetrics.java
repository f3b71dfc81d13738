package io.sparkdml.ui;

import com.codahale.metrics.Gauge;
import com.codahale.metrics.MetricRegistry;
import java.util.ArrayDeque;
import java.util.Deque;
import org.apache.spark.metrics.source.Source;

/**
 * Gauges in Spark's metrics system, so for each sink that it has.
 *
 * <p>{@code sparkdml.loss}, {@code sparkdml.rank.0.rowsPerSecond} and so on follow the newest run:
 * names that a dashboard can hold on to. {@code sparkdml.run.<id>.…} are those of one run, for as
 * long as it is among the newest few.
 */
final class TrainingMetrics implements Source {
  private static final int RUNS = 4;

  private final MetricRegistry registry = new MetricRegistry();
  private final Deque<RunState> shown = new ArrayDeque<>();
  private volatile RunState newest;

  TrainingMetrics() {
    for (Metric metric : Metric.values()) {
      registry.register(metric.label, gauge(() -> newest == null ? Double.NaN : newest.metric(metric)));
    }
  }

  @Override
  public String sourceName() {
    return "sparkdml";
  }

  @Override
  public MetricRegistry metricRegistry() {
    return registry;
  }

  /** Called again for each batch: a rank may have been seen for the first time. */
  synchronized void show(RunState run) {
    if (!shown.contains(run)) {
      shown.addLast(run);
      newest = run;
      for (Metric metric : Metric.values()) {
        registry.register(name(run, metric.label), gauge(() -> run.metric(metric)));
      }
      if (shown.size() > RUNS) {
        String gone = name(shown.removeFirst(), "");
        registry.removeMatching((name, metric) -> name.startsWith(gone));
      }
    }
    for (int rank : run.rankNumbers()) {
      for (Metric metric : Metric.values()) {
        if (metric.perRank && rank < Limits.RANKS_WITH_CURVES) {
          String label = "rank." + rank + "." + metric.label;
          registerOnce(name(run, label), gauge(() -> run.metric(metric, rank)));
          registerOnce(label, gauge(() -> newest.metric(metric, rank)));
        }
      }
    }
  }

  private void registerOnce(String name, Gauge<Double> gauge) {
    if (!registry.getNames().contains(name)) {
      registry.register(name, gauge);
    }
  }

  private static String name(RunState run, String label) {
    return "run." + run.id.replaceAll("[^A-Za-z0-9_-]", "_") + "." + label;
  }

  private static Gauge<Double> gauge(Gauge<Double> gauge) {
    return gauge;
  }
}
