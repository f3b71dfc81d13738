"""The objects of an estimator or model as references and files, and back.

Safest first: a reference in JSON, a module as skeleton and weights, and only then a pickle, in a
folder whose name warns of it, which loads only when `allow_pickle` says so. What a reference may
name is up to `allowed`.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import platform
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
from pyspark import cloudpickle
from torch import Tensor, nn

from sparkdml.errors import DataError, SetupError
from sparkdml.inference.weights import (
    LARGE_BYTES,
    Weights,
    file_digest,
    must_stay_in_memory,
    new_file,
)
from sparkdml.persistence.allowed import HOW_TO_MARK, is_known, makes_module, package_of
from sparkdml.persistence.folder import AnyFolder
from sparkdml.persistence.permission import (
    ALLOW_PICKLE_VARIABLE,
    is_package_allowed,
    is_pickle_allowed,
)
from sparkdml.persistence.references import (
    NotMarked,
    NotPlain,
    decode_reference,
    encode_reference,
)
from sparkdml.persistence.secrets import Secret, check_bound
from sparkdml.persistence.skeleton import (
    decode_skeleton,
    encode_skeleton,
    plain_skeleton,
    put_together,
)
from sparkdml.recorded_names import current_module
from sparkdml.training.weights import encode_weights

MANIFEST_FILE = "objects.json"
WEIGHTS_FILE = "weights.safetensors"
_PICKLES = "unsafe-pickle"


class Encoder:
    """Collects references and files in memory: nothing is written before all are complete."""

    def __init__(self) -> None:
        self.files: dict[str, bytes | Path] = {}
        self.pickled: dict[str, str] = {}  # name of the object -> why it had to be

    def encode(self, name: str, value: Any) -> Any:
        if type(value) is list:
            return [self.encode(f"{name}.{index}", item) for index, item in enumerate(value)]
        if type(value) is dict and value and all(isinstance(v, Tensor) for v in value.values()):
            return self._encode_tensors(name, value)
        if type(value) is dict:
            return {"dict": {key: self.encode(f"{name}.{key}", v) for key, v in value.items()}}
        try:
            if isinstance(value, nn.Module):
                return self._encode_module(name, value)
            check_bound(value)
            return encode_reference(value, _param(name))
        except NotPlain as reason:
            return self._pickle(name, value, str(reason))
        except Secret as secret:
            raise SetupError(
                f"{name} can't be saved, because it holds {secret}: the saved folder would show "
                "it in plain text. Let the code read it where it is used, for instance from an "
                "environment variable"
            ) from None

    def encode_fitted(self, name: str, source: Any, module: nn.Module, weights: Weights) -> Any:
        """Encode what makes a fitted module; its trained weights replace the initial ones."""
        self.files[WEIGHTS_FILE] = weights.path or weights.content
        return self._encode_source(name, source, module)

    def _encode_source(self, name: str, source: Any, module: nn.Module) -> Any:
        if type(source) is dict:
            parts = {
                key: self._encode_source(f"{name}.{key}", value, module.get_submodule(key))
                for key, value in source.items()
            }
            return {"dict": parts}
        is_module = isinstance(source, nn.Module)
        if not is_module and not _is_unmarked(source):
            return self.encode(name, source)
        # What an unmarked function has made may be plain, and then loads without permission.
        made = source if is_module else module
        try:
            return {"module": {"structure": self._encode_structure(name, made), "weights": None}}
        except NotPlain as reason:
            return self._pickle(name, source, str(reason))

    def warn(self, manifest: Any) -> None:
        """Say now what the caller of `load` must allow."""
        self._warn_of_pickles()
        needed = {path: package_of(path) for path in sorted(set(_named_in(manifest)))}
        packages = sorted({package for package in needed.values() if package is not None})
        if packages:
            quoted = ", ".join(map(repr, packages))
            warnings.warn(
                f"what was saved names {', '.join(needed)}: it will load only where "
                f"sparkdml.allow_packages({quoted}) allows it",
                UserWarning,
                stacklevel=4,
            )

    def _warn_of_pickles(self) -> None:
        if self.pickled:
            named = "; ".join(f"{name} ({reason})" for name, reason in self.pickled.items())
            warnings.warn(
                f"saved as a pickle: loading it requires sparkdml.allow_pickle(): "
                f"{named}. Move it into a module that can be imported wherever it is loaded.",
                UserWarning,
                stacklevel=5,
            )

    def _encode_module(self, name: str, module: nn.Module) -> Any:
        structure = self._encode_structure(name, module)
        file = None
        if module.state_dict():
            file = f"objects/{_file_name(name)}.safetensors"
            self.files[file] = encode_weights(module)
        return {"module": {"structure": structure, "weights": file}}

    def _encode_structure(self, name: str, module: nn.Module) -> Any:
        skeleton = plain_skeleton(module)
        try:
            content, classes = encode_skeleton(skeleton)
        except NotPlain as reason:
            return self._pickle(name, skeleton, str(reason))
        file = f"objects/{_file_name(name)}.structure.pt"
        self.files[file] = content
        return {"file": file, "classes": classes}

    def _encode_tensors(self, name: str, tensors: dict[str, Tensor]) -> Any:
        file = f"objects/{_file_name(name)}.safetensors"
        own = {key: tensor.detach().cpu().clone() for key, tensor in tensors.items()}
        self.files[file] = safetensors.torch.save(own)
        return {"tensors": file}

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


def measure(content: bytes | Path) -> dict[str, Any]:
    """Return a file's size and hash, as in the manifest."""
    if isinstance(content, Path):
        return {"bytes": content.stat().st_size, "sha256": file_digest(content)}
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


