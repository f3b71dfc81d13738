"""Strategies for workers of different speed, and gossip, in real workers on Spark."""

import os
import time
from functools import partial

import pytest
import torch
from torch import nn

import sparkdml as dml

ROWS, BATCH = 480, 8


class SlowOnRank2(nn.Module):
    """A row takes four times as long there."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        if self.training:
            time.sleep(len(x) * (0.008 if os.environ["RANK"] == "2" else 0.002))
        return self.layer(x)


class OwnRows(dml.Callback):
    """How many rows each rank has trained on, as columns of the history."""

    def on_epoch_end(self, training, row):
        own = torch.tensor([training.epoch.own_rows])
        for rank, rows in enumerate(training.ctx.comm.allgather(own)):
            row[f"rows_{rank}"] = rows.item()


@pytest.fixture(scope="module")
def rows(spark):
    df = spark.range(0, ROWS, 1, 3).selectExpr(
        "array(cast(randn(1) as float), cast(randn(2) as float)) as features", "id"
    )
    return df.selectExpr("features", "cast(features[0] > 0 as bigint) as label").cache()


def fit(rows, strategy):
    fitted = dml.TorchEstimator(
        model=SlowOnRank2,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.5),
        batchSize=BATCH,
        epochs=2,
        numWorkers=3,
        seed=7,
        strategy=strategy,
        callbacks=[OwnRows()],
        verbose=0,
    ).fit(rows)
    first, last = fitted.history
    assert sum(last[f"rows_{rank}"] for rank in range(3)) >= last["rows"]
    assert last["loss"] < first["loss"] < 0.7
    return last


@pytest.mark.spark
def test_adaptive_balance_is_allreduce_on_other_ranks(rows):
    balanced = fit(rows, dml.AdaptiveBalance(every=4, backend="torch"))
    plain = fit(rows, dml.AllReduce(backend="torch"))
    assert balanced["rows"] == plain["rows"] == ROWS
    assert balanced["loss"] == pytest.approx(plain["loss"], rel=1e-4)
    assert balanced["moved_rows"] > 0
    assert balanced["rows_2"] < plain["rows_2"]


@pytest.mark.spark
def test_ad_psgd_leases_each_row_once(rows):
    last = fit(rows, dml.ADPSGD(every=4))  # beside Horovod, where it is installed
    assert last["rows"] == ROWS == sum(last[f"rows_{rank}"] for rank in range(3))
    assert last["rows_2"] < ROWS / 3
    assert last["consensus_distance"] > 0


@pytest.mark.spark
def test_backup_workers_and_gossip(rows):
    last = fit(rows, dml.BackupWorkers(backup=1, backend="torch"))
    assert last["rows"] + last["skipped_rows"] == ROWS
    assert last["skipped_rows"] > 0
    last = fit(rows, dml.Gossip("random"))
    assert last["rows"] == ROWS
    assert last["consensus_distance"] > 0
