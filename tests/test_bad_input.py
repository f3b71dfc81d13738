"""Bad input, case by case: the message that a user wants, and before which work it comes."""

from functools import partial
from pathlib import Path

import pytest
import torch
from pyspark.sql import functions as F
from torch import nn

import sparkdml as dml

pytestmark = pytest.mark.spark

SGD = partial(torch.optim.SGD, lr=0.1)


def make_net():
    return nn.Linear(4, 3)


def make_estimator(**changes):
    settings = {
        "model": make_net,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": SGD,
        "numWorkers": 2,
        "batchSize": 16,
        "verbose": 0,
    }
    given = {**settings, **changes}
    return dml.TorchEstimator(**{name: v for name, v in given.items() if v is not LEFT_OUT})


LEFT_OUT = object()


@pytest.fixture(scope="module")
def rows(spark):
    frame = spark.createDataFrame(
        [([0.1 * i, 1.0, 2.0, 3.0], i % 3, 1.0, "text", b"x", i % 2 == 0) for i in range(60)],
        "features array<float>, label long, weight double, name string, image binary, "
        "held_out boolean",
    )
    return (
        frame.withColumn("when", F.current_timestamp())
        .withColumn("day", F.current_date())
        .withColumn("price", F.lit(1).cast("decimal(10,2)"))
        .withColumn("map", F.create_map(F.lit("a"), F.lit(1)))
        .withColumn("words", F.array(F.lit("a")))
    )


@pytest.fixture
def no_job(spark):
    """The block that the test runs may not start a Spark job."""
    scheduler = spark.sparkContext._jsc.sc().dagScheduler()
    before = scheduler.nextJobId()
    yield
    assert scheduler.nextJobId() == before, "a Spark job was started"


def step(modules, batch, ctx):
    return modules(batch["features"]).sum(dim=1)


# What the settings show. Each: the Params, and what the message says.
SETTINGS = {
    "model: a number": ({"model": 3}, "model must be an nn.Module, a function of no arguments"),
    "model: makes a number": ({"model": lambda: 3}, "model must be an nn.Module"),
    "model: nothing to train": ({"model": nn.ReLU}, "at least one trainable parameter"),
    "model: lazy": ({"model": lambda: nn.LazyLinear(3)}, "whose parameters have shapes"),
    "model: integers": (
        {"model": lambda: nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3).double()])},
        "parameters of one floating-point type",
    ),
    "model: missing": ({"model": LEFT_OUT}, "model must be given"),
    "model: an empty dict": ({"model": {}}, "model must be"),
    "model: a name that is none": ({"model": {"a b": make_net}}, "named by identifiers"),
    "model: not in the dict": ({"model": {"a": 3}}, r"model\['a'\] must be"),
    "loss: a text": ({"loss": "mse"}, "loss must be a function"),
    "loss: missing": ({"loss": LEFT_OUT}, "loss.*step|step.*loss"),
    "loss and step": ({"step": step}, "loss.*step|step.*loss"),
    "optimizer: an object": (
        {"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())},
        r"functools.partial\(torch.optim.SGD",
    ),
    "optimizer: missing": ({"optimizer": LEFT_OUT}, "optimizer must be given"),
    "optimizer: other names": (
        {"model": {"a": make_net}, "optimizer": {"b": SGD}, "loss": LEFT_OUT, "step": step},
        "optimizer.*'?b'?",
    ),
    "batchSize: 0": ({"batchSize": 0}, "batchSize must be a whole number of at least 1 but got 0"),
    "batchSize: True": ({"batchSize": True}, "batchSize must be a whole number"),
    "epochs: a half": ({"epochs": 1.5}, "epochs must be a whole number"),
    "numWorkers: negative": ({"numWorkers": -1}, "numWorkers must be a whole number of at least 1"),
    "gpusPerWorker: 2": ({"gpusPerWorker": 2}, "gpusPerWorker must be one of 0, 1"),
    "validation: above 1": ({"validation": 1.5}, "validation must be a fraction between 0 and 1"),
    "clipNorm: 0": ({"clipNorm": 0}, "clipNorm must be a number above 0"),
    "metrics: a reserved name": ({"metrics": {"loss": len}}, "metrics must be named differently"),
    "metrics: names without step": ({"metrics": ["a"]}, "metrics must be"),
    "callbacks: a number": ({"callbacks": [3]}, "callbacks must be a list of dml.Callback"),
    "strategy: a text": ({"strategy": "ring"}, "strategy must be a strategy"),
    "output: unknown": ({"output": "probability"}, "output must be one of 'auto', 'raw', 'class'"),
    "featuresCol: empty": ({"featuresCol": []}, "featuresCol must be a column's name, or a list"),
    "heartbeatTimeout: 0": ({"heartbeatTimeout": 0}, "heartbeatTimeout must be"),
    "precision: half": (
        {"precision": "half"},
        "precision must be one of 'float32', 'bf16'",
    ),
    "compile: a text": ({"compile": "fast"}, "compile must be True, False, or a dict"),
    "logs: here": ({"logs": "here"}, "logs must be one of 'driver'"),
    "verbose: 3": ({"verbose": 3}, "verbose must be one of 0, 1, 2"),
    "timeline: a number": ({"timeline": 3}, "timeline must be the path of a file"),
    "tracker: a number": ({"tracker": 3}, "tracker must be"),
    "checkpoint: a number": ({"checkpoint": 3}, "checkpoint must be a path"),
    "warmStart: a module": (
        {"warmStart": nn.Linear(4, 3)},
        "warmStart must be a fitted Torch",
    ),
    "warmStart: another shape": (
        {"warmStart": nn.Linear(5, 3).state_dict()},
        r"warmStart.*weight",
    ),
    "onInterrupt: keep": ({"onInterrupt": "keep"}, "onInterrupt must be one of 'raise'"),
    "preprocess: a text": ({"preprocess": "decode"}, "preprocess must be a function"),
    "outputCols: twice": ({"outputCols": ["a", "a"]}, "outputCols must be a list without repet"),
    "shuffle: 1": ({"shuffle": 1}, "shuffle must be True or False"),
}

