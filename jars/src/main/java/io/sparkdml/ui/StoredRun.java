package io.sparkdml.ui;

import org.apache.spark.util.kvstore.KVIndex;

/** A line of the list of runs in Spark's status store: the JSON that the list's page serves. */
public final class StoredRun {
  @KVIndex public String id;

  @KVIndex("started")
  public long startedMillis;

  public String json;

  /** For the store's reader. */
  public StoredRun() {}

  StoredRun(String id, long startedMillis, String json) {
    this.id = id;
    this.startedMillis = startedMillis;
    this.json = json;
  }
}
