package io.sparkdml.ui;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.Iterator;
import java.util.Map;
import java.util.TreeMap;
import java.util.function.ObjDoubleConsumer;

/**
 * One run as its events tell it. The listener's thread writes, the metrics' threads read: hence the
 * locks.
 */
final class RunState {
  static final String EVALUATOR = "evaluator/"; // before the names of what an evaluator measured

  final String id;
  final Progress progress = new Progress();
  final Ranks ranks = new Ranks();
  private final Incidents incidents = new Incidents();
  private final Reports reports = new Reports();
  private final Series losses = new Series(Limits.POINTS);
  private final Map<String, Series> logged = new TreeMap<>();
  private final TreeMap<Long, ObjectNode> epochRows = new TreeMap<>();
  private final ObjectNode settings = Json.object(); // as run-start gave them
  private ObjectNode plan = Json.object();
  private String state = "starting";
  private String cause;
  private JsonNode stopped;
  private long workers;
  private double loss = Double.NaN; // the mean of the epoch
  private double valLoss = Double.NaN;
  private double started = Double.NaN;
  private double ended = Double.NaN;
  private double seconds = Double.NaN;
  private double lastTime = Double.NaN;

  RunState(String id) {
    this.id = id;
  }

  synchronized void apply(int rank, JsonNode event) {
    double time = Json.number(event, "time");
    if (Double.isFinite(time)) {
      lastTime = Double.isNaN(lastTime) ? time : Math.max(lastTime, time);
      started = Double.isNaN(started) ? time : started;
    }
    switch (event.path("kind").asText()) {
      case "run-start" -> start(event);
      case "submission" -> submit(time, event);
      case "steps" -> steps(time, event);
      case "rank" -> rank(rank, time, event);
      case "epoch" -> epoch(time, event.path("row"));
      case "checkpoint" -> incidents.checkpoint(time, event);
      case "failure" -> incidents.failure(time, event);
      case "restart" -> restart(time, event);
      case "topology" -> settings.put("topology", Json.string(event, "used", Limits.TEXT));
      case "note" -> incidents.note(rank, time, event);
      case "log" -> log("", rank, event);
      case "evaluation" -> log(EVALUATOR, 0, event);
      case "already-trained" -> progress.step = Json.whole(event, "step", progress.step);
      case "run-end" -> end(event);
      default -> reports.add(event.path("kind").asText(), rank, event);
    }
  }

  private void start(JsonNode event) {
    for (String field : new String[] {"name", "strategy", "backend"}) {
      settings.put(field, Json.string(event, field, Limits.TEXT));
    }
    Json.put(settings, "batchSize", Json.number(event, "batch_size"));
    Json.put(settings, "globalBatch", Json.number(event, "global_batch"));
    Json.put(settings, "seed", Json.number(event, "seed"));
    workers = Json.whole(event, "workers", 0);
    progress.epochs = Json.whole(event, "epochs", 0);
    plan = Json.object();
    Iterator<String> names = event.path("plan").fieldNames();
    while (names.hasNext() && plan.size() < Limits.PLAN_ENTRIES) {
      String name = names.next();
      plan.put(Json.cut(name, Limits.TEXT), Json.string(event.path("plan"), name, Limits.TEXT));
    }
  }

  private void submit(double time, JsonNode event) {
    workers = Json.whole(event, "workers", workers);
    if (event.has("backend")) { // now that the number of workers is known
      settings.put("backend", Json.string(event, "backend", Limits.TEXT));
    }
    incidents.submission(time, event);
    ranks.hosts(event.path("hosts"));
    if (!"running".equals(state)) { // the hosts of a running submission may come late
      progress.begin();
      goBack(event);
    }
  }

  private void restart(double time, JsonNode event) {
    state = "restarting";
    incidents.restart(time, event);
    progress.begin();
    goBack(event);
  }

  /** Steps after the one that the run goes on from are done again: the first ones must not stay. */
  private void goBack(JsonNode event) {
    double from = Json.number(event, "from_step");
    if (from >= 0) {
      losses.forgetAfter(from);
      logged.values().forEach(series -> series.forgetAfter(from));
    }
  }

  private void steps(double time, JsonNode event) {
    run();
    progress.steps(time, event);
    for (JsonNode point : event.path("losses")) {
      losses.add(point.path(0).asDouble(), value(point.path(1)));
    }
    loss = Json.number(event, "loss");
  }

  private void rank(int rank, double time, JsonNode event) {
    begin();
    RankState told = ranks.of(rank);
    if (told != null) {
      told.add(time, event);
      incidents.joined(rank, told.host);
      ranks.compare();
    }
  }

