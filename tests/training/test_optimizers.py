"""Several modules, optimizers by name, parameter groups: what fits together, and what doesn't."""

import sys
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from sparkdml.errors import ParameterError
from sparkdml.feed.batch import Batch
from sparkdml.fitting.fit import check_run
from sparkdml.strategies.allreduce import AllReduce
from sparkdml.testing.models import autoencoder_step
from sparkdml.training.callbacks import (
    BestModel,
    EarlyStopping,
    GradientMonitor,
    LearningRateSchedule,
)
from sparkdml.training.modules import build_module
from sparkdml.training.plan import Schedule
from sparkdml.training.task import Task
from sparkdml.training.training import TrainingPlan

sys.path.insert(0, str(Path(__file__).parent))
from objectives import gan_plan, make_plan, make_points

SGD = partial(torch.optim.SGD, lr=0.1)


def check(plan, callbacks=(), validates=False):
    schedule = Schedule(1, 8, validates=validates)
    check_run(TrainingPlan(plan, schedule, callbacks), build_module(plan.model), AllReduce())


def supervised(**changes):
    fields = {"loss": nn.MSELoss(), "features": ("x",), "label": "y", "metrics": {}}
    return make_plan(**{**fields, **changes})


def frozen_linear():
    return nn.Linear(2, 1).requires_grad_(False)


def test_good_plans_pass():
    check(supervised())
    check(make_plan(step=autoencoder_step, metrics=["code_size", "is_training"]))
    check(gan_plan())
    check(gan_plan(optimizer=SGD))
    check(gan_plan(model={**gan_plan().model, "teacher": frozen_linear}))


SHARED = nn.Linear(2, 2)

BAD = [
    (lambda: supervised(step=autoencoder_step), "step must be left out if loss= is given"),
    (lambda: make_plan(), "loss must be given, or step= in its place"),
    (lambda: gan_plan(step=None, loss=nn.MSELoss()), "only step= can combine several modules"),
    (lambda: supervised(metrics=["kl"]), "a list of names goes with step="),
    (lambda: gan_plan(metrics={"a": max}), "with step= a list of the names"),
    (
        lambda: gan_plan(metrics=["generator_loss"]),
        "a column 'generator_loss' already, written by the loss of 'generator'",
    ),
    (lambda: supervised(optimizer={"a": SGD}), "since model= is one module"),
    (
        lambda: gan_plan(optimizer={"generator": SGD}),
        r"each module of model=: generator, discriminator.*requires_grad_\(False\)",
    ),
    (
        lambda: gan_plan(optimizer={**gan_plan().optimizer, "judge": SGD}),
        "'judge' is no module of model=",
    ),
    (
        lambda: gan_plan(
            model={**gan_plan().model, "teacher": frozen_linear},
            optimizer={**gan_plan().optimizer, "teacher": SGD},
        ),
        "'teacher' has no trainable parameter",
    ),
    (
        lambda: gan_plan(model={"generator": SHARED, "discriminator": nn.Sequential(SHARED)}),
        "share a parameter",
    ),
    (lambda: supervised(optimizer=torch.optim.LBFGS), "a step of one gradient"),
    (lambda: supervised(parameter_groups=lambda m: 3), "a list of dicts, each with 'params'"),
    (
        lambda: supervised(parameter_groups=lambda m: [{"params": m.weight}]),
        "groups without bias",
    ),
    (
        lambda: supervised(
            parameter_groups=lambda m: [{"params": list(m.parameters())}, {"params": [m.bias]}]
        ),
        "in one group, not in two but got 'bias'",
    ),
    (
        lambda: supervised(parameter_groups=lambda m: [{"params": [torch.ones(2)]}]),
        "the module's trainable parameters alone",
    ),
    (
        lambda: supervised(model=lambda: nn.Linear(2, 2).double(), precision="bf16"),
        "a module of torch.float64",
    ),
    (lambda: supervised(compile={"speed": 3}), "torch.compile's arguments"),
    (lambda: supervised(sync_batch_norm=True), "no BatchNorm layer"),
]


