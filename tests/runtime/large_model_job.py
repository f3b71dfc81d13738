"""The job of the test of large models: 1 GB of weights are shipped, trained, returned, used."""

import sys
import time
from functools import partial

import torch
from torch import nn

import sparkdml as dml

ROWS = 64_000_000


def main(folder):
    spark = (
        dml.session_builder("large", "local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.maxResultSize", "1m")
        .config("spark.driver.memory", "2g")
        .config("spark.local.dir", folder)
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    module = nn.Embedding(ROWS, 4, sparse=False)
    nn.init.zeros_(module.weight)
    rows = spark.range(8).selectExpr(
        f"cast({ROWS} - 1 - id as long) as features", "array(1f, 1f, 1f, 1f) as label"
    )
    began = time.monotonic()
    fitted = dml.TorchEstimator(
        model=module,  # not a function that makes one: the weights themselves are shipped
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.5),
        numWorkers=1,
        verbose=0,
        heartbeatTimeout=60.0,
    ).fit(rows)
    trained = time.monotonic()
    weight = fitted.module.weight
    assert (weight[-8:] > 0).all(), "trained on"
    assert not weight[:1000].any(), "all others are as they were"
    predicted = fitted.transform(rows).collect()
    assert all(row.prediction[0] > 0 for row in predicted)
    print(
        f"{weight.nbytes:,} bytes trained, returned and used: fit {trained - began:.0f} s, "
        f"transform {time.monotonic() - trained:.0f} s"
    )
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
