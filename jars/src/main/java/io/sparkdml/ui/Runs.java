package io.sparkdml.ui;

import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.NoSuchElementException;
import org.apache.spark.util.kvstore.KVStore;
import org.apache.spark.util.kvstore.KVStoreIterator;

/** The runs in Spark's status store: live in memory, on disk in the History Server. */
final class Runs {
  private final KVStore store;
  private final int retained;

  Runs(KVStore store, int retained) {
    this.store = store;
    this.retained = Math.max(1, retained);
  }

  void write(RunState run) {
    try {
      store.write(new StoredRun(run.id, run.startedMillis(), Json.text(run.summary())));
      store.write(new StoredDetail(run.id, Json.text(run.detail())));
      for (long over = store.count(StoredRun.class) - retained; over > 0; over--) {
        StoredRun oldest = oldest();
        store.delete(StoredRun.class, oldest.id);
        store.delete(StoredDetail.class, oldest.id);
      }
    } catch (Exception error) {
      throw new IllegalStateException("Spark's status store refused run " + run.id, error);
    }
  }

  private StoredRun oldest() throws Exception {
    try (KVStoreIterator<StoredRun> runs =
        store.view(StoredRun.class).index("started").closeableIterator()) {
      return runs.next();
    }
  }

  boolean isEmpty() {
    try {
      return store.count(StoredRun.class) == 0;
    } catch (Exception error) {
      throw new IllegalStateException(error);
    }
  }

  /** The newest first. */
  ArrayNode list() {
    ArrayNode list = Json.array();
    try (KVStoreIterator<StoredRun> runs =
        store.view(StoredRun.class).index("started").reverse().closeableIterator()) {
      while (runs.hasNext()) {
        list.add(Json.parse(runs.next().json));
      }
    } catch (RuntimeException error) {
      throw error;
    } catch (Exception error) {
      throw new IllegalStateException(error);
    }
    return list;
  }

  /** Null where there is no such run, or no longer. */
  ObjectNode detail(String id) {
    if (id == null) {
      return null;
    }
    try {
      return (ObjectNode) Json.parse(store.read(StoredDetail.class, id).json);
    } catch (NoSuchElementException error) {
      return null;
    } catch (RuntimeException error) {
      throw error;
    } catch (Exception error) {
      throw new IllegalStateException(error);
    }
  }
}
