"""transform, udf and evaluate on real Spark: types, batches, several models, streams, weights."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
import torch
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions as F
from torch import Tensor, nn

import sparkdml as dml
from sparkdml.errors import DataError, ParameterError
from sparkdml.feed.batch import Batch
from sparkdml.feed.columns.kinds import (
    ArrayColumn,
    OpaqueColumn,
    RaggedColumn,
    ScalarColumn,
    VectorColumn,
)
from sparkdml.history import History
from sparkdml.inference import weights as weights_module
from sparkdml.inference.weights import Weights
from sparkdml.model import TorchModel
from sparkdml.runtime.driver import preflight
from sparkdml.testing.models import TinyClassifier
from sparkdml.training.modules import build_module
from sparkdml.training.weights import encode_weights

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

FEATURES = (ArrayColumn("features", "float32"),)


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> DataFrame:
    values = torch.rand(50, 4, generator=torch.Generator().manual_seed(1)).tolist()
    return spark.createDataFrame(
        [(index, row, {"k": index}, index % 3) for index, row in enumerate(values)],
        "id int, features array<float>, extra map<string,int>, label int",
    ).repartition(3)


def fitted(source: Any, shape: Any = (3,), loss: Any = None, **more: Any) -> TorchModel:
    """As a fit leaves it, without the time that a fit takes."""
    torch.manual_seed(3)
    module = build_module(source)
    kind: type[TorchModel] = more.pop("kind", TorchModel)
    model: TorchModel = kind._make(
        module=module,
        source=source,
        weights=encode_weights(module),
        loss=loss,
        metrics=more.pop("metrics", {}),
        features=more.pop("features", FEATURES),
        output_shape=list(shape) if isinstance(shape, tuple) else shape,
        history=History([], None, None),
        **more,
    )
    return model


def kinds_of(frame: DataFrame) -> dict[str, str]:
    return {field.name: field.dataType.simpleString() for field in frame.schema.fields}


def tensors(frame: DataFrame, column: str = "features") -> Tensor:
    return torch.tensor([row[column] for row in frame.orderBy("id").collect()])


def plan_of(frame: DataFrame) -> str:
    text: str = frame._jdf.queryExecution().executedPlan().toString()
    return text


# -- types ----------------------------------------------------------------------------------------


class Several(nn.Module):
    """A tuple, with a number, a matrix and whole numbers."""

    def __init__(self, form: type = tuple) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)
        self.form = form

    def forward(self, features: Tensor) -> Any:
        hidden = self.layer(features)
        found = [hidden.mean(dim=1), hidden.reshape(-1, 2, 3)]
        if self.form is dict:
            return {"mean": found[0], "grid": found[1]}
        return tuple(found)


@pytest.mark.parametrize(
    ("module", "shape", "loss", "output", "kind"),
    [
        (lambda: nn.Linear(4, 1), (1,), nn.MSELoss(), "auto", "double"),
        (lambda: nn.Linear(4, 3), (3,), nn.MSELoss(), "auto", "array<float>"),
        (lambda: nn.Linear(4, 3).double(), (3,), nn.MSELoss(), "auto", "array<double>"),
        (lambda: nn.Linear(4, 3), (3,), nn.CrossEntropyLoss(), "auto", "double"),
        (lambda: nn.Linear(4, 3), (3,), nn.CrossEntropyLoss(), "raw", "array<float>"),
        (
            lambda: nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (2, 3))),
            (2, 3),
            nn.MSELoss(),
            "class",
            "array<double>",
        ),
        (
            lambda: nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (2, 3))),
            (2, 3),
            nn.MSELoss(),
            "raw",
            "array<array<float>>",
        ),
    ],
)
def test_one_output(
    rows: DataFrame, module: Any, shape: Any, loss: Any, output: str, kind: str
) -> None:
    model = fitted(module, shape, loss).setOutput(output)
    predicted = model.transform(rows)
    assert kinds_of(predicted)["prediction"] == kind
    inputs = tensors(rows).to(next(model.module.parameters()).dtype)
    expected = model.module(inputs)
    if kind == "double" or output == "class":
        expected = expected.argmax(dim=-1) if expected.shape[-1] > 1 else expected[:, 0]
    found = tensors(predicted, "prediction")
    torch.testing.assert_close(found, expected.to(found.dtype))


def test_several_outputs_are_columns_or_a_struct(rows: DataFrame) -> None:
    shape = {"0": [], "1": [2, 3]}
    model = fitted(Several, shape, nn.MSELoss())
    structs = model.transform(rows)
    assert kinds_of(structs)["prediction"] == "struct<_1:double,_2:array<array<float>>>"
    columns = model.copy().setOutputCols(["mean", "grid"]).transform(rows)
    assert columns.columns == [*rows.columns, "mean", "grid"]
    assert kinds_of(columns)["grid"] == "array<array<float>>"
    mean, grid = model.module(tensors(rows))
    torch.testing.assert_close(tensors(columns, "mean"), mean)
    torch.testing.assert_close(tensors(columns, "grid"), grid)
    named = fitted(partial(Several, dict), {"mean": [], "grid": [2, 3]}, nn.MSELoss())
    assert kinds_of(named.transform(rows))["prediction"].startswith("struct<mean:double,grid:")
    swapped = named.setOutputCols(["grid", "mean"]).transform(rows)
    assert kinds_of(swapped)["mean"] == "double"
    with pytest.raises(ParameterError, match=r"outputCols must be 2 names.*\(mean, grid\)"):
        named.setOutputCols(["one"]).transform(rows)


def double_ids(modules: Any, batch: Batch) -> dict[str, Tensor]:
    return {"id": batch["big"] * 2, "ok": batch["big"] > 0}


def test_whole_numbers_stay_whole(spark: SparkSession) -> None:
    """Above 2^24 a float would lose them, above 2^53 a double."""
    big = (1 << 60) + 1
    data = spark.createDataFrame([(1, big), (2, 5)], "id int, big bigint")
    model = fitted(
        lambda: nn.Linear(1, 1), None, features=(ScalarColumn("big", "int64"),)
    ).setPredict(double_ids)
    model.setFeaturesCol("big").setOutputCols(["twice", "ok"])
    predicted = model.transform(data)
    assert kinds_of(predicted)["twice"] == "bigint"
    assert kinds_of(predicted)["ok"] == "boolean"
    assert [row.twice for row in predicted.orderBy("id").collect()] == [2 * big, 10]


# -- how rows travel ------------------------------------------------------------------------------


def test_only_what_the_model_reads_goes_to_python(rows: DataFrame) -> None:
    predicted = fitted(TinyClassifier, loss=nn.CrossEntropyLoss()).transform(rows)
    assert predicted.columns == [*rows.columns, "prediction"]
    assert plan_of(predicted).count("ArrowEvalPython") == 1
    assert "predict(features" in plan_of(predicted)
    assert predicted.where("id = 7").first().extra == {"k": 7}


def test_a_row_is_predicted_once_even_if_it_is_filtered_by(rows: DataFrame) -> None:
    predicted = fitted(TinyClassifier, loss=nn.CrossEntropyLoss()).transform(rows)
    assert plan_of(predicted.where("prediction > 0")).count("ArrowEvalPython") == 1
    assert "ArrowEvalPython" not in plan_of(predicted.select("id"))


def test_several_models_in_one_pass(rows: DataFrame) -> None:
    one = fitted(TinyClassifier, loss=nn.CrossEntropyLoss()).setPredictionCol("one")
    two = fitted(lambda: nn.Linear(4, 1), (1,), nn.MSELoss()).setPredictionCol("two")
    three = fitted(Several, {"0": [], "1": [2, 3]}).setOutputCols(["mean", "grid"])
    together = dml.transform_with([one, two, three], rows)
    assert together.columns == [*rows.columns, "one", "two", "mean", "grid"]
    assert plan_of(together).count("ArrowEvalPython") == 1
    for model, column in ((one, "one"), (two, "two"), (three, "grid")):
        alone = model.transform(rows)
        assert torch.equal(tensors(together, column), tensors(alone, column))
    with pytest.raises(DataError, match="two outputs would be named 'one'"):
        dml.transform_with([one, one], rows)
    with pytest.raises(ParameterError, match="models must be a list of fitted models"):
        dml.transform_with([nn.Linear(1, 1)], rows)  # type: ignore[list-item]


def test_odd_names_and_empty_frames(spark: SparkSession) -> None:
    data = spark.createDataFrame([([1.0, 2.0],)], "`a.b` array<float>")
    columns = (ArrayColumn("a.b", "float32"),)
    model = fitted(lambda: nn.Linear(2, 1), (1,), nn.MSELoss(), features=columns)
    model.setFeaturesCol("a.b").setPredictionCol("p.q")
    assert model.transform(data).columns == ["a.b", "p.q"]
    assert model.transform(data).collect()[0]["p.q"] is not None
    assert model.transform(data.limit(0)).collect() == []


class CountsRows(nn.Module):
    """Tells in its output how many rows came with each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, features: Tensor) -> Tensor:
        return torch.full((len(features),), float(len(features)))