  private void epoch(double time, JsonNode row) {
    run();
    progress.epochDone(time, row);
    long epoch = Json.whole(row, "epoch", progress.epoch);
    ObjectNode kept = Json.object();
    kept.put("epoch", epoch);
    kept.put("step", progress.step);
    row.properties().forEach(field -> {
      if (field.getValue().isNumber() && kept.size() < Limits.LOGGED_NAMES) {
        Json.put(kept, Json.cut(field.getKey(), Limits.TEXT), field.getValue().asDouble());
      } else if (field.getValue().isNull()) {
        kept.putNull(Json.cut(field.getKey(), Limits.TEXT));
      }
    });
    epochRows.put(epoch, kept);
    if (epochRows.size() > Limits.EPOCHS) {
      // Every second row goes, never the first or the last.
      Iterator<Long> epochs = epochRows.navigableKeySet().iterator();
      for (boolean keep = true; epochs.hasNext(); keep = !keep) {
        long number = epochs.next();
        if (!keep && number != epoch) {
          epochs.remove();
        }
      }
    }
    loss = Json.number(row, "loss");
    valLoss = Json.number(row, "val_loss");
  }

  /** A function with a loop of its own tells no steps: its values are counted instead. */
  private void log(String prefix, int rank, JsonNode event) {
    begin();
    long told = Json.whole(event, "step", progress.step);
    event.path("values").properties().forEach(field -> {
      String name = prefix + Json.cut(field.getKey(), Limits.TEXT) + (rank > 0 ? " [" + rank + "]" : "");
      if (logged.size() < Limits.LOGGED_NAMES || logged.containsKey(name)) {
        Series series = logged.computeIfAbsent(name, key -> new Series(Limits.POINTS));
        series.add(told > 0 ? told : series.added() + 1, value(field.getValue()));
      }
    });
  }

  private void end(JsonNode event) {
    String outcome = Json.string(event, "outcome", Limits.TEXT);
    cause = Json.string(event, "cause", Limits.TEXT);
    stopped = event.get("stopped");
    if (event.path("stragglers").isArray()) {
      ranks.judge(event.path("stragglers"));
    }
    finish(outcome == null ? "finished" : outcome, Json.number(event, "seconds"));
  }

  private void finish(String outcome, double told) {
    state = outcome;
    ended = lastTime;
    seconds = Double.isFinite(told) ? told : lastTime - started;
    ranks.all().forEach(RankState::end);
    progress.end(lastTime, "finished".equals(outcome) && progress.epoch >= progress.epochs);
  }

  /** The application has ended, and the run never said how. */
  synchronized void abandon() {
    if (isOpen()) {
      finish("interrupted", Double.NaN);
    }
  }

  /** Something is done, though not by a new submission: a late word of a dead one may come too. */
  private void begin() {
    if ("starting".equals(state)) {
      state = "running";
    }
  }

  private void run() {
    if (isOpen()) {
      state = "running";
    }
  }

  private static double value(JsonNode value) {
    return value.isNumber() ? value.asDouble() : Double.NaN;
  }

  synchronized boolean isOpen() {
    return Double.isNaN(ended);
  }

  synchronized long startedMillis() {
    return Double.isNaN(started) ? 0 : (long) (started * 1000);
  }

  /** The numbers that Spark's metrics system gets. */
  synchronized double metric(Metric metric) {
    return metric.ofRun(loss, incidents.restartCount, progress, ranks);
  }

  synchronized double metric(Metric metric, int rank) {
    RankState told = ranks.of(rank);
    return told == null ? Double.NaN : metric.ofRank(told);
  }

  synchronized int[] rankNumbers() {
    return ranks.all().stream().mapToInt(told -> told.rank).toArray();
  }

  synchronized ObjectNode summary() {
    ObjectNode node = Json.object();
    node.put("id", id);
    node.put("name", settings.path("name").asText(id));
    node.put("state", state);
    node.put("strategy", settings.path("strategy").textValue());
    node.put("backend", settings.path("backend").textValue());
    node.put("topology", settings.path("topology").textValue());
    node.put("workers", workers);
    node.put("epoch", progress.epoch);
    node.put("epochs", progress.epochs);
    node.put("step", progress.step);
    ObjDoubleConsumer<String> put = (field, value) -> Json.put(node, field, value);
    put.accept("progress", progress.fraction);
    put.accept("secondsLeft", progress.secondsLeft);
    put.accept("loss", loss);
    put.accept("valLoss", valLoss);
    put.accept("rowsPerSecond", isOpen() ? progress.rowsPerSecond.lastValue() : progress.meanRate());
    put.accept("started", started);
    put.accept("ended", ended);
    put.accept("seconds", isOpen() ? lastTime - started : seconds);
    node.put("restarts", incidents.restartCount);
    node.put("cause", cause);
    return node;
  }

  synchronized ObjectNode detail() {
    ObjectNode node = summary();
    for (String field : new String[] {"batchSize", "globalBatch", "seed"}) {
      node.set(field, settings.path(field).isMissingNode() ? node.nullNode() : settings.get(field));
    }
    node.set("stopped", stopped == null ? node.nullNode() : stopped);
    ObjectNode series = node.putObject("series");
    series.set("loss", losses.toJson());
    series.set("rowsPerSecond", progress.rowsPerSecond.toJson());
    series.set("rankRowsPerSecond", ranks.curves());
    ObjectNode values = series.putObject("logged");
    logged.forEach((name, curve) -> values.set(name, curve.toJson()));
    ArrayNode rows = series.putArray("epochs");
    epochRows.values().forEach(rows::add);
    node.set("ranks", ranks.toJson());
    node.set("reports", reports.toJson());
    incidents.writeTo(node);
    node.set("plan", plan);
    return node;
  }
}
