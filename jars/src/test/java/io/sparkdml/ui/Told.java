package io.sparkdml.ui;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.Arrays;
import org.apache.spark.SparkConf;
import org.apache.spark.status.ElementTrackingStore;
import org.apache.spark.util.kvstore.InMemoryStore;

/** Events as a driver tells them, and a store to keep them in. */
final class Told {
  private Told() {}

  /** Single quotes, for readable tests. */
  static JsonNode event(String fields) {
    return Json.parse("{" + fields.replace('\'', '"') + "}");
  }

  static TrainingEvents batch(String... events) {
    return TrainingEvents.parse(
        Arrays.stream(events).map(each -> event(each).toString()).toList().toString());
  }

  static String start(String run, double time) {
    return String.format(
        "'kind':'run-start','run':'%s','time':%s,'name':'%s','strategy':'Ring()','backend':'torch',"
            + "'workers':2,'epochs':4,'batch_size':8,'global_batch':16,'seed':1,'plan':{'model':'Net'}",
        run, time, run);
  }

  static String steps(String run, double time, int epoch, int step, double loss, int rows) {
    return String.format(
        "'kind':'steps','run':'%s','time':%s,'rank':0,'epoch':%d,'step':%d,'losses':[[%d,%s]],"
            + "'rows':%d,'of':100,'loss':%s",
        run, time, epoch, step, step, loss, rows, loss);
  }

  static String rank(String run, double time, int rank, int steps, double compute) {
    return String.format(
        "'kind':'rank','run':'%s','time':%s,'rank':%d,'host':'h%d','steps':%d,'rows':%d,"
            + "'seconds':{'data':0.0,'compute':%s,'communication':0.5,'checkpoint':0,'other':0}",
        run, time, rank, rank, steps, steps * 8, compute);
  }

  static String end(String run, double time, String outcome) {
    return String.format(
        "'kind':'run-end','run':'%s','time':%s,'outcome':'%s','cause':null,'seconds':9.5,'stopped':null",
        run, time, outcome);
  }

  static ElementTrackingStore store() {
    return new ElementTrackingStore(new InMemoryStore(), new SparkConf(false));
  }
}
