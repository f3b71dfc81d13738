package io.sparkdml.ui;

import com.fasterxml.jackson.databind.JsonNode;
import java.net.URLEncoder;
import java.nio.charset.StandardCharsets;
import java.time.Instant;
import java.time.ZoneId;
import java.time.format.DateTimeFormatter;
import java.util.Locale;

/** Writes text, numbers and tables into HTML. Every name of a user passes through {@link #escape}. */
final class Html {
  private static final DateTimeFormatter TIME =
      DateTimeFormatter.ofPattern("yyyy/MM/dd HH:mm:ss").withZone(ZoneId.systemDefault());

  private Html() {}

  static String escape(String text) {
    StringBuilder safe = new StringBuilder(text.length() + 16);
    for (int i = 0; i < text.length(); i++) {
      char c = text.charAt(i);
      switch (c) {
        case '&' -> safe.append("&amp;");
        case '<' -> safe.append("&lt;");
        case '>' -> safe.append("&gt;");
        case '"' -> safe.append("&quot;");
        case '\'' -> safe.append("&#39;");
        default -> safe.append(c);
      }
    }
    return safe.toString();
  }

  static String unescape(String html) {
    return html.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"").replace("&#39;", "'")
        .replace("&amp;", "&");
  }

  static String query(String text) {
    return URLEncoder.encode(text, StandardCharsets.UTF_8);
  }

  static String table(String[] heads, Iterable<String[]> rows) {
    StringBuilder html = new StringBuilder();
    html.append("<table class=\"table table-bordered table-sm table-striped\"><thead><tr>");
    for (String head : heads) {
      html.append("<th>").append(escape(head)).append("</th>");
    }
    html.append("</tr></thead><tbody>");
    for (String[] row : rows) {
      html.append("<tr>");
      for (String cell : row) {
        html.append("<td>").append(cell).append("</td>"); // escaped already: a cell may be a link
      }
      html.append("</tr>");
    }
    return html.append("</tbody></table>").toString();
  }

  static String text(JsonNode value) {
    return value == null || value.isNull() || value.isMissingNode() ? "" : escape(value.asText());
  }

  static String number(JsonNode value, String format) {
    return value != null && value.isNumber() ? String.format(Locale.ROOT, format, value.asDouble()) : "";
  }

  static String time(JsonNode value) {
    return value != null && value.isNumber()
        ? TIME.format(Instant.ofEpochMilli((long) (value.asDouble() * 1000)))
        : "";
  }

  static String duration(JsonNode value) {
    if (value == null || !value.isNumber()) {
      return "";
    }
    long seconds = Math.round(value.asDouble());
    if (seconds < 60) {
      return seconds + " s";
    }
    return seconds < 3600
        ? String.format("%d min %02d s", seconds / 60, seconds % 60)
        : String.format("%d h %02d min", seconds / 3600, seconds / 60 % 60);
  }
}