@pytest.mark.parametrize(
    ("width", "batch_size", "expected"), [(4, 8, 1024.0), (4, 2000, 2000.0), (300_000, 3, 3.0)]
)
def test_batches_are_sized_by_rows(
    spark: SparkSession, width: int, batch_size: int, expected: float
) -> None:
    """Light rows go by the thousand; of heavy ones no more than batchSize."""
    count = 3000 if width < 10 else 8
    data = spark.range(0, count, 1, 1).select(
        F.array_repeat(F.lit(0.5).cast("float"), width).alias("features")
    )
    model = fitted(CountsRows, (), nn.MSELoss()).setBatchSize(batch_size)
    found = model.transform(data).agg(F.max("prediction")).first()[0]
    assert found == expected


def test_nulls_are_told(spark: SparkSession) -> None:
    data = spark.createDataFrame([([1.0] * 4, 1), (None, 2)], "features array<float>, id int")
    with pytest.raises(Exception, match="column 'features' is null in the row"):
        fitted(TinyClassifier).transform(data.coalesce(1)).collect()


# -- what prepares the rows -----------------------------------------------------------------------


def halve(batch: pa.RecordBatch) -> dict[str, Any]:
    text = batch.column("text").to_pylist()
    return {"features": torch.tensor([[float(len(t))] * 4 for t in text])}


