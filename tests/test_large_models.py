"""A model of 1 GB is kept, shipped, run, saved and loaded without copies of it in memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from pyspark import cloudpickle
from pyspark.sql import functions as F
from torch import Tensor, nn

from sparkdml.feed.columns.kinds import ArrayColumn
from sparkdml.history import History
from sparkdml.inference.weights import Weights
from sparkdml.model import TorchModel
from sparkdml.persistence import allow_packages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]

WIDTH = 16_384  # squared, in float32: 1 GiB
MEGABYTE = 1 << 20


class Wide(nn.Module):
    """Reads all of its weights, and tells how much memory the process has for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, features: Tensor) -> Tensor:
        total = self.weight.sum(dtype=torch.float64).float()
        own = float(private_bytes()) / MEGABYTE
        return torch.stack([features[:, 0] * total, torch.full((len(features),), own)], dim=1)


def private_bytes() -> int:
    """What this process has written: mapped pages of a file are not among them."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Private_Dirty in smaps_rollup")


@pytest.mark.timeout(600)
def test_one_gigabyte(spark: SparkSession, tmp_path: Path) -> None:
    module = Wide()
    weights = Weights.of(module.state_dict())
    assert weights.path is not None
    model: TorchModel = TorchModel._make(
        module=module,
        source=Wide,
        weights=weights,
        loss=None,
        metrics={},
        features=(ArrayColumn("features", "float32"),),
        output_shape=[2],
        history=History([], None, None),
    )
    del module, weights
    before = private_bytes()
    assert model.module.weight.shape == (WIDTH, WIDTH)  # type: ignore[union-attr]
    data = spark.range(0, 8, 1, 2).select("id", F.array(F.lit(2.0).cast("float")).alias("features"))
    plan = model._prediction_plan(data)
    assert len(cloudpickle.dumps(plan)) < MEGABYTE  # type: ignore[no-untyped-call]
    for row in model.transform(data).collect():
        assert row.prediction[0] == 2.0 * WIDTH * WIDTH
        assert row.prediction[1] < 700, "the worker has a copy of its own"

    model.write().save(str(tmp_path / "model"))
    with allow_packages("tests"):
        loaded: TorchModel = TorchModel.load(str(tmp_path / "model"))
    assert loaded._weights == model._weights
    # Loading builds the module once by its own code, and lets go of it.
    assert private_bytes() - before < 300 * MEGABYTE
    assert loaded.transform(data).first().prediction[0] == 2.0 * WIDTH * WIDTH
