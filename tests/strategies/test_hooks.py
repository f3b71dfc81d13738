"""Which strategy calls which hook of a callback when: the table of the how-to is what is recorded.

Each strategy trains 2 epochs of 4 batches on each of 2 workers, with a callback that writes down
every call, and what the gradients and the parameters were on each rank at that moment.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import sparkdml as dml
from sparkdml.testing.digits import cut, digits, digits_plan
from sparkdml.testing.served_threads import train_served
from sparkdml.testing.threads import train_on_threads
from sparkdml.training.plan import Schedule

PAGE = Path(__file__).parents[2] / "docs" / "how-to-write-a-callback.md"
EPOCHS, WORKERS, BATCHES = 2, 2, 4
STRATEGIES: dict[str, Callable[[], dml.Strategy]] = {
    "AllReduce": dml.AllReduce,
    "LayeredSGD": partial(dml.LayeredSGD, 2),
    "BackupWorkers": partial(dml.BackupWorkers, backup=0),
    "AdaptiveBalance": partial(dml.AdaptiveBalance, every=2),
    "LocalSGD": partial(dml.LocalSGD, steps=2),
    "BlockMomentum": partial(dml.BlockMomentum, block=2),
    "SlowMo": partial(dml.SlowMo, steps=2),
    "Hogwild": partial(dml.Hogwild, steps=2),
    "EASGD": partial(dml.EASGD, steps=2),
    "Gossip": dml.Gossip,
    "ADPSGD": partial(dml.ADPSGD, every=2),
    "Averaging": dml.Averaging,
    "LBFGS": dml.LBFGS,
    "NewtonCG": dml.NewtonCG,
    "ParameterServer": dml.ParameterServer,
    "Downpour": partial(dml.Downpour, n_fetch=2, n_push=2, num_servers=1),
    "Hybrid": partial(dml.Hybrid, 2),
}
SERVED = ("ParameterServer", "Downpour", "Hybrid")
LETTERS = {
    "on_run_start": "R",
    "on_epoch_start": "E",
    "on_step_start": "S",
    "on_gradient": "g",
    "on_step_end": "s",
    "on_epoch_end": "e",
    "on_run_end": "r",
}
ROWS_MOVE = ("ADPSGD",)  # who trains on which batches is left to chance


class Recorder(dml.Callback):
    """One for each rank: (hook, what it saw)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, torch.Tensor | None]] = []
        self.rank = 0

    def note(self, hook: str, seen: torch.Tensor | None = None) -> None:
        self.calls.append((hook, None if seen is None else seen.clone()))

    def on_run_start(self, training: Any) -> None:
        self.rank = training.ctx.rank
        self.note("on_run_start", training.task.params.values)

    def on_epoch_start(self, training: Any) -> None:
        self.note("on_epoch_start")

    def on_step_start(self, training: Any) -> None:
        self.note("on_step_start")

    def on_gradient(self, training: Any) -> None:
        self.note("on_gradient", training.task.params.grads)

    def on_step_end(self, training: Any) -> None:
        self.note("on_step_end", training.task.params.values)

    def on_epoch_end(self, training: Any, row: dict[str, float]) -> None:
        self.note("on_epoch_end", training.task.params.values)

    def on_run_end(self, training: Any) -> None:
        self.note("on_run_end", training.task.params.values)

    def seen(self, hook: str) -> list[torch.Tensor | None]:
        return [seen for name, seen in self.calls if name == hook]


def record(name: str) -> list[Recorder]:
    recorders: list[Recorder] = []

    def make() -> Sequence[dml.Callback]:
        recorders.append(Recorder())
        return recorders[-1:]

    train = train_served if name in SERVED else train_on_threads
    train(
        STRATEGIES[name],
        digits_plan(lr=0.05),
        Schedule(EPOCHS, 8),
        cut(digits(64), [32, 32]),
        callbacks=make,
    )
    called = [recorder for recorder in recorders if recorder.calls]
    return sorted(called, key=lambda recorder: recorder.rank)  # threads begin in any order


def is_alike(recorders: list[Recorder], hook: str) -> bool:
    one, other = (recorder.seen(hook) for recorder in recorders)
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) > 0 and all(torch.equal(a, b) for a, b in pairs)


def per_epoch(recorders: list[Recorder], hook: str) -> str:
    """How often each rank was called; all of them, where they are called equally often."""
    counts = [len(recorder.seen(hook)) / EPOCHS for recorder in recorders]
    return " and ".join(f"{count:g}" for count in (counts[:1] if len({*counts}) == 1 else counts))


def cells_of(page: str, name: str) -> list[str]:
    """Of the table's line about a strategy, but for its name and for what is said in words."""
    [line] = [line for line in page.splitlines() if re.match(rf"\|.*`{name}[`(]", line)]
    return [cell.strip() for cell in line.strip("|").split("|")][2:]


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_table_is_what_is_recorded(name: str) -> None:
    recorders = record(name)
    starts, gradients, ends, alike = cells_of(PAGE.read_text(), name)
    assert len(recorders) == WORKERS
    if name in ROWS_MOVE:
        assert sum(len(each.seen("on_gradient")) for each in recorders) == EPOCHS * 2 * BATCHES
        assert (starts, ends) == ("varies", "varies")
    else:
        assert starts == per_epoch(recorders, "on_step_start")
        assert ends == per_epoch(recorders, "on_step_end")
        assert re.split(", |:", gradients)[0] == per_epoch(recorders, "on_gradient")
    # What is the same on all ranks must be so; what may differ may by chance be the same.
    for hook, word in (
        ("on_step_end", "each step"),
        ("on_epoch_end", "each epoch"),
        ("on_run_end", "the run"),
    ):
        if word in alike:
            assert is_alike(recorders, hook), f"the parameters differ after {word}"
    if "agreed" in gradients:
        assert is_alike(recorders, "on_gradient")


@pytest.mark.parametrize("name", STRATEGIES)
def test_hooks_nest(name: str) -> None:
    """Run, epochs, steps: each begins and ends once, inside the one around it."""
    recorders = record(name)
    assert is_alike(recorders, "on_run_start")
    for recorder in recorders:
        calls = "".join(LETTERS[hook] for hook, _ in recorder.calls)
        # After the last step of an epoch, most strategies look for one more batch in vain.
        assert re.fullmatch(rf"R(E(Sg*s)*S?e){{{EPOCHS}}}r", calls), calls


def test_every_strategy_is_in_the_table() -> None:
    public = {name for name in dml.__all__ if isinstance(getattr(dml, name), type)}
    strategies = {name for name in public if issubclass(getattr(dml, name), dml.Strategy)}
    assert strategies - {"Strategy"} == set(STRATEGIES)
