package io.sparkdml.ui;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.Collection;
import java.util.TreeMap;

/** All ranks of a run, and which of them hold the others up. */
final class Ranks {
  private static final double STRAGGLER_RATIO = 1.25;
  private static final int STEPS_TO_JUDGE = 10;

  private final TreeMap<Integer, RankState> byNumber = new TreeMap<>();
  private boolean judged; // by the run itself, which saw more than the sums

  Collection<RankState> all() {
    return byNumber.values();
  }

  RankState of(int rank) {
    if (rank < 0 || (byNumber.size() >= Limits.RANKS && !byNumber.containsKey(rank))) {
      return null;
    }
    return byNumber.computeIfAbsent(rank, RankState::new);
  }

  void hosts(JsonNode hosts) {
    for (int rank = 0; rank < hosts.size(); rank++) {
      RankState state = of(rank);
      if (state != null && hosts.path(rank).isTextual()) {
        state.host = Json.cut(hosts.path(rank).asText(), Limits.TEXT);
      }
    }
  }

  /** Compares each rank's own work a step with that of the others in the middle. */
  void compare() {
    if (judged) {
      return;
    }
    double[] sorted =
        byNumber.values().stream()
            .filter(state -> state.steps >= STEPS_TO_JUDGE)
            .mapToDouble(RankState::workSecondsPerStep)
            .sorted()
            .toArray();
    for (RankState state : byNumber.values()) {
      state.slower = Double.NaN;
      state.straggler = false;
      if (sorted.length >= 2 && state.steps >= STEPS_TO_JUDGE) {
        // The lower middle: of two ranks, the slower is compared with the other, not with a mean.
        double ratio = state.workSecondsPerStep() / sorted[(sorted.length - 1) / 2];
        state.straggler = ratio >= STRAGGLER_RATIO;
        state.slower = state.straggler && Double.isFinite(ratio) ? ratio : Double.NaN;
      }
    }
  }

  void judge(JsonNode stragglers) {
    judged = true;
    for (RankState state : byNumber.values()) {
      state.straggler = false;
      state.slower = Double.NaN;
    }
    for (JsonNode told : stragglers) {
      RankState state = of((int) Json.whole(told, "rank", -1));
      if (state != null) {
        state.straggler = true;
        state.slower = Json.number(told, "slower");
        state.why = Json.string(told, "why", Limits.TEXT);
      }
    }
  }

  double stepSeconds() {
    return byNumber.values().stream()
        .mapToDouble(state -> state.stepSeconds)
        .filter(Double::isFinite)
        .average()
        .orElse(Double.NaN);
  }

  double staleness() {
    return byNumber.values().stream().mapToDouble(state -> state.staleness).max().orElse(0);
  }

  ArrayNode toJson() {
    ArrayNode list = Json.array();
    byNumber.values().forEach(state -> list.add(state.toJson()));
    return list;
  }

  ObjectNode curves() {
    ObjectNode curves = Json.object();
    byNumber.values().stream()
        .filter(state -> state.rowsPerSecondCurve != null)
        .forEach(state -> curves.set(Integer.toString(state.rank), state.rowsPerSecondCurve.toJson()));
    return curves;
  }
}
