package io.sparkdml.ui;

import com.fasterxml.jackson.databind.JsonNode;

/** How far a run is, how fast its rows go by, and when it will be done. */
final class Progress {
  private static final double WINDOW_SECONDS = 1.0; // a rate over less is noise

  final Series rowsPerSecond = new Series(Limits.POINTS);
  long epoch;
  long epochs;
  long step;
  double fraction = Double.NaN;
  double secondsLeft = Double.NaN;
  private double rowsOfEpoch; // how many there are in one
  private double rowsDone; // in this epoch
  private double beginTime = Double.NaN; // of this submission
  private double beginFraction;
  private double windowTime = Double.NaN;
  private double windowRows;
  private double lastCount = Double.NaN; // when rows were last counted
  private double countedRows;
  private double countedSeconds;
  private double epochRate = Double.NaN; // as the last epoch told it

  /** A new submission: the time since the last event was no training. */
  void begin() {
    windowTime = Double.NaN;
    lastCount = Double.NaN;
    beginTime = Double.NaN;
    secondsLeft = Double.NaN;
  }

  void steps(double time, JsonNode event) {
    step = Json.whole(event, "step", step);
    double rows = Json.number(event, "rows");
    double of = Json.number(event, "of");
    if (of > 0) {
      rowsOfEpoch = of;
    }
    long now = Json.whole(event, "epoch", epoch);
    double before = now == epoch ? rowsDone : 0;
    epoch = now;
    if (Double.isFinite(rows)) {
      rowsDone = rows;
      count(time, rows - before);
    }
    if (rowsOfEpoch > 0) {
      reach(time, epoch - 1 + Math.min(1, rowsDone / rowsOfEpoch));
    }
  }

  void epochDone(double time, JsonNode row) {
    long done = Json.whole(row, "epoch", epoch);
    double rows = Json.number(row, "rows");
    if (rows > 0) {
      rowsOfEpoch = rows;
      count(time, done == epoch ? rows - rowsDone : rows);
      rowsDone = rows;
    }
    epochRate = Json.number(row, "rows_per_second");
    epoch = done;
    reach(time, done);
  }

  void end(double time, boolean finished) {
    if (Double.isFinite(epochRate) && Double.isNaN(rowsPerSecond.lastValue())) {
      rowsPerSecond.add(time, epochRate); // a run of less than a window
    }
    secondsLeft = Double.NaN;
    if (finished) {
      fraction = 1;
    }
  }

  /** Of the whole run, pauses between submissions left out. */
  double meanRate() {
    return countedSeconds > 0 ? countedRows / countedSeconds : epochRate;
  }

  private void reach(double time, double epochsDone) {
    if (epochs <= 0) {
      return;
    }
    fraction = Math.min(1, epochsDone / epochs);
    if (Double.isNaN(beginTime)) {
      beginTime = time;
      beginFraction = fraction;
    } else if (fraction > beginFraction && time > beginTime) {
      secondsLeft = (time - beginTime) * (1 - fraction) / (fraction - beginFraction);
    }
  }

  private void count(double time, double rows) {
    if (Double.isNaN(windowTime) || rows < 0) {
      lastCount = time;
      windowTime = time; // the rows before it came with a resumed epoch, or an unknown start
      windowRows = 0;
      return;
    }
    countedRows += rows;
    countedSeconds += time - lastCount;
    lastCount = time;
    windowRows += rows;
    if (time - windowTime >= WINDOW_SECONDS) {
      rowsPerSecond.add(time, windowRows / (time - windowTime));
      windowTime = time;
      windowRows = 0;
    }
  }
}
