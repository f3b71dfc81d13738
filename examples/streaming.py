"""One model is applied to a stream, another learns from it: `python examples/streaming.py`.

Loans are repaid, or not. Folders of Parquet files stand for the stream, as any source of Structured
Streaming could; both queries process the available files and end. Then the world changes, and the
model that continues to learn adapts.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from pyspark.sql import DataFrame, SparkSession
from torch import Tensor, nn

import sparkdml as dml

WIDTH = 8


def network() -> nn.Module:
    return nn.Linear(WIDTH, 2)


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.argmax(dim=1) == targets


def make_estimator(num_workers: int = 2) -> dml.TorchEstimator:
    return dml.TorchEstimator(
        model=network,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=0.03),
        batchSize=32,
        epochs=3,
        numWorkers=num_workers,
        seed=7,
        metrics={"accuracy": accuracy},
        verbose=0,
    )


def write_files(folder: Path, sign: float, num_files: int, seed: int) -> None:
    """Make loans whose repayment depends on the features; `sign` is the direction."""
    dice = np.random.default_rng(seed)
    for number in range(num_files):
        features = dice.standard_normal((400, WIDTH)).astype(np.float32)
        label = (sign * features.sum(axis=1) > 0).astype(np.int64)
        folder.mkdir(parents=True, exist_ok=True)
        pd.DataFrame({"features": list(features), "label": label}).to_parquet(
            folder / f"{seed}-{number}.parquet"
        )


def read_stream(spark: SparkSession, folder: Path) -> DataFrame:
    schema = "features array<float>, label bigint"
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", 2).parquet(str(folder))


def apply_to(fitted: dml.TorchModel, stream: DataFrame, name: str) -> None:
    """Write predictions into a table of this session, as rows arrive."""
    predicted = fitted.transform(stream)
    query = predicted.writeStream.format("memory").queryName(name).trigger(availableNow=True)
    query.start().awaitTermination()


def learn_from(trainer: dml.OnlineTrainer, stream: DataFrame, positions: Path) -> None:
    """Train the model further with each batch of the stream."""
    query = stream.writeStream.foreachBatch(trainer).trigger(availableNow=True)
    query.option("checkpointLocation", str(positions)).start().awaitTermination()


def run(spark: SparkSession, folder: Path, num_workers: int = 2) -> dict[str, float]:
    """Return the accuracy before the change, after it, and after learning from it."""
    past, arriving = folder / "past", folder / "arriving"
    write_files(past, sign=1.0, num_files=4, seed=1)
    estimator = make_estimator(num_workers)
    fitted = estimator.fit(spark.read.parquet(str(past)))

    write_files(arriving, sign=1.0, num_files=2, seed=2)
    apply_to(fitted, read_stream(spark, arriving), "predictions")
    right = spark.table("predictions").selectExpr("avg(int(prediction = label))").first()[0]

    changed = folder / "changed"
    write_files(changed, sign=-1.0, num_files=6, seed=3)
    trainer = dml.OnlineTrainer(estimator, model=fitted)
    learn_from(trainer, read_stream(spark, changed), folder / "positions")
    rows = spark.read.parquet(str(changed))
    return {
        "before": right,
        "changed": fitted.evaluate(rows)["accuracy"],
        "learnt": trainer.model.evaluate(rows)["accuracy"],
    }


def main() -> None:
    spark = dml.session_builder("streaming").getOrCreate()
    with tempfile.TemporaryDirectory() as folder:
        found = run(spark, Path(folder))
    print(f"right predictions on the stream:      {found['before']:.1%}")
    print(f"after the world has changed:          {found['changed']:.1%}")
    print(f"by the model that went on learning:   {found['learnt']:.1%}")
    spark.stop()


if __name__ == "__main__":
    main()
