"""Local steps and compressed gradients through the Estimator: a DataFrame, checkpoints, a fault."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import sparkdml as dml
from sparkdml.persistence.references import decode_reference, encode_reference
from sparkdml.testing.faults import FaultAt
from sparkdml.testing.models import noisy_classifier


@pytest.fixture(scope="module")
def rows(spark):
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(300, 8)).astype("float32")
    labels = (inputs.sum(axis=1) > 0).astype(int)
    data = [(x.tolist(), int(y)) for x, y in zip(inputs, labels, strict=True)]
    return spark.createDataFrame(data, "features array<float>, label bigint").repartition(3).cache()


def make_estimator(strategy, **params):
    return dml.TorchEstimator(
        model=noisy_classifier,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.5),
        batchSize=16,
        epochs=2,
        seed=3,
        numWorkers=2,
        verbose=0,
        strategy=strategy,
        **params,
    )


@pytest.mark.filterwarnings("ignore:.*Resuming from step.*")
@pytest.mark.parametrize(
    "strategy",
    [
        # A model and an optimizer on each rank, and residuals on each rank.
        pytest.param(dml.EASGD(steps=3, backend="torch"), marks=pytest.mark.slow, id="EASGD"),
        pytest.param(dml.AllReduce("torch", compression=dml.OneBit()), id="OneBit"),
    ],
)
def test_a_run_that_failed_ends_with_the_same_bits(rows, tmp_path, strategy):
    expected = make_estimator(strategy).fit(rows)
    fault = FaultAt(rank=1, step=7, kind="raise", folder=str(tmp_path))
    checkpoints = dml.Checkpoints(f"{tmp_path}/run", every=2)
    fitted = make_estimator(strategy, checkpoint=checkpoints, callbacks=[fault]).fit(rows)
    assert [s.outcome for s in checkpoints.lineage().submissions] == ["failed", "finished"]
    ours, theirs = fitted.module.state_dict(), expected.module.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    told = [[row["loss"] for row in model.history] for model in (fitted, expected)]
    assert told[0] == told[1]
    assert told[0][-1] < told[0][0]


def test_workers_that_meet_now_and_then_learn(rows):
    fitted = make_estimator(dml.LocalSGD(steps=4)).fit(rows)
    assert [row["rows"] for row in fitted.history] == [300, 300]
    assert fitted.history[0]["steps"] == 3  # meetings: 9 or 10 batches of each worker
    assert fitted.history[1]["loss"] < fitted.history[0]["loss"]


@pytest.mark.parametrize(
    "strategy",
    [
        dml.LocalSGD(steps=4),
        dml.BlockMomentum(block=4, nesterov=True),
        dml.SlowMo(momentum=0.7),
        dml.EASGD(rho=0.1),
        dml.AllReduce(compression=dml.TopK(0.1)),
        dml.AllReduce(compression=dml.PowerSGD(3), topology="ring"),
    ],
    ids=repr,
)
def test_an_estimator_can_be_saved_with_how_its_workers_agree(strategy):
    saved = json.loads(json.dumps(encode_reference(strategy)))
    assert repr(decode_reference(saved, "strategy")) == repr(strategy)
