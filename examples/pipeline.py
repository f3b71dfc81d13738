"""A Pipeline with a cross-validation over a network's Params: `python examples/pipeline.py`.

StringIndexer and VectorAssembler come before the network, CrossValidator chooses among its Params
with Spark's own evaluator, and the whole pipeline is saved and loaded.
"""

from __future__ import annotations

import tempfile
from functools import partial

import numpy as np
import pandas as pd
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import StandardScaler, StringIndexer, VectorAssembler
from pyspark.ml.tuning import CrossValidator, CrossValidatorModel, ParamGridBuilder
from pyspark.sql import DataFrame, SparkSession
from torch import nn

import sparkdml as dml


def make_rows(spark: SparkSession, num_rows: int = 600) -> DataFrame:
    """Plants by petal and sepal, with their names and where they were found."""
    dice = np.random.default_rng(7)
    kind = dice.integers(0, 3, num_rows)
    centres = np.array([[1.5, 5.0], [4.3, 5.9], [5.6, 6.6]])[kind]
    petal, sepal = (centres + 0.4 * dice.normal(size=(num_rows, 2))).T
    places = np.array(["meadow", "wood", "shore"])[(kind + dice.integers(0, 2, num_rows)) % 3]
    species = np.array(["setosa", "versicolor", "virginica"])[kind]
    return spark.createDataFrame(
        pd.DataFrame({"petal": petal, "sepal": sepal, "place": places, "species": species})
    )


def make_network() -> nn.Module:
    """A function, and no module: so `seed` decides its initial weights too."""
    return nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 3))


def make_pipeline(num_workers: int = 2) -> tuple[Pipeline, dml.TorchEstimator]:
    network = dml.TorchEstimator(
        model=make_network,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=0.01),
        batchSize=8,
        epochs=15,
        numWorkers=num_workers,
        seed=7,
        verbose=0,
    )
    stages = [
        StringIndexer(inputCol="species", outputCol="label"),
        StringIndexer(inputCol="place", outputCol="place_index"),
        VectorAssembler(inputCols=["petal", "sepal", "place_index"], outputCol="measured"),
        StandardScaler(inputCol="measured", outputCol="features"),
        network,
    ]
    return Pipeline(stages=stages), network


def choose(rows: DataFrame, num_workers: int = 2, folds: int = 2) -> CrossValidatorModel:
    pipeline, network = make_pipeline(num_workers)
    slow = partial(torch.optim.Adam, lr=0.0001)
    fast = partial(torch.optim.Adam, lr=0.03)
    grid = ParamGridBuilder().addGrid(network.optimizer, [slow, fast]).build()
    evaluator = MulticlassClassificationEvaluator(metricName="accuracy")
    return CrossValidator(
        estimator=pipeline, estimatorParamMaps=grid, evaluator=evaluator, numFolds=folds, seed=7
    ).fit(rows)


def main() -> None:
    spark = dml.session_builder("pipeline").getOrCreate()
    train, test = make_rows(spark).randomSplit([0.8, 0.2], seed=7)
    chosen = choose(train)
    print("accuracy of each setting:", [f"{value:.1%}" for value in chosen.avgMetrics])
    with tempfile.TemporaryDirectory() as folder:
        chosen.bestModel.write().overwrite().save(f"file:{folder}/pipeline")
        with dml.allow_pickle():  # `make_network` is this script's own: no module has it
            loaded = PipelineModel.load(f"file:{folder}/pipeline")
    measure = MulticlassClassificationEvaluator(metricName="accuracy")
    print(f"test accuracy: {measure.evaluate(loaded.transform(test)):.1%}")
    spark.stop()


if __name__ == "__main__":
    main()
