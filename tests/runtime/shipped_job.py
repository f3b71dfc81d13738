"""What the tests of shipped code submit: which Python and which sparkdml do workers have?"""

import json
import sys
import warnings
from functools import partial

import torch
from shipped_code import make_net  # travels beside sparkdml
from torch import nn

import sparkdml as dml


def where(ctx):
    import shipped_code

    return sys.executable, dml.__file__, shipped_code.__file__


def main(output):
    warnings.simplefilter("always")
    builder = dml.session_builder("shipped").config("spark.ui.enabled", "false")
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    rows = spark.range(100).selectExpr(
        "array(cast(id % 7 as float), cast(id % 3 as float)) as features",
        "cast(id % 7 as double) as label",
    )
    fitted = dml.TorchEstimator(
        model=make_net,
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.01),
        numWorkers=2,
        verbose=0,
    ).fit(rows)
    result = {
        "workers": dml.run(where, num_workers=2, spark=spark),
        "driver": dml.__file__,
        "rows": fitted.history[0]["rows"],
        "predicted": fitted.transform(rows).count(),
    }
    with open(output, "w") as file:
        json.dump(result, file)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
