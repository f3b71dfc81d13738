"""What would this user give that film? Embeddings on MovieLens: `python examples/movielens.py`.

`--data`, or SPARKDML_DATA, names a folder that has `movielens-100k/u.data`. Without it, ratings are
made up from hidden tastes. In both cases the ids are integers all the way to the embeddings.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.sql import DataFrame, SparkSession
from torch import Tensor, nn

import sparkdml as dml


class Factors(nn.Module):
    """A rating is a mean, two biases, and the product of two vectors of tastes."""

    def __init__(self, num_users: int, num_items: int, width: int = 16) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(num_users, width), nn.Embedding(num_items, width)
        self.user_bias, self.item_bias = nn.Embedding(num_users, 1), nn.Embedding(num_items, 1)
        self.mean = nn.Parameter(torch.tensor(3.5))
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)
        for table in (self.user_bias, self.item_bias):
            nn.init.zeros_(table.weight)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        biases = self.user_bias(user) + self.item_bias(item)
        agreement = (self.users(user) * self.items(item)).sum(dim=1)
        rating: Tensor = agreement + biases.squeeze(1) + self.mean
        return rating


def read_movielens(spark: SparkSession, folder: Path) -> DataFrame:
    lines = spark.read.text(str(folder / "u.data"))
    parts = lines.selectExpr("split(value, '\\t') as part").where("part[0] rlike '^[0-9]+$'")
    return parts.selectExpr(
        "cast(part[0] as bigint) as user",
        "cast(part[1] as bigint) as item",
        "cast(part[2] as float) as rating",
    )


def make_up_ratings(spark: SparkSession, num_rows: int = 20_000) -> DataFrame:
    dice = np.random.default_rng(7)
    users, items = dice.integers(0, 300, num_rows), dice.integers(0, 400, num_rows)
    tastes, films = dice.normal(size=(300, 2)), dice.normal(size=(400, 2))
    rating = 3.5 + (tastes[users] * films[items]).sum(axis=1) + 0.3 * dice.normal(size=num_rows)
    rating = rating.clip(1, 5).round().astype(np.float32)
    return spark.createDataFrame(pd.DataFrame({"user": users, "item": items, "rating": rating}))


def train(ratings: DataFrame, epochs: int, num_workers: int = 2) -> dml.TorchModel:
    [(num_users, num_items)] = ratings.selectExpr("max(user) + 1", "max(item) + 1").collect()
    estimator = dml.TorchEstimator(
        model=partial(Factors, num_users, num_items),
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.AdamW, lr=0.01, weight_decay=0.01),
        featuresCol=["user", "item"],
        labelCol="rating",
        batchSize=256,
        epochs=epochs,
        numWorkers=num_workers,
        seed=7,
        validation=0.1,
        callbacks=[dml.EarlyStopping("val_loss", patience=1, restore_best=True)],
    )
    return estimator.fit(ratings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("SPARKDML_DATA"))
    parser.add_argument("--epochs", type=int, default=15)
    options = parser.parse_args()
    spark = dml.session_builder("movielens").getOrCreate()
    if options.data is not None:
        ratings = read_movielens(spark, Path(options.data) / "movielens-100k")
    else:
        ratings = make_up_ratings(spark)
    known, unseen = ratings.randomSplit([0.9, 0.1], seed=7)
    fitted = train(known, options.epochs)
    print(fitted.history.to_pandas().to_string(index=False))
    measure = RegressionEvaluator(labelCol="rating", predictionCol="prediction")
    print(f"root mean square error: {measure.evaluate(fitted.transform(unseen)):.3f} stars")
    spark.stop()


if __name__ == "__main__":
    main()
