"""The examples of what extends sparkdml: each keeps its contract, and trains on Spark's workers."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import sparkdml as dml
from sparkdml.testing.compression_contract import CompressionCase, CompressionContract
from sparkdml.testing.strategy_contract import Case, StrategyContract

sys.path.insert(0, str(Path(__file__).parent))
from loading import load_example

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

compression = load_example("extending/compression.py")


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user's module is: plain pickle finds its classes by name."""
    monkeypatch.setitem(sys.modules, compression.__name__, compression)


@pytest.mark.usefixtures("importable")
class TestRandomBlock(CompressionContract):
    cases = {
        "RandomBlock": CompressionCase(
            compression.RandomBlock,
            bad=[
                (partial(compression.RandomBlock, fraction=0.0), "fraction"),
                (partial(compression.RandomBlock, fraction=1.5), "fraction"),
            ],
        )
    }


@pytest.mark.usefixtures("importable")
class TestAllReduceWithRandomBlock(StrategyContract):
    cases = {
        "RandomBlock": Case(
            lambda: dml.AllReduce(compression=compression.RandomBlock(0.25), bucket_bytes=600),
            plain=lambda: dml.AllReduce(compression=compression.RandomBlock(1.0)),
            plain_workers=3,
            lr=0.2,  # what is sent late weighs on the next steps, as momentum does
            epochs=10,
        )
    }


@pytest.mark.spark
def test_a_compressor_of_ones_own_on_spark(spark: SparkSession) -> None:
    rows = compression.read_digits(spark).limit(600)
    fitted = compression.train(rows, compression.RandomBlock(0.25), epochs=6)
    assert fitted.history.accuracy[-1] > 0.8
