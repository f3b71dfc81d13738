"""The contract suite of strategies: subclass it, and list the strategies to test.

    class TestMine(StrategyContract):
        cases = {"Mine": Case(lambda: Mine(steps=4), plain=lambda: Mine(steps=1), plain_workers=3)}

Everything runs in memory, and on threads unless a case has another `train` with the same arguments:
`ProcessTrainer` for a real backend, `train_served` for strategies with servers.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from sparkdml.errors import NonFiniteLoss, ParameterError
from sparkdml.strategies.base import Strategy
from sparkdml.testing.digits import (
    combined_batches,
    cut,
    digits,
    digits_plan,
    loss_of,
    make_normed_reader,
    make_reader,
)
from sparkdml.testing.faults import FailsAt, Injected, StopAt
from sparkdml.testing.memory_checkpoints import MemoryCheckpoints
from sparkdml.testing.models import RefusesRows
from sparkdml.testing.threads import train_alone, train_on_threads
from sparkdml.training.plan import Schedule

BATCH = 8


@dataclass(frozen=True)
class Case:
    """A strategy as the suite runs it.

    Args:
        make: makes the strategy with typical settings, for 1 to 4 workers and some 20 steps per
            rank in an epoch.
        plain: makes it with the degenerate settings that equal plain SGD without momentum.
        plain_workers: the number of workers on which they do, with the workers' batches joined.
        plain_lr: the factor of plain SGD's learning rate (an average halves it, for instance).
        lr: the learning rate with which it learns the digits.
        max_loss: the loss that it must reach on all rows of the digits in `epochs` epochs, with 2
            to 4 workers.
        ends_alike: whether all ranks have the same parameters at the end.
        resumes_exactly: whether a run that is interrupted and resumed ends with the same bits.
        rows_move: whether a rank may train on another rank's rows.
        bad: functions that must raise, each with a word of the message (the parameter's name).
        train: `train_on_threads`, or a function that runs the strategy elsewhere, or its other
            roles, too.
        slow: whether the case runs only with `pytest -m slow`, because another one has the same
            strategy.
    """

    make: Callable[[], Strategy]
    plain: Callable[[], Strategy] | None = None
    plain_workers: int = 1
    plain_lr: float = 1.0
    lr: float = 0.5
    epochs: int = 6
    max_loss: float = 0.45
    ends_alike: bool = True
    resumes_exactly: bool = True
    rows_move: bool = False
    bad: Sequence[tuple[Callable[[], object], str]] = field(default=())
    train: Callable[..., Sequence[Any]] = train_on_threads  # of `Training` or `Trained`
    slow: bool = False


def slowly(value: Any) -> Any:
    """Mark an additional case, which runs only with `pytest -m slow`."""
    return pytest.param(value, marks=pytest.mark.slow)


def assert_alike(trainings: Sequence[Any], expected: nn.Module, **tolerance: Any) -> None:
    theirs = expected.state_dict()
    for training in trainings:
        ours = training.task.module.state_dict()
        assert ours.keys() == theirs.keys()
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], **tolerance)


class StrategyContract:
    """What every strategy promises."""

    cases: ClassVar[dict[str, Case]] = {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "case" in metafunc.fixturenames:
            cases = [slowly(case) if case.slow else case for case in self.cases.values()]
            metafunc.parametrize("case", cases, ids=self.cases.keys(), indirect=True)

    @pytest.fixture
    def case(self, request: pytest.FixtureRequest) -> Case:
        """Return the case; a subclass may replace its `train`."""
        case: Case = request.param
        return case

    # -- what it computes -----------------------------------------------------------------------

    def test_the_degenerate_setting_is_plain_sgd(self, case: Case) -> None:
        rows = digits(128)
        size = len(rows["y"]) // case.plain_workers
        parts = cut(rows, [size + 3, *[size - 4] * (case.plain_workers - 1)])
        make = case.plain or case.make
        trainings = case.train(make, digits_plan(lr=0.1), Schedule(2, BATCH), parts)
        batches = [*combined_batches(parts, BATCH)] * 2
        reference = train_alone(digits_plan(lr=0.1 * case.plain_lr), batches)
        assert_alike(trainings, reference, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("num_workers", [slowly(2), 3, slowly(4)])
    def test_workers_learn_together(self, case: Case, num_workers: int) -> None:
        rows = digits(400)
        parts = cut(rows, [400 // num_workers] * num_workers)
        plan = digits_plan(lr=case.lr)
        trainings = case.train(case.make, plan, Schedule(case.epochs, BATCH), parts)
        losses = [loss_of(training.task.module, rows) for training in trainings]
        assert max(losses) < case.max_loss
        assert trainings[0].history[-1]["accuracy"] > 0.85
        if case.ends_alike:
            assert_alike(trainings[1:], trainings[0].task.module, rtol=0, atol=0)

    # -- rows -----------------------------------------------------------------------------------

    @pytest.mark.parametrize("sizes", [[37, 5, 0, 64], slowly([0, 21]), [6]])
    def test_uneven_parts_and_ranks_without_rows(self, case: Case, sizes: list[int]) -> None:
        parts = cut(digits(200), sizes)
        # Where rows move, a rank's share may be one row, on which BatchNorm fails.
        model = make_reader if case.rows_move else make_normed_reader
        plan = digits_plan(lr=0.1, model=model)
        trainings = case.train(case.make, plan, Schedule(2, BATCH), parts)
        for training in trainings:
            assert [row["rows"] for row in training.history] == [sum(sizes)] * 2
            assert all(math.isfinite(row["loss"]) for row in training.history)
            assert told(training) == told(trainings[0])
        if case.ends_alike:
            assert_alike(trainings[1:], trainings[0].task.module, rtol=0, atol=0)

    def test_losses_and_metrics_are_means_over_rows(self, case: Case) -> None:
        parts = cut(digits(60), [44, 16])
        plan = digits_plan(lr=0.0)
        first = case.train(case.make, plan, Schedule(1, BATCH), parts)[0]
        rows, module = digits(60), train_alone(plan, [])  # as it is made, since nothing moves
        right = module(rows["x"]).argmax(1) == rows["y"]
        assert first.history[0]["loss"] == pytest.approx(loss_of(module, rows), rel=1e-4)
        assert first.history[0]["accuracy"] == pytest.approx(right.float().mean().item())

    # -- checkpoints ----------------------------------------------------------------------------

    @pytest.mark.parametrize("num_workers", [slowly(1), 3])
    def test_a_resumed_run_is_the_uninterrupted_one(self, case: Case, num_workers: int) -> None:
        if not case.resumes_exactly:
            pytest.skip("it promises no exact resumption")
        parts = cut(digits(320), [100 + 3 * rank for rank in range(num_workers)])
        plan = digits_plan(lr=0.1, momentum=0.9, model=make_normed_reader)
        schedule = Schedule(2, BATCH)

        def train(checkpoints: MemoryCheckpoints, fails_at: int = 0) -> Sequence[Any]:
            callbacks = [FailsAt(num_workers - 1, fails_at)]
            return case.train(
                case.make, plan, schedule, parts, callbacks=callbacks, checkpoints=checkpoints
            )

        expected = train(MemoryCheckpoints(every=2))
        step = expected[0].step // 2 + 1  # in the second epoch
        for fails_at in {3, step}:
            kept = MemoryCheckpoints(every=2)
            with pytest.raises(Injected):
                train(kept, fails_at)
            assert kept.newest is not None
            assert 0 < kept.newest.step <= fails_at
            resumed = train(kept)
            for ours, theirs in zip(resumed, expected, strict=True):
                assert ours.step == theirs.step
                assert told(ours) == told(theirs)
                assert_alike([ours], theirs.task.module, rtol=0, atol=0)

    @pytest.mark.parametrize("sizes", [slowly([66, 66]), slowly([132]), [40, 0, 40, 40, 12]])
    def test_other_numbers_of_workers_resume(self, case: Case, sizes: list[int]) -> None:
        plan, kept = digits_plan(lr=0.1, momentum=0.5), MemoryCheckpoints(every=3)
        rows = digits(132)
        first = case.train(
            case.make, plan, Schedule(1, BATCH), cut(rows, [60, 0, 72]), checkpoints=kept
        )
        trainings = case.train(
            case.make, plan, Schedule(3, BATCH), cut(rows, sizes), checkpoints=kept
        )
        assert [row["rows"] for row in trainings[0].history] == [132.0] * 3
        assert told(trainings[0])[0] == told(first[0])[0]
        assert trainings[0].history[-1]["loss"] < first[0].history[0]["loss"]

    def test_more_epochs_later_are_the_same_as_at_once(self, case: Case) -> None:
        """A run's last checkpoint has the state to resume from, in addition to the result."""
        if not case.resumes_exactly:
            pytest.skip("it promises no exact resumption")
        plan, parts = digits_plan(lr=0.1, momentum=0.5), cut(digits(72), [40, 32])

        def train(epochs: int, checkpoints: MemoryCheckpoints) -> Sequence[Any]:
            return case.train(
                case.make, plan, Schedule(epochs, BATCH), parts, checkpoints=checkpoints
            )

        at_once, kept = train(3, MemoryCheckpoints(every=1000)), MemoryCheckpoints(every=1000)
        train(1, kept)
        assert kept.newest is not None
        assert kept.newest.kind == "final"
        for ours, theirs in zip(train(3, kept), at_once, strict=True):
            assert told(ours) == told(theirs)
            assert_alike([ours], theirs.task.module, rtol=0, atol=0)

    # -- ends -----------------------------------------------------------------------------------

    def test_a_rank_that_raises_releases_the_others(self, case: Case) -> None:
        rows = {name: value.clone() for name, value in digits(90).items()}
        rows["x"][75] = 1e4  # the second batch of the last rank
        with pytest.raises(Injected, match="can't be read"):
            case.train(
                case.make,
                digits_plan(model=RefusesRows),
                Schedule(2, BATCH),
                cut(rows, [30, 30, 30]),
            )

    def test_a_loss_that_is_not_finite_is_reported_with_its_rank(self, case: Case) -> None:
        rows = {name: value.clone() for name, value in digits(64).items()}
        rows["x"][45] = float("nan")
        rank = r"\d" if case.rows_move else "1"
        with pytest.raises(NonFiniteLoss, match=rf"nan at step \d+ \(epoch 1\) on rank {rank}"):
            case.train(case.make, digits_plan(), Schedule(1, BATCH), cut(rows, [32, 32]))

    def test_one_rank_that_wants_to_stop_is_enough(self, case: Case) -> None:
        trainings = case.train(
            case.make,
            digits_plan(lr=0.1),
            Schedule(9, BATCH),
            cut(digits(240), [100, 140]),
            callbacks=[StopAt(1, 2)],
        )
        assert [training.stopped for training in trainings] == ["a test asked"] * 2
        assert trainings[0].step == trainings[1].step
        assert len(trainings[0].history) < 9

    # -- as an object ---------------------------------------------------------------------------

    def test_it_can_be_shipped_and_described(self, case: Case) -> None:
        strategy = case.make()
        assert repr(strategy).startswith(f"{type(strategy).__name__}(")
        assert repr(pickle.loads(pickle.dumps(strategy))) == repr(strategy)
        assert [role.count for role in strategy.roles(3) if role.name == "worker"] == [3]

    def test_bad_arguments_are_refused(self, case: Case) -> None:
        for make, word in case.bad:
            with pytest.raises(ParameterError, match=word):
                make()


def told(training: Any) -> list[dict[str, Any]]:
    """Return the history without its times."""
    return [
        {name: value for name, value in row.items() if "second" not in name}
        for row in training.history
    ]
