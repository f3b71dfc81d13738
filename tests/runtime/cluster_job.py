"""The job of the cluster tests: one run and one fit, on whatever master the session has.

On a given master without other users, an executor is killed as well.
"""

import json
import os
import sys
import warnings
from functools import partial
from pathlib import Path

import torch
from torch import nn

import sparkdml as dml
from sparkdml.comm.backends import horovod_available

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
from killed_executor_job import kill_one
from small_run import make_rows


def who(ctx):
    total = ctx.comm.allreduce_(torch.tensor([ctx.rank + 1.0])).item()
    return ctx.rank, os.getppid(), total


def net():
    return nn.Linear(2, 1)


def main(output, master=None):
    spark = (
        dml.session_builder("cluster-job", master)
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.python.task.killTimeout", "200ms")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    backends = ["torch"]
    if horovod_available():
        backends.append("horovod")
    runs = {name: dml.run(who, num_workers=2, backend=name, spark=spark) for name in backends}
    rows = spark.range(200).selectExpr(
        "array(cast(id % 7 as float), cast(id % 3 as float)) as features",
        "cast(id % 7 as double) as label",
    )
    fitted = dml.TorchEstimator(
        model=net,
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.01),
        numWorkers=2,
        epochs=2,
    ).fit(rows)
    too_many = None
    try:
        dml.run(who, num_workers=64, slot_timeout=1, spark=spark)
    except dml.NotEnoughSlots as error:
        too_many = str(error)
    kill = None
    if master is not None:
        warnings.filterwarnings("ignore", message=".*Resuming from step.*")
        kill = kill_one(make_rows(spark), {}, 0, 1, Path(output).parent / "killed-executor")
    with open(output, "w") as file:
        json.dump(
            {
                "runs": runs,
                "weights": [p.flatten().tolist() for p in fitted.module.parameters()],
                "rows": fitted.history[0]["rows"],
                "predicted": fitted.transform(rows).count(),
                "too_many": too_many,
                "kill": kill,
            },
            file,
        )
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
