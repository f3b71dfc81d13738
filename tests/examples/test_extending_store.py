"""The example of a checkpoint store of one's own: it keeps the contract, and resumes on Spark."""

from __future__ import annotations

import pickle
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import sparkdml as dml
from sparkdml.checkpoint.stores.places import GivenPlace
from sparkdml.testing.store_contract import OpenStore, StoreContract

sys.path.insert(0, str(Path(__file__).parent))
from loading import load_example

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

checkpoint_store = load_example("extending/checkpoint_store.py")


class TestSqliteStore(StoreContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        place = GivenPlace(checkpoint_store.SqliteStore(str(tmp_path / "objects.sqlite")))
        return lambda: pickle.loads(pickle.dumps(place)).open()  # as a worker gets it


def test_a_locked_database_is_trouble_that_may_pass(tmp_path: Path) -> None:
    store = checkpoint_store.SqliteStore(str(tmp_path / "no" / "folder.sqlite"))
    with pytest.raises(OSError, match=r"sqlite:.*unable to open"):
        store.names()


def test_a_store_is_used_by_several_threads(tmp_path: Path) -> None:
    store = checkpoint_store.SqliteStore(str(tmp_path / "objects.sqlite"))
    threads = [
        threading.Thread(target=store.write, args=(f"part-{number}", [b"x" * 100_000]))
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.names("part-") == [f"part-{number}" for number in range(8)]


@pytest.mark.spark
def test_a_store_of_ones_own_on_spark(spark: SparkSession, tmp_path: Path) -> None:
    store = checkpoint_store.SqliteStore(str(tmp_path / "run.sqlite"))
    rows = checkpoint_store.read_digits(spark)
    resumed = checkpoint_store.train_with_a_failure(rows, store, str(tmp_path))
    lineage = dml.Checkpoints(store=store).lineage()
    reasons = [(one.reason, one.outcome) for one in lineage.submissions]
    assert reasons == [("start", "failed"), ("restart", "finished"), ("resume", "finished")]
    undisturbed = checkpoint_store.train(rows, epochs=4).module.state_dict()
    for name, tensor in resumed.module.state_dict().items():
        assert torch.equal(tensor, undisturbed[name])
