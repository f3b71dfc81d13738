package io.sparkdml.ui;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.Arrays;

/** What one rank has done, and where its time went. */
final class RankState {
  private static final String[] PARTS = {"data", "compute", "communication", "checkpoint", "other"};

  final int rank;
  final Series rowsPerSecondCurve;
  double rowsPerSecond = Double.NaN;
  double stepSeconds = Double.NaN;
  double staleness;
  String host;
  long steps;
  long rows;
  long bytes; // sent to other ranks
  long messages;
  boolean straggler;
  double slower = Double.NaN;
  String why;
  private final double[] seconds = new double[PARTS.length];

  RankState(int rank) {
    this.rank = rank;
    this.rowsPerSecondCurve = rank < Limits.RANKS_WITH_CURVES ? new Series(Limits.POINTS_OF_RANK) : null;
  }

  void add(double time, JsonNode event) {
    long newSteps = Math.max(0, Json.whole(event, "steps", 0));
    long newRows = Math.max(0, Json.whole(event, "rows", 0));
    steps += newSteps;
    rows += newRows;
    bytes += Math.max(0, Json.whole(event, "bytes", 0));
    messages += Math.max(0, Json.whole(event, "messages", 0));
    String told = Json.string(event, "host", Limits.TEXT);
    host = told == null ? host : told;
    staleness = Json.whole(event, "staleness", 0);
    double spent = 0;
    for (int i = 0; i < PARTS.length; i++) {
      double part = Json.number(event.path("seconds"), PARTS[i]);
      if (part > 0) {
        seconds[i] += part;
        spent += part;
      }
    }
    if (spent > 0 && newSteps > 0) {
      stepSeconds = spent / newSteps;
    }
    if (spent > 0) {
      rowsPerSecond = newRows / spent;
      if (rowsPerSecondCurve != null) {
        rowsPerSecondCurve.add(time, rowsPerSecond);
      }
    }
  }

  /** Of its own, without waiting for the others. */
  double workSecondsPerStep() {
    return steps == 0 ? Double.NaN : (seconds[0] + seconds[1]) / steps;
  }

  /** Rates are of the newest report; at the run's end the means of the run say more. */
  void end() {
    double spent = Arrays.stream(seconds).sum();
    if (spent > 0 && steps > 0) {
      rowsPerSecond = rows / spent;
      stepSeconds = spent / steps;
    }
  }

  ObjectNode toJson() {
    ObjectNode node = Json.object();
    node.put("rank", rank);
    node.put("host", host);
    node.put("steps", steps);
    node.put("rows", rows);
    node.put("bytes", bytes);
    node.put("messages", messages);
    Json.put(node, "rowsPerSecond", rowsPerSecond);
    ObjectNode parts = node.putObject("seconds");
    for (int i = 0; i < PARTS.length; i++) {
      Json.put(parts, PARTS[i], Math.rint(seconds[i] * 1e6) / 1e6);
    }
    Json.put(node, "stepSeconds", stepSeconds);
    Json.put(node, "staleness", staleness);
    node.put("straggler", straggler);
    Json.put(node, "slower", slower);
    node.put("why", why);
    return node;
  }
}
