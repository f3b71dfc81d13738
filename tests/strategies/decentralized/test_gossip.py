"""D-PSGD on threads: the recursion of the paper, and what must be right whatever the strategy."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from sparkdml.checkpoint.encoding import decode
from sparkdml.checkpoint.state import merge
from sparkdml.errors import ParameterError
from sparkdml.strategies.decentralized.ad_psgd import ADPSGD
from sparkdml.strategies.decentralized.gossip import Gossip, edges_of, mixing_matrix
from sparkdml.testing.digits import cut, digits, digits_plan
from sparkdml.testing.faults import FailsAt, Injected
from sparkdml.testing.memory_checkpoints import MemoryCheckpoints
from sparkdml.testing.strategy_contract import assert_alike, told
from sparkdml.testing.threads import train_on_threads
from sparkdml.training.callbacks import EMA, Callback, GradientMonitor
from sparkdml.training.flat import in_order
from sparkdml.training.plan import Schedule
from sparkdml.training.training import TrainingPlan


class KeepsReplicas(Callback):
    """The parameters as they are before the average takes their place at the run's end."""

    def __init__(self):
        self.values = {}

    def on_step_end(self, training):
        self.values[training.ctx.rank] = training.task.params.values.clone()


def reference(plan, parts, matrix, batch_size, epochs):
    """X(t+1) = W X(t) - step(G(t)), with torch alone: every rank's parameters at the end."""
    modules, optimizers = [], []
    for _ in parts:
        torch.manual_seed(0)
        modules.append(plan.model())
        optimizers.append(plan.optimizer(modules[-1].parameters()))
    steps = max(-(-len(part["y"]) // batch_size) for part in parts)
    for step in [*range(steps)] * epochs:
        rows = slice(step * batch_size, (step + 1) * batch_size)
        for module, part in zip(modules, parts, strict=True):
            module.zero_grad()
            if len(part["y"][rows]):
                plan.loss(module(part["x"][rows]), part["y"][rows]).backward()
        with torch.no_grad():
            for replicas in zip(*(module.parameters() for module in modules), strict=True):
                before = torch.stack([p.detach().clone() for p in replicas])
                for rank, parameter in enumerate(replicas):
                    weights = torch.tensor(matrix[rank], dtype=before.dtype)
                    parameter.copy_(torch.tensordot(weights, before, 1))
        for optimizer, part in zip(optimizers, parts, strict=True):
            if len(part["y"][rows]):
                optimizer.step()
    return modules


def flat(module):
    """In the order of FlatParams."""
    return torch.cat([p.detach().reshape(-1) for p in in_order(module)])


@pytest.mark.parametrize("graph", ["ring", "complete", [(0, 1), (1, 2), (1, 3)]])
def test_the_recursion_of_the_paper(graph):
    parts = cut(digits(90), [30, 20, 17, 23])  # ranks run out of rows at different steps
    plan, kept = digits_plan(lr=0.1, momentum=0.9), KeepsReplicas()
    trainings = train_on_threads(
        lambda: Gossip(graph), plan, Schedule(2, 8), parts, callbacks=[kept]
    )
    matrix = mixing_matrix(edges_of(graph, 4), 4).tolist()
    modules = reference(plan, parts, matrix, 8, epochs=2)
    for rank, module in enumerate(modules):
        torch.testing.assert_close(kept.values[rank], flat(module), rtol=1e-4, atol=1e-6)
    average = torch.stack([flat(module) for module in modules]).mean(0)
    spread = torch.stack([(flat(m) - average).square().sum() for m in modules]).mean().sqrt()
    for training in trainings:  # the result is the average over ranks
        torch.testing.assert_close(training.task.params.values, average, rtol=1e-4, atol=1e-6)
        last = training.history[-1]
        assert last["consensus_distance"] == pytest.approx(spread.item(), rel=1e-3)
        assert (last["rows"], last["steps"]) == (90, 4)


def test_without_steps_replicas_find_each_other():
    """Mixing alone: the average stays, the distance falls by the spectral gap at least."""

    class Scatter(Callback):
        def __init__(self):
            self.before = {}

        def on_epoch_start(self, training):
            if training.epoch.number == 0:
                torch.manual_seed(training.ctx.rank)
                training.task.params.values.copy_(torch.randn(training.task.params.values.shape))
                self.before[training.ctx.rank] = training.task.params.values.clone()

    scatter = Scatter()
    plan = digits_plan(optimizer=partial(torch.optim.SGD, lr=0.0))
    trainings = train_on_threads(
        Gossip, plan, Schedule(3, 8), cut(digits(128), [32] * 4), callbacks=[scatter]
    )
    average = torch.stack([scatter.before[rank] for rank in range(4)]).mean(0)
    torch.testing.assert_close(trainings[2].task.params.values, average, rtol=1e-4, atol=1e-5)
    distances = [row["consensus_distance"] for row in trainings[0].history]
    assert distances[1] < distances[0] * 0.5
    assert distances[2] < distances[1] * 0.5


def test_validation_is_of_the_average_and_ema_of_its_replicas():
    held_out = cut(digits(30), [25, 5])
    plan = digits_plan()
    parts = cut(digits(64), [40, 24])
    schedule = Schedule(1, 8, validates=True)
    for callbacks in (list, lambda: [EMA(0.5)]):
        trainings = train_on_threads(Gossip, plan, schedule, parts, held_out, callbacks=callbacks)
        module, rows = trainings[0].task.module, digits(30)
        expected = nn.CrossEntropyLoss()(module(rows["x"]), rows["y"]).item()
        assert trainings[0].history[0]["val_loss"] == pytest.approx(expected, rel=1e-5)
        assert_alike(trainings, module)


def test_a_replica_survives_a_checkpoint_and_a_change_of_the_number_of_ranks():
    states = {}

    class Saves(Callback):
        def on_step_end(self, training):
            values = training.task.params.values
            states[training.ctx.rank] = (values.clone(), training.ctx.strategy.state())

    train_on_threads(
        Gossip,
        digits_plan(momentum=0.9),
        Schedule(1, 8),
        cut(digits(64), [40, 24]),
        callbacks=[Saves()],
    )
    merged = {name: entry.value for name, entry in merge([s for _, s in states.values()]).items()}

    class Loads(Callback):
        def on_epoch_start(self, training):
            training.ctx.strategy.load(merged)
            average = torch.stack([values for values, _ in states.values()]).mean(0)
            torch.testing.assert_close(training.task.params.values, average)
            [momentum] = {
                id(s["momentum_buffer"]): s["momentum_buffer"]
                for s in list(training.task.optimizers[""].state.values())[:1]
            }.values()
            assert momentum.abs().sum() > 0

    train_on_threads(
        Gossip, digits_plan(momentum=0.9), Schedule(1, 8), [digits(16)] * 3, callbacks=[Loads()]
    )


@pytest.mark.parametrize("changes", [{}, {"precision": "fp16"}])
def test_each_replicas_own_state_resumes_as_it_was(changes):
    """A moving average, and a loss scale that overflows on one rank alone."""
    parts = cut(digits(96), [48, 48])
    parts[1] = {**parts[1], "x": parts[1]["x"] * (300.0 if changes else 2.0)}
    plan = replace(digits_plan(lr=0.01), **changes)
    schedule = Schedule(2, 8)

    def train(checkpoints, fails_at=0):
        def callbacks():
            return [EMA(0.9), FailsAt(1, fails_at)]

        return train_on_threads(
            Gossip, plan, schedule, parts, callbacks=callbacks, checkpoints=checkpoints
        )

    expected, kept = train(MemoryCheckpoints()), MemoryCheckpoints()
    with pytest.raises(Injected):
        train(kept, 4)
    assert 0 < kept.newest.step < 6  # within the first epoch
    for ours, theirs in zip(train(kept), expected, strict=True):
        assert told(ours) == told(theirs) == told(expected[0])
        assert_alike([ours], theirs.task.module, rtol=0, atol=0)
    if changes:
        assert expected[0].history[-1]["skipped_steps"] > 0


def test_a_run_with_nothing_left_to_train_ends_with_the_average():
    """The checkpoint is of the middle of an epoch that fewer epochs no longer have."""
    parts, kept = cut(digits(96), [64, 32]), MemoryCheckpoints(every=1)

    def train(epochs, fails_at):
        return train_on_threads(
            Gossip,
            digits_plan(lr=0.5),
            Schedule(epochs, 8),
            parts,
            callbacks=[FailsAt(0, fails_at)],
            checkpoints=kept,
        )

    per_epoch = train(1, 0)[0].step
    with pytest.raises(Injected):
        train(3, per_epoch + 2)
    saved = kept.newest
    assert saved.kind == "step"
    replicas = [decode(saved.parts[rank], "")["strategy.replica"].value for rank in (0, 1)]
    assert not torch.equal(*replicas)
    for training in train(1, 0):
        torch.testing.assert_close(training.task.params.values, sum(replicas) / 2)


def test_another_graph_is_another_strategy():
    """Only the same strategy resumes from a checkpoint, which records it."""
    pairs = Gossip([(1, 0), (1, 2)])
    assert repr(pairs) == repr(Gossip([(2, 1), (0, 1)]))
    assert repr(pairs) != repr(Gossip([(0, 2), (1, 2)]))
    assert repr(Gossip("random", seed=1)) != repr(Gossip("random", seed=2))
    assert repr(ADPSGD(seed=1)) != repr(ADPSGD(seed=2))


def test_a_graph_that_does_not_fit_the_workers_is_refused_at_the_driver():
    with pytest.raises(ParameterError, match="no way leads from rank 0"):
        Gossip([(0, 1)]).roles(3)
    assert Gossip("random").roles(3)[0].count == 3


@pytest.mark.parametrize("strategy", [Gossip(), ADPSGD()])
def test_a_monitor_of_agreed_gradients_is_refused(strategy):
    plan = TrainingPlan(digits_plan(), Schedule(1, 8), (GradientMonitor(),))
    with pytest.raises(ParameterError, match="agree on no gradient"):
        strategy.check(plan)
