"""MNIST with a small CNN, on whatever Spark there is.

    python examples/mnist.py                                    local Spark
    spark-submit --master spark://host:7077 examples/mnist.py   your cluster
    python examples/standalone_cluster.py examples/mnist.py     a cluster that is started for it

`--data`, or SPARKDML_DATA, names a folder that has `mnist/` with the four idx files, gzipped: two
workers reach 98.5% on the test images in a few epochs. Without it, scikit-learn's 1,797 small
digits are blown up to the size of MNIST's.
"""

from __future__ import annotations

import argparse
import gzip
import os
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from pyspark.sql import DataFrame, SparkSession
from torch import Tensor, nn

import sparkdml as dml


def network() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    )


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.argmax(dim=1) == targets


def read_idx(path: Path, header_bytes: int) -> np.ndarray:
    with gzip.open(path) as file:
        return np.frombuffer(file.read(), dtype=np.uint8, offset=header_bytes)


def read_mnist(spark: SparkSession, folder: Path, name: str) -> DataFrame:
    images = read_idx(folder / f"{name}-images-idx3-ubyte.gz", 16).reshape(-1, 28 * 28)
    return to_dataframe(spark, images / 255, read_idx(folder / f"{name}-labels-idx1-ubyte.gz", 8))


def blow_up_digits(spark: SparkSession) -> tuple[DataFrame, DataFrame]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    small = np.pad(digits.images / 16, ((0, 0), (3, 3), (3, 3)))  # 8 x 8 in the middle of 14 x 14
    images = small.repeat(2, axis=1).repeat(2, axis=2).reshape(-1, 28 * 28)
    rows = to_dataframe(spark, images, digits.target)
    train, test = rows.randomSplit([0.8, 0.2], seed=7)
    return train, test


def to_dataframe(spark: SparkSession, images: np.ndarray, labels: np.ndarray) -> DataFrame:
    pixels = pa.array(images.astype(np.float32).ravel())
    offsets = pa.array(np.arange(0, images.size + 1, 28 * 28, dtype=np.int32))
    features = pa.ListArray.from_arrays(offsets, pixels)
    return spark.createDataFrame(pa.table({"features": features, "label": labels.astype(np.int64)}))


def train(images: DataFrame, epochs: int, num_workers: int = 2) -> dml.TorchModel:
    estimator = dml.TorchEstimator(
        model=network,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        batchSize=64,
        epochs=epochs,
        numWorkers=num_workers,
        seed=7,
        metrics={"accuracy": accuracy},
    )
    return estimator.fit(images)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("SPARKDML_DATA"))
    parser.add_argument("--epochs", type=int, help="3 for MNIST, 10 for the few small digits")
    options = parser.parse_args()
    spark = dml.session_builder("mnist").config("spark.driver.memory", "3g").getOrCreate()
    if options.data is not None:
        folder = Path(options.data) / "mnist"
        train_images, test_images = (read_mnist(spark, folder, n) for n in ("train", "t10k"))
    else:
        train_images, test_images = blow_up_digits(spark)
    fitted = train(train_images, options.epochs or (3 if options.data else 10))
    print(fitted.history.to_pandas().to_string(index=False))
    print(f"test accuracy: {fitted.evaluate(test_images)['accuracy']:.2%}")
    spark.stop()


if __name__ == "__main__":
    main()
