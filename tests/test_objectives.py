"""Objectives of one's own through the estimator: on Spark, and through failures, bit for bit."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import sparkdml as dml
from sparkdml.errors import CheckpointError, ParameterError
from sparkdml.testing.faults import FaultAt, StopAt
from sparkdml.testing.models import (
    alternating_step,
    autoencoder_step,
    contrastive_step,
    make_autoencoder,
    make_discriminator,
    make_embedding,
    make_generator,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*Resuming from step.*")

CENTRE = [2.0, -1.0]


@pytest.fixture(scope="module")
def points(spark):
    """Points, noise and weights; no label."""
    rng = np.random.default_rng(0)
    real = rng.normal(CENTRE, 0.3, size=(400, 2))
    noise, weights = rng.normal(size=(400, 2)), rng.random(400)
    rows = [
        (x.tolist(), z.tolist(), float(w)) for x, z, w in zip(real, noise, weights, strict=True)
    ]
    df = spark.createDataFrame(rows, "x array<float>, noise array<float>, w double").repartition(3)
    df = df.cache()
    df.count()
    yield df
    df.unpersist()


def gan(**params):
    defaults = {
        "model": {"generator": make_generator, "discriminator": make_discriminator},
        "optimizer": {
            "generator": partial(torch.optim.Adam, lr=0.02, betas=(0.5, 0.9)),
            "discriminator": partial(torch.optim.Adam, lr=0.01, betas=(0.5, 0.9)),
        },
        "step": alternating_step,
        "featuresCol": ["x", "noise"],
        "batchSize": 16,
        "epochs": 2,
        "numWorkers": 2,
        "seed": 3,
        "replacementSeconds": 5.0,
        "strategy": dml.AllReduce(backend="torch"),
        "verbose": 0,
    }
    return dml.TorchEstimator(**{**defaults, **params})


def with_everything(*more):
    return [
        dml.LearningRateSchedule(
            partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=26),
            per="step",
            warmup_steps=5,
            scale_with_workers=True,
        ),
        dml.EMA(0.9),
        dml.BestModel("val_loss", mode="max"),
        dml.GradientMonitor(),
        *more,
    ]


def equal(one, other):
    first, second = one.module.state_dict(), other.module.state_dict()
    return all(torch.equal(first[name], second[name]) for name in first)


TIMES = {"seconds", "rows_per_second"}


def without_times(history):
    return [{n: v for n, v in row.items() if n not in TIMES} for row in history]


@pytest.fixture(scope="module")
def uninterrupted(points):
    return gan(
        callbacks=with_everything(FaultAt(0, -1, "raise", "")), precision="fp16", validation=0.1
    ).fit(points)


def test_a_gan_without_a_label_column(uninterrupted):
    history = uninterrupted.history
    assert history.columns[:4] == ["epoch", "loss", "generator_loss", "discriminator_loss"]
    for row in history:
        assert row["loss"] == pytest.approx(row["generator_loss"] + row["discriminator_loss"])
        assert {
            "val_generator_loss",
            "generator_lr",
            "discriminator_lr",
            "loss_scale",
        } <= row.keys()
    assert set(dict(uninterrupted.module.named_children())) == {"generator", "discriminator"}


def test_the_same_bits_after_a_fault_with_everything_that_has_a_state(
    points, uninterrupted, tmp_path
):
    """Two optimizers in turn, a schedule per step, an average, the best epoch, a loss scale."""
    fault = FaultAt(1, 19, "raise", str(tmp_path))
    checkpoints = dml.Checkpoints(f"{tmp_path}/run", every=4)
    fitted = gan(
        callbacks=with_everything(fault), precision="fp16", validation=0.1, checkpoint=checkpoints
    ).fit(points)
    submissions = checkpoints.lineage().submissions
    assert [s.outcome for s in submissions] == ["failed", "finished"], submissions
    assert equal(fitted, uninterrupted)
    assert without_times(fitted.history) == without_times(uninterrupted.history)


def test_a_run_that_was_stopped_in_an_epoch_gives_its_model_and_resumes_when_fit_again(
    points, tmp_path
):
    whole = gan(callbacks=[StopAt(0, -1)]).fit(points)
    path = f"{tmp_path}/run"
    part = gan(callbacks=[StopAt(1, 17)], checkpoint=path).fit(points)
    assert part.history.stopped == "a test asked"
    assert [row["steps"] for row in part.history] == [13, 5]
    assert part.history[-1]["rows"] < 400
    rest = gan(callbacks=[StopAt(0, -1)], checkpoint=path).fit(points)
    assert equal(rest, whole)
    assert without_times(rest.history) == without_times(whole.history)
    assert rest.history.stopped is None


def test_an_autoencoder_with_weights(points):
    fitted = dml.TorchEstimator(
        model=make_autoencoder,
        step=autoencoder_step,  # one value a row
        metrics=["code_size", "is_training"],
        optimizer=partial(torch.optim.Adam, lr=0.05),
        featuresCol="x",
        weightCol="w",
        validation=0.2,
        batchSize=16,
        epochs=6,
        numWorkers=2,
        verbose=0,
    ).fit(points)
    history = fitted.history
    assert history[-1]["val_loss"] < 0.5 * history[0]["val_loss"]
    assert (history[0]["is_training"], history[0]["val_is_training"]) == (1, 0)


@pytest.mark.slow
def test_a_contrastive_model_with_synchronized_batch_norm(points):
    fitted = dml.TorchEstimator(
        model=make_embedding,
        step=contrastive_step,
        optimizer=partial(torch.optim.Adam, lr=0.01),
        featuresCol=["x", "noise"],
        syncBatchNorm=True,
        batchSize=16,
        epochs=6,
        numWorkers=3,
        verbose=0,
    ).fit(points)
    assert fitted.history[-1]["loss"] < 0.8 * fitted.history[0]["loss"]


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"loss": nn.MSELoss()}, "step must be left out if loss= is given"),
        ({"optimizer": {"generator": torch.optim.SGD}}, "each module of model="),
        ({"metrics": {"a": max}}, "a list of the names"),
        ({"callbacks": [dml.BestModel()]}, "need validation="),
        ({"syncBatchNorm": True}, "no BatchNorm layer"),
        ({"compile": {"speed": 1}}, "torch.compile's arguments"),
    ],
)
def test_what_does_not_fit_together_is_told_before_any_job(points, params, words):
    with pytest.raises(ParameterError, match=words):
        gan(**params).fit(points)


def test_another_plan_is_refused_by_name(points, tmp_path):
    gan(epochs=1, checkpoint=f"{tmp_path}/run").fit(points)
    for change, words in (
        ({"precision": "bf16"}, "precision was not set, is now 'bf16'"),
        ({"step": lambda modules, batch, ctx: None}, "step was"),
        ({"weightCol": "w"}, "weightCol was not set, is now 'w'"),
        ({"parameterGroups": lambda m: [{"params": m.parameters()}]}, "parameterGroups was not"),
    ):
        with pytest.raises(CheckpointError, match=words):
            gan(epochs=1, checkpoint=f"{tmp_path}/run", **change).fit(points)
