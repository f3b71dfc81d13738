"""Folders of saved stages with a manifest of the test's choice, as somebody else could write it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from sparkdml.estimator import TorchEstimator
from sparkdml.model import TorchModel
from sparkdml.persistence.folder import PlainFolder
from sparkdml.persistence.spark_ml import ModelReader, StageReader

# What the weights of these folders fit.
LAYER = {
    "partial": {
        "of": "torch.nn.modules.linear:Linear",
        "args": [1, 1],
        "kwargs": {"bias": False},
    }
}


def write_model(folder: Path, model: Any, **changes: Any) -> Path:
    """The folder of a fitted model whose hashes are right; `changes` are those of `fitted`."""
    fitted = {
        "model": model,
        "loss": None,
        "metrics": {"dict": {}},
        "features": [],
        "output_shape": None,
        **changes,
    }
    files = {
        "weights.safetensors": safetensors.torch.save({"weight": torch.zeros(1, 1)}),
        "history.json": json.dumps({"rows": []}).encode(),
    }
    return _write(folder, "sparkdml.model.TorchModel", files, {"fitted": fitted, "params": {}})


def write_estimator(folder: Path, **params: Any) -> Path:
    return _write(folder, "sparkdml.estimator.TorchEstimator", {}, {"params": params})


def _write(folder: Path, kind: str, files: dict[str, bytes], manifest: dict[str, Any]) -> Path:
    (folder / "metadata").mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    measured = {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in files.items()
    }
    whole = {"format": 1, "defaults": {}, "files": measured, **manifest}
    (folder / "objects.json").write_text(json.dumps(whole))
    metadata = {
        "class": kind,
        "timestamp": 0,
        "sparkVersion": "4.1.0",
        "uid": "x",
        "paramMap": {},
        "defaultParamMap": {},
    }
    (folder / "metadata/part-00000").write_text(json.dumps(metadata))
    return folder


def load_model(folder: Path) -> TorchModel:
    model: TorchModel = ModelReader(TorchModel).load_from(PlainFolder(str(folder)))
    return model


def load_estimator(folder: Path) -> TorchEstimator:
    estimator: TorchEstimator = StageReader(TorchEstimator).load_from(PlainFolder(str(folder)))
    return estimator
