package io.sparkdml.ui;

import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.JsonNodeFactory;
import com.fasterxml.jackson.databind.node.ObjectNode;

/** Reads fields that may be missing or of another type than expected, and writes finite numbers. */
final class Json {
  private static final ObjectMapper MAPPER = new ObjectMapper();

  private Json() {}

  static ObjectNode object() {
    return JsonNodeFactory.instance.objectNode();
  }

  static ArrayNode array() {
    return JsonNodeFactory.instance.arrayNode();
  }

  static JsonNode parse(String text) {
    try {
      return MAPPER.readTree(text);
    } catch (JsonProcessingException error) {
      throw new IllegalArgumentException("not JSON: " + error.getOriginalMessage(), error);
    }
  }

  static String text(JsonNode node) {
    try {
      return MAPPER.writeValueAsString(node);
    } catch (JsonProcessingException error) {
      throw new IllegalStateException(error);
    }
  }

  /** A number, or NaN where there is none. */
  static double number(JsonNode event, String field) {
    JsonNode value = event.get(field);
    return value != null && value.isNumber() ? value.asDouble() : Double.NaN;
  }

  static long whole(JsonNode event, String field, long otherwise) {
    JsonNode value = event.get(field);
    return value != null && value.isNumber() ? value.asLong() : otherwise;
  }

  /** The field's text, cut; null where there is none. */
  static String string(JsonNode event, String field, int limit) {
    JsonNode value = event.get(field);
    if (value == null || value.isNull()) {
      return null;
    }
    return cut(value.isTextual() ? value.asText() : value.toString(), limit);
  }

  /** Cut in the middle: of a traceback both ends matter, the last lines the most. */
  static String cut(String text, int limit) {
    if (text.length() <= limit) {
      return text;
    }
    int head = limit / 4;
    return text.substring(0, head) + " … " + text.substring(text.length() - (limit - head));
  }

  static void put(ObjectNode node, String field, double value) {
    if (!Double.isFinite(value)) {
      node.putNull(field);
    } else if (isWhole(value)) {
      node.put(field, (long) value);
    } else {
      node.put(field, value);
    }
  }

  /** A value on an axis or of a curve: seven digits of a value are enough, of a time they are not. */
  static void addPoint(ArrayNode points, double x, double y) {
    ArrayNode point = points.addArray();
    if (isWhole(x)) {
      point.add((long) x);
    } else {
      point.add(Math.rint(x * 1000) / 1000);
    }
    if (!Double.isFinite(y)) {
      point.addNull();
    } else if (Math.abs(y) < Float.MAX_VALUE) {
      point.add((float) y);
    } else {
      point.add(y);
    }
  }

  private static boolean isWhole(double value) {
    return value == Math.rint(value) && Math.abs(value) < 1e15;
  }
}
