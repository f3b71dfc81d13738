"""What is run with each version of Spark: a fit, its model used, saved and loaded."""

import json
import sys
import warnings
from functools import partial

import pyspark
import torch
from torch import nn

import sparkdml as dml


def main(folder):
    builder = dml.session_builder("versions", "local[2]").config("spark.ui.enabled", "true")
    spark = builder.config("spark.ui.port", "0").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    rows = spark.range(200).selectExpr(
        "array(cast(id % 7 as float), cast(id % 3 as float)) as features",
        "cast(id % 7 as double) as label",
    )
    estimator = dml.TorchEstimator(
        model=partial(nn.Linear, 2, 1),
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.02),
        numWorkers=2,
        epochs=3,
        seed=7,
        validation=0.2,
        verbose=0,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted = estimator.fit(rows)
    fitted.write().overwrite().save(f"{folder}/model")
    loaded = dml.TorchModel.load(f"{folder}/model")
    predicted = [row.prediction for row in loaded.transform(rows).collect()]
    resumed = dml.TorchEstimator.copy(estimator, {estimator.checkpoint: f"file:{folder}/run"})
    result = {
        "version": pyspark.__version__,
        "weights": [p.flatten().tolist() for p in fitted.module.parameters()],
        "rows": fitted.history[0]["rows"],
        "predicted": len(predicted),
        "evaluated": fitted.evaluate(rows)["loss"],
        "checkpointed": resumed.fit(rows).module.weight.flatten().tolist(),
        "run": dml.run(lambda ctx: ctx.rank, num_workers=2, spark=spark),
        "rdd": dml.run(
            lambda ctx: len(list(ctx.rows())), spark.sparkContext.parallelize(range(50)), 2
        ),
        "warnings": [str(w.message) for w in caught if "Training tab" in str(w.message)],
    }
    with open(f"{folder}/result.json", "w") as file:
        json.dump(result, file)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