class Decoder:
    """Reads references, and the files that they name, each checked against its hash."""

    def __init__(self, folder: AnyFolder, files: dict[str, dict[str, Any]]) -> None:
        self._folder = folder
        self._files = files

    def decode(self, name: str, saved: Any) -> Any:
        if isinstance(saved, list):
            return [self.decode(f"{name}.{index}", item) for index, item in enumerate(saved)]
        if isinstance(saved, dict):
            if "dict" in saved:
                return {k: self.decode(f"{name}.{k}", v) for k, v in saved["dict"].items()}
            if "tensors" in saved:
                return safetensors.torch.load(self.read(saved["tensors"]))
            if "module" in saved:
                return self._decode_module(name, saved["module"])
            if "pickle" in saved:
                return self._unpickle(name, saved["pickle"])
        wanted_by = f"{name} in {self._folder.name_of(MANIFEST_FILE)}"
        return decode_reference(saved, wanted_by, _param(name))

    def decode_model(self, name: str, saved: Any) -> Any:
        """What makes the module. Loading calls it, so fewer values are allowed than elsewhere."""
        source = self.decode(name, saved)
        for one in source.values() if isinstance(source, dict) else [source]:
            if not makes_module(one) and not is_pickle_allowed():
                raise DataError(
                    f"{name} in {self._folder.name_of(MANIFEST_FILE)} is saved as {saved}, which "
                    f"is neither a module, nor a class of one, nor a function that is marked as "
                    f"making one. {HOW_TO_MARK}"
                )
        return source

    def read(self, file: str) -> bytes:
        self._expected(file)
        content = self._folder.read(file)
        self._check(file, len(content), lambda: hashlib.sha256(content).hexdigest())
        return content

    def read_weights(self) -> Weights:
        """Return the trained weights; large ones are never in memory as a whole."""
        if self._expected(WEIGHTS_FILE)["bytes"] < LARGE_BYTES or must_stay_in_memory():
            return Weights.of(self.read(WEIGHTS_FILE))
        path = new_file()
        weights = Weights(None, path)
        self._folder.fetch(WEIGHTS_FILE, path)
        self._check(WEIGHTS_FILE, weights.num_bytes, lambda: weights.digest)
        return weights

    def _expected(self, file: str) -> dict[str, Any]:
        if file not in self._files:
            raise DataError(
                f"{self._folder.name_of(MANIFEST_FILE)} has no entry for {file}: it was changed "
                "after it was saved. Copy or save the model again."
            )
        return self._files[file]

    def _check(self, file: str, num_bytes: int, digest: Callable[[], str]) -> None:
        expected = self._files[file]
        if num_bytes != expected["bytes"]:
            raise DataError(
                f"{self._folder.name_of(file)} is damaged: it has {num_bytes} bytes but "
                f"{expected['bytes']} were saved. Copy or save the model again."
            )
        if digest() != expected["sha256"]:
            raise DataError(
                f"{self._folder.name_of(file)} is damaged: its SHA-256 is not the one that was "
                "saved. Copy or save the model again."
            )

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
            return _Unpickler(io.BytesIO(content)).load()
        except Exception as error:  # unpickling runs foreign code
            raise SetupError(
                f"{name} can't be unpickled from {file}: {error!r}. It was saved by Python "
                f"{saved['python']}; this is {platform.python_version()}, and pickled functions "
                "need the same minor version and the modules that they use."
            ) from error


class _Unpickler(pickle.Unpickler):
    """Finds classes that have moved since the file was saved."""

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(current_module(module, name), name)


def _param(name: str) -> str:
    """The Param whose value, or part of a value, has this name."""
    return name.removeprefix("default.").partition(".")[0]


def _is_unmarked(source: Any) -> bool:
    try:
        encode_reference(source)
    except NotMarked:
        return True
    except (NotPlain, Secret):
        return False
    return False


def _named_in(saved: Any) -> Iterator[str]:
    """The import paths for which `load` would need a permission that this process lacks."""
    if isinstance(saved, list):
        for item in saved:
            yield from _named_in(item)
    elif isinstance(saved, dict):
        for key, item in saved.items():
            if key in ("import", "of", "class", "classes"):
                paths = item if isinstance(item, list) else [item]
                yield from (path for path in paths if isinstance(path, str) and _is_asked(path))
            yield from _named_in(item)


def _is_asked(path: str) -> bool:
    return ":" in path and not is_known(path) and not is_package_allowed(path.partition(":")[0])


def _file_name(name: str) -> str:
    """Return a name that every file system accepts, even if two differ in odd characters only."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", name)
    if plain == name:
        return name
    return f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