def test_preprocess_runs_in_transform_and_udf(spark: SparkSession) -> None:
    data = spark.createDataFrame([(1, "ab"), (2, "abcd")], "id int, text string")
    text = OpaqueColumn("text")
    model = fitted(lambda: nn.Linear(4, 1), (1,), nn.MSELoss(), features=(), inputs=(text,))
    model.setPreprocess(halve).setInputCols(["text", "label"]).setLabelCol("label")
    predicted = model.transform(data)
    expected = model.module(torch.tensor([[2.0] * 4, [4.0] * 4]))[:, 0]
    torch.testing.assert_close(tensors(predicted, "prediction"), expected)
    by_udf = data.select("id", model.udf()("text").alias("prediction"))
    torch.testing.assert_close(tensors(by_udf, "prediction"), expected)


class SumsTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 2)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(tokens.shape[1]) < lengths[:, None]
        found: Tensor = (self.embedding(tokens) * mask[..., None]).sum(dim=1)
        return found


def test_ragged_rows_are_collated(spark: SparkSession) -> None:
    data = spark.createDataFrame(
        [(i, [1 + j % 9 for j in range(1 + i % 5)]) for i in range(20)],
        "id int, tokens array<bigint>",
    )
    columns = (RaggedColumn("tokens", "int64"),)
    model = fitted(SumsTokens, (2,), nn.MSELoss(), features=columns).setBatchSize(4)
    model.setFeaturesCol(["tokens", "tokens_length"]).setCollate(dml.pad())
    module: Any = model.module
    for row in model.transform(data).collect():
        expected = module.embedding(torch.tensor(row.tokens)).sum(dim=0)
        torch.testing.assert_close(torch.tensor(row.prediction), expected)


