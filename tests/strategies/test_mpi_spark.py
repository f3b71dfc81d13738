"""Whole fits over MPI on Spark, where mpi4py and Open MPI are installed."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import sparkdml as dml
from sparkdml.comm.mpi_names import why_no_mpi, why_no_name_server
from sparkdml.testing.digits import digits, make_reader

REASON = why_no_mpi() or why_no_name_server()
pytestmark = [
    pytest.mark.slow,  # `make test-slow` installs Open MPI where it can
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]


@pytest.fixture(scope="module")
def df(spark):
    rows = digits(400)
    pairs = [(x.tolist(), int(y)) for x, y in zip(rows["x"], rows["y"], strict=True)]
    return spark.createDataFrame(pairs, "features array<float>, label long").cache()


def fit(df, strategy, **changes):
    fields = {
        "model": make_reader,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.SGD, lr=0.5),
        "batchSize": 16,
        "epochs": 3,
        "numWorkers": 3,
        "seed": 7,
        "verbose": 0,
        **changes,
    }
    if strategy.has_own_optimizer:
        del fields["optimizer"]
    return dml.TorchEstimator(strategy=strategy, **fields).fit(df)


@pytest.mark.parametrize("topology", ["native", "ring", "auto"])
def test_mpi_comes_to_what_torch_comes_to(df, topology):
    by_mpi, by_torch = (
        fit(df, dml.AllReduce(backend=backend, topology=topology)) for backend in ("mpi", "torch")
    )
    assert by_mpi.history.loss == pytest.approx(by_torch.history.loss, rel=1e-6)
    for ours, theirs in zip(by_mpi.module.parameters(), by_torch.module.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "strategy",
    [
        dml.AllReduce(backend="mpi", compression=dml.OneBit()),
        dml.AdaptiveBalance(backend="mpi"),
        dml.BackupWorkers(backend="mpi"),
        dml.LocalSGD(4, backend="mpi"),
        dml.Gossip(backend="mpi"),
        dml.ADPSGD(backend="mpi"),
        dml.LBFGS(backend="mpi"),
    ],
    ids=lambda strategy: type(strategy).__name__,
)
def test_strategies_learn_over_mpi(df, strategy):
    fitted = fit(df, strategy)
    assert fitted.history.loss[-1] < 0.8 * fitted.history.loss[0]


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("a broken layer")
        return self.layer(x)


def test_a_worker_that_raises_ends_the_run_and_mpi_serves_the_next_one(df):
    with pytest.raises(dml.WorkerError, match="a broken layer"):
        fit(df, dml.AllReduce(backend="mpi"), model=Breaks)
    assert fit(df, dml.AllReduce(backend="mpi")).history.loss[-1] < 1.5
