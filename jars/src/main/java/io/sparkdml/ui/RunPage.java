package io.sparkdml.ui;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import jakarta.servlet.http.HttpServletRequest;
import java.util.ArrayList;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Set;
import org.apache.spark.ui.WebUIPage;
import org.json4s.JValue;
import org.json4s.jackson.JsonMethods$;
import scala.collection.immutable.Seq;
import scala.xml.Node;

/** {@code /training/run/?id=…}: one run. Readable without the script, which draws the curves. */
final class RunPage extends WebUIPage {
  private final TrainingTab tab;
  private final Runs runs;

  RunPage(TrainingTab tab, Runs runs) {
    super("run");
    this.tab = tab;
    this.runs = runs;
  }

  @Override
  public Seq<Node> render(HttpServletRequest request) {
    String id = requested(request);
    ObjectNode run = runs.detail(id);
    String json = "/run/json/?id=" + Html.query(id == null ? "" : id);
    if (run == null) {
      String content = "<p>" + Html.escape(missing(id)) + "</p>";
      return tab.page(request, "Training Run", "missing", json, id == null ? "" : id, content);
    }
    String content =
        RunsPage.table(run)
            + section("Epochs", epochs(run.path("series").path("epochs")))
            + section("Failures", failures(run.path("failures")))
            + section("Plan", plan(run.path("plan")));
    return tab.page(request, "Training Run: " + run.path("name").asText(), "run", json, id, content);
  }

  /** Spark escapes each parameter before a page sees it; the id in the store is as the run has it. */
  private static String requested(HttpServletRequest request) {
    String id = request.getParameter("id");
    return id == null ? null : Html.unescape(id);
  }

  private static String section(String title, String table) {
    return table.isEmpty() ? "" : "<h4>" + title + "</h4>" + table;
  }

  private static String epochs(JsonNode epochs) {
    Set<String> names = new LinkedHashSet<>();
    epochs.forEach(row -> row.fieldNames().forEachRemaining(names::add));
    List<String[]> rows = new ArrayList<>();
    for (JsonNode row : epochs) {
      rows.add(names.stream().map(name -> cell(row.get(name))).toArray(String[]::new));
    }
    return rows.isEmpty() ? "" : Html.table(names.toArray(String[]::new), rows);
  }

  private static String cell(JsonNode value) {
    return value != null && value.isIntegralNumber() ? Html.text(value) : Html.number(value, "%.5g");
  }

  private static String failures(JsonNode failures) {
    List<String[]> rows = new ArrayList<>();
    for (JsonNode failure : failures) {
      rows.add(
          new String[] {
            Html.time(failure.get("time")),
            Html.text(failure.get("rank")),
            Html.text(failure.get("host")),
            Html.text(failure.get("step")),
            Html.text(failure.get("cause")),
            "<pre>" + Html.text(failure.get("traceback")) + "</pre>"
          });
    }
    String[] heads = {"Time", "Rank", "Host", "Step", "Cause", "Traceback"};
    return rows.isEmpty() ? "" : Html.table(heads, rows);
  }

  private static String plan(JsonNode plan) {
    List<String[]> rows = new ArrayList<>();
    plan.properties()
        .forEach(
            entry -> rows.add(new String[] {Html.escape(entry.getKey()), Html.text(entry.getValue())}));
    return rows.isEmpty() ? "" : Html.table(new String[] {"Name", "Value"}, rows);
  }

  private static String missing(String id) {
    return id == null
        ? "Which run? The address needs ?id=…, as the list of runs has it."
        : "There is no run " + id + " here, or no longer: only the newest are kept ("
            + Limits.RETAINED_RUNS_KEY + ").";
  }

  @Override
  public JValue renderJson(HttpServletRequest request) {
    String id = requested(request);
    ObjectNode run = runs.detail(id);
    if (run == null) {
      run = Json.object().put("error", missing(id));
    }
    return JsonMethods$.MODULE$.fromJsonNode(run);
  }
}
