"""TorchClassifier and TorchRegressor among Spark's own stages and evaluators."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import (
    BinaryClassificationEvaluator,
    MulticlassClassificationEvaluator,
    RegressionEvaluator,
)
from pyspark.ml.feature import StringIndexer, VectorAssembler
from pyspark.sql import functions as F
from torch import nn

import sparkdml as dml
from sparkdml.feed.columns.kinds import ArrayColumn
from sparkdml.history import History
from sparkdml.inference.probe import find_largest_label
from sparkdml.inference.scores import choose_class, find_link, to_probabilities, to_scores
from sparkdml.testing.models import TinyClassifier
from sparkdml.training.modules import build_module
from sparkdml.training.weights import encode_weights

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SPARK = pytest.mark.spark


def make_classifier(**changes: Any) -> dml.TorchClassifier:
    settings: dict[str, Any] = {
        "model": TinyClassifier,
        "optimizer": partial(torch.optim.Adam, lr=0.05),
        "numWorkers": 1,
        "epochs": 15,
        "batchSize": 32,
        "verbose": 0,
    }
    return dml.TorchClassifier(**{**settings, **changes})


def classification_model(loss: Any, shape: list[int], module: Any) -> Any:
    torch.manual_seed(1)
    built = build_module(module)
    return dml.TorchClassificationModel._make(
        module=built,
        source=module,
        weights=encode_weights(built),
        loss=loss,
        metrics={},
        features=(ArrayColumn("features", "float32"),),
        output_shape=shape,
        history=History([], None, None),
    )


@pytest.fixture(scope="module")
def flowers(spark: SparkSession) -> DataFrame:
    """Three kinds that four numbers tell apart."""
    random = np.random.default_rng(5)
    kinds = random.integers(0, 3, 240)
    values = random.normal(size=(240, 4)) + np.eye(3, 4)[kinds] * 4
    return spark.createDataFrame(
        [(*map(float, row), "abc"[kind]) for row, kind in zip(values, kinds, strict=True)],
        "a double, b double, c double, d double, kind string",
    ).repartition(2)


@SPARK
def test_a_pipeline_like_any_other(spark: SparkSession, flowers: DataFrame, tmp_path: Path) -> None:
    pipeline = Pipeline(
        stages=[
            StringIndexer(inputCol="kind", outputCol="label"),
            VectorAssembler(inputCols=["a", "b", "c", "d"], outputCol="features"),
            make_classifier(),
        ]
    )
    fitted = pipeline.fit(flowers)
    model = fitted.stages[-1]
    assert isinstance(model, dml.TorchClassificationModel)
    assert model.numClasses == 3
    predicted = fitted.transform(flowers)
    kinds = {field.name: field.dataType.simpleString() for field in predicted.schema.fields}
    assert kinds["rawPrediction"] == kinds["probability"] == "vector"
    assert kinds["prediction"] == "double"
    for name in ("accuracy", "f1", "logLoss"):
        value = MulticlassClassificationEvaluator(metricName=name).evaluate(predicted)
        assert (value < 0.3) if name == "logLoss" else (value > 0.9), name
    for row in predicted.limit(10).collect():
        assert sum(row.probability) == pytest.approx(1)
        assert row.prediction == int(np.argmax(row.rawPrediction.toArray()))
        scores = np.exp(row.rawPrediction.toArray())
        assert row.probability.toArray() == pytest.approx(scores / scores.sum())

    model.setThresholds([0.0, 1.0, 1.0])
    path = str(tmp_path / "pipeline")
    fitted.write().overwrite().save(path)
    with pytest.raises(dml.DataError, match=r"model in .*allow_packages\('sparkdml\.testing'\)"):
        PipelineModel.load(path)
    with dml.allow_packages("sparkdml.testing"):
        loaded = PipelineModel.load(path)
    assert isinstance(loaded.stages[-1], dml.TorchClassificationModel)
    assert loaded.stages[-1].getThresholds() == [0.0, 1.0, 1.0]
    again = loaded.transform(flowers)
    assert {row.prediction for row in again.select("prediction").distinct().collect()} == {0.0}
    pipeline.write().overwrite().save(path)
    with pytest.raises(dml.DataError, match=r"model in .*allow_packages\('sparkdml\.testing'\)"):
        Pipeline.load(path)
    with dml.allow_packages("sparkdml.testing"):
        unfitted = Pipeline.load(path).getStages()[-1]
    assert isinstance(unfitted, dml.TorchClassifier)
    assert isinstance(unfitted.getLoss(), nn.CrossEntropyLoss)
    assert unfitted.getProbabilityCol() == "probability"


@SPARK
def test_one_output_tells_two_classes_apart(spark: SparkSession) -> None:
    data = spark.range(120).select(
        F.array((F.col("id") % 2 * 2 - 1 + F.rand(3)).cast("float")).alias("features"),
        (F.col("id") % 2).alias("label"),
    )
    fitted = make_classifier(
        model=partial(nn.Linear, 1, 1),
        loss=nn.BCEWithLogitsLoss(),
        rawPredictionCol="scores",
        probabilityCol="chance",
        predictionCol="guess",
    ).fit(data)
    predicted = fitted.transform(data)
    assert predicted.columns == ["features", "label", "scores", "chance", "guess"]
    evaluator = BinaryClassificationEvaluator(rawPredictionCol="scores")
    assert evaluator.evaluate(predicted) > 0.95
    assert fitted.numClasses == 2
    only = data.select("label", fitted.udf("chance")("features").alias("c")).first()
    assert len(only.c) == 2


@SPARK
def test_a_regressor(spark: SparkSession, tmp_path: Path) -> None:
    data = spark.range(100).select(
        F.array((F.col("id") / 50 - 1).cast("float")).alias("features"),
        (F.col("id") / 25 - 2).alias("label"),
    )
    fitted = dml.TorchRegressor(
        model=partial(nn.Linear, 1, 1),
        optimizer=partial(torch.optim.Adam, lr=0.1),
        numWorkers=1,
        epochs=25,
        batchSize=20,
        verbose=0,
    ).fit(data)
    assert isinstance(fitted, dml.TorchRegressionModel)
    assert RegressionEvaluator(metricName="r2").evaluate(fitted.transform(data)) > 0.95
    fitted.save(str(tmp_path / "model"))
    loaded = dml.TorchRegressionModel.load(str(tmp_path / "model"))
    assert loaded.transform(data).collect() == fitted.transform(data).collect()
    with pytest.raises(dml.SetupError, match=r"load it by TorchRegressionModel\.load"):
        dml.TorchModel.load(str(tmp_path / "model"))


# -- labels ---------------------------------------------------------------------------------------


@SPARK
@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("1.5D", "has 4 values that are not classes, for instance 1.5"),
        ("-1", "for instance -1: classes are whole numbers from 0 on"),
        ("double('NaN')", "for instance nan"),
        ("'cat'", r"has the type string, which no tensor has: index it first \(StringIndexer\)"),
        (
            "array(1D)",
            "is array<double>, but classes are whole numbers from 0 on: use StringIndexer",
        ),
        ("5", "has the class 5, but the model has 3 classes, 0 to 2"),
    ],
)
def test_labels_are_checked_before_the_workers_start(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, label: str, words: str
) -> None:
    monkeypatch.setattr("sparkdml.fitting.fit.launch", lambda *_: pytest.fail("a run was launched"))
    data = spark.range(4).selectExpr("array_repeat(1f, 4) AS features", f"{label} AS label")
    with pytest.raises(dml.DataError, match=words):
        make_classifier().fit(data)


@SPARK
def test_indexed_labels_cost_no_job(spark: SparkSession, flowers: DataFrame) -> None:
    indexed = StringIndexer(inputCol="kind", outputCol="label").fit(flowers).transform(flowers)
    monitor = spark.sparkContext.statusTracker()
    spark.sparkContext.setJobGroup("labels", "find the largest label")
    try:
        assert find_largest_label(indexed, "label") == 2
        assert len(monitor.getJobIdsForGroup("labels")) == 0
        assert find_largest_label(indexed.select((F.col("label") + 0).alias("l")), "l") == 2
        assert len(monitor.getJobIdsForGroup("labels")) > 0
    finally:
        spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)


# -- thresholds and probabilities: no Spark -------------------------------------------------------


def test_probabilities_are_what_the_loss_takes_the_outputs_for() -> None:
    outputs = torch.tensor([[0.1, 2.0, -1.0], [3.0, 0.0, 0.0]])
    link = find_link(nn.CrossEntropyLoss(), False)
    torch.testing.assert_close(
        to_probabilities(to_scores(outputs, link), link), outputs.double().softmax(1)
    )
    logs = outputs.log_softmax(1)
    link = find_link(nn.NLLLoss(), False)
    torch.testing.assert_close(
        to_probabilities(to_scores(logs, link), link), outputs.double().softmax(1)
    )
    one = torch.tensor([[0.3], [-2.0]])
    link = find_link(nn.BCEWithLogitsLoss(), True)
    both = to_probabilities(to_scores(one, link), link)
    torch.testing.assert_close(both[:, 1], one[:, 0].double().sigmoid())
    torch.testing.assert_close(both.sum(1), torch.ones(2, dtype=torch.float64))
    link = find_link(nn.BCELoss(), True)
    torch.testing.assert_close(
        to_probabilities(to_scores(one.sigmoid(), link), link), both, rtol=1e-6, atol=1e-6
    )


def test_thresholds_work_as_in_spark() -> None:
    scores = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log()
    assert choose_class(scores, "softmax", None).tolist() == [0.0]
    assert choose_class(scores, "softmax", (1.0, 0.5, 1.0)).tolist() == [1.0]
    assert choose_class(scores, "softmax", (1.0, 1.0, 0.0)).tolist() == [2.0]


@SPARK
def test_thresholds_and_shapes_are_checked(spark: SparkSession) -> None:
    data = spark.createDataFrame([([1.0] * 4,)], "features array<float>")
    model = classification_model(nn.CrossEntropyLoss(), [3], TinyClassifier)
    model.setThresholds([1.0, 1.0])
    with pytest.raises(dml.ParameterError, match="thresholds must be a list of 3 numbers"):
        model.transform(data)
    odd = classification_model(nn.CrossEntropyLoss(), [2, 3], TinyClassifier)
    with pytest.raises(dml.ParameterError, match="one that returns one number for each class"):
        odd.transform(data)
