package io.sparkdml.ui;

import jakarta.servlet.http.HttpServletRequest;
import org.apache.spark.ui.SparkUI;
import org.apache.spark.ui.SparkUITab;
import org.apache.spark.ui.UIUtils;
import scala.collection.immutable.Seq;
import scala.xml.Node;

/** The tab: its two pages, its JSON and its script, in the live UI or the History Server's. */
final class TrainingTab extends SparkUITab {
  static final String PREFIX = "training";

  private final SparkUI ui;
  private final boolean live;
  private final Assets assets = new Assets();

  TrainingTab(SparkUI ui, Runs runs, boolean live) {
    super(ui, PREFIX);
    this.ui = ui;
    this.live = live;
    attachPage(new RunsPage(this, runs));
    attachPage(new RunPage(this, runs));
  }

  @Override
  public String name() {
    return "Training";
  }

  /** After Spark's own tabs, as the SQL tab is. */
  @Override
  public int displayOrder() {
    return 1;
  }

  void attach() {
    // The handler with the longer path goes first; Spark's own static handler sees no late jar.
    ui.attachHandler(ui.basePath() + "/" + PREFIX + "/static", assets, "/*");
    ui.attachTab(this);
  }

  String address(HttpServletRequest request, String path) {
    return UIUtils.prependBaseUri(request, basePath(), "/" + PREFIX + path);
  }

  /** Spark's header, then what the server knows, for the script to replace and keep fresh. */
  Seq<Node> page(HttpServletRequest request, String title, String kind, String json, String id, String content) {
    String html =
        String.format(
            "<link rel=\"stylesheet\" href=\"%s\"/>"
                + "<div id=\"sparkdml-training\" data-page=\"%s\" data-json=\"%s\" data-runs-page=\"%s\""
                + " data-run-page=\"%s\" data-run-id=\"%s\" data-live=\"%s\">%s</div>"
                + "<script src=\"%s\" defer=\"defer\"></script>",
            Html.escape(asset(request, "training.css")),
            kind,
            Html.escape(address(request, json)),
            Html.escape(address(request, "/")),
            Html.escape(address(request, "/run/")),
            Html.escape(id),
            live,
            content,
            Html.escape(asset(request, "training.js")));
    return SparkFit.page(request, title, Scala.html(html), this);
  }

  private String asset(HttpServletRequest request, String name) {
    return address(request, "/static/" + name + "?v=" + assets.version());
  }
}
