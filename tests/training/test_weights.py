"""weightCol: the weighted mean over all ranks is the sum of w * l over the sum of w, exactly."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from sparkdml.errors import DataError, ParameterError
from sparkdml.strategies.allreduce import AllReduce
from sparkdml.testing.models import autoencoder_step, make_autoencoder
from sparkdml.testing.threads import train_on_threads
from sparkdml.training.objective import Objective
from sparkdml.training.plan import Schedule

sys.path.insert(0, str(Path(__file__).parent))
from objectives import cut, interleave, make_plan

CLASSES = 3


def make_rows(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 2, generator=generator)
    return {
        "x": x,
        "y": torch.randint(0, CLASSES, (count,), generator=generator),
        "w": torch.rand(count, generator=generator) * 5,
    }


def by_hand(outputs, targets, weights):
    """A weighted mean, written out."""
    values = F.cross_entropy(outputs, targets, reduction="none")
    return (values * weights).sum() / weights.sum()


def test_two_workers_equal_the_weighted_mean_of_the_combined_batch():
    parts = cut(make_rows(56), [40, 16])
    plan = make_plan(
        model=lambda: nn.Linear(2, CLASSES),
        loss=nn.CrossEntropyLoss(),
        features=("x",),
        label="y",
        metrics={},
        weight="w",
    )
    trainings = train_on_threads(
        AllReduce, plan, Schedule(2, 8, validates=True), parts, cut(make_rows(20, 5), [15, 5])
    )
    torch.manual_seed(0)
    module = nn.Linear(2, CLASSES)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for batch in [*interleave(parts, 8)] * 2:
        optimizer.zero_grad()
        by_hand(module(batch["x"]), batch["y"], batch["w"]).backward()
        optimizer.step()
    for training in trainings:
        torch.testing.assert_close(training.task.module.weight, module.weight)
    held_out = make_rows(20, 5)
    expected = by_hand(module(held_out["x"]), held_out["y"], held_out["w"]).item()
    assert trainings[0].history[-1]["val_loss"] == pytest.approx(expected, rel=1e-5)


@settings(deadline=None, max_examples=10)
@given(cut_at=st.integers(1, 23))
@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (nn.CrossEntropyLoss(), "class"),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5])), "class"),
        (nn.CrossEntropyLoss(ignore_index=1), "class"),
        (nn.CrossEntropyLoss(), "soft"),
        (nn.NLLLoss(), "class"),
        (nn.MSELoss(), "number"),
        (nn.L1Loss(), "number"),
        (partial(F.mse_loss, reduction="none"), "number"),
    ],
)
def test_a_weight_of_n_counts_a_row_n_times(loss, kind, cut_at):
    """The weighted mean equals the plain mean of the rows written out as often as they weigh."""
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randn(24, CLASSES, generator=generator)
    targets = {
        "class": torch.randint(0, CLASSES, (24,), generator=generator),
        "soft": torch.rand(24, CLASSES, generator=generator).softmax(1),
        "number": torch.randn(24, CLASSES, generator=generator),
    }[kind]
    weights = torch.randint(0, 4, (24,), generator=generator).float()
    objective = Objective(loss, weighted=True)
    parts = [
        objective(outputs[rows], targets[rows], len(outputs[rows]), weights[rows])
        for rows in (slice(0, cut_at), slice(cut_at, 24))
    ]
    total = sum(value for value, _ in parts) / sum(weight for _, weight in parts)
    often = weights.long()
    repeated = loss(outputs.repeat_interleave(often, 0), targets.repeat_interleave(often, 0))
    torch.testing.assert_close(total, repeated.mean())


def test_a_step_with_one_value_a_row_is_weighted_too():
    rows = make_rows(32)
    plan = make_plan(
        model=make_autoencoder,
        step=autoencoder_step,
        metrics=["code_size", "is_training"],
        weight="w",
        optimizer=partial(torch.optim.SGD, lr=0.0),
    )
    training = train_on_threads(AllReduce, plan, Schedule(1, 8), cut(rows, [20, 12]))[0]
    error = ((training.task.module(rows["x"]) - rows["x"]) ** 2).mean(dim=1)
    expected = ((error * rows["w"]).sum() / rows["w"].sum()).item()
    assert training.history[0]["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_loss_that_is_a_mean_already_can_not_be_weighted():
    plan = make_plan(step=lambda m, b, c: m(b["x"]).mean(), weight="w")
    with pytest.raises(ParameterError, match="one value a row, since weightCol is set"):
        train_on_threads(AllReduce, plan, Schedule(1, 8), [make_rows(8)])


@pytest.mark.parametrize("bad", [-1.0, float("nan")])
def test_bad_weights_are_refused(bad):
    rows = make_rows(8)
    rows["w"][3] = bad
    plan = make_plan(step=lambda m, b, c: m(b["x"]).sum(dim=1), weight="w")
    with pytest.raises(DataError, match="weightCol 'w' must hold one number of 0 or more"):
        train_on_threads(AllReduce, plan, Schedule(1, 8), [rows])


def test_a_batch_of_no_weight_moves_nothing():
    rows = make_rows(16)
    rows["w"][8:] = 0
    plan = make_plan(step=lambda m, b, c: m(b["x"]).sum(dim=1), weight="w")
    once = train_on_threads(AllReduce, plan, Schedule(1, 8), [{n: v[:8] for n, v in rows.items()}])
    both = train_on_threads(AllReduce, plan, Schedule(1, 8), [rows])
    assert torch.equal(once[0].task.module.weight, both[0].task.module.weight)
