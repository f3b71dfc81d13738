"""The loop of local steps and meetings: what a round is to all else."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdml.errors import ParameterError
from sparkdml.strategies.local.easgd import EASGD
from sparkdml.strategies.local.local_sgd import LocalSGD
from sparkdml.testing.digits import cut, digits, digits_plan
from sparkdml.testing.threads import train_alone, train_on_threads
from sparkdml.training.callbacks import EMA, Callback, GradientMonitor, LearningRateSchedule
from sparkdml.training.forward import LossScale
from sparkdml.training.plan import Schedule


def values_of(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


@settings(deadline=None, max_examples=15)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=3).filter(any),
    steps=st.integers(1, 9),
)
def test_a_round_is_the_mean_of_the_models_by_rows(sizes, steps):
    """One round, written out: each rank alone with plain torch, then the weighted mean."""
    parts = cut(digits(130), sizes)
    plan = digits_plan(lr=0.1, momentum=0.9)
    firsts = [{name: value[: 8 * steps] for name, value in part.items()} for part in parts]
    trainings = train_on_threads(partial(LocalSGD, steps), plan, Schedule(1, 8), firsts)
    alone = [
        train_alone(plan, [dict(zip(part, batch, strict=True)) for batch in batches_of(part)])
        for part in firsts
    ]
    rows = torch.tensor([float(len(part["y"])) for part in firsts])
    expected = sum(values_of(m) * w for m, w in zip(alone, rows / rows.sum(), strict=True))
    for training in trainings:
        torch.testing.assert_close(values_of(training.task.module), expected)
        assert training.step == 1
        assert training.history[0]["steps"] == 1
        assert training.history[0]["rows"] == rows.sum()


def batches_of(part):
    return list(zip(part["x"].split(8), part["y"].split(8), strict=True)) if len(part["y"]) else []


def test_fewer_meetings_send_fewer_bytes():
    parts = cut(digits(128), [64, 64])

    def sent(strategy_of):
        training = train_on_threads(strategy_of, digits_plan(), Schedule(2, 8), parts)[0]
        return training.ctx.comm.traffic.bytes

    one, eight = sent(partial(LocalSGD, 1)), sent(partial(LocalSGD, 8))
    assert eight < one / 4  # 2 meetings, and what is sent before and after the run, for 16


@pytest.mark.parametrize(("policy", "num_kept"), [("keep", 4), ("reset", 0)])
def test_momentum_is_kept_or_reset_when_ranks_meet(policy, num_kept):
    class Watches(Callback):
        def on_step_end(self, training):
            (optimizer,) = training.task.optimizers.values()
            assert len(optimizer.state) == num_kept

    train_on_threads(
        lambda: LocalSGD(3, optimizer_state=policy),
        digits_plan(lr=0.1, momentum=0.9),
        Schedule(1, 8),
        cut(digits(60), [30, 30]),
        callbacks=[Watches()],
    )


def test_callbacks_are_called_at_meetings_with_the_same_numbers():
    seen = {0: [], 1: []}

    class Watches(Callback):
        def on_step_start(self, training):
            seen[training.ctx.rank].append("start")

        def on_step_end(self, training):
            total = training.task.params.values.sum().item()
            seen[training.ctx.rank].append((training.step, training.epoch.totals, total))

    train_on_threads(
        partial(LocalSGD, 4),
        digits_plan(),
        Schedule(1, 8),
        cut(digits(90), [70, 20]),
        callbacks=[Watches()],
    )
    assert seen[0] == seen[1]
    # 9 batches of rank 0 in rounds of 4, and the round in which they find that it is over.
    assert [entry[0] for entry in seen[0] if entry != "start"] == [1, 2, 3]
    assert seen[0].count("start") == 4


def test_a_scheduled_rate_holds_for_a_whole_round():
    """Warm-up multiplies the rate of each step: of all steps of a round by the same factor."""
    rates = []

    class Watches(Callback):
        def on_gradient(self, training):
            (optimizer,) = training.task.optimizers.values()
            rates.append(optimizer.param_groups[0]["lr"])

    train_on_threads(
        partial(LocalSGD, 2),
        digits_plan(lr=0.4),
        Schedule(1, 8),
        [digits(48)],
        callbacks=lambda: [LearningRateSchedule(warmup_steps=2), Watches()],
    )
    assert rates == pytest.approx([0.2, 0.2, 0.4, 0.4, 0.4, 0.4])


@pytest.mark.parametrize("strategy", [LocalSGD, EASGD])
def test_a_moving_average_is_of_what_would_be_kept_and_alike_on_all_ranks(strategy):
    trainings = train_on_threads(
        partial(strategy, 2),
        digits_plan(lr=0.2),
        Schedule(2, 8),
        cut(digits(64), [40, 24]),
        callbacks=lambda: [EMA(0.5, warmup=False), KeepsAverage()],
    )
    first, second = trainings
    assert torch.equal(first.task.params.values, second.task.params.values)
    torch.testing.assert_close(first.task.params.values, first.callbacks[1].average)


class KeepsAverage(Callback):
    """The same moving average, of EASGD's centre or of the models that all have."""

    def on_run_start(self, training):
        self.average = training.task.params.values.clone()

    def on_step_end(self, training):
        strategy, values = training.ctx.strategy, training.task.params.values
        kept = strategy._centre if isinstance(strategy, EASGD) else values
        self.average.lerp_(kept, 0.5)


def test_validation_and_stops_are_those_of_one_model():
    held_out = cut(digits(200), [100, 100])
    trainings = train_on_threads(
        partial(EASGD, 3),
        digits_plan(),
        Schedule(2, 8, validates=True),
        cut(digits(90), [60, 30]),
        held_out,
    )
    assert trainings[0].history[-1]["val_loss"] == trainings[1].history[-1]["val_loss"]


def test_a_monitor_of_agreed_gradients_is_refused():
    with pytest.raises(ParameterError, match="workers agree on no gradient"):
        LocalSGD().check(SimpleNamespace(callbacks=[EMA(), GradientMonitor()]))
    LocalSGD().check(SimpleNamespace(callbacks=[EMA()]))


def test_the_smallest_loss_scale_is_kept():
    from sparkdml.comm.threads import run_threads

    def agree(comm):
        scale = LossScale(8)
        scale.value, scale.good_steps = 2.0 ** (10 + comm.rank), 5 - comm.rank
        scale.skipped_steps = comm.rank
        scale.agree(comm, torch.device("cpu"))
        return scale.state()

    expected = {"value": 2.0**10, "good_steps": 3, "skipped_steps": 2}
    assert run_threads(3, agree) == [expected] * 3
