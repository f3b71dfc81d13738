"""Params of what is trained: modules, losses, optimizers, and how a step computes."""

from __future__ import annotations

from functools import partial

from sparkdml.checkpoint.fingerprint import describe
from sparkdml.params.objects import (
    to_callbacks,
    to_metrics,
    to_model,
    to_optimizer,
    to_strategy,
)
from sparkdml.params.param import (
    BY_OWN_STEPS,
    BY_SEPARATE_STEPS,
    AccessibleParams,
    Fingerprint,
    flag,
    flag_or_arguments,
    function,
    number,
    one_of,
    param,
    whole,
)
from sparkdml.strategies.allreduce import AllReduce
from sparkdml.warm_start import to_warm_start


class ObjectiveParams(AccessibleParams):
    """What is trained, with which objective, and how."""

    model = param(
        "model",
        "an nn.Module, a function that returns one, or a dict of these by name",
        to_model,
        fingerprint=Fingerprint.ALWAYS,
        is_object=True,
    )
    loss = param(
        "loss",
        "(outputs, targets) -> a scalar, the batch's mean, or one value per row",
        function("loss", "a function (outputs, targets) -> loss"),
        fingerprint=Fingerprint.ALWAYS,
        described_by=partial(describe, weights=True),
        is_object=True,
    )
    step = param(
        "step",
        "instead of loss: (modules, batch, ctx) -> a loss, or losses by the optimizer's name, and "
        "with metrics=, also a dict of their values",
        function("step", "a function (modules, batch, ctx) -> loss"),
        fingerprint=Fingerprint.WHEN_USED,
        is_object=True,
    )
    optimizer = param(
        "optimizer",
        "(parameters) -> torch optimizer, or a dict of these by the module's name",
        to_optimizer,
        fingerprint=Fingerprint.ALWAYS,
        refused=BY_OWN_STEPS,
        is_object=True,
    )
    parameterGroups = param(
        "parameterGroups",
        "(module) -> torch's list of parameter groups, passed to optimizer instead of parameters",
        function("parameterGroups", "a function (module) -> a list of parameter groups"),
        fingerprint=Fingerprint.WHEN_USED,
        is_object=True,
    )
    metrics = param(
        "metrics",
        "name -> (outputs, targets) -> a scalar, the batch's mean, or one value per row; or a "
        "torchmetrics object; with step= the names of the values that it returns",
        to_metrics,
        default_factory=dict,
        fingerprint=Fingerprint.ALWAYS,
        is_object=True,
    )
    callbacks = param(
        "callbacks",
        "dml.Callback objects, called on every rank",
        to_callbacks,
        default_factory=list,
        fingerprint=Fingerprint.ALWAYS,
        is_object=True,
    )
    strategy = param(
        "strategy",
        "how the workers synchronize the model",
        to_strategy,
        default_factory=AllReduce,
        fingerprint=Fingerprint.ALWAYS,
        is_object=True,
    )
    epochs = param(
        "epochs",
        "passes over the data",
        whole("epochs", 1),
        default=1,
        fingerprint=Fingerprint.NEVER,
    )
    seed = param(
        "seed",
        "random seed for initialization, sharding, shuffling and dropout",
        whole("seed", 0),
        default=0,
        fingerprint=Fingerprint.ALWAYS,
    )
    warmStart = param(
        "warmStart",
        "initial weights: a fitted model, or a state dict",
        to_warm_start,
        fingerprint=Fingerprint.WHEN_USED,
        is_object=True,
    )
    gradientAccumulation = param(
        "gradientAccumulation",
        "number of batches whose gradients are added before a step",
        whole("gradientAccumulation", 1),
        default=1,
        fingerprint=Fingerprint.ALWAYS,
    )
    clipNorm = param(
        "clipNorm",
        "clip the averaged gradient to this norm",
        number("clipNorm", "a number above 0", lambda value: value > 0),
        fingerprint=Fingerprint.ALWAYS,
    )
    precision = param(
        "precision",
        "'float32', or autocast to 'bf16', or to 'fp16' with a scaled loss",
        one_of("precision", "float32", "bf16", "fp16"),
        default="float32",
        fingerprint=Fingerprint.WHEN_USED,
    )
    compile = param(
        "compile",
        "True, or a dict of torch.compile's arguments: compile the module in every worker",
        flag_or_arguments("compile", "torch.compile"),
        default=False,
        fingerprint=Fingerprint.WHEN_USED,
        is_object=True,
    )
    syncBatchNorm = param(
        "syncBatchNorm",
        "compute the statistics of BatchNorm layers over all workers' rows",
        flag("syncBatchNorm"),
        default=False,
        fingerprint=Fingerprint.WHEN_USED,
        refused=BY_SEPARATE_STEPS,
    )
