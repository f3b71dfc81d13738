"""Strategies whose roles are more than workers, through the estimator on a real session."""

import os
import signal
import threading
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import sparkdml as dml
from sparkdml.parameter_server.consistency import BSP, SSP
from sparkdml.parameter_server.hybrid import Hybrid
from sparkdml.parameter_server.server.node import serve
from sparkdml.parameter_server.strategy import ParameterServer
from sparkdml.strategies.layered_sgd import LayeredSGD
from sparkdml.testing.faults import FaultAt
from sparkdml.testing.waiting import wait_until


def fit(rows, strategy, **changes):
    settings = {
        "model": lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.SGD, lr=0.2, momentum=0.9),
        "strategy": strategy,
        "batchSize": 10,
        "epochs": 2,
        "numWorkers": 2,
        "seed": 3,
        "verbose": 0,
        "validation": 0.2,
    }
    return dml.TorchEstimator(**{**settings, **changes}).fit(rows)


def told(model):
    """But for times, and for what only servers tell."""
    return [
        {name: row[name] for name in row if "second" not in name and name != "staleness"}
        for row in model.history
    ]


@pytest.fixture(scope="module")
def rows(spark):
    x = np.random.default_rng(0).standard_normal((240, 4)).astype(np.float32)
    labels = (x[:, 0] > 0).astype(int) + (x[:, 1] > 0).astype(int)
    return spark.createDataFrame(
        [(row.tolist(), int(label)) for row, label in zip(x, labels, strict=True)],
        "features array<float>, label long",
    ).cache()


@pytest.fixture(scope="module")
def expected(rows):
    return fit(rows, dml.AllReduce("torch"))


def assert_alike(model, expected):
    for one, other in zip(model.module.parameters(), expected.module.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    for one, other in zip(told(model), told(expected), strict=True):
        assert one == pytest.approx(other, rel=1e-3)


class SharesMemory:
    """In every worker: on one host no gradient goes through a socket."""

    def open_wire(self, ctx, comm=None):
        wire = super().open_wire(ctx, comm)
        assert wire.topology == "shared-memory"
        return wire


class LayersInMemory(SharesMemory, LayeredSGD):
    """In groups of two workers."""


class GroupsInMemory(SharesMemory, Hybrid):
    """In groups of two workers."""


def test_layers_equal_allreduce(rows, expected):
    assert_alike(fit(rows, LayersInMemory(2, "torch")), expected)


def test_servers_equal_allreduce(rows, expected):
    assert_alike(fit(rows, ParameterServer()), expected)


def test_groups_before_servers_equal_allreduce(rows, expected):
    assert_alike(fit(rows, GroupsInMemory(2, consistency=BSP(), backend="torch")), expected)


def test_a_killed_worker_restarts_with_its_rows(rows, expected, tmp_path):
    fault = FaultAt(rank=1, step=4, kind="kill", folder=str(tmp_path))
    model = fit(rows, ParameterServer(consistency=SSP(2)), callbacks=[fault])
    assert any(tmp_path.iterdir()), "it was killed"
    num_rows = told(expected)[0]["rows"]
    assert [row["rows"] for row in told(model)] == [num_rows] * 2  # each once
    assert told(model)[-1]["val_loss"] < 0.9  # of three classes, ln 3 by chance


def test_a_killed_server_loses_nothing(rows, expected, tmp_path):
    class Mortal(ParameterServer):
        """One of its servers is killed once it has taken some pushes."""

        def _serve(self, ctx):
            if ctx.rank != 1 or ctx.attempt:
                super()._serve(ctx)
                return

            def watch(node):
                while node.stats.pushes < 6:
                    over.wait(0.001)
                (tmp_path / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)

            over = threading.Event()
            start = lambda node: threading.Thread(target=watch, args=(node,)).start()  # noqa: E731
            serve(ctx.rank, self.config(ctx), ctx.ask, ctx.host, start)

    model = fit(rows, Mortal())
    assert (tmp_path / "killed").exists()
    assert_alike(model, expected)


def test_servers_take_part_in_checkpoints(rows, expected, tmp_path):
    fit(rows, ParameterServer(), epochs=1, checkpoint=str(tmp_path))
    model = fit(rows, ParameterServer(), checkpoint=str(tmp_path))
    assert_alike(model, expected)  # with the momentum that the servers had


def test_too_few_slots_name_the_roles(rows):
    with pytest.raises(dml.NotEnoughSlots, match="2 workers and 3 servers"):
        fit(rows, ParameterServer(3))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"clipNorm": 1.0}, "clipNorm"),
        ({"optimizer": partial(torch.optim.RMSprop, lr=0.1)}, "optimizer"),
        ({"loss": nn.CrossEntropyLoss(reduction="sum")}, "loss"),
        ({"callbacks": [dml.GradientMonitor()]}, "callbacks"),
    ],
)
def test_what_servers_can_not_do_is_refused_at_the_driver(rows, changes, name):
    with pytest.raises(dml.ParameterError, match=f"^{name} must be"):
        fit(rows, ParameterServer(), **changes)


class WaitsForFile(dml.Callback):
    """The first worker continues after its third step once a file is as long as that."""

    def __init__(self, path, length):
        self.path, self.length = path, length

    def on_step_end(self, training):
        if training.ctx.rank == 0 and training.step == 3:
            wait_until(self._is_long, seconds=60)  # a measurement has been written

    def _is_long(self):
        return self.path.exists() and self.path.stat().st_size >= self.length


class Sign:
    """A metric that makes a file longer by each row that is only looked at."""

    def __init__(self, path):
        self.path = path

    def __call__(self, outputs, targets):
        if not outputs.requires_grad:
            with self.path.open("a") as file:
                file.write("." * len(targets))
        return (outputs.argmax(1) == targets).float()


def test_an_evaluator_measures_while_the_workers_train(rows, expected, tmp_path):
    measured, num_held_out = tmp_path / "measured", rows.count() - expected.history.rows[0]
    model = fit(
        rows,
        ParameterServer(num_servers=1, evaluator=True),
        metrics={"accuracy": Sign(measured)},
        callbacks=[WaitsForFile(measured, num_held_out)],
    )
    for one, other in zip(model.module.parameters(), expected.module.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    first = model.history.evaluations[0]
    assert first["epoch"] == 1
    assert 1 <= first["step"] <= 4  # the other worker may be a step ahead
    assert first["val_loss"] > model.history.val_loss[-1]
    # All held-out rows, and no others: accuracies are multiples of one in their number.
    hits = first["val_accuracy"] * num_held_out
    assert hits == pytest.approx(round(hits), abs=1e-4)


def test_roles_with_an_evaluator_need_a_slot_for_each(rows):
    with pytest.raises(dml.NotEnoughSlots, match="2 workers, 2 servers and 1 evaluator"):
        fit(rows, ParameterServer(evaluator=True))
    with pytest.raises(dml.ParameterError, match="validation"):
        fit(rows, ParameterServer(evaluator=True), validation=None)