# -- predict and several modules ------------------------------------------------------------------


def difference(modules: Any, batch: Batch) -> Tensor:
    found: Tensor = modules.left(batch["features"]) - modules.right(batch["features"])
    return found.squeeze(1)


def test_several_modules(rows: DataFrame) -> None:
    source = {"left": partial(nn.Linear, 4, 1), "right": partial(nn.Linear, 4, 1)}
    model = fitted(source, None)
    with pytest.raises(ParameterError, match=r"predict must be a function.*one of left, right"):
        model.transform(rows)
    module: Any = model.module
    left = model.copy().setPredict("left").transform(rows)
    torch.testing.assert_close(tensors(left, "prediction"), module.left(tensors(rows))[:, 0])
    with pytest.raises(ParameterError, match="predict must be one of left, right"):
        model.copy().setPredict("middle").transform(rows)
    model.setPredict(difference)
    with pytest.raises(DataError, match="are unknown before the first transform"):
        model.udf()
    both = model.transform(rows)
    expected = difference(module, Batch({"features": tensors(rows)}, 50))
    torch.testing.assert_close(tensors(both, "prediction"), expected)
    torch.testing.assert_close(
        tensors(rows.select("id", model.udf()("features").alias("p")), "p"), expected
    )


def reconstruct(modules: Any, batch: Batch, ctx: Any) -> Any:
    assert not ctx.training
    wrong = (modules(batch["features"]) - batch["features"]).pow(2).mean(dim=1)
    return wrong, {"worst": wrong.max()}


def test_evaluate_of_a_step(rows: DataFrame) -> None:
    model = fitted(lambda: nn.Linear(4, 4), None, step=reconstruct, metrics=["worst"])
    found = model.evaluate(rows)
    inputs = tensors(rows)
    expected = (model.module(inputs) - inputs).pow(2).mean().item()
    assert found["loss"] == pytest.approx(expected, rel=1e-5)
    assert set(found) == {"loss", "worst"}


def test_evaluate_with_weights_and_metric_objects(rows: DataFrame) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    metrics = {"accuracy": torchmetrics.classification.MulticlassAccuracy(3, average="micro")}
    model = fitted(TinyClassifier, loss=nn.CrossEntropyLoss(), metrics=metrics)
    data = rows.withColumn("weight", F.col("label").cast("float"))
    found = model.setWeightCol("weight").evaluate(data)
    outputs, labels = model.module(tensors(rows)), tensors(rows, "label").long()
    losses = nn.CrossEntropyLoss(reduction="none")(outputs, labels)
    assert found["loss"] == pytest.approx(((losses * labels).sum() / labels.sum()).item(), rel=1e-5)
    right = (outputs.argmax(1) == labels).float().mean().item()
    assert found["accuracy"] == pytest.approx(right, abs=1e-6)


# -- SQL and streams ------------------------------------------------------------------------------


def test_udf_in_sql(spark: SparkSession, rows: DataFrame) -> None:
    model = fitted(TinyClassifier, loss=nn.CrossEntropyLoss())
    spark.udf.register("sparkdml_classify", model.udf())
    rows.createOrReplaceTempView("sparkdml_rows")
    found = spark.sql(
        "SELECT id, sparkdml_classify(features) AS c FROM sparkdml_rows "
        "WHERE sparkdml_classify(features) >= 0 ORDER BY id"
    )
    expected = model.module(tensors(rows)).argmax(dim=1).tolist()
    assert [row.c for row in found.collect()] == expected
    with pytest.raises(ParameterError, match="column must be one of prediction"):
        model.udf("probability")