# What the schema shows.
SCHEMA = {
    "features: no such column": (
        {"featuresCol": "feature"},
        "no column 'feature': the DataFrame has features, label",
    ),
    "label: no such column": ({"labelCol": "y"}, "no column 'y'"),
    "validation: no such column": (
        {"validation": "is_test"},
        "no column 'is_test' for valid",
    ),
    "validation: not boolean": (
        {"validation": "label"},
        "validation column 'label' is bigint, not boolean",
    ),
    "features: a string": ({"featuresCol": "name"}, "'name'.*StringIndexer"),
    "features: binary": ({"featuresCol": "image"}, "'image'.*(decode|preprocess)"),
    "features: a timestamp": ({"featuresCol": "when"}, "'when'.*unix_timestamp"),
    "features: a date": ({"featuresCol": "day"}, "'day'.*datediff"),
    "features: a decimal": ({"featuresCol": "price"}, "'price'.*(cast|double)"),
    "features: a map": ({"featuresCol": "map"}, "'map'"),
    "features: words": ({"featuresCol": "words"}, "'words'"),
    "weight: no such column": ({"weightCol": "w"}, "no column 'w'"),
    "weight: a string": ({"weightCol": "name"}, "'name'"),
    "sampling: no such column": ({"samplingCol": "w"}, "no column 'w'|'w'"),
    "stratify: no such column": ({"validation": 0.2, "stratifyCol": "w"}, "'w'"),
    "stratify: without a fraction": ({"stratifyCol": "label"}, "stratifyCol.*validation"),
    "inputCols: without preprocess": ({"inputCols": ["name"]}, "inputCols.*preprocess"),
}

# What only rows show.
ROWS = {
    "a null label": (
        lambda df: df.withColumn("label", F.when(F.col("label") > 0, F.col("label"))),
        {},
        "null",
    ),
    "a null in an array": (
        lambda df: df.withColumn(
            "features",
            F.when(F.col("label") > 0, F.col("features")).otherwise(
                F.array(*[F.lit(None).cast("float")] * 4)
            ),
        ),
        {},
        "null",
    ),
    "arrays of two lengths": (
        lambda df: df.withColumn(
            "features",
            F.when(F.col("label") > 0, F.col("features")).otherwise(F.slice("features", 1, 2)),
        ),
        {},
        "column 'features' has 4 elements in the row .* but 2 in others|2 elements .* but 4",
    ),
    "a label out of range": (
        lambda df: df.withColumn("label", F.col("label") + 7),
        {},
        "out of bounds|Target 7|Target",
    ),
    "no rows": (lambda df: df.filter("label > 9"), {}, "no rows"),
    "NaN, looked for": (
        lambda df: df.withColumn("weight", F.lit(float("nan"))),
        {"weightCol": "weight", "checkFinite": True},
        "'weight'.*NaN|NaN.*'weight'|not finite",
    ),
    "a negative weight to draw by": (
        lambda df: df.withColumn("weight", F.lit(-1.0)),
        {"samplingCol": "weight"},
        "samplingCol|'weight'",
    ),
    "a width that the model has not": (
        lambda df: df.withColumn("features", F.slice("features", 1, 3)),
        {},
        "mat1 and mat2",
    ),
    "validation that selects nothing": (
        lambda df: df.withColumn("held_out", F.lit(False)),
        {"validation": "held_out"},
        "validation= selected no rows",
    ),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings(case, rows, no_job):
    changes, words = SETTINGS[case]
    with pytest.raises(dml.ParameterError, match=words):
        make_estimator(**changes).fit(rows)


@pytest.mark.parametrize("case", SCHEMA)
def test_schema(case, rows, no_job):
    changes, words = SCHEMA[case]
    with pytest.raises((dml.DataError, dml.ParameterError), match=words):
        make_estimator(**changes).fit(rows)


class Steps(torch.optim.SGD):
    """Leaves a mark if it ever makes a step."""

    def __init__(self, parameters, mark):
        super().__init__(parameters, lr=0.1)
        self._mark = mark

    def step(self, closure=None):
        Path(self._mark).touch()
        return super().step(closure)


@pytest.mark.parametrize("case", ROWS)
def test_rows(case, rows, tmp_path):
    change, settings, words = ROWS[case]
    mark = tmp_path / "stepped"
    estimator = make_estimator(optimizer=partial(Steps, mark=str(mark)), **settings)
    with pytest.raises(dml.SparkDMLError, match=f"(?s){words}"):
        estimator.fit(change(rows))
    if case != "validation that selects nothing":
        assert not mark.exists(), "an optimizer step came first"


def test_there_are_enough_cases():
    assert len(SETTINGS) + len(SCHEMA) + len(ROWS) >= 40
