package io.sparkdml.ui;

/** The numbers of a run, and of each of its ranks, that go into Spark's metrics system. */
enum Metric {
  LOSS("loss", false),
  ROWS_PER_SECOND("rowsPerSecond", true),
  STEP_SECONDS("stepSeconds", true),
  STALENESS("staleness", true),
  RESTARTS("restarts", false);

  final String label;
  final boolean perRank;

  Metric(String label, boolean perRank) {
    this.label = label;
    this.perRank = perRank;
  }

  double ofRun(double loss, long restarts, Progress progress, Ranks ranks) {
    return switch (this) {
      case LOSS -> loss;
      case ROWS_PER_SECOND -> progress.rowsPerSecond.lastValue();
      case STEP_SECONDS -> ranks.stepSeconds();
      case STALENESS -> ranks.staleness();
      case RESTARTS -> restarts;
    };
  }

  double ofRank(RankState rank) {
    return switch (this) {
      case ROWS_PER_SECOND -> rank.rowsPerSecond;
      case STEP_SECONDS -> rank.stepSeconds;
      case STALENESS -> rank.staleness;
      case LOSS, RESTARTS -> throw new IllegalArgumentException(label + " is not counted per rank");
    };
  }
}
