"""ONNX, torch.export and MLflow: what is written is read back and computes the same."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sparkdml as dml
from sparkdml.export import compare
from sparkdml.feed.batch import Batch
from sparkdml.feed.columns.kinds import ArrayColumn
from sparkdml.history import History
from sparkdml.model import TorchModel
from sparkdml.testing.models import TinyClassifier
from sparkdml.training.modules import build_module
from sparkdml.training.weights import encode_weights

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = torch.rand(5, 4, generator=torch.Generator().manual_seed(2))


def fitted(source: Any, shape: Any = (3,), loss: Any = None, kind: Any = TorchModel) -> Any:
    torch.manual_seed(4)
    module = build_module(source)
    return kind._make(
        module=module,
        source=source,
        weights=encode_weights(module),
        loss=loss or nn.CrossEntropyLoss(),
        metrics={},
        features=(ArrayColumn("features", "float32"),),
        output_shape=list(shape) if isinstance(shape, tuple) else shape,
        history=History([], None, None),
    )


class Two(nn.Module):
    """Two inputs, one of them whole numbers; two named outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 3)
        self.layer = nn.Linear(5, 2)

    def forward(self, ids: Tensor, dense: Tensor) -> dict[str, Tensor]:
        hidden = self.layer(torch.cat([self.embedding(ids), dense], dim=1))
        return {"mean": hidden.mean(dim=1), "hidden": hidden}


def test_onnx_computes_the_same_for_any_number_of_rows(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model = fitted(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)))
    path = tmp_path / "model.onnx"
    model.save_onnx(path, ROWS)
    session = onnxruntime.InferenceSession(str(path))
    assert [entry.name for entry in session.get_inputs()] == ["features"]
    assert [entry.name for entry in session.get_outputs()] == ["prediction"]
    for rows in (1, 17):
        inputs = torch.rand(rows, 4)
        (found,) = session.run(None, {"features": inputs.numpy()})
        np.testing.assert_allclose(found, model.module(inputs).detach().numpy(), atol=1e-5)


