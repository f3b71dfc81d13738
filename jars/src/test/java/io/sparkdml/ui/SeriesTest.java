package io.sparkdml.ui;

import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertTrue;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import java.util.stream.StreamSupport;
import org.junit.Test;

public class SeriesTest {
  private static double[] values(ArrayNode points) {
    return StreamSupport.stream(points.spliterator(), false)
        .filter(point -> !point.get(1).isNull())
        .mapToDouble(point -> point.get(1).asDouble())
        .toArray();
  }

  @Test
  public void fewPointsStayAsTheyAre() {
    Series series = new Series(100);
    series.add(1, 0.5);
    series.add(2, 0.25);
    assertEquals("[[1,0.5],[2,0.25]]", series.toJson().toString());
  }

  @Test
  public void aMillionPointsAreBoundedAndKeepTheirExtremesAndTheLast() {
    Series series = new Series(2000);
    for (int step = 1; step <= 1_000_000; step++) {
      double value = 1.0 / step + 0.001 * Math.sin(step);
      series.add(step, step == 654_321 ? 77 : step == 123_456 ? -5 : value);
    }
    ArrayNode points = series.toJson();
    assertTrue(points.size() + " points", points.size() <= 2000 && points.size() >= 900);
    double[] values = values(points);
    assertEquals(77, java.util.Arrays.stream(values).max().getAsDouble(), 0);
    assertEquals(-5, java.util.Arrays.stream(values).min().getAsDouble(), 0);
    assertEquals(1_000_000, points.get(points.size() - 1).get(0).asInt());
  }

  @Test
  public void stepsAscend() {
    Series series = new Series(50);
    for (int step = 1; step <= 997; step++) {
      series.add(step, Math.sin(step * 0.7));
    }
    double before = -1;
    for (JsonNode point : series.toJson()) {
      assertTrue(point.get(0).asDouble() > before);
      before = point.get(0).asDouble();
    }
  }

  @Test
  public void aLossThatIsNotFiniteIsNullAndSurvivesThinning() {
    Series series = new Series(20);
    for (int step = 1; step <= 5000; step++) {
      series.add(step, step == 1234 ? Double.NaN : 1);
    }
    long broken =
        StreamSupport.stream(series.toJson().spliterator(), false)
            .filter(point -> point.get(1).isNull() && point.get(0).asInt() == 1234)
            .count();
    assertEquals(1, broken);
    assertTrue(series.toJson().size() <= 20);
  }

  @Test
  public void valuesBeyondAFloatStayNumbers() {
    Series series = new Series(10);
    series.add(1, 1e300);
    assertEquals(1e300, series.toJson().get(0).get(1).asDouble(), 0);
  }

  @Test
  public void stepsDoneAgainReplaceTheFirst() {
    Series series = new Series(100);
    for (int step = 1; step <= 10; step++) {
      series.add(step, 1);
    }
    series.forgetAfter(6);
    assertEquals(6, series.toJson().size());
    series.add(7, 2);
    assertEquals("[7,2.0]", series.toJson().get(6).toString());
  }
}
