package io.sparkdml.ui;

import com.fasterxml.jackson.databind.node.ArrayNode;
import java.util.ArrayList;
import java.util.List;

/**
 * A curve of bounded size, whatever is put into it.
 *
 * <p>Points go into buckets that keep their least and greatest value. When all buckets are full,
 * neighbours are merged and each holds twice as many points from then on. So a spike of one step in
 * a million stays visible.
 */
final class Series {
  private static final class Bucket {
    int count;
    double firstX;
    double lastX;
    double lastY;
    double leastX;
    double leastY = Double.POSITIVE_INFINITY;
    double greatestX;
    double greatestY = Double.NEGATIVE_INFINITY;
    double brokenX = Double.NaN; // where a value was not finite

    void add(double x, double y) {
      if (count == 0) {
        firstX = x;
      }
      count++;
      lastX = x;
      lastY = y;
      if (!Double.isFinite(y)) {
        brokenX = x;
        return;
      }
      if (y < leastY) {
        leastX = x;
        leastY = y;
      }
      if (y > greatestY) {
        greatestX = x;
        greatestY = y;
      }
    }

    void merge(Bucket later) {
      count += later.count;
      lastX = later.lastX;
      lastY = later.lastY;
      if (!Double.isNaN(later.brokenX)) {
        brokenX = later.brokenX;
      }
      if (later.leastY < leastY) {
        leastX = later.leastX;
        leastY = later.leastY;
      }
      if (later.greatestY > greatestY) {
        greatestX = later.greatestX;
        greatestY = later.greatestY;
      }
    }

    /** At most two points. */
    void write(ArrayNode points) {
      boolean finite = leastY <= greatestY;
      if (!Double.isNaN(brokenX)) {
        if (finite && greatestX < brokenX) {
          Json.addPoint(points, greatestX, greatestY);
        }
        Json.addPoint(points, brokenX, Double.NaN);
        if (finite && greatestX > brokenX) {
          Json.addPoint(points, greatestX, greatestY);
        }
      } else if (leastX == greatestX) {
        Json.addPoint(points, leastX, leastY);
      } else if (leastX < greatestX) {
        Json.addPoint(points, leastX, leastY);
        Json.addPoint(points, greatestX, greatestY);
      } else {
        Json.addPoint(points, greatestX, greatestY);
        Json.addPoint(points, leastX, leastY);
      }
    }
  }

  private final int mostBuckets;
  private final List<Bucket> buckets = new ArrayList<>();
  private int pointsPerBucket = 1;
  private long added;

  Series(int mostPoints) {
    if (mostPoints < 8) {
      throw new IllegalArgumentException("mostPoints must be at least 8 but got " + mostPoints);
    }
    // Two points a bucket, and one more for the last point itself.
    this.mostBuckets = (mostPoints - 1) / 2;
  }

  void add(double x, double y) {
    added++;
    Bucket last = buckets.isEmpty() ? null : buckets.get(buckets.size() - 1);
    if (last == null || last.count >= pointsPerBucket) {
      if (buckets.size() == mostBuckets) {
        halve();
        last = buckets.get(buckets.size() - 1);
      }
      if (last == null || last.count >= pointsPerBucket) {
        last = new Bucket();
        buckets.add(last);
      }
    }
    last.add(x, y);
  }

  private void halve() {
    int kept = 0;
    for (int i = 0; i < buckets.size(); i += 2) {
      Bucket bucket = buckets.get(i);
      if (i + 1 < buckets.size()) {
        bucket.merge(buckets.get(i + 1));
      }
      buckets.set(kept++, bucket);
    }
    buckets.subList(kept, buckets.size()).clear();
    pointsPerBucket *= 2;
  }

  /** Forgets what lies wholly after x: those steps are done again. */
  void forgetAfter(double x) {
    while (!buckets.isEmpty() && buckets.get(buckets.size() - 1).firstX > x) {
      buckets.remove(buckets.size() - 1);
    }
  }

  long added() {
    return added;
  }

  double lastValue() {
    return buckets.isEmpty() ? Double.NaN : buckets.get(buckets.size() - 1).lastY;
  }

  ArrayNode toJson() {
    ArrayNode points = Json.array();
    buckets.forEach(bucket -> bucket.write(points));
    if (!buckets.isEmpty()) {
      Bucket last = buckets.get(buckets.size() - 1);
      if (points.get(points.size() - 1).get(0).asDouble() < Math.rint(last.lastX * 1000) / 1000) {
        Json.addPoint(points, last.lastX, last.lastY);
      }
    }
    return points;
  }
}
