"""The columns of the history: one list, with which no user's name collides."""

from pathlib import Path

import pytest
from torch import nn

import sparkdml as dml
from sparkdml.fitting.fit import check_run
from sparkdml.history_columns import COLUMNS, EVERY_FIT, check_columns, check_metric
from sparkdml.parameter_server.strategy import ParameterServer
from sparkdml.strategies.base import Strategy
from sparkdml.testing.digits import digits_plan
from sparkdml.training.callbacks import Callback
from sparkdml.training.training import Schedule, TrainingPlan

PUBLIC = [getattr(dml, name) for name in dml.__all__ if not name.startswith("_")]
WRITERS = [
    kind
    for kind in PUBLIC
    if isinstance(kind, type) and issubclass(kind, Strategy | Callback) and kind.columns
]
SERVERS = {"strategy ParameterServer": ParameterServer.columns}


def judge(metrics=(), loss_names=(), validates=False, **writers):
    return check_columns(metrics, loss_names, validates, writers)


def test_each_is_listed_once():
    names = [column.name for column in COLUMNS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("kind", WRITERS, ids=lambda kind: kind.__name__)
def test_what_strategies_and_callbacks_write_is_listed_with_its_owner(kind):
    owners = {column.name: column.owner.split(", ") for column in COLUMNS}
    for name in kind.columns:
        assert kind.__name__ in owners[name]


def test_every_listed_owner_writes_its_columns():
    writers = {kind.__name__: kind for kind in WRITERS}
    for column in COLUMNS:
        for owner in column.owner.split(", "):
            if column.owner not in (EVERY_FIT, 'precision="fp16"'):
                assert column.name in writers[owner].columns


def test_the_columns_of_a_fit():
    assert judge() == {"epoch", "loss", "rows", "steps", "seconds", "rows_per_second"}
    found = judge(["accuracy"], ["net", "critic"], validates=True)
    assert found - judge() == {
        *("accuracy", "net_loss", "critic_loss"),
        *("val_loss", "val_accuracy", "val_net_loss", "val_critic_loss"),
    }


@pytest.mark.parametrize("name", ["loss", "rows_per_second", "lr", "best_epoch", "skipped_steps"])
def test_names_that_no_metric_may_have(name):
    with pytest.raises(dml.ParameterError, match=f"metrics must be named differently.*'{name}'"):
        dml.TorchEstimator(metrics={name: len})


def test_names_of_validation_are_not_for_metrics():
    with pytest.raises(dml.ParameterError, match="written by validation="):
        check_metric("val_mine")


def test_a_metric_with_a_name_of_the_strategys():
    judge(["staleness"])
    with pytest.raises(
        dml.ParameterError, match=r"metrics.*'staleness' already, written by ParameterServer"
    ):
        check_columns(["staleness"], [], False, SERVERS)


def test_a_loss_with_a_name_of_validations():
    judge(loss_names=["val", "net"])
    with pytest.raises(dml.ParameterError, match=r"optimizer.*'val_loss'.*by validation="):
        judge(loss_names=["val", "net"], validates=True)


def test_a_metric_with_a_name_of_a_loss_or_a_callback():
    with pytest.raises(dml.ParameterError, match=r"'net_loss'.*the loss of 'net'"):
        judge(["net_loss"], ["net"])
    rates = {"callbacks LearningRateSchedule": dml.LearningRateSchedule.columns}
    check_columns(["my_lr"], [], False, rates)
    with pytest.raises(dml.ParameterError, match=r"'net_lr'.*LearningRateSchedule"):
        check_columns(["net_lr"], ["net"], False, rates)
    with pytest.raises(dml.ParameterError, match=r"'gradient_norm_head'.*GradientMonitor"):
        check_columns(
            ["gradient_norm_head"],
            [],
            False,
            {"callbacks GradientMonitor": dml.GradientMonitor.columns},
        )


def test_a_strategy_of_ones_own_with_a_column_that_is_taken():
    with pytest.raises(dml.ParameterError, match=r"strategy.*'loss'.*by every fit.*got 'Mine'"):
        check_columns([], [], False, {"strategy Mine": ("loss",)})
    with pytest.raises(dml.ParameterError, match=r"callbacks.*'staleness'.*by ParameterServer"):
        check_columns([], [], False, {**SERVERS, "callbacks Late": ("staleness",)})


def test_a_fit_is_refused_before_any_job():
    task = digits_plan(metrics={"staleness": len})
    plan = TrainingPlan(task, Schedule(1, 8))
    module = nn.Linear(1, 1)
    check_run(plan, module, dml.AllReduce())
    with pytest.raises(dml.ParameterError, match="written by ParameterServer"):
        check_run(plan, module, dml.ParameterServer(num_servers=1))


def test_the_docs_have_the_same_table():
    page = Path(__file__).parents[1] / "docs" / "how-to-see-a-run.md"
    section = page.read_text().partition("## The columns of the history")[2]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    expected = [f"| `{one.name}` | {one.owner} | {one.meaning} |" for one in COLUMNS]
    assert rows == expected
