package io.sparkdml.ui;

import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertFalse;
import static org.junit.Assert.assertTrue;

import com.fasterxml.jackson.databind.node.DoubleNode;
import com.fasterxml.jackson.databind.node.NullNode;
import org.junit.Test;

public class HtmlTest {
  private static final String EVIL = "<script>alert('\"&')</script>";

  @Test
  public void whatTheUserNamedIsEscaped() {
    assertEquals("&lt;script&gt;alert(&#39;&quot;&amp;&#39;)&lt;/script&gt;", Html.escape(EVIL));
    RunState run = new RunState(EVIL);
    run.apply(-1, Json.object().put("kind", "run-start").put("name", EVIL).put("strategy", EVIL).put("time", 1));
    String table = RunsPage.table(run.summary());
    assertFalse(table, table.contains("<script"));
    assertTrue(table, table.contains("&lt;script&gt;"));
  }

  @Test
  public void whatSparkEscapedComesBack() {
    for (String text : new String[] {EVIL, "&lt;", "&amp;lt;", "plain"}) {
      assertEquals(text, Html.unescape(Html.escape(text)));
    }
  }

  @Test
  public void idsInAddressesAreEncoded() {
    assertEquals("%3Cscript%3E%22%26+%27", Html.query("<script>\"& '"));
  }

  @Test
  public void durationsAreReadable() {
    assertEquals("59 s", Html.duration(DoubleNode.valueOf(59.4)));
    assertEquals("2 min 05 s", Html.duration(DoubleNode.valueOf(125)));
    assertEquals("3 h 01 min", Html.duration(DoubleNode.valueOf(3 * 3600 + 60)));
    assertEquals("", Html.duration(NullNode.instance));
  }

  @Test
  public void thisSparkFitsAndAnotherIsFoundOut() {
    SparkFit.check();
    assertFalse(SparkFit.has("org.apache.spark.ui.UIUtils", "prependBaseUri", 7));
    assertFalse(SparkFit.has("org.apache.spark.ui.Gone", "x", 0));
  }

  @Test
  public void aTextIsCutInTheMiddle() {
    String cut = Json.cut("a".repeat(100) + "z".repeat(100), 40);
    assertEquals(43, cut.length());
    assertTrue(cut.startsWith("aaaaaaaaaa …") && cut.endsWith("z".repeat(30)));
  }
}
