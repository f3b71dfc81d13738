"""The objects of an estimator or model as references and files, and back.

Safest first: a reference in JSON, a module as skeleton and weights, and only then a pickle, in a
folder whose name warns of it, which loads only when `allow_pickle` says so.
"""

from __future__ import annotations

import hashlib
import platform
import re
import warnings
from typing import Any

from pyspark import cloudpickle
from torch import nn

from sparkdml.errors import DataError, SetupError
from sparkdml.persistence.folder import Folder
from sparkdml.persistence.imports import NotPlain
from sparkdml.persistence.permission import ALLOW_PICKLE_VARIABLE, is_pickle_allowed
from sparkdml.persistence.references import decode_reference, encode_reference
from sparkdml.persistence.skeleton import (
    decode_skeleton,
    encode_skeleton,
    put_together,
    take_apart,
)

WEIGHTS_FILE = "weights.safetensors"
_PICKLES = "unsafe-pickle"


class Encoder:
    """Collects references and files in memory: nothing is written before all of them are there."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.pickled: dict[str, str] = {}  # name of the object -> why it had to be

    def encode(self, name: str, value: Any) -> Any:
        if type(value) is list:
            return [self.encode(f"{name}.{index}", item) for index, item in enumerate(value)]
        if type(value) is dict:
            return {"dict": {key: self.encode(f"{name}.{key}", v) for key, v in value.items()}}
        try:
            if isinstance(value, nn.Module):
                return self._encode_module(name, value, f"objects/{_file_name(name)}.safetensors")
            return encode_reference(value)
        except NotPlain as reason:
            return self._pickle(name, value, str(reason))

    def encode_fitted(self, name: str, source: Any, weights: bytes) -> Any:
        """What makes a fitted module; its trained weights take the place of the first ones."""
        self.files[WEIGHTS_FILE] = weights
        if not isinstance(source, nn.Module):
            return self.encode(name, source)
        try:
            reference = self._encode_module(name, source, WEIGHTS_FILE)
        except NotPlain as reason:
            reference = self._pickle(name, source, str(reason))
        self.files[WEIGHTS_FILE] = weights
        return reference

    def warn_of_pickles(self) -> None:
        if self.pickled:
            named = "; ".join(f"{name} ({reason})" for name, reason in self.pickled.items())
            warnings.warn(
                f"saved as a pickle, which will load only where sparkdml.allow_pickle() allows it: "
                f"{named}. Move it into a module that can be imported wherever it is loaded.",
                UserWarning,
                stacklevel=4,
            )

    def _encode_module(self, name: str, module: nn.Module, weights_file: str) -> Any:
        skeleton, weights = take_apart(module)
        structure: Any
        try:
            content, classes = encode_skeleton(skeleton)
        except NotPlain as reason:
            structure = self._pickle(name, skeleton, str(reason))
        else:
            file = f"objects/{_file_name(name)}.structure.pt"
            self.files[file] = content
            structure = {"file": file, "classes": classes}
        if weights is not None:
            self.files[weights_file] = weights
        saved_weights = weights_file if weights is not None else None
        return {"module": {"structure": structure, "weights": saved_weights}}

    def _pickle(self, name: str, value: Any, reason: str) -> Any:
        try:
            content: bytes = cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
        except Exception as error:  # pickling runs the object's own code
            raise SetupError(
                f"{name} can't be saved: {reason}, and it can't be pickled either ({error}). Move "
                "it into a module, as a class or a function without arguments."
            ) from error
        file = f"{_PICKLES}/{_file_name(name)}.pkl"
        self.files[file] = content
        self.pickled[name] = reason
        return {
            "pickle": {
                "file": file,
                "sha256": hashlib.sha256(content).hexdigest(),
                "python": platform.python_version(),
                "reason": reason,
            }
        }


class Decoder:
    """Reads references, and the files that they name, each checked against its hash."""

    def __init__(self, folder: Folder, files: dict[str, dict[str, Any]]) -> None:
        self._folder = folder
        self._files = files

    def decode(self, name: str, saved: Any) -> Any:
        if isinstance(saved, list):
            return [self.decode(f"{name}.{index}", item) for index, item in enumerate(saved)]
        if isinstance(saved, dict):
            if "dict" in saved:
                return {k: self.decode(f"{name}.{k}", v) for k, v in saved["dict"].items()}
            if "module" in saved:
                return self._decode_module(name, saved["module"])
            if "pickle" in saved:
                return self._unpickle(name, saved["pickle"])
        return decode_reference(saved, f"{name} in {self._folder.path}")

    def read(self, file: str) -> bytes:
        if file not in self._files:
            raise DataError(f"objects.json in {self._folder.path} has no entry for {file}")
        content = self._folder.read(file)
        expected = self._files[file]
        if len(content) != expected["bytes"]:
            raise DataError(
                f"{self._folder.name_of(file)} is damaged: it has {len(content)} bytes but "
                f"{expected['bytes']} were saved. Copy or save the model again."
            )
        if hashlib.sha256(content).hexdigest() != expected["sha256"]:
            raise DataError(
                f"{self._folder.name_of(file)} is damaged: its SHA-256 is not the one that was "
                "saved. Copy or save the model again."
            )
        return content

    def _decode_module(self, name: str, saved: dict[str, Any]) -> nn.Module:
        structure = saved["structure"]
        if "pickle" in structure:
            skeleton = self._unpickle(name, structure["pickle"])
        else:
            file = structure["file"]
            skeleton = decode_skeleton(
                self.read(file), structure["classes"], self._folder.name_of(file)
            )
        weights_file = saved["weights"]
        weights = self.read(weights_file) if weights_file else None
        return put_together(skeleton, weights, self._folder.name_of(weights_file or ""))

    def _unpickle(self, name: str, saved: dict[str, Any]) -> Any:
        file = self._folder.name_of(saved["file"])
        if not is_pickle_allowed():
            raise SetupError(
                f"{name} was saved as a pickle, because {saved['reason']}: {file}. Loading it runs "
                "the code in it, so it is refused. If you trust the file: with "
                "sparkdml.allow_pickle(): … around the load, or set "
                f"{ALLOW_PICKLE_VARIABLE}=1."
            )
        content = self.read(saved["file"])
        if hashlib.sha256(content).hexdigest() != saved["sha256"]:
            raise DataError(f"{file} is not the file whose SHA-256 the reference of {name} has")
        try:
            return cloudpickle.loads(content)
        except Exception as error:  # unpickling runs foreign code
            raise SetupError(
                f"{name} can't be unpickled from {file}: {error!r}. It was saved by Python "
                f"{saved['python']}; this is {platform.python_version()}, and pickled functions "
                "need the same minor version and the modules that they use."
            ) from error


def _file_name(name: str) -> str:
    """A name that every file system takes; two metrics may differ in odd characters alone."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", name)
    if plain == name:
        return name
    return f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
