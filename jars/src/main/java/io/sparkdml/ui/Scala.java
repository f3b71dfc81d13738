package io.sparkdml.ui;

import java.util.List;
import scala.collection.immutable.Seq;
import scala.jdk.javaapi.CollectionConverters;
import scala.xml.Node;
import scala.xml.Unparsed;

/** What Spark's Scala interfaces want of Java. */
final class Scala {
  private Scala() {}

  static <T> Seq<T> list(T element) {
    return CollectionConverters.asScala(List.of(element)).toSeq();
  }

  /** HTML as it stands: whoever wrote it has escaped what is in it. */
  static Seq<Node> html(String html) {
    return list(new Unparsed(html));
  }
}
