package io.sparkdml.ui;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import jakarta.servlet.http.HttpServletRequest;
import java.util.ArrayList;
import java.util.List;
import org.apache.spark.ui.WebUIPage;
import org.json4s.JValue;
import org.json4s.jackson.JsonMethods$;
import scala.collection.immutable.Seq;
import scala.xml.Node;

/** {@code /training/}: the list of runs. */
final class RunsPage extends WebUIPage {
  private static final String[] HEADS = {
    "Run", "State", "Strategy", "Backend", "Topology", "Workers", "Epoch", "Progress", "Time left", "Loss", "Samples/s", "Started", "Duration"
  };

  private final TrainingTab tab;
  private final Runs runs;

  RunsPage(TrainingTab tab, Runs runs) {
    super("");
    this.tab = tab;
    this.runs = runs;
  }

  @Override
  public Seq<Node> render(HttpServletRequest request) {
    List<String[]> rows = new ArrayList<>();
    for (JsonNode run : runs.list()) {
      String page = tab.address(request, "/run/?id=" + Html.query(run.path("id").asText()));
      rows.add(cells(run, "<a href=\"" + Html.escape(page) + "\">" + Html.text(run.get("name")) + "</a>"));
    }
    String content = rows.isEmpty() ? "<p>No run has started yet.</p>" : Html.table(HEADS, rows);
    return tab.page(request, "Training Runs", "runs", "/json/", "", content);
  }

  /** A line of the table; the run's own page shows the same line. */
  static String table(JsonNode run) {
    return Html.table(HEADS, List.<String[]>of(cells(run, Html.text(run.get("name")))));
  }

  private static String[] cells(JsonNode run, String name) {
    double progress = run.path("progress").asDouble(Double.NaN);
    return new String[] {
      name,
      Html.text(run.get("state")),
      Html.text(run.get("strategy")),
      Html.text(run.get("backend")),
      Html.text(run.get("topology")),
      Html.text(run.get("workers")),
      Html.text(run.get("epoch")) + " / " + Html.text(run.get("epochs")),
      run.path("progress").isNumber() ? Math.round(progress * 100) + "%" : "",
      Html.duration(run.get("secondsLeft")),
      Html.number(run.get("loss"), "%.4g"),
      Html.number(run.get("rowsPerSecond"), "%,.0f"),
      Html.time(run.get("started")),
      Html.duration(run.get("seconds")),
    };
  }

  @Override
  public JValue renderJson(HttpServletRequest request) {
    ObjectNode node = Json.object();
    node.set("runs", runs.list());
    return JsonMethods$.MODULE$.fromJsonNode(node);
  }
}