def test_onnx_of_two_inputs_and_outputs(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model = fitted(Two, {"mean": [], "hidden": [2]})
    model.setFeaturesCol(["user id", "dense"])
    ids, dense = torch.tensor([1, 2, 9]), torch.rand(3, 2)
    model.save_onnx(tmp_path / "two.onnx", [ids, dense])
    session = onnxruntime.InferenceSession(str(tmp_path / "two.onnx"))
    assert [entry.name for entry in session.get_inputs()] == ["user_id", "dense"]
    names = [entry.name for entry in session.get_outputs()]
    found = dict(
        zip(names, session.run(None, {"user_id": ids.numpy(), "dense": dense.numpy()}), strict=True)
    )
    expected = model.module(ids, dense)
    for name in ("mean", "hidden"):
        np.testing.assert_allclose(found[name], expected[name].detach().numpy(), atol=1e-5)


def both(modules: Any, batch: Batch) -> Tensor:
    found: Tensor = modules.left(batch["features"]) + modules.right(batch["features"])
    return found


@pytest.mark.parametrize("predict", ["left", both], ids=["name", "function"])
def test_exported_program_computes_the_same(tmp_path: Path, predict: Any) -> None:
    source = {"left": partial(nn.Linear, 4, 2), "right": partial(nn.Linear, 4, 2)}
    model = fitted(source, None).setPredict(predict)
    path = tmp_path / "deep" / "model.pt2"
    model.save_exported(path, ROWS[:1])
    loaded = torch.export.load(path).module()
    module: Any = model.module
    for rows in (1, 3):
        inputs = torch.rand(rows, 4)
        expected = module.left(inputs) if predict == "left" else both(module, _batch(inputs))
        torch.testing.assert_close(loaded(inputs), expected)


def _batch(inputs: Tensor) -> Batch:
    return Batch({"features": inputs}, len(inputs))


def test_what_computes_something_else_is_told(tmp_path: Path) -> None:
    module = nn.Linear(4, 1)
    target = tmp_path / "model.pt2"
    with pytest.raises(dml.ExportError, match=r"differs .* by up to 0\.5, more than tolerance=0.1"):
        compare(module, lambda x: module(x) + 0.5, (ROWS,), 0.1, target)
    compare(module, lambda x: module(x) + 0.05, (ROWS,), 0.1, target)
    with pytest.raises(dml.ExportError, match=r"shape \[1, 5\] instead of \[5, 1\]"):
        compare(module, lambda x: module(x).T, (ROWS,), 0.1, target)


class Peeks(nn.Module):
    """Looks into its values, which no exporter can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, features: Tensor) -> Tensor:
        found: Tensor = self.layer(features)
        return found if found.sum().item() > 0 else -found


def test_what_cannot_be_exported_leaves_no_file(tmp_path: Path) -> None:
    model = fitted(Peeks)
    with pytest.raises(dml.ExportError, match=r"can't be exported by torch\.export"):
        model.save_exported(tmp_path / "model.pt2", ROWS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("example", "words"),
    [
        ([ROWS, ROWS], "a tensor for each of features"),
        (torch.rand(0, 4), "the same number of rows in their first"),
    ],
)
def test_bad_examples(tmp_path: Path, example: Any, words: str) -> None:
    with pytest.raises(dml.ParameterError, match=words):
        fitted(TinyClassifier).save_exported(tmp_path / "model.pt2", example)


@pytest.mark.spark
def test_a_dataframe_is_an_example(spark: SparkSession, tmp_path: Path) -> None:
    data = spark.createDataFrame([(row,) for row in ROWS.tolist()], "features array<double>")
    model = fitted(TinyClassifier)
    model.save_exported(tmp_path / "model.pt2", data)
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(loaded(ROWS), model.module(ROWS))
    with pytest.raises(dml.ParameterError, match="a DataFrame with rows"):
        model.save_exported(tmp_path / "model.pt2", data.limit(0))


# -- MLflow ---------------------------------------------------------------------------------------


def test_mlflow_without_spark(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    pandas = pytest.importorskip("pandas")
    from sparkdml import mlflow_flavor

    model = fitted(TinyClassifier, kind=dml.TorchClassificationModel)
    with pytest.warns(UserWarning, match=r"load only where .*allow_packages\('sparkdml\.testing'"):
        mlflow_flavor.save_model(model, tmp_path / "saved", metadata={"team": "a"})
    with pytest.raises(dml.DataError, match=r"model in .*allow_packages\('sparkdml\.testing'"):
        mlflow.pyfunc.load_model(str(tmp_path / "saved"))
    with dml.allow_packages("sparkdml.testing"):
        function = mlflow.pyfunc.load_model(str(tmp_path / "saved"))
    rows = pandas.DataFrame({"features": [row.tolist() for row in ROWS]}, index=range(10, 15))
    found = function.predict(rows)
    assert list(found.columns) == ["rawPrediction", "probability", "prediction"]
    assert list(found.index) == list(range(10, 15))
    outputs = model.module(ROWS)
    assert found["prediction"].tolist() == outputs.argmax(1).tolist()
    np.testing.assert_allclose(
        np.array(found["probability"].tolist()), outputs.softmax(1).detach(), atol=1e-6
    )
    assert "sparkdml==" in (tmp_path / "saved/requirements.txt").read_text()
    with pytest.raises(dml.DataError, match="the rows have no column 'features'"):
        function.predict(rows.rename(columns={"features": "x"}))
    with pytest.raises(dml.SetupError, match="already exists"):
        mlflow_flavor.save_model(model, tmp_path / "saved")


@pytest.mark.spark
def test_mlflow_logged_and_loaded_back(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    from sparkdml import mlflow_flavor

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the client alone has no database
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    try:
        model = fitted(TinyClassifier)
        with mlflow.start_run():
            info = mlflow_flavor.log_model(model, name="classifier")
        assert set(info.flavors) == {"python_function", "sparkdml"}
        with pytest.raises(dml.DataError, match="allow_packages"):
            mlflow_flavor.load_model(info.model_uri)
        monkeypatch.setenv("SPARKDML_ALLOW_PACKAGES", "sparkdml.testing")
        loaded = mlflow_flavor.load_model(info.model_uri)
        assert type(loaded) is TorchModel
        data = spark.createDataFrame([(row,) for row in ROWS.tolist()], "features array<float>")
        expected = [row.prediction for row in model.transform(data).collect()]
        assert [row.prediction for row in loaded.transform(data).collect()] == expected
        function = mlflow.pyfunc.load_model(info.model_uri)
        assert function.predict(data.toPandas())["prediction"].tolist() == expected
    finally:
        mlflow.set_tracking_uri(before)
