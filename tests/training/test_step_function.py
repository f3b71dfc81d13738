"""`step=`: any objective, with several modules and optimizers, equal to plain torch."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from sparkdml.errors import ParameterError
from sparkdml.strategies.allreduce import AllReduce
from sparkdml.testing.models import (
    alternating_step,
    autoencoder_step,
    contrastive_step,
    make_autoencoder,
)
from sparkdml.testing.threads import train_on_threads
from sparkdml.training.plan import Schedule

sys.path.insert(0, str(Path(__file__).parent))
from objectives import cut, gan_plan, interleave, make_plan, make_points, train_gan_alone


def assert_same(trainings, reference, rtol=1e-4, atol=1e-6):
    for training in trainings:
        ours, theirs = training.task.module.state_dict(), reference.state_dict()
        assert ours.keys() == theirs.keys()
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], rtol=rtol, atol=atol)


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])  # with and without overlap
def test_a_gan_on_two_workers_equals_plain_torch_on_the_combined_batch(bucket_bytes):
    parts = cut(make_points(96), [48, 48])
    trainings = train_on_threads(
        lambda: AllReduce(bucket_bytes=bucket_bytes), gan_plan(), Schedule(2, 8), parts
    )
    assert_same(trainings, train_gan_alone([*interleave(parts, 8)] * 2))
    row = trainings[0].history[-1]
    assert row["loss"] == pytest.approx(row["generator_loss"] + row["discriminator_loss"])


def test_a_gan_learns_where_the_points_are():
    parts = cut(make_points(512), [256, 256])
    trainings = train_on_threads(AllReduce, gan_plan(batch_size=32), Schedule(25, 32), parts)
    generator = trainings[0].task.module.generator
    with torch.no_grad():
        made = generator(make_points(1000, seed=5)["noise"])
    assert (made.mean(dim=0) - torch.tensor([2.0, -1.0])).abs().max() < 0.35
    start = nn.Linear(2, 2)(torch.zeros(1, 2)).abs().max()
    assert start < 1.5, "it did not begin there"


@pytest.mark.parametrize("sizes", [[48, 48], [64, 16]])
def test_an_optimizer_without_a_loss_does_not_move_on_any_rank(sizes):
    """The second part has rows for the first steps only: its rank learns from the totals."""
    parts = cut(make_points(sum(sizes)), sizes)
    trainings = train_on_threads(AllReduce, gan_plan(step=alternating_step), Schedule(1, 8), parts)
    assert_same(trainings, train_gan_alone([*interleave(parts, 8)], alternating=True))
    states = [training.task.optimizers["generator"].state_dict() for training in trainings]
    steps = [int(state["state"][0]["step"]) for state in states]
    assert steps == [max(sizes) // 8 // 2] * 2, "half of the steps moved it, on both ranks"


def test_one_loss_for_several_optimizers_moves_all():
    def step(modules, batch, ctx):
        return ((modules.generator(batch["noise"]) - batch["x"]) ** 2).mean() + (
            modules.discriminator(batch["x"]) ** 2
        ).mean()

    trainings = train_on_threads(
        AllReduce, gan_plan(step=step), Schedule(1, 8), cut(make_points(32), [16, 16])
    )
    torch.manual_seed(0)
    before = gan_plan().model["generator"]()
    moved = trainings[0].task.module.generator.weight
    assert not torch.equal(before.weight, moved)
    row = trainings[0].history[0]
    assert row["loss"] == row["generator_loss"] == row["discriminator_loss"]


def test_an_autoencoder_with_values_beside_its_loss():
    plan = make_plan(
        model=make_autoencoder, step=autoencoder_step, metrics=["code_size", "is_training"]
    )
    parts = cut(make_points(60), [40, 20])
    trainings = train_on_threads(
        AllReduce, plan, Schedule(12, 8, validates=True), parts, cut(make_points(9, 3), [9, 0])
    )
    history = trainings[0].history
    assert history[-1]["loss"] < 0.5 * history[0]["loss"]
    assert (history[0]["is_training"], history[0]["val_is_training"]) == (1.0, 0.0)
    module, x = trainings[0].task.module, make_points(9, 3)["x"]
    with torch.no_grad():
        error = ((module(x) - x) ** 2).mean().item()
    assert history[-1]["val_loss"] == pytest.approx(error, rel=1e-5)
    assert history[-1]["val_code_size"] == pytest.approx(module[0](x).abs().mean().item(), rel=1e-5)


def test_a_contrastive_model_equals_one_process_that_adds_up_both_batches():
    """The negatives are those of a rank's own batch, so the reference is a sum of two losses."""
    parts = cut(make_points(64), [32, 32])
    plan = make_plan(model=lambda: nn.Linear(2, 4), step=contrastive_step)
    trainings = train_on_threads(AllReduce, plan, Schedule(3, 16), parts)
    torch.manual_seed(0)
    module = nn.Linear(2, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    class Rows(dict):
        num_rows = 8

    for _ in range(3):
        for step in range(2):
            optimizer.zero_grad()
            pieces = [
                Rows({n: v[start : start + 8] for n, v in part.items()})
                for part in parts
                for start in (step * 16, step * 16 + 8)  # batch_size=8: two pieces a rank
            ]
            loss = sum(contrastive_step(module, piece, None).sum() for piece in pieces) / 32
            loss.backward()
            optimizer.step()
    assert_same(trainings, module)
    losses = [row["loss"] for row in trainings[0].history]
    assert losses[-1] < losses[0]


def test_the_context_says_where_the_run_is():
    seen = []

    def step(module, batch, ctx):
        seen.append((ctx.rank, ctx.size, ctx.epoch, ctx.step, ctx.training, str(ctx.device)))
        assert ctx.seed == 0, "the rest is the worker's own context"
        return module(batch["x"]).sum()

    train_on_threads(
        AllReduce,
        make_plan(step=step),
        Schedule(2, 8, validates=True),
        [make_points(16)],
        [make_points(3)],
    )
    assert seen == [
        (0, 1, 0, 0, True, "cpu"),
        (0, 1, 0, 1, True, "cpu"),
        (0, 1, 0, 2, False, "cpu"),
        (0, 1, 1, 2, True, "cpu"),
        (0, 1, 1, 3, True, "cpu"),
        (0, 1, 1, 4, False, "cpu"),
    ]


def returning(result):
    return lambda modules, batch, ctx: result(modules, batch)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda m, b: 1.0, "returns a tensor but got 'float'"),
        (lambda m, b: m(b["x"]).sum(dim=1)[:3], "one value for each of the 8 rows"),
        (lambda m, b: {"a": m(b["x"]).sum()}, "one optimizer"),
        (lambda m, b: (m(b["x"]).sum(), 1, 2), "tuple of 3"),
        (lambda m, b: (m(b["x"]).sum(), {"kl": 1.0}), "declares: nothing"),
    ],
)
def test_results_that_mean_nothing_are_refused(result, words):
    with pytest.raises(ParameterError, match=words):
        train_on_threads(
            AllReduce, make_plan(step=returning(result)), Schedule(1, 8), [make_points(8)]
        )


def test_declared_values_must_come_and_losses_must_have_an_optimizer():
    plan = make_plan(step=lambda m, b, c: m(b["x"]).sum(), metrics=["kl"])
    with pytest.raises(ParameterError, match="declares: kl"):
        train_on_threads(AllReduce, plan, Schedule(1, 8), [make_points(8)])
    plan = gan_plan(step=lambda m, b, c: {"judge": m.generator(b["noise"]).sum()})
    with pytest.raises(ParameterError, match="one or more of generator, discriminator"):
        train_on_threads(AllReduce, plan, Schedule(1, 8), [make_points(8)])


def test_a_nan_in_one_of_several_losses_is_found():
    def step(modules, batch, ctx):
        generated = modules.generator(batch["noise"]).mean()
        return {"generator": generated / 0 * 0, "discriminator": modules.discriminator(batch["x"])}

    with pytest.raises(ArithmeticError, match="step 1"):
        train_on_threads(AllReduce, gan_plan(step=step), Schedule(1, 8), [make_points(8)])
