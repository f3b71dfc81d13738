package io.sparkdml.ui;

import java.util.Map;
import org.apache.spark.SparkContext;
import org.apache.spark.api.plugin.DriverPlugin;
import org.apache.spark.api.plugin.ExecutorPlugin;
import org.apache.spark.api.plugin.PluginContext;
import org.apache.spark.api.plugin.SparkPlugin;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/** {@code spark.plugins=io.sparkdml.ui.TrainingPlugin}: the tab from the application's start. */
public final class TrainingPlugin implements SparkPlugin {
  private static final Logger LOG = LoggerFactory.getLogger(TrainingPlugin.class);

  @Override
  public DriverPlugin driverPlugin() {
    return new Driver();
  }

  /** Executors have no part in it. */
  @Override
  public ExecutorPlugin executorPlugin() {
    return null;
  }

  private static final class Driver implements DriverPlugin {
    private SparkContext context;

    @Override
    public Map<String, String> init(SparkContext context, PluginContext plugin) {
      this.context = context;
      return Map.of();
    }

    /** Only now: the names of metrics begin with the application's id, which init is too early for. */
    @Override
    public void registerMetrics(String applicationId, PluginContext plugin) {
      try {
        TrainingUi.attach(context);
      } catch (RuntimeException | LinkageError error) {
        LOG.warn("No Training tab: {}", error.toString()); // an application must start without it
      }
    }
  }
}
