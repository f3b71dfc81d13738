"""Spark's own CrossValidator and TrainValidationSplit over the Params of an estimator."""

import os
import threading
import time
import uuid
from functools import partial
from pathlib import Path

import pytest
import torch
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder, TrainValidationSplit
from torch import nn

import sparkdml as dml
from sparkdml.testing.waiting import wait_until


def estimator(**params):
    defaults = {
        "model": partial(nn.Linear, 2, 1),
        "loss": nn.MSELoss(),
        "optimizer": partial(torch.optim.SGD, lr=0.02),
        "numWorkers": 1,
        "epochs": 2,
        "seed": 5,
        "verbose": 0,
    }
    return dml.TorchEstimator(**{**defaults, **params})


@pytest.fixture(scope="module")
def rows(spark):
    made = spark.range(120).selectExpr(
        "array(cast(id % 7 as float), cast(id % 3 as float)) as features",
        "cast(id % 7 as double) as label",
    )
    return made.persist()


class WaitsForAnother(dml.Callback):
    """The first fit of all does not begin before there is a second: they must run at once."""

    def __init__(self, folder):
        self.folder = str(folder)

    def on_run_start(self, training):
        Path(self.folder, uuid.uuid4().hex).touch()
        wait_until(lambda: len(os.listdir(self.folder)) >= 2, seconds=60)


class Overlap(dml.Callback):
    """Notes at the shared disk from when to when a fit has trained."""

    def __init__(self, folder, seconds):
        self.folder, self.seconds = str(folder), seconds

    def on_run_start(self, training):
        self.began = time.time()
        time.sleep(self.seconds)

    def on_run_end(self, training):
        path = f"{self.folder}/{self.began}-{training.ctx.rank}-{threading.get_ident()}"
        with open(path, "w") as file:
            file.write(f"{self.began} {time.time()}")


def spans(folder):
    return sorted(tuple(map(float, path.read_text().split())) for path in folder.iterdir())


def at_once(times):
    """The largest number of fits that trained at one moment."""
    return max(sum(begin <= moment < end for begin, end in times) for moment, _ in times)


def grid_of(est):
    rates = [partial(torch.optim.SGD, lr=rate) for rate in (1e-6, 0.02)]
    return ParamGridBuilder().addGrid(est.optimizer, rates).build()


def test_fits_of_a_grid_run_at_once_and_choose_rightly(spark, rows, tmp_path):
    est = estimator(callbacks=[WaitsForAnother(tmp_path)])
    split = TrainValidationSplit(
        estimator=est,
        estimatorParamMaps=grid_of(est),
        evaluator=RegressionEvaluator(metricName="mse"),
        trainRatio=0.8,
        parallelism=2,
        seed=1,
    )
    chosen = split.fit(rows)
    assert len(list(tmp_path.iterdir())) == 3  # two candidates, and the best on all rows
    bad, good = chosen.validationMetrics
    assert good < bad
    own = RegressionEvaluator(metricName="mse").evaluate(chosen.transform(rows))
    assert own == pytest.approx(chosen.bestModel.evaluate(rows)["loss"], rel=1e-4)


def test_gangs_that_need_all_slots_queue(spark, rows, tmp_path):
    """Four slots: two gangs of three can't run at once, and must neither fail nor deadlock."""
    est = estimator(numWorkers=3, callbacks=[Overlap(tmp_path, 0.3)])
    fits = {}

    def fit(seed):
        fits[seed] = est.copy({est.seed: seed}).fit(rows)

    threads = [threading.Thread(target=fit, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(fits) == [1, 2]
    times = spans(tmp_path)
    assert len(times) == 6
    assert at_once(times) == 3


def test_parallel_fits_are_those_of_one_after_another(spark, rows):
    est = estimator()
    maps = [{est.seed: seed} for seed in (1, 2)]
    alone = [est.fit(rows, params) for params in maps]
    together = {}

    def fit(index):
        together[index] = est.fit(rows, maps[index])

    threads = [threading.Thread(target=fit, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for index in range(2):
        expected, got = alone[index].module.weight, together[index].module.weight
        assert torch.equal(expected, got)
    assert not torch.equal(alone[0].module.weight, alone[1].module.weight)


@pytest.mark.slow
def test_cross_validation_over_plain_params_and_objects(spark, rows):
    est = estimator()
    grid = (
        ParamGridBuilder()
        .addGrid(est.batchSize, [8, 64])
        .addGrid(est.optimizer, [partial(torch.optim.SGD, lr=r) for r in (1e-6, 0.02)])
        .build()
    )
    validator = CrossValidator(
        estimator=est,
        estimatorParamMaps=grid,
        evaluator=RegressionEvaluator(metricName="mse"),
        numFolds=2,
        parallelism=2,
        seed=1,
        collectSubModels=True,
    )
    first, second = validator.fit(rows), validator.fit(rows)
    assert first.avgMetrics == second.avgMetrics
    best = min(range(4), key=lambda index: first.avgMetrics[index])
    assert grid[best][est.optimizer].keywords["lr"] == 0.02
    assert first.bestModel.value("batchSize") == grid[best][est.batchSize]
    assert len(first.subModels) == 2
    assert len(first.subModels[0]) == 4
