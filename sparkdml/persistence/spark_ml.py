"""Spark ML's write and read for estimators and models. Driver only. The layout of the saved folder:

metadata/                Spark's own: class, uid, the Params that are plain values
objects.json             all other Params, the model's signature, size and hash of every file
weights.safetensors      the trained weights
history.json             one row per epoch
objects/                 modules: their structure, and weights that are not the trained ones
unsafe-pickle/           objects that could only be pickled; loaded only when allowed
"""

from __future__ import annotations

import dataclasses
import json
import platform
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import safetensors
import torch
from pyspark.ml.param import Param, Params
from pyspark.ml.util import (
    DefaultParamsReader,
    MLReadable,
    MLReader,
    MLWritable,
    MLWriter,
)

from sparkdml.checkpoint.checkpoints import Checkpoints
from sparkdml.errors import DataError, SetupError, SparkDMLError
from sparkdml.feed.columns.schema import recorded_column
from sparkdml.history import History
from sparkdml.inference.outputs import Output
from sparkdml.inference.structure import check_state
from sparkdml.params.param import DefinedParam
from sparkdml.persistence.folder import AnyFolder, open_folder
from sparkdml.persistence.objects import (
    MANIFEST_FILE,
    WEIGHTS_FILE,
    Decoder,
    Encoder,
    measure,
)
from sparkdml.persistence.references import import_object
from sparkdml.training.modules import build_module

FORMAT = 1
_HISTORY = "history.json"
Stage = TypeVar("Stage", bound=MLReadable[Any])


class StageWriter(MLWriter):
    """Params by Spark's metadata where they are plain, by references where they are objects."""

    def __init__(self, stage: Any) -> None:
        super().__init__()
        self._stage = stage

    def save(self, path: str) -> None:
        self.save_to(open_folder(self.sparkSession, path))

    def save_to(self, folder: AnyFolder) -> None:
        encoder = Encoder()
        manifest = self._encode(encoder)  # all of it, before an older save is removed
        folder.prepare(self.shouldOverwrite)
        for name, content in encoder.files.items():
            folder.write(name, content)
        folder.write(MANIFEST_FILE, _to_json(manifest))
        # Last, since nothing loads without it: an interrupted save is never taken for complete.
        folder.write_metadata(_without_objects(self._stage))
        encoder.warn([manifest["params"], manifest["defaults"], manifest.get("fitted")])

    def _encode(self, encoder: Encoder) -> dict[str, Any]:
        stage = self._stage
        manifest = {
            "format": FORMAT,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "params": _encode_params(encoder, stage._paramMap, ""),
            "defaults": _encode_params(encoder, stage._defaultParamMap, "default."),
            **self._encode_state(encoder),
        }
        manifest["files"] = {name: measure(content) for name, content in encoder.files.items()}
        return manifest

    def _encode_state(self, encoder: Encoder) -> dict[str, Any]:
        return {}


class ModelWriter(StageWriter):
    """The fitted module beside the Params."""

    def _encode_state(self, encoder: Encoder) -> dict[str, Any]:
        stage = self._stage
        encoder.files[_HISTORY] = _to_json(stage.history.to_dict())
        metrics = stage._metrics
        found = stage._found_outputs
        return {
            "fitted": {
                "model": encoder.encode_fitted(
                    "model", stage._source, stage.module, stage._weights
                ),
                "loss": encoder.encode("loss", stage._loss),
                "step": encoder.encode("step", stage._step),
                "metrics": encoder.encode(
                    "metrics", dict(metrics) if isinstance(metrics, Mapping) else list(metrics)
                ),
                "loss_names": list(stage._loss_names),
                "features": [column.record() for column in stage._features],
                "inputs": [column.record() for column in stage._inputs],
                "output_shape": stage._output_shape,
                "outputs": found and [dataclasses.asdict(output) for output in found],
            }
        }


class StageReader(MLReader[Stage], Generic[Stage]):
    """Reads a stage of one class; raises an error if the folder holds another."""

    def __init__(self, kind: type[Stage]) -> None:
        super().__init__()
        self._kind = kind

    def load(self, path: str) -> Stage:
        return self.load_from(open_folder(self.sparkSession, path))

    def load_from(self, folder: AnyFolder) -> Stage:
        path = folder.path
        metadata = folder.read_metadata()
        wanted = f"{self._kind.__module__}.{self._kind.__name__}"
        if metadata["class"] != wanted:
            found = metadata["class"].rpartition(".")[2]
            raise SetupError(
                f"{path} holds a {metadata['class']}, not a {wanted}: load it by {found}.load"
            )
        manifest = _read_manifest(folder)
        with _naming_damage(folder):
            return self._load(folder, metadata, manifest)

    def _load(self, folder: AnyFolder, metadata: dict[str, Any], manifest: dict[str, Any]) -> Stage:
        decoder = Decoder(folder, manifest["files"])
        stage = self._build(decoder, manifest)
        stage._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(stage, metadata)
        for name, saved in manifest["params"].items():
            stage._set(**{name: decoder.decode(name, saved)})
        for name, saved in manifest["defaults"].items():
            stage._setDefault(**{name: decoder.decode(f"default.{name}", saved)})
        self._finish(stage, manifest)
        result: Stage = stage
        return result

    def _build(self, decoder: Decoder, manifest: dict[str, Any]) -> Any:
        return self._kind()

    def _finish(self, stage: Any, manifest: dict[str, Any]) -> None:
        """Set what depends on the Params, once they are set."""


