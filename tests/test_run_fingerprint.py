"""What a run's fingerprint holds of its Params: checkpoints that exist must go on matching it."""

from functools import partial

import numpy as np
import torch
from torch import nn

import sparkdml as dml
from sparkdml.checkpoint.fingerprint import describe
from sparkdml.testing.models import accuracy
from sparkdml.training.callbacks import TimeLimit


def prepare_columns(batch):
    return {"features": np.ones((batch.num_rows, 2), "float32"), "label": np.zeros(batch.num_rows)}


def keep(columns):
    return columns


def one_group(module):
    return [{"params": list(module.parameters())}]


def own_step(modules, batch, ctx):
    return modules(batch["features"]).sum()


def rows(spark):
    data = [([0.0, 1.0], 1, 1.0, "a"), ([1.0, 0.0], 0, 2.0, "b")]
    return spark.createDataFrame(data, "features array<float>, label int, w double, kind string")


def fingerprint(spark, **params):
    estimator = dml.TorchEstimator(**params, numWorkers=1, verbose=0)
    return estimator._prepare(rows(spark)).start()["plan"]


SGD = partial(torch.optim.SGD, lr=0.1)
PLAIN = {
    "optimizer": "torch.optim.sgd.SGD(lr=0.1)",
    "metrics": "",
    "callbacks": "",
    "strategy": "AllReduce(backend='auto', bucket_bytes=8388608, topology='auto')",
    "featuresCol": "'features'",
    "labelCol": "'label'",
    "validation": "None",
    "batchSize": "64",
    "gradientAccumulation": "1",
    "clipNorm": "None",
    "shuffle": "True",
    "seed": "0",
}


def test_of_a_run_with_the_defaults(spark):
    model, loss = nn.Linear(2, 2), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]))
    found = fingerprint(spark, model=model, loss=loss, optimizer=SGD)
    assert found == {**PLAIN, "model": describe(model), "loss": describe(loss, weights=True)}
    assert found["loss"] != describe(loss)


def test_of_a_run_with_everything(spark):
    model, loss = nn.Linear(2, 2), nn.CrossEntropyLoss()
    callback = TimeLimit(seconds=60)
    found = fingerprint(
        spark,
        model=model,
        loss=loss,
        optimizer=SGD,
        parameterGroups=one_group,
        weightCol="w",
        precision="bf16",
        compile={"dynamic": False},
        warmStart={"weight": torch.ones(2, 2), "bias": torch.zeros(2)},
        preprocess=prepare_columns,
        collate=keep,
        augment=keep,
        samplingCol="w",
        validation=0.5,
        dropLast=True,
        metrics={"accuracy": accuracy},
        callbacks=[callback],
        strategy=dml.AllReduce(backend="torch"),
        batchSize=8,
        gradientAccumulation=2,
        clipNorm=1.0,
        shuffle=False,
        seed=7,
        epochs=3,
    )
    assert found == {
        **PLAIN,
        "model": describe(model),
        "loss": describe(loss, weights=True),
        "parameterGroups": describe(one_group),
        "weightCol": "'w'",
        "precision": "'bf16'",
        "compile": "dynamic: False",
        "warmStart": "'weights 50df651c258a'",
        "preprocess": describe(prepare_columns),
        "inputCols": "'features', 'label', 'w'",
        "collate": describe(keep),
        "augment": describe(keep),
        "samplingCol": "'w'",
        "validation": "0.5",
        "dropLast": "True",
        "metrics": f"accuracy: {describe(accuracy)}",
        "callbacks": describe(callback),
        "strategy": "AllReduce(backend='torch', bucket_bytes=8388608, topology='auto')",
        "batchSize": "8",
        "gradientAccumulation": "2",
        "clipNorm": "1.0",
        "shuffle": "False",
        "seed": "7",
    }


def test_of_a_run_with_a_step_and_several_modules(spark):
    found = fingerprint(
        spark,
        model=partial(nn.Linear, 2, 1),
        step=own_step,
        optimizer=SGD,
        metrics=["size"],
        featuresCol=["features", "w"],
        validation=0.5,
        stratifyCol="kind",
    )
    expected = {
        **PLAIN,
        "model": describe(nn.Linear(2, 1)),
        "loss": "None",
        "step": describe(own_step),
        "metrics": "'size'",
        "featuresCol": "'features', 'w'",
        "labelCol": "None",
        "validation": "0.5",
        "stratifyCol": "'kind'",
    }
    assert found == expected


def test_of_a_run_whose_batch_norms_are_synchronized(spark):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    found = fingerprint(
        spark, model=model, loss=nn.MSELoss(), optimizer=SGD, syncBatchNorm=True, compile=True
    )
    assert (found["syncBatchNorm"], found["compile"]) == ("True", "True")


def prepare_with(batch, password):
    return prepare_columns(batch)


def test_does_not_show_what_a_partial_binds(spark):
    found = fingerprint(
        spark,
        model=nn.Linear(2, 2),
        loss=nn.CrossEntropyLoss(),
        optimizer=SGD,
        preprocess=partial(prepare_with, password="hunter2"),
    )
    assert "password=text " in found["preprocess"]
    assert "hunter2" not in str(found)


def test_of_a_run_whose_strategy_makes_the_steps(spark):
    model, loss = nn.Linear(2, 2), nn.CrossEntropyLoss()
    found = fingerprint(spark, model=model, loss=loss, strategy=dml.LBFGS())
    assert found["optimizer"] == "sparkdml.training.optimizers.NoOptimizer"
