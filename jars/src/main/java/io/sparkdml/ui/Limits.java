package io.sparkdml.ui;

/** How much of a run is kept: a driver that trains for weeks must not fill up. */
final class Limits {
  static final int POINTS = 2000; // of a curve
  static final int POINTS_OF_RANK = 400;
  static final int RANKS = 4096;
  static final int RANKS_WITH_CURVES = 256;
  static final int LOGGED_NAMES = 40;
  static final int EPOCHS = 2000;
  static final int CHECKPOINTS = 200;
  static final int FAILURES = 50;
  static final int SUBMISSIONS = 100;
  static final int NOTES = 100;
  static final int REPORT_KINDS = 20;
  static final int PLAN_ENTRIES = 100;
  static final int TEXT = 2000;
  static final int TRACEBACK = 16_000;
  static final int OPEN_RUNS = 32; // whose state is held beside the store
  static final int RETAINED_RUNS = 100;
  static final String RETAINED_RUNS_KEY = "spark.sparkdml.ui.retainedRuns";

  private Limits() {}
}
