package io.sparkdml.ui;

import org.apache.spark.util.kvstore.KVIndex;

/** A whole run in Spark's status store, apart from its line, so that a list reads no curves. */
public final class StoredDetail {
  @KVIndex public String id;

  public String json;

  /** For the store's reader. */
  public StoredDetail() {}

  StoredDetail(String id, String json) {
    this.id = id;
    this.json = json;
  }
}
