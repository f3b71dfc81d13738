"""A Spark application with its UI on, told of a run that never was; prints what the UI serves.

Run as a process of its own: the session that the tests share has no UI, and a JVM keeps a jar.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import warnings
from typing import Any

from pyspark.sql import SparkSession

from sparkdml.observe.observers import Observers
from sparkdml.observe.spark_ui import SparkUi

EVIL = "<script>alert('x')</script>"
RUN = "run-1 <&>"


def get(address: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(address, timeout=20) as answer:
            return {"status": answer.status, "text": answer.read().decode()}
    except urllib.error.HTTPError as error:
        return {"status": error.code, "text": ""}


def tell(spark: SparkSession, run: str, outcome: str | None = "finished") -> None:
    observers = Observers([SparkUi(spark)], run=run)
    plan = {f"plan{EVIL}": EVIL}
    observers.handle(
        -1,
        {"kind": "run-start", "name": EVIL, "strategy": EVIL, "backend": "torch", "workers": 2}
        | {"epochs": 1, "batch_size": 8, "global_batch": 16, "seed": 3, "plan": plan},
    )
    submission = {"number": 1, "workers": 2, "hosts": [EVIL, "b"], "from_step": 0}
    observers.handle(-1, {"kind": "submission", **submission})
    for step in range(1, 201):
        loss = float("nan") if step == 50 else 1 / step
        told = {"epoch": 1, "step": step, "losses": [[step, loss]], "rows": step * 16, "of": 3200}
        observers.handle(0, {"kind": "steps", "loss": 0.5, **told})
        for rank in (0, 1):
            seconds = {"data": 0.01, "compute": 0.02 * (rank + 1), "communication": 0.01}
            told = {"steps": 1, "rows": 8, "host": EVIL, "seconds": seconds}
            observers.handle(rank, {"kind": "rank", **told})
    failure = {"failed_rank": 1, "host": EVIL, "cause": EVIL, "traceback": EVIL, "step": 9}
    observers.handle(-1, {"kind": "failure", **failure})
    observers.handle(0, {"kind": "log", "values": {EVIL: 2.5}, "step": 7})
    row = {"epoch": 1, "loss": 0.25, "val_loss": float("inf"), "rows": 3200, "steps": 200}
    observers.handle(0, {"kind": "epoch", "row": row})
    if outcome is not None:
        end = {"outcome": outcome, "cause": None, "seconds": 1.5}
        observers.handle(-1, {"kind": "run-end", **end})
    observers.close()


def wait_for(address: str, state: str) -> dict[str, Any]:
    """The listener bus is asynchronous: what was posted is shown a moment later."""
    for _ in range(600):
        answer: dict[str, Any] = json.loads(get(address)["text"])
        if answer["runs"] and answer["runs"][0]["state"] == state:
            return answer
        time.sleep(0.1)
    raise TimeoutError(f"no run became {state}: {answer}")


def session(log: str) -> SparkSession:
    prometheus = "spark.metrics.conf.*.sink.prometheusServlet"
    return (
        SparkSession.builder.master("local[1]")
        .appName("training-tab")
        .config("spark.ui.port", "0")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1")
        .config("spark.eventLog.enabled", "true")
        .config("spark.eventLog.dir", f"file://{log}")
        .config("spark.eventLog.rolling.enabled", "false")  # a file that a test can edit
        .config("spark.eventLog.compress", "false")
        .config(f"{prometheus}.class", "org.apache.spark.metrics.sink.PrometheusServlet")
        .config(f"{prometheus}.path", "/metrics/prometheus")
        .getOrCreate()
    )


def main(log: str) -> None:
    told: dict[str, Any] = {}
    spark = session(log)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tell(spark, RUN)
        base = str(spark.sparkContext.uiWebUrl)
        told["list"] = wait_for(f"{base}/training/json/", "finished")
        tell(spark, "second", outcome="failed")  # a second run in the same application
        wait_for(f"{base}/training/json/", "failed")
        tell(spark, "open", outcome=None)  # its driver is lost before the run ends
        wait_for(f"{base}/training/json/", "running")
        query = urllib.parse.quote(RUN)
        told["detail"] = json.loads(get(f"{base}/training/run/json/?id={query}")["text"])
        told["unknown"] = json.loads(get(f"{base}/training/run/json/?id=none")["text"])
        for name, path in {
            "runs page": "/training/",
            "run page": f"/training/run/?id={query}",
            "unknown page": f"/training/run/?id={urllib.parse.quote(EVIL)}",
            "script": "/training/static/training.js",
            "style": "/training/static/training.css",
            "other file": "/training/static/%2e%2e/TrainingUi.class",
            "no file": "/training/static/none.js",
            "metrics": "/metrics/prometheus/",
            "jobs page": "/jobs/",
        }.items():
            told[name] = get(base + path)
        told["application"] = spark.sparkContext.applicationId
        spark.stop()
        spark = session(log)  # another application in the same JVM has a tab of its own
        tell(spark, "other")
        told["other application"] = wait_for(
            f"{spark.sparkContext.uiWebUrl}/training/json/", "finished"
        )
        spark.stop()
        told["warnings"] = [str(each.message) for each in caught if "Training" in str(each.message)]
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
