"""Callbacks on threads: hooks, schedules, averages, limits; the same on every rank."""

import threading
import time
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import sparkdml as dml
from sparkdml.errors import ParameterError
from sparkdml.strategies.allreduce import AllReduce
from sparkdml.testing.threads import train_alone, train_on_threads
from sparkdml.training.callbacks import Callback
from sparkdml.training.callbacks.gradient_monitor import NonFiniteGradient
from sparkdml.training.callbacks.learning_rate_schedule import _like, _plain
from sparkdml.training.plan import Schedule, TaskPlan

LR = 0.1


def make_plan(**changes):
    fields = {
        "model": lambda: nn.Linear(3, 2),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.SGD, lr=LR),
        "features": ("x",),
        "label": "y",
        "metrics": {},
        "batch_size": 8,
    }
    return TaskPlan(**{**fields, **changes})


def make_rows(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator)
    return {"x": x, "y": (x.sum(dim=1) > 0).long()}


def halves(count=32):
    rows = make_rows(count)
    return [
        {n: v[: count // 2] for n, v in rows.items()},
        {n: v[count // 2 :] for n, v in rows.items()},
    ]


def train(callbacks, epochs=3, plan=None, parts=None, held_out=None):
    return train_on_threads(
        AllReduce,
        plan or make_plan(),
        Schedule(epochs, 8, validates=held_out is not None),
        parts or halves(),
        held_out,
        callbacks=callbacks,
    )


class Rates(Callback):
    """The learning rates that the steps were made with."""

    def __init__(self):
        self.rates = []

    def on_gradient(self, training):
        self.rates.append(training.task.optimizers[""].param_groups[0]["lr"])


def rates_of(schedule, epochs=3, num_workers=2):
    """(rates of the steps, rows, notes) of 2 steps an epoch."""
    seen = Rates()
    rows = make_rows(16 * num_workers)
    parts = [
        {n: v[16 * rank : 16 * rank + 16] for n, v in rows.items()} for rank in range(num_workers)
    ]

    def make():
        return [schedule()] if threading.current_thread().name != "rank-0" else [schedule(), seen]

    trainings = train(make, epochs, parts=parts)
    assert len({training.task.params.values.sum().item() for training in trainings}) == 1
    notes = [event["text"] for event in trainings[0].ctx.events if event["kind"] == "note"]
    return seen.rates, trainings[0].history, notes


def by_hand(make_scheduler, steps, every):
    """The same schedule in plain torch."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=LR)
    scheduler, rates = make_scheduler(optimizer), []
    for step in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if (step + 1) % every == 0:
            scheduler.step()
    return rates


SCHEDULERS = {
    "StepLR": partial(lr_scheduler.StepLR, step_size=2, gamma=0.5),
    "MultiStepLR": partial(lr_scheduler.MultiStepLR, milestones=[1, 4]),
    "LambdaLR": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.9**step),
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=7),
    "CosineAnnealingLR": partial(lr_scheduler.CosineAnnealingLR, T_max=6),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[3],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_any_torch_scheduler_gives_its_own_rates(name):
    factory = SCHEDULERS[name]
    rates, history, _ = rates_of(lambda: dml.LearningRateSchedule(factory, per="step"))
    assert rates == by_hand(factory, 6, every=1)
    assert [row["lr"] for row in history] == rates[1::2], "of the last step of each epoch"


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_resumes_from_its_saved_state(name):
    from sparkdml.checkpoint.encoding import put_together, take_apart
    from sparkdml.checkpoint.state import Entry

    def fresh():
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=LR)
        return optimizer, SCHEDULERS[name](optimizer)

    optimizer, scheduler = fresh()
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    saved = take_apart({"s": Entry(_plain(scheduler.state_dict()))})
    other, resumed = fresh()
    other.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(_like(resumed.state_dict(), put_together(*saved)["s"].value))
    for _ in range(3):
        for one, its in ((optimizer, scheduler), (other, resumed)):
            one.step()
            its.step()
        assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"]


def test_per_epoch():
    factory = SCHEDULERS["StepLR"]
    rates, _, notes = rates_of(lambda: dml.LearningRateSchedule(factory), epochs=4)
    assert rates == by_hand(factory, 8, every=2)
    assert notes == ["learning rate: 0.1, then by StepLR per epoch"]


def test_warm_up_alone_begins_above_nothing():
    rates, _, notes = rates_of(lambda: dml.LearningRateSchedule(warmup_steps=4))
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])
    assert notes == ["learning rate: 0.1, reached from 0 in 4 steps"]


def test_scaling_with_workers_warms_up_from_the_base_and_says_so():
    rates, history, notes = rates_of(
        lambda: dml.LearningRateSchedule(
            SCHEDULERS["StepLR"], per="step", warmup_steps=3, scale_with_workers=True
        ),
        num_workers=3,
    )
    base = by_hand(SCHEDULERS["StepLR"], 6, every=1)
    factors = [1 + 2 / 3, 1 + 4 / 3, 3, 3, 3, 3]
    assert rates == pytest.approx([b * f for b, f in zip(base, factors, strict=True)])
    assert history[-1]["lr"] == pytest.approx(base[-1] * 3)
    assert notes == [
        "learning rate: 0.1, times 3 workers, reached from that of one worker in 3 steps, "
        "then by StepLR per step"
    ]


def test_on_a_plateau_the_rate_falls_and_it_is_said():
    schedule = partial(
        dml.LearningRateSchedule,
        partial(lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5, threshold=0.9),
        monitor="loss",
    )
    _, history, notes = rates_of(schedule, epochs=3)
    assert [row["lr"] for row in history] == [0.1, 0.1, 0.05]
    assert notes[1] == "learning rate: 0.1 -> 0.05, since loss no longer improves"


def test_rates_of_several_groups_and_optimizers_are_columns():
    def groups(module):
        return [{"params": [module.weight]}, {"params": [module.bias], "lr": 0.5}]

    schedule = partial(dml.LearningRateSchedule, SCHEDULERS["StepLR"], scale_with_workers=True)
    row = train(lambda: [schedule()], 1, make_plan(parameter_groups=groups))[0].history[0]
    assert (row["lr"], row["lr_1"]) == (0.2, 1.0)
    plan = make_plan(
        model={"a": lambda: nn.Linear(3, 2), "b": lambda: nn.Linear(3, 2)},
        loss=None,
        metrics=[],
        step=lambda m, b, c: {"a": m.a(b["x"]).mean(), "b": m.b(b["x"]).mean()},
        optimizer={n: partial(torch.optim.SGD, lr=r) for n, r in (("a", 0.1), ("b", 0.2))},
    )
    schedule = partial(dml.LearningRateSchedule, {"b": SCHEDULERS["StepLR"]})
    history = train(lambda: [schedule()], 3, plan)[0].history
    assert [row["a_lr"] for row in history] == [0.1, 0.1, 0.1]
    assert [row["b_lr"] for row in history] == [0.2, 0.2, 0.1]


def test_the_mean_of_weights_is_kept_and_validated():
    decay, held_out = 0.8, make_rows(10, seed=3)
    states = []

    class Watch(Callback):
        def on_step_end(self, training):
            if training.ctx.rank == 0:
                states.append(training.task.params.values.clone())

    empty = {name: value[:0] for name, value in held_out.items()}
    trainings = train(
        lambda: [dml.EMA(decay, warmup=False), Watch()], 2, held_out=[held_out, empty]
    )
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    expected = torch.cat([module.bias.detach(), module.weight.detach().flatten()])
    for state in states:
        expected = decay * expected + (1 - decay) * state
    for training in trainings:
        torch.testing.assert_close(training.task.params.values, expected)
    last = nn.CrossEntropyLoss()(trainings[0].task.module(held_out["x"]), held_out["y"])
    assert trainings[0].history[-1]["val_loss"] == pytest.approx(last.item(), rel=1e-5)
    plain = train_alone(make_plan(), combined(halves()) * 2)
    torch.testing.assert_close(states[-1][2:].view(2, 3), plain.weight)  # trained on as ever


def combined(parts):
    return [
        {name: torch.cat([part[name][i : i + 8] for part in parts]) for name in parts[0]}
        for i in (0, 8)
    ]


def test_the_best_model_is_that_of_its_epoch_also_among_averages():
    class Score(Callback):
        """The second epoch is the best, and what would be kept then is remembered."""

        kept = {}

        def on_epoch_end(self, training, row):
            row["score"] = {1: 0.5, 2: 0.9, 3: 0.7}[int(row["epoch"])]
            if row["epoch"] == 2:
                self.kept[training.ctx.rank] = training.result_state()

    for averaging in ([], [dml.EMA(0.5)]):
        trainings = train(
            lambda averaging=averaging: [
                *(dml.EMA(e.decay) for e in averaging),
                Score(),
                dml.BestModel("score", mode="max"),
            ]
        )
        for training in trainings:
            kept = Score.kept[training.ctx.rank]
            assert all(
                torch.equal(v, kept[n]) for n, v in training.task.module.state_dict().items()
            )
            assert [row["best_epoch"] for row in training.history] == [1, 2, 2]


@pytest.mark.parametrize("asking", [0, 1])
def test_one_rank_that_asks_ends_the_run_after_the_same_step_on_all(asking):
    class Asks(Callback):
        def on_step_end(self, training):
            if training.ctx.rank == asking and training.step == 5:
                training.request_stop("enough of it")

    parts = halves(96)  # 6 steps an epoch
    trainings = train(lambda: [Asks()], 9, parts=parts)
    for training in trainings:
        assert (training.step, training.stopped) == (6, "enough of it")
        assert len(training.history) == 1
    trainings = train(lambda: [Asks()], 9, parts=halves(64))  # 4 steps an epoch
    for training in trainings:
        assert training.step == 6
        assert [row["rows"] for row in training.history] == [64, 32], "a row of what was trained"
    assert torch.equal(trainings[0].task.params.values, trainings[1].task.params.values)


def test_a_request_that_comes_with_the_last_step_of_an_epoch_is_not_lost():
    class Asks(Callback):
        def on_step_end(self, training):
            if training.step == 2:
                training.request_stop("enough")

    for training in train(lambda: [Asks()], 5):  # 2 steps an epoch
        assert (training.step, training.stopped, len(training.history)) == (2, "enough", 1)


def test_a_time_limit_ends_the_run_in_the_middle_of_an_epoch():
    class Slow(Callback):
        def on_step_start(self, training):
            time.sleep(0.01)

    started = time.monotonic()
    trainings = train(lambda: [Slow(), dml.TimeLimit(0.3)], 10**6)
    assert time.monotonic() - started < 5
    for training in trainings:
        assert training.stopped == "the limit of 0.3 s was reached"
        assert training.step == trainings[0].step


def test_the_time_of_failed_submissions_counts_and_that_of_another_fit_does_not():
    limit, training = dml.TimeLimit(100), type("T", (), {"request_stop": lambda self, why: None})()
    limit.on_run_start(training)
    limit.load({"seconds": 99.5})
    limit.on_step_end(training)
    assert limit.state()["seconds"] >= 99.5
    limit.load({"seconds": 100.5})
    limit.on_step_end(training)
    assert limit.state()["seconds"] == 0.0


def test_norms_of_the_gradient_are_measured():
    class ByHand(Callback):
        norms = []

        def on_gradient(self, training):
            if training.ctx.rank == 0:
                self.norms.append(training.task.params.grads.norm().item())

    plan = make_plan(
        model=lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)), clip_norm=1e-4
    )
    trainings = train(lambda: [ByHand(), dml.GradientMonitor(by_module=True)], 1, plan)
    row = trainings[1].history[0]
    assert row["gradient_norm"] == pytest.approx(sum(ByHand.norms) / 2)
    assert row["gradient_norm_max"] == pytest.approx(max(ByHand.norms))
    assert row["gradient_norm"] > 1e-2, "before it is clipped"
    assert 0 < row["gradient_norm_0"] < row["gradient_norm"]
    assert "gradient_norm_1" not in row, "which has no parameters"
    sparse = train(lambda: [dml.GradientMonitor(every=5)], 3)[0].history
    assert [row["gradient_norm"] > 0 for row in sparse] == [True, False, True]


def test_a_gradient_that_is_no_number_is_named():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.fine, self.bad = nn.Linear(3, 2), nn.Parameter(torch.zeros(2))

        def forward(self, x):
            return self.fine(x) + self.bad.abs().sqrt()

    with pytest.raises(NonFiniteGradient, match="gradient of bad is not finite at step 1"):
        train(lambda: [dml.GradientMonitor()], 1, make_plan(model=Root))


def test_hooks_come_in_order():
    class Log(Callback):
        def __init__(self):
            self.calls = []

        def on_run_start(self, training):
            self.calls.append("run")

        def on_epoch_start(self, training):
            self.calls.append(f"epoch {training.epoch.number}")

        def on_step_start(self, training):
            self.calls.append("step")

        def on_gradient(self, training):
            self.calls.append("gradient")

        def on_step_end(self, training):
            self.calls.append(f"step {training.step} done")

        def on_epoch_end(self, training, row):
            self.calls.append("epoch done")

        def on_run_end(self, training):
            self.calls.append("run done")

    log = Log()
    train([log], 2, parts=[make_rows(8)])
    epoch = ["step", "gradient"]
    assert log.calls == [
        "run",
        "epoch 0", *epoch, "step 1 done", "step", "epoch done",
        "epoch 1", *epoch, "step 2 done", "step", "epoch done",
        "run done",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: dml.EMA(1.0), "decay must be a number between 0 and 1"),
        (lambda: dml.TimeLimit(0), "seconds must be a number above 0"),
        (lambda: dml.GradientMonitor(every=0), "every must be 1 or more"),
        (lambda: dml.BestModel(mode="most"), "'min' or 'max'"),
        (lambda: dml.EarlyStopping(patience=-1), "0 or more epochs"),
        (lambda: dml.LearningRateSchedule(), "scheduler must be given, or warmup_steps"),
        (lambda: dml.LearningRateSchedule(3), r"a function \(optimizer\) -> scheduler"),
        (lambda: dml.LearningRateSchedule(lambda o: o, per="batch"), "'step' or 'epoch'"),
        (lambda: dml.LearningRateSchedule(warmup_steps=-1), "0 or more steps"),
        (
            lambda: dml.LearningRateSchedule(
                lr_scheduler.StepLR(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1), 1)
            ),
            "each worker has an optimizer of its own",
        ),
    ],
)
def test_bad_arguments(make, words):
    with pytest.raises(ParameterError, match=words):
        make()
