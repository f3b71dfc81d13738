package io.sparkdml.ui;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.stream.Collectors;

/**
 * Events of the kinds that have no drawing of their own, such as those of servers: the newest of each
 * rank, field by field. A kind that a newer sparkdml sends is shown without a change here.
 */
final class Reports {
  private static final Set<String> STAMPS = Set.of("type", "kind", "time", "run", "rank");

  private final Map<String, TreeMap<Integer, ObjectNode>> byKind = new TreeMap<>();

  void add(String kind, int rank, JsonNode event) {
    if (kind.isEmpty() || (byKind.size() >= Limits.REPORT_KINDS && !byKind.containsKey(kind))) {
      return;
    }
    TreeMap<Integer, ObjectNode> reports =
        byKind.computeIfAbsent(Json.cut(kind, Limits.TEXT), name -> new TreeMap<>());
    if (reports.size() >= Limits.RANKS && !reports.containsKey(rank)) {
      return;
    }
    ObjectNode kept = Json.object().put("rank", rank);
    event.properties().forEach(field -> {
      if (!STAMPS.contains(field.getKey()) && kept.size() < Limits.LOGGED_NAMES) {
        put(kept, Json.cut(field.getKey(), Limits.TEXT), field.getValue());
      }
    });
    reports.put(rank, kept);
  }

  /** Numbers stay numbers; all else is text, a mapping as "name: value, …". */
  private static void put(ObjectNode kept, String name, JsonNode value) {
    if (value.isNumber()) {
      Json.put(kept, name, value.asDouble());
    } else if (value.isObject()) {
      String entries =
          value.properties().stream()
              .limit(Limits.LOGGED_NAMES)
              .map(entry -> entry.getKey() + ": " + entry.getValue().asText())
              .collect(Collectors.joining(", "));
      kept.put(name, Json.cut(entries, Limits.TEXT));
    } else {
      kept.put(name, value.isNull() ? null : Json.cut(value.asText(), Limits.TEXT));
    }
  }

  ObjectNode toJson() {
    ObjectNode kinds = Json.object();
    byKind.forEach((kind, reports) -> {
      ArrayNode list = kinds.putArray(kind);
      reports.values().forEach(list::add);
    });
    return kinds;
  }
}
