package io.sparkdml.ui;

import jakarta.servlet.http.HttpServletRequest;
import java.lang.reflect.Method;
import java.util.Arrays;
import org.apache.spark.SparkContext;
import org.apache.spark.ui.SparkUITab;
import org.apache.spark.ui.UIUtils;
import scala.Function0;
import scala.Option;
import scala.collection.immutable.Seq;
import scala.xml.Node;

/**
 * Are the parts of Spark that this jar needs as it knows them? They are not public, and another
 * version may have others. Found out before anything is attached, not by a page that fails; where
 * versions differ in a way that is known, both are served.
 */
final class SparkFit {
  private static final String[][] NEEDED = {
    {"org.apache.spark.ui.UIUtils", "prependBaseUri", "3"},
    {"org.apache.spark.ui.WebUI", "attachTab", "1"},
    {"org.apache.spark.ui.WebUI", "attachHandler", "3"},
    {"org.apache.spark.ui.WebUIPage", "renderJson", "1"},
    {"org.apache.spark.ui.SparkUI", "basePath", "0"},
    {"org.apache.spark.scheduler.LiveListenerBus", "addToStatusQueue", "1"},
    {"org.apache.spark.status.ElementTrackingStore", "onFlush", "1"},
    {"org.apache.spark.metrics.MetricsSystem", "registerSource", "1"},
    {"org.json4s.jackson.JsonMethods$", "fromJsonNode", "1"},
    {"jakarta.servlet.http.HttpServletRequest", "getParameter", "1"},
  };

  private SparkFit() {}

  static void check() {
    headerMethod();
    for (String[] needed : NEEDED) {
      if (!has(needed[0], needed[1], Integer.parseInt(needed[2]))) {
        throw new UnsupportedOperationException(
            String.format("this Spark has no %s.%s as sparkdml-ui.jar knows it", needed[0], needed[1]));
      }
    }
  }

  /** Its last parameters are switches, all of them off by default; 4.1 has two, 4.3 three. */
  private static Method headerMethod() {
    Class<?>[] known = {HttpServletRequest.class, String.class, Function0.class, SparkUITab.class, Option.class};
    for (Method method : UIUtils.class.getMethods()) {
      Class<?>[] types = method.getParameterTypes();
      if (method.getName().equals("headerSparkPage")
          && types.length >= known.length
          && Arrays.equals(Arrays.copyOf(types, known.length), known)
          && Arrays.stream(types).skip(known.length).allMatch(type -> type == boolean.class)) {
        return method;
      }
    }
    throw new UnsupportedOperationException(
        "this Spark has no org.apache.spark.ui.UIUtils.headerSparkPage as sparkdml-ui.jar knows it");
  }

  /** A page with Spark's header around the content. */
  @SuppressWarnings("unchecked") // what the method has returned since Spark 2
  static Seq<Node> page(HttpServletRequest request, String title, Seq<Node> content, SparkUITab tab) {
    Method method = headerMethod();
    Object[] arguments = new Object[method.getParameterCount()];
    Arrays.fill(arguments, false);
    arguments[0] = request;
    arguments[1] = title;
    arguments[2] = (Function0<Seq<Node>>) () -> content;
    arguments[3] = tab;
    arguments[4] = Option.empty();
    try {
      return (Seq<Node>) method.invoke(null, arguments);
    } catch (ReflectiveOperationException error) {
      throw new IllegalStateException("Spark could not make the page's header", error);
    }
  }

  static boolean has(String type, String method, int parameters) {
    try {
      Class<?> found = Class.forName(type, false, SparkContext.class.getClassLoader());
      return Arrays.stream(found.getMethods())
          .anyMatch(each -> each.getName().equals(method) && each.getParameterCount() == parameters);
    } catch (ClassNotFoundException | LinkageError error) {
      return false;
    }
  }
}