class ModelReader(StageReader[Stage]):
    """The fitted module beside the Params."""

    def _build(self, decoder: Decoder, manifest: dict[str, Any]) -> Any:
        fitted = manifest["fitted"]
        weights = decoder.read_weights()
        source = decoder.decode_model("model", fitted["model"])
        try:
            with torch.random.fork_rng(devices=[]):  # its initial weights are replaced at once
                module = build_module(source)
        except Exception as error:  # of the model's own code, or of arguments that don't fit it
            raise DataError(
                f"the model can't be made by {fitted['model']}, as {MANIFEST_FILE} has it: "
                f"{type(error).__name__}: {error}"
            ) from error
        kind: Any = self._kind
        try:
            check_state(module, weights.state())
        except (RuntimeError, safetensors.SafetensorError) as error:
            raise DataError(
                f"the model's code has changed since it was saved: {WEIGHTS_FILE} does not fit "
                f"what {fitted['model']} makes now. {error}"
            ) from error
        return kind._make(
            module=module,
            source=source,
            weights=weights,
            loss=decoder.decode("loss", fitted["loss"]),
            metrics=decoder.decode("metrics", fitted["metrics"]),
            features=tuple(map(recorded_column, fitted["features"])),
            output_shape=fitted["output_shape"],
            history=History.from_dict(json.loads(decoder.read(_HISTORY))),
            step=decoder.decode("step", fitted.get("step")),
            loss_names=tuple(fitted.get("loss_names", ())),
            inputs=tuple(map(recorded_column, fitted.get("inputs", ()))),
        )

    def _finish(self, stage: Any, manifest: dict[str, Any]) -> None:
        outputs = manifest["fitted"].get("outputs")
        if outputs:
            found = tuple(Output(o["name"], tuple(o["shape"]), o["dtype"]) for o in outputs)
            stage._probed = (stage.value("predict"), found)


class EstimatorPersistence(MLReadable[Any], MLWritable):
    """`save`, `write`, `load` and `read` of an estimator."""

    def write(self) -> MLWriter:
        return StageWriter(self)

    @classmethod
    def read(cls) -> MLReader[Any]:
        return StageReader(cls)


class ModelPersistence(MLReadable[Any], MLWritable):
    """`save`, `write`, `load` and `read` of a fitted model."""

    def write(self) -> MLWriter:
        return ModelWriter(self)

    @classmethod
    def read(cls) -> MLReader[Any]:
        return ModelReader(cls)


def find_model_class(folder: AnyFolder) -> type[Any]:
    """Return the class of the model in a folder, if its metadata may name it."""
    saved = str(folder.read_metadata()["class"])
    module_name, _, name = saved.rpartition(".")
    kind = import_object(f"{module_name}:{name}", folder.path)
    if not isinstance(kind, type) or not issubclass(kind, ModelPersistence):
        raise DataError(f"{folder.path} contains a {name}, which is not a fitted model")
    return kind


def _as_saved(value: Any) -> Any:
    """Replace a `warmStart` model by its weights, and `checkpoint` by a copy without secrets."""
    if isinstance(value, ModelPersistence):
        model: Any = value
        return dict(model.module.state_dict())
    if isinstance(value, Checkpoints) and value.store is not None:
        raise SetupError(
            "an estimator with checkpoint=Checkpoints(store=…) can't be saved: the store may hold "
            "credentials. Save it without, estimator.clear(estimator.checkpoint), and set the "
            "checkpoint again after loading"
        )
    if isinstance(value, Checkpoints):
        plain = value.without_secrets()
        if value.storage_options or value.path != plain.path:
            warnings.warn(
                "the storage_options of checkpoint= are not saved, nor is a password in its path: "
                "they are credentials, or may hold some. Set them again after loading",
                stacklevel=5,
            )
        return plain
    return value


def _is_object(param: Param[Any]) -> bool:
    return isinstance(param, DefinedParam) and param.is_object


def _encode_params(encoder: Encoder, values: dict[Any, Any], prefix: str) -> dict[str, Any]:
    return {
        param.name: encoder.encode(f"{prefix}{param.name}", _as_saved(value))
        for param, value in values.items()
        if _is_object(param)
    }


def _without_objects(stage: Any) -> Params:
    plain: Any = stage.copy()
    for values in (plain._paramMap, plain._defaultParamMap):
        for param in [param for param in values if _is_object(param)]:
            del values[param]
    result: Params = plain
    return result


def _read_manifest(folder: AnyFolder) -> dict[str, Any]:
    file = folder.name_of(MANIFEST_FILE)
    try:
        manifest: dict[str, Any] = json.loads(folder.read(MANIFEST_FILE))
    except (ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{file} is damaged: {error}. Copy or save it again.") from error
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if not isinstance(version, int):
        raise DataError(f"{file} has no format number: this folder was not saved by sparkdml")
    if version > FORMAT:
        raise SetupError(
            f"{file} has format {version}, but this sparkdml reads up to {FORMAT}: it was saved by "
            "a newer one. Upgrade: pip install --upgrade sparkdml"
        )
    return manifest


@contextmanager
def _naming_damage(folder: AnyFolder) -> Iterator[None]:
    """What is not of the form that a save writes ends in an error about the file."""
    try:
        yield
    except SparkDMLError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
        safetensors.SafetensorError,
    ) as error:
        raise DataError(
            f"{folder.name_of(MANIFEST_FILE)} or the metadata beside it is damaged "
            f"({type(error).__name__}: {error}). Copy or save it again."
        ) from error


def _to_json(value: Any) -> bytes:
    return json.dumps(value, indent=1).encode()
