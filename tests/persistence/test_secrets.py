"""Secrets that a stage holds are not in what is saved, shown or written of it."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_folder import load_estimator
from torch import nn

import sparkdml as dml
from sparkdml.checkpoint.fingerprint import describe, differences
from sparkdml.persistence.folder import PlainFolder
from sparkdml.persistence.spark_ml import StageWriter


def prepare(batch: Any, password: str = "", table: str = "", **others: Any) -> Any:
    return batch


def save(path: Path, **params: Any) -> str:
    """All that is written, as text."""
    estimator = dml.TorchEstimator(
        model=nn.Linear(1, 1), optimizer=torch.optim.SGD, loss=nn.MSELoss(), **params
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        StageWriter(estimator).save_to(PlainFolder(str(path)))
    files = [file for file in path.rglob("*") if file.is_file()]
    return " ".join(file.read_bytes().decode("latin-1") for file in files)


@pytest.mark.parametrize(
    "bound",
    [
        partial(prepare, password="hunter2"),
        partial(prepare, headers={"api_key": "hunter2"}),
        partial(prepare, options=[{"secret": b"hunter2"}]),
        partial(partial(prepare, token="hunter2"), table="clicks"),
        partial(prepare, table="postgres://me:hunter2@db/clicks"),
        partial(lambda batch, password: batch, password="hunter2"),
        partial(torch.optim.SGD, lr=0.1, auth_token="hunter2"),
    ],
    ids=range(7),
)
def test_a_secret_that_is_bound_is_not_saved(tmp_path: Path, bound: Any) -> None:
    with pytest.raises(
        dml.SetupError, match=r"preprocess can't be saved, because it holds"
    ) as info:
        save(tmp_path / "saved", preprocess=bound)
    assert "hunter2" not in str(info.value)
    assert not (tmp_path / "saved").exists()


def test_what_is_no_secret_is_saved(tmp_path: Path) -> None:
    bound = partial(dml.factory(prepare), table="clicks", max_tokens=5, pad_token="<pad>")
    with dml.allow_packages("tests"):
        assert "clicks" in save(tmp_path / "saved", preprocess=bound)
        loaded = load_estimator(tmp_path / "saved")
    assert loaded.getPreprocess().keywords == bound.keywords


def test_a_password_in_a_path_is_neither_shown_nor_saved(tmp_path: Path) -> None:
    place = dml.Checkpoints("ftp://me:hun@ter2@host/runs/1", every=5)
    assert repr(place) == "Checkpoints('ftp://me@host/runs/1', every='5 steps')"
    assert place.url == "ftp://me@host/runs/1"
    assert place.path == "ftp://me:hun@ter2@host/runs/1"
    assert place.without_secrets().path == "ftp://me@host/runs/1"
    assert "ter2" not in save(tmp_path / "saved", checkpoint=place)
    loaded = load_estimator(tmp_path / "saved").getCheckpoint()
    assert (loaded.path, loaded.every) == ("ftp://me@host/runs/1", place.every)


class Account:
    def __init__(self, secret: str) -> None:
        self.secret = secret

    def __repr__(self) -> str:
        return f"Account({self.secret!r})"


def older(value: Any) -> str:
    """As a partial was described before its texts were hidden."""
    bound = [repr(item) for item in value.args]
    bound += [f"{name}={item!r}" for name, item in sorted(value.keywords.items())]
    return f"{describe(value.func)}({', '.join(bound)})"


@pytest.mark.parametrize(
    "bound",
    [
        partial(prepare, 3, "hunter2", password="hunt\"er'2", others=b"hunter2"),
        partial(prepare, others=Account("hunter2"), table="hunter2\n"),
        partial(torch.optim.SGD, lr=0.1, foreach="hunter2"),
    ],
    ids=["texts", "object", "class"],
)
def test_texts_of_a_partial_are_described_by_digests(bound: Any) -> None:
    found = describe(bound)
    assert "hunt" not in found
    assert found == describe(bound)
    assert "hunt" not in describe({"a": [bound]})
    # A checkpoint of before, and the error about one that differs.
    assert differences({"preprocess": older(bound)}, {"preprocess": found}) == []
    other = describe(partial(bound, password="another"))
    [line] = differences({"preprocess": older(bound)}, {"preprocess": other})
    assert "hunt" not in line


def test_descriptions_without_texts_are_as_ever() -> None:
    sgd = partial(torch.optim.SGD, lr=0.1, betas=(0.9, 0.99), nesterov=True)
    assert describe(sgd) == "torch.optim.sgd.SGD(betas=0.9, 0.99, lr=0.1, nesterov=True)"
    assert differences({"labelCol": "'label'"}, {"labelCol": "'target'"}) == [
        "labelCol was 'label', is now 'target'"
    ]

    def bound_in_a_cell(batch: Any) -> Any:
        return prepare(batch, password=cell)

    cell = "hunter2"
    assert "hunter2" not in describe(bound_in_a_cell)


def test_other_texts_differ() -> None:
    one, other = (describe(partial(prepare, table=name)) for name in ("a", "b"))
    assert one != other
    assert differences({"p": one}, {"p": other})
