"""Files that earlier code wrote: a saved model loads, and a run resumes from its checkpoints.

`model/` and `checkpoints/` were written by scripts/golden.py before the tree was redesigned; the
run has the seed, rows and settings of that script.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import sparkdml as dml

HERE = Path(__file__).parent
SCRIPT = HERE.parents[1] / "scripts" / "golden.py"


@pytest.fixture(scope="module")
def golden() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_saved_model_loads(spark: Any, golden: ModuleType) -> None:
    model = dml.TorchModel.load(str(HERE / "model"))
    assert [row["epoch"] for row in model.history] == [1, 2, 3, 4]
    rows = model.transform(golden.make_rows(spark)).collect()
    right = sum(row["prediction"] == row["label"] for row in rows)
    assert right > 0.8 * len(rows)


def test_a_run_resumes_from_its_checkpoints(spark: Any, golden: ModuleType, tmp_path: Path) -> None:
    place = tmp_path / "run"
    shutil.copytree(HERE / "checkpoints", place)
    checkpoints = dml.Checkpoints(str(place))
    estimator = golden.make_estimator("AllReduce", epochs=4, checkpoint=checkpoints)
    resumed = estimator.fit(golden.make_rows(spark))
    assert "resumed from step 30" in str(checkpoints.lineage())
    # The saved model is that of the uninterrupted run. Other processors round otherwise.
    uninterrupted = dml.TorchModel.load(str(HERE / "model")).module.state_dict()
    torch.testing.assert_close(resumed.module.state_dict(), uninterrupted, atol=1e-4, rtol=1e-4)
