"""The job of the stop-and-keep tests: a fit that would never end."""

import json
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

import sparkdml as dml


class Signals(dml.Callback):
    """Says that training has begun; with slow steps where a file asks for them."""

    def __init__(self, folder):
        self.folder = folder

    def on_step_end(self, training):
        Path(self.folder, "training").touch()
        if Path(self.folder, "slow").exists():
            time.sleep(5)


def main(folder):
    spark = dml.session_builder("kept", "local[2]").config("spark.ui.enabled", "false")
    spark = spark.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    rows = spark.range(64).selectExpr(
        "array(cast(id % 7 as float), cast(id % 3 as float)) as features",
        "cast(id % 7 as double) as label",
    )
    start = {"weight": torch.zeros(1, 2), "bias": torch.zeros(1)}
    estimator = dml.TorchEstimator(
        model=partial(nn.Linear, 2, 1),
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=1e-3),
        warmStart=start,
        callbacks=[Signals(folder)],
        numWorkers=2,
        epochs=100_000,
        onInterrupt="stop-and-keep",
        verbose=0,
    )
    try:
        fitted = estimator.fit(rows)
    except KeyboardInterrupt:
        result = {"outcome": "raised"}
    else:
        result = {
            "outcome": "kept",
            "stopped": fitted.history.stopped,
            "epochs": len(fitted.history),
            "moved": bool(fitted.module.weight.any()),
            "after": dml.run(lambda ctx: ctx.rank, num_workers=2, spark=spark),
        }
    Path(folder, "result.json").write_text(json.dumps(result))
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
