"""The job of the Spark Connect test, in a process of its own: one by one, what users would do.

Writes what it found to a file of JSON, for the test to judge.
"""

import contextlib
import json
import os
import sys
import time
import traceback
import warnings
from functools import partial
from pathlib import Path

import torch
from torch import nn

import sparkdml as dml
from sparkdml.runtime.driver.cluster import connect


def regression(spark, num_rows=200):
    return spark.range(num_rows).selectExpr(
        "id",
        "array(cast(id % 7 as float), cast(id % 3 as float)) as features",
        "cast(id % 7 as double) as label",
    )


def estimator(**params):
    defaults = {
        "model": partial(nn.Linear, 2, 1),
        "loss": nn.MSELoss(),
        "optimizer": partial(torch.optim.SGD, lr=0.02),
        "numWorkers": 2,
        "epochs": 3,
        "verbose": 0,
    }
    return dml.TorchEstimator(**{**defaults, **params})


def message_of(action):
    """The kind and the words of the error that an action raises."""
    try:
        action()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


def fit_and_use(spark, folder):
    rows = regression(spark)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted = estimator().fit(rows)
    path = f"{folder}/model"
    fitted.write().overwrite().save(path)
    loaded = dml.TorchModel.load(path)
    predicted = fitted.transform(rows).orderBy("id").select("prediction").toPandas()
    again = loaded.transform(rows).orderBy("id").select("prediction").toPandas()
    return {
        "losses": [row["loss"] for row in fitted.history],
        "rows": fitted.history[0]["rows"],
        "weights": [p.flatten().tolist() for p in fitted.module.parameters()],
        "predicted": len(predicted),
        "loaded_alike": predicted.equals(again),
        "evaluated": fitted.evaluate(rows),
        "warnings": [str(warning.message) for warning in caught],
        "overwrite": message_of(lambda: fitted.write().save(path)),
    }


def run_with_data(spark, folder):
    def body(ctx):
        own = sum(batch.num_rows for batch in ctx.feed(16))
        total = ctx.comm.allreduce_(torch.tensor([float(own)])).item()
        return ctx.rank, total

    return {
        "rows": dml.run(body, regression(spark), 2),
        "none": dml.run(lambda ctx: ctx.size, num_workers=2, spark=spark),
    }


def checkpointed(spark, folder):
    path = f"file:{folder}/run"
    whole = estimator(checkpoint=path).fit(regression(spark))
    again = estimator(checkpoint=path).fit(regression(spark))
    return [whole.module.weight.tolist(), again.module.weight.tolist()]


def errors(spark, folder):
    rows = regression(spark)
    nulls = rows.selectExpr("features", "if(id = 7, null, label) as label")

    def raises(ctx):
        if ctx.rank == 1:
            raise KeyError("from rank 1")
        ctx.comm.barrier()

    found = {
        "no workers": message_of(lambda: dml.run(lambda ctx: 0, spark=spark)),
        "rdd": message_of(lambda: dml.run(lambda ctx: 0, [1, 2, 3], 2, spark=spark)),
        "too many": message_of(lambda: estimator(numWorkers=9).fit(rows)),
        "nulls": message_of(lambda: estimator().fit(nulls)),
        "no rows": message_of(lambda: estimator().fit(rows.filter("id < 0"))),
        "in a worker": message_of(lambda: dml.run(raises, num_workers=2, spark=spark)),
        "gpu": message_of(lambda: estimator(gpusPerWorker=1).fit(rows)),
        "hdfs": message_of(lambda: estimator(checkpoint="hdfs://x/y").fit(rows)),
        "save to hdfs": message_of(lambda: estimator().save("hdfs://x/y")),
    }
    spark.conf.set("spark.sparkdml.driver.host", "192.0.2.77")
    found["not ours"] = message_of(lambda: estimator().fit(rows))
    spark.conf.unset("spark.sparkdml.driver.host")
    with unanswered():
        found["unreachable"] = message_of(lambda: estimator().fit(rows))
    return found


@contextlib.contextmanager
def unanswered():
    """The client listens, but no process has the address that workers are told."""
    reach = connect._reach
    connect._reach = partial(partial_reach, reach)
    try:
        yield
    finally:
        connect._reach = reach


def partial_reach(reach, host, port, rows):
    return reach(host, 1, rows)  # no process listens on port 1


def after_a_failure(spark, folder):
    return dml.run(lambda ctx: ctx.rank, num_workers=2, spark=spark)


def large_model(spark, folder):
    module = nn.Embedding(25_000_000, 2)
    before = module.weight[0].tolist()
    rows = spark.range(64).selectExpr("id as features", "array(1f, 1f) as label")
    fitted = estimator(model=module, numWorkers=1, epochs=1).fit(rows)
    return {
        "moved": fitted.module.weight[0].tolist() != before,
        "num_bytes": fitted.module.weight.nbytes,
    }


def main(output, folder):
    session = dml.session_builder("connect", remote="local[2]").getOrCreate()
    found = {"seconds": {}}
    for part in (fit_and_use, run_with_data, checkpointed, errors, after_a_failure, large_model):
        began = time.monotonic()
        try:
            found[part.__name__] = part(session, folder)
        except Exception:
            found[part.__name__] = {"failed": traceback.format_exc()}
        found["seconds"][part.__name__] = time.monotonic() - began
    Path(output).write_text(json.dumps(found))
    session.stop()
    os._exit(0)  # the server that pyspark started ends with it


if __name__ == "__main__":
    main(*sys.argv[1:])
