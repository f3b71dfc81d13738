"""The work that every contender does: the data, the models and the sizes.

A workload travels to other processes as JSON, so it is plain values only. The data is made once,
as Parquet in several part files, and every contender reads those same files.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

WORKERS = 2
PART_FILES = 8  # a multiple of WORKERS, so that every rank reads as many rows as its peers
SEED = 7


@dataclass(frozen=True)
class Training:
    """Train a classifier on `rows` rows with WORKERS workers of `batch_size` rows a step each."""

    name: str
    title: str
    rows: int
    width: int
    classes: int
    model: Literal["mlp", "cnn", "linear"]
    batch_size: int
    epochs: int = 1
    learning_rate: float = 0.01

    @property
    def data_name(self) -> str:
        """Workloads with the same data share one folder, whatever their model or epochs."""
        return f"{self.rows}x{self.width}-{self.classes}-classes"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Training:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Allreduce:
    """Sum float32 tensors of several sizes among WORKERS ranks; the median of `repeats` each."""

    name: str
    title: str
    sizes: tuple[int, ...]
    repeats: tuple[int, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Allreduce:
        fields = json.loads(text)
        fields["sizes"], fields["repeats"] = tuple(fields["sizes"]), tuple(fields["repeats"])
        return cls(**fields)


Workload = Training | Allreduce

W1 = Training("W1", "tabular, one epoch", 1_000_000, 32, 2, "mlp", batch_size=1024)
W2 = Training("W2", "images, one epoch", 60_000, 784, 10, "cnn", batch_size=128)
W3 = Training("W3", "start-up", 1_000, 4, 2, "linear", batch_size=100)
W4 = Allreduce("W4", "allreduce", (1_000, 100_000, 10_000_000), (500, 200, 15))


def _with_steady(trainings: tuple[Training, ...], epochs: int) -> dict[str, Workload]:
    """Each workload by name, followed by its variant with the later epochs that it lacks."""
    named: dict[str, Workload] = {}
    for each in trainings:
        steady = f"{each.name}-steady"
        named[each.name] = each
        named[steady] = replace(each, name=steady, title=f"{epochs} epochs of it", epochs=epochs)
    return named


FULL: dict[str, Workload] = {**_with_steady((W1, W2), 3), "W3": W3, "W4": W4}

# Small enough for a smoke run of everything; the numbers it gives say nothing about speed.
QUICK: dict[str, Workload] = {
    **_with_steady(
        (replace(W1, rows=16_000, batch_size=256), replace(W2, rows=1_600, batch_size=64)), 2
    ),
    "W3": W3,
    "W4": replace(W4, sizes=(1_000, 100_000), repeats=(100, 50)),
}


def ensure_data(workload: Training, cache: Path) -> Path:
    """The folder with the workload's Parquet files, made now if it isn't there yet."""
    folder = cache / workload.data_name
    if not folder.exists():
        unfinished = folder.with_name(folder.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        _write_parts(workload, unfinished)
        unfinished.rename(folder)
    for part in folder.glob("*.parquet"):
        part.read_bytes()  # into the page cache: no contender pays for reading the disk first
    return folder


def _write_parts(workload: Training, folder: Path) -> None:
    if workload.rows % PART_FILES:
        raise ValueError(f"rows must be a multiple of {PART_FILES} but got {workload.rows}")
    random = np.random.default_rng(SEED)
    teacher = random.standard_normal((workload.width, workload.classes), dtype=np.float32)
    rows = workload.rows // PART_FILES
    offsets = np.arange(0, (rows + 1) * workload.width, workload.width, dtype=np.int32)
    for part in range(PART_FILES):
        features = random.standard_normal((rows, workload.width), dtype=np.float32)
        labels = (features @ teacher).argmax(axis=1).astype(np.int64)
        column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(features.reshape(-1)))
        table = pa.table({"features": column, "label": pa.array(labels)})
        pq.write_table(table, folder / f"part-{part:05d}.parquet")


def load_share(folder: Path, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Rank's share of the files as tensors in memory."""
    parts = sorted(folder.glob("*.parquet"))[rank::size]
    table = pa.concat_tables([pq.ParquetFile(part).read() for part in parts]).combine_chunks()
    values = table["features"].combine_chunks().flatten().to_numpy()
    features = torch.from_numpy(values.reshape(table.num_rows, -1).copy())
    return features, torch.from_numpy(table["label"].to_numpy().copy())


class SmallCNN(nn.Module):
    """Two convolutions and a linear layer, for 28 x 28 images that come as rows of 784."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 7 * 7, classes),
        )

    def forward(self, rows: Tensor) -> Tensor:
        outputs: Tensor = self.layers(rows.view(-1, 1, 28, 28))
        return outputs


def make_model(workload: Training) -> nn.Module:
    """The workload's model, with the same initial weights for every contender and rank."""
    torch.manual_seed(SEED)
    if workload.model == "cnn":
        return SmallCNN(workload.classes)
    if workload.model == "linear":
        return nn.Linear(workload.width, workload.classes)
    return nn.Sequential(
        nn.Linear(workload.width, 128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, workload.classes),
    )
