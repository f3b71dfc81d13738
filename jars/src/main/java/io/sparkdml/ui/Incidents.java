package io.sparkdml.ui;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.ArrayDeque;
import java.util.Deque;

/** What happened to a run besides its steps: submissions, checkpoints, failures, restarts, notes. */
final class Incidents {
  private final Deque<ObjectNode> checkpoints = new ArrayDeque<>();
  private final Deque<ObjectNode> failures = new ArrayDeque<>();
  private final Deque<ObjectNode> restarts = new ArrayDeque<>();
  private final Deque<ObjectNode> submissions = new ArrayDeque<>();
  private final Deque<ObjectNode> notes = new ArrayDeque<>();
  private long checkpointCount;
  private long failureCount;
  long restartCount;

  void checkpoint(double time, JsonNode event) {
    ObjectNode node = Json.object();
    node.put("id", Json.string(event, "id", Limits.TEXT));
    node.put("parent", Json.string(event, "parent", Limits.TEXT));
    Json.put(node, "step", Json.number(event, "step"));
    Json.put(node, "bytes", Json.number(event, "bytes"));
    Json.put(node, "copySeconds", Json.number(event, "copy_seconds"));
    Json.put(node, "writeSeconds", Json.number(event, "write_seconds"));
    node.put("kind", Json.string(event, "ckpt_kind", Limits.TEXT));
    keep(checkpoints, node, time, Limits.CHECKPOINTS);
    checkpointCount++;
  }

  void failure(double time, JsonNode event) {
    ObjectNode node = Json.object();
    Json.put(node, "rank", Json.number(event, "failed_rank"));
    node.put("host", Json.string(event, "host", Limits.TEXT));
    node.put("cause", Json.string(event, "cause", Limits.TEXT));
    node.put("traceback", Json.string(event, "traceback", Limits.TRACEBACK));
    Json.put(node, "step", Json.number(event, "step"));
    keep(failures, node, time, Limits.FAILURES);
    failureCount++;
  }

  void restart(double time, JsonNode event) {
    ObjectNode node = Json.object();
    node.put("cause", Json.string(event, "cause", Limits.TEXT));
    Json.put(node, "fromStep", Json.number(event, "from_step"));
    Json.put(node, "workers", Json.number(event, "workers"));
    keep(restarts, node, time, Limits.SUBMISSIONS);
    restartCount++;
  }

  void note(int rank, double time, JsonNode event) {
    ObjectNode node = Json.object();
    node.put("rank", rank);
    node.put("text", Json.string(event, "text", Limits.TEXT));
    keep(notes, node, time, Limits.NOTES);
  }

  /** The hosts of a submission may come later, under the same number. */
  void submission(double time, JsonNode event) {
    ObjectNode node = Json.object();
    double number = Json.number(event, "number");
    Json.put(node, "number", number);
    Json.put(node, "workers", Json.number(event, "workers"));
    ArrayNode hosts = node.putArray("hosts");
    for (JsonNode host : event.path("hosts")) {
      if (hosts.size() < Limits.RANKS) {
        hosts.add(host.isTextual() ? Json.cut(host.asText(), Limits.TEXT) : null);
      }
    }
    Json.put(node, "fromStep", Json.number(event, "from_step"));
    ObjectNode last = submissions.peekLast();
    if (last != null && Json.number(last, "number") == number) {
      submissions.removeLast();
      time = Json.number(last, "time");
    }
    keep(submissions, node, time, Limits.SUBMISSIONS);
  }

  /** A rank of the newest submission tells where it runs. */
  void joined(int rank, String host) {
    ObjectNode newest = submissions.peekLast();
    if (newest == null || host == null || rank >= Limits.RANKS) {
      return;
    }
    ArrayNode hosts = (ArrayNode) newest.get("hosts");
    while (hosts.size() <= rank) {
      hosts.addNull();
    }
    hosts.set(rank, host);
  }

  private static void keep(Deque<ObjectNode> kept, ObjectNode node, double time, int most) {
    Json.put(node, "time", time);
    kept.addLast(node);
    if (kept.size() > most) {
      kept.removeFirst();
    }
  }

  void writeTo(ObjectNode run) {
    run.putArray("checkpoints").addAll(checkpoints);
    run.put("checkpointCount", checkpointCount);
    run.putArray("failures").addAll(failures);
    run.put("failureCount", failureCount);
    run.putArray("restartEvents").addAll(restarts);
    run.putArray("submissions").addAll(submissions);
    run.putArray("notes").addAll(notes);
  }
}