def test_a_stream_of_files(spark: SparkSession, rows: DataFrame, tmp_path: Path) -> None:
    """Two micro-batches of a real query, the second after the first was answered."""
    model = fitted(TinyClassifier, loss=nn.CrossEntropyLoss())
    kept = rows.drop("extra")
    kept.where("id < 30").coalesce(1).write.parquet(str(tmp_path / "in"))
    stream = spark.readStream.schema(kept.schema).parquet(str(tmp_path / "in"))
    predicted = model.transform(stream)
    assert predicted.isStreaming
    query = (
        predicted.writeStream.format("memory")
        .queryName("sparkdml_stream")
        .option("checkpointLocation", str(tmp_path / "state"))
        .trigger(processingTime="100 milliseconds")
        .start()
    )
    try:
        wait_for(spark, query, 30)
        kept.where("id >= 30").coalesce(1).write.mode("append").parquet(str(tmp_path / "in"))
        wait_for(spark, query, 50)
    finally:
        query.stop()
    answered = spark.table("sparkdml_stream")
    torch.testing.assert_close(
        tensors(answered, "prediction"), tensors(model.transform(rows), "prediction")
    )


def wait_for(spark: SparkSession, query: Any, count: int) -> None:
    deadline = time.monotonic() + 60
    while spark.table(query.name).count() < count:
        assert query.exception() is None, query.exception()
        assert time.monotonic() < deadline, "the stream has not answered in a minute"
        time.sleep(0.1)


# -- weights --------------------------------------------------------------------------------------


def test_large_weights_travel_as_a_file(
    spark: SparkSession, rows: DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = nn.Sequential(nn.Linear(4, 60), nn.Tanh(), nn.Linear(60, 1))
    small = fitted(source, (1,), nn.MSELoss())
    monkeypatch.setattr(weights_module, "LARGE_BYTES", 100)
    large = fitted(source, (1,), nn.MSELoss())
    assert small._weights.path is None
    path = large._weights.path
    assert path is not None
    assert path.stat().st_mode & 0o077 == 0
    plan = large._prediction_plan(rows)
    assert plan.model.weights.content is None
    assert plan.model.weights.file == path.name
    torch.testing.assert_close(
        tensors(large.transform(rows), "prediction"), tensors(small.transform(rows), "prediction")
    )
    module = large.module
    with torch.no_grad():
        next(module.parameters()).zero_()  # the user's copy: nothing else changes
    assert large._weights == small._weights


def test_nothing_is_written_where_disks_must_be_encrypted(
    spark: SparkSession, rows: DataFrame, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = preflight.session_setting
    monkeypatch.setattr(
        preflight,
        "session_setting",
        lambda sc, key: "true" if key == "spark.io.encryption.enabled" else asked(sc, key),
    )
    monkeypatch.setattr(weights_module, "LARGE_BYTES", 0)
    monkeypatch.setattr("sparkdml.persistence.objects.LARGE_BYTES", 0)
    model = fitted(nn.Sequential(nn.Linear(4, 1)), (1,), nn.MSELoss())
    model.save(str(tmp_path / "model"))
    loaded = TorchModel.load(str(tmp_path / "model"))
    assert model._weights.path is None
    assert loaded._weights.path is None
    assert Weights.of(model._weights.content).path is None
    assert len(tensors(loaded.transform(rows), "prediction")) == rows.count()


def test_files_of_weights_go_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "LARGE_BYTES", 0)
    weights = Weights.of({"a": torch.ones(3)})
    path = weights.path
    assert path is not None
    assert path.exists()
    assert torch.equal(weights.state()["a"], torch.ones(3))
    del weights
    assert not path.exists()


def test_vectors_are_read_as_in_training(spark: SparkSession, tmp_path: Path) -> None:
    data = spark.createDataFrame(
        [(1, Vectors.dense(1.0, 2.0)), (2, Vectors.sparse(2, [0], [3.0]))], ["id", "features"]
    )
    columns = (VectorColumn("features", "float32"),)
    model = fitted(lambda: nn.Linear(2, 1), (1,), nn.MSELoss(), features=columns)
    expected = model.module(torch.tensor([[1.0, 2.0], [3.0, 0.0]]))[:, 0]
    torch.testing.assert_close(tensors(model.transform(data), "prediction"), expected)
    data.write.parquet(str(tmp_path / "vectors"))  # as batches of columns, which is another way
    stored = data.sparkSession.read.parquet(str(tmp_path / "vectors"))
    torch.testing.assert_close(tensors(model.transform(stored), "prediction"), expected)
