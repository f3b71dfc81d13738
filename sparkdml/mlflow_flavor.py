"""Saves fitted models as MLflow models, with a flavor of their own and as Python functions.

The Python function needs no Spark: it takes a pandas DataFrame and returns the columns that
`transform` would add. `load_model` returns the fitted model, for `transform`.

>>> with mlflow.start_run():
...     sparkdml.mlflow_flavor.log_model(fitted, name="model")
>>> mlflow.pyfunc.load_model(uri).predict(rows)
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyspark
import torch

import sparkdml
from sparkdml.errors import DataError, SetupError
from sparkdml.feed.columns.kinds import vectors_to_python
from sparkdml.inference.predictor import PredictionPlan, Predictor
from sparkdml.inference.reading import plan_inputs
from sparkdml.inference.weights import ShippedModel, ShippedWeights
from sparkdml.model import TorchModel
from sparkdml.persistence.folder import PlainFolder
from sparkdml.persistence.spark_ml import ModelReader, ModelWriter, find_model_class

if TYPE_CHECKING:
    import pandas as pd

FLAVOR_NAME = "sparkdml"
_DATA = "model"


def save_model(
    model: TorchModel,
    path: str | os.PathLike[str],
    mlflow_model: Any = None,
    signature: Any = None,
    input_example: Any = None,
    pip_requirements: list[str] | None = None,
    metadata: dict[str, Any] | None = None,
) -> None:
    """Save the model as a folder in MLflow's format, in the driver; `path` must not exist."""
    mlflow = _import_mlflow()
    target = Path(path)
    if target.exists() and any(target.iterdir()):
        raise SetupError(f"{target} already exists: remove it, or choose another path")
    target.mkdir(parents=True, exist_ok=True)
    # Written without Spark's own writer: this needs no session and no JVM.
    ModelWriter(model).save_to(PlainFolder(str(target / _DATA)))
    described = mlflow.models.Model() if mlflow_model is None else mlflow_model
    if signature is not None:
        described.signature = signature
    if metadata is not None:
        described.metadata = metadata
    if input_example is not None:
        mlflow.models.utils._save_example(described, input_example, str(target))
    requirements = default_requirements() if pip_requirements is None else pip_requirements
    mlflow.pyfunc.add_to_model(
        described,
        loader_module="sparkdml.mlflow_flavor",
        data=_DATA,
        python_env="python_env.yaml",
    )
    described.add_flavor(
        FLAVOR_NAME,
        data=_DATA,
        model_class=f"{type(model).__module__}:{type(model).__name__}",
        sparkdml_version=sparkdml.__version__,
        torch_version=str(torch.__version__),  # a str subclass, which YAML can't write
    )
    described.save(str(target / "MLmodel"))
    (target / "requirements.txt").write_text("\n".join(requirements) + "\n")
    mlflow.utils.environment._PythonEnv.current().to_yaml(str(target / "python_env.yaml"))


def log_model(
    model: TorchModel,
    name: str = "model",
    registered_model_name: str | None = None,
    signature: Any = None,
    input_example: Any = None,
    pip_requirements: list[str] | None = None,
    **options: Any,
) -> Any:
    """Log the model to the active run, and register it if `registered_model_name` is given."""
    import sparkdml.mlflow_flavor as flavor

    return _import_mlflow().models.Model.log(
        artifact_path=None,
        name=name,
        flavor=flavor,
        model=model,
        registered_model_name=registered_model_name,
        signature=signature,
        input_example=input_example,
        pip_requirements=pip_requirements,
        **options,
    )


def load_model(model_uri: str, dst_path: str | None = None) -> TorchModel:
    """Load the fitted model, for `transform` on a Spark DataFrame."""
    mlflow = _import_mlflow()
    local = mlflow.artifacts.download_artifacts(artifact_uri=model_uri, dst_path=dst_path)
    described = mlflow.models.Model.load(os.path.join(local, "MLmodel"))
    if FLAVOR_NAME not in described.flavors:
        raise DataError(
            f"{model_uri} has the flavors {', '.join(described.flavors)}, not {FLAVOR_NAME!r}: it "
            "was not saved by sparkdml.mlflow_flavor"
        )
    return load_local(os.path.join(local, described.flavors[FLAVOR_NAME]["data"]))


def load_local(path: str) -> TorchModel:
    """Load the fitted model from a folder on this machine, without a Spark session."""
    folder = PlainFolder(path)
    model: TorchModel = ModelReader(find_model_class(folder)).load_from(folder)
    return model


def _load_pyfunc(path: str) -> RowFunction:
    """Load the Python function; mlflow.pyfunc calls this."""
    return RowFunction(load_local(path))


class RowFunction:
    """A fitted model as a function of a pandas DataFrame."""

    def __init__(self, model: TorchModel) -> None:
        self.model = model
        feed = plan_inputs(model, model._features, model._inputs, model._floating)
        feed = replace(
            feed,
            columns=tuple(column.outside_spark() for column in feed.columns),
            inputs=tuple(column.outside_spark() for column in feed.inputs),
        )
        self._plan = PredictionPlan(
            model=ShippedModel(ShippedWeights("local")),
            inputs=tuple(dict.fromkeys(c.name for c in (*feed.inputs, *feed.columns))),
            feed=feed,
            features=tuple(model.feature_columns()),
            predict=model.value("predict"),
            batch_size=model.value("batchSize"),
            columns=model._columns(model._known_outputs()),
        )
        self._predictor = Predictor.of_module(self._plan, model.module)

    def predict(self, rows: pd.DataFrame, params: dict[str, Any] | None = None) -> pd.DataFrame:
        import pandas

        missing = [name for name in self._plan.inputs if name not in rows.columns]
        if missing:
            raise DataError(
                f"the rows have no column {missing[0]!r}; the model reads "
                f"{', '.join(self._plan.inputs)}"
            )
        arrays = [pa.array(list(rows[name])) for name in self._plan.inputs]
        batch = pa.RecordBatch.from_arrays(arrays, names=list(self._plan.inputs))
        found = self._predictor.columns(batch)
        names = [name for name, _ in self._plan.columns]
        return pandas.DataFrame(
            {name: vectors_to_python(array) for name, array in zip(names, found, strict=True)},
            index=rows.index,
        )


def default_requirements() -> list[str]:
    plain = torch.__version__.partition("+")[0]
    return [
        f"sparkdml=={sparkdml.__version__}",
        f"torch=={plain}",
        f"pyspark=={pyspark.__version__}",
        f"pyarrow>={pa.__version__.partition('.')[0]}",
        "pandas<3",
    ]


def _import_mlflow() -> Any:
    try:
        import mlflow
        import mlflow.artifacts
        import mlflow.models
        import mlflow.models.utils
        import mlflow.pyfunc
        import mlflow.utils.environment
    except ImportError as error:
        raise SetupError("MLflow is not installed: pip install sparkdml[mlflow]") from error
    return mlflow
