"""Whatever objects.json holds, loading ends in a model or one of our errors, and runs nothing."""

from __future__ import annotations

import contextlib
import importlib
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from saved_folder import LAYER, load_estimator, load_model, write_estimator, write_model

import sparkdml as dml
from sparkdml.errors import SparkDMLError
from sparkdml.persistence import allowed

PATHS = st.sampled_from(
    [
        "subprocess:getoutput",
        "os:system",
        "builtins:eval",
        "torch.fx:symbolic_trace",
        "torch.hub:load",
        "torch.nn.modules.linear:Linear",
        "torch.nn.modules.container:Sequential",
        "torch.nn.functional:relu",
        "torch.nn.functional:importlib.import_module",
        "torch.nn.modules.linear:math.exp",
        "torch.optim.sgd:SGD",
        "torch.optim.lr_scheduler:LambdaLR",
        "sparkdml.strategies.allreduce:AllReduce",
        "sparkdml.strategies.local_sgd:LocalSGD",
        "sparkdml.checkpoint.checkpoints:Checkpoints",
        "sparkdml.server.optimizers:Adam",
        "sparkdml.cli.main:main",
        "admin_tasks:drop_everything",
        "..:x",
        "torch.nn.modules:__builtins__",
        ":",
        "",
    ]
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats()
    | st.text(max_size=5)
    | PATHS
    | st.sampled_from(["weights.safetensors", "history.json", "objects.json", "../x", "module"])
)
NAMES = st.sampled_from(
    ["backend", "path", "lr", "args", "in_features", "out_features", "bias", "__class__", "", "a.b"]
)


def references(inner: Any) -> Any:
    """Of the form that a save writes, more or less."""
    named = st.dictionaries(NAMES, inner, max_size=3)
    listed = st.lists(inner, max_size=3)
    file = st.sampled_from(["weights.safetensors", "history.json", "objects/x.pt", None, 3])
    return st.one_of(
        listed,
        named,
        st.fixed_dictionaries({"import": PATHS | inner}),
        st.fixed_dictionaries({"tuple": listed | inner}),
        st.fixed_dictionaries({"dict": named | inner}),
        st.fixed_dictionaries(
            {
                "partial": st.fixed_dictionaries(
                    {"of": PATHS, "args": listed | inner, "kwargs": named | inner}
                )
                | inner
            }
        ),
        st.fixed_dictionaries(
            {
                "object": st.fixed_dictionaries(
                    {"class": PATHS, "args": st.lists(NAMES, max_size=2), "state": named | inner}
                )
                | inner
            }
        ),
        st.fixed_dictionaries({"tensors": file}),
        st.fixed_dictionaries(
            {
                "module": st.fixed_dictionaries(
                    {
                        "structure": st.fixed_dictionaries(
                            {"file": file, "classes": st.lists(PATHS, max_size=3)}
                        )
                        | inner,
                        "weights": file,
                    }
                )
            }
        ),
        st.fixed_dictionaries(
            {
                "pickle": st.fixed_dictionaries(
                    {"file": file, "sha256": inner, "python": inner, "reason": inner}
                )
            }
        ),
    )


VALUES = st.recursive(LEAVES, references, max_leaves=12)
FITTED = st.sampled_from(
    ["model", "loss", "step", "metrics", "features", "inputs", "outputs", "output_shape"]
)
PARAMS = st.sampled_from(
    ["model", "optimizer", "loss", "strategy", "callbacks", "checkpoint", "collate", "nothing"]
)
MANY = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)


def load(write: Any, read: Any, *args: Any, **kwargs: Any) -> None:
    """Loads, with an eye on what is imported and called."""
    imported: list[str] = []

    def import_module(name: str) -> Any:
        imported.append(name)
        return genuine(name)

    genuine = importlib.import_module
    folder = Path(tempfile.mkdtemp())
    try:
        write(folder, *args, **kwargs)
        with (
            mock.patch("sparkdml.persistence.references.importlib.import_module", import_module),
            mock.patch.object(subprocess, "getoutput", side_effect=AssertionError("called")),
            contextlib.suppress(SparkDMLError),
        ):
            read(folder)
    finally:
        shutil.rmtree(folder)
    known = [*allowed._TORCH, *{path.partition(":")[0] for path in allowed.OWN_VALUES}]
    for name in imported:
        assert any(name == one or name.startswith(f"{one}.") for one in known), name


@MANY
@given(place=FITTED, value=VALUES)
@example(
    place="model", value={"partial": {"of": "torch.fx:symbolic_trace", "args": [], "kwargs": {}}}
)
@example(place="loss", value={"module": {"structure": {"file": 3, "classes": []}, "weights": 1}})
def test_of_a_fitted_model(place: str, value: Any) -> None:
    changes = {"model": LAYER, place: value}
    load(write_model, load_model, changes.pop("model"), **changes)


@MANY
@given(params=st.dictionaries(PARAMS, VALUES, max_size=2))
def test_of_an_estimator(params: dict[str, Any]) -> None:
    load(write_estimator, load_estimator, **params)


@MANY
@given(value=VALUES, key=st.sampled_from(["params", "defaults", "files", "fitted", "format", ""]))
def test_of_the_manifest_itself(value: Any, key: str) -> None:
    def write(folder: Path) -> None:
        write_model(folder, LAYER)
        manifest = json.loads((folder / "objects.json").read_text())
        changed = {**manifest, key: value} if key else value
        (folder / "objects.json").write_text(json.dumps(changed))

    load(write, load_model)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format": 1}', "nul", "[]", '"text"', "\x00"])
def test_of_no_manifest(tmp_path: Path, text: str) -> None:
    folder = write_model(tmp_path / "model", LAYER)
    (folder / "objects.json").write_text(text)
    with pytest.raises(dml.DataError, match=r"objects\.json"):
        load_model(folder)


def test_deep_references_end_in_our_error(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", LAYER, loss="DEEP")
    file = folder / "objects.json"
    file.write_text(file.read_text().replace('"DEEP"', '{"tuple": [' * 480 + "]}" * 480))
    with pytest.raises(dml.DataError, match=r"objects\.json"):
        load_model(folder)