@pytest.mark.parametrize(("plan", "words"), BAD)
def test_bad_plans_are_refused_at_the_driver(plan, words):
    with pytest.raises(ParameterError, match=words):
        check(plan())


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({}, "at least one by name"),
        ({"a": lambda: 3}, r"model\['a'\] must be an nn.Module"),
        ({"no name": nn.Linear(1, 1)}, "keys are names"),
        ({"train": nn.Linear(1, 1)}, "no attributes of nn.Module"),
        (lambda: 3, "model must be an nn.Module"),
        (3, "model must be an nn.Module"),
    ],
)
def test_bad_models_are_refused(model, words):
    with pytest.raises(ParameterError, match=words):
        build_module(model)


StepLR = partial(torch.optim.lr_scheduler.StepLR, step_size=1)
Plateau = torch.optim.lr_scheduler.ReduceLROnPlateau


@pytest.mark.parametrize(
    ("callbacks", "validates", "words"),
    [
        ([EarlyStopping("val_loss")], False, r"EarlyStopping\(monitor\).*need validation="),
        ([BestModel("accuracy")], True, r"BestModel\(monitor\) must be a column"),
        ([LearningRateSchedule(Plateau)], True, "for ReduceLROnPlateau"),
        ([LearningRateSchedule(Plateau, per="step", monitor="loss")], True, "ReduceLROnPlateau"),
        ([LearningRateSchedule(Plateau, monitor="val_los")], True, r"LearningRateSchedule\(monit"),
        ([LearningRateSchedule(StepLR, monitor="loss")], True, "StepLR looks at no number"),
        ([LearningRateSchedule(lambda o: 3)], True, "makes a torch scheduler"),
        ([LearningRateSchedule({"judge": StepLR})], True, "there is but one"),
        ([LearningRateSchedule(StepLR)] * 2, True, "with one at most"),
    ],
)
def test_callbacks_that_can_not_work_are_refused_at_the_driver(callbacks, validates, words):
    with pytest.raises(ParameterError, match=words):
        check(supervised(), callbacks, validates)


def test_a_column_that_a_callback_may_add_is_let_pass():
    check(supervised(), [GradientMonitor(), EarlyStopping("gradient_norm")])
    with pytest.raises(ParameterError, match="need validation="):
        check(supervised(), [GradientMonitor(), EarlyStopping("val_loss")])


def test_a_factory_that_makes_something_else_is_refused_before_the_first_step():
    with pytest.raises(ParameterError, match="makes a torch optimizer but got 'int'"):
        Task(supervised(optimizer=lambda p: 3), torch.device("cpu"))
    optimizers = {**gan_plan().optimizer, "generator": lambda p: torch.optim.LBFGS(p)}
    with pytest.raises(ParameterError, match=r"optimizer\['generator'\].*of one gradient"):
        Task(gan_plan(optimizer=optimizers), torch.device("cpu"))


def test_states_of_several_optimizers_are_put_back_by_name():
    first, second = (Task(gan_plan(), torch.device("cpu")) for _ in range(2))
    for _ in range(3):
        first.grad(Batch(make_points(8), 8))
        first.apply(first.totals())
    second.load({name: deepcopy(entry.value) for name, entry in first.state().items()})
    for task in (first, second):
        task.grad(Batch(make_points(8, seed=4), 8))
        task.apply(task.totals())
    assert torch.equal(first.params.values, second.params.values)


def test_clipping_is_of_each_optimizer_by_itself():
    tasks = {norm: Task(gan_plan(clip_norm=norm), torch.device("cpu")) for norm in (None, 1e-3)}
    for task in tasks.values():
        task.grad(Batch(make_points(8), 8))
        task.apply(task.totals())
    for name in ("generator", "discriminator"):
        clipped = [p.grad for p in tasks[1e-3].optimizers.parameters(name)]
        norm = torch.cat([grad.flatten() for grad in clipped]).norm()
        assert norm == pytest.approx(1e-3, rel=1e-2)
