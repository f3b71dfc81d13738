"""A fitted model's weights: how the driver keeps them, and how they reach the workers.

Small weights are bytes inside the function that Spark ships. Large weights are a file: the driver
maps it, Spark copies it to each host once (executors on a host share its cache), and all Python
workers on that host map the same copy, so its pages are in memory once. A Python worker builds the
module once per process, and keeps it for later batches, tasks and queries.
"""

from __future__ import annotations

import gc
import hashlib
import os
import secrets
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from pyspark import cloudpickle
from torch import Tensor, nn

from sparkdml.inference.structure import fill
from sparkdml.runtime.driver.cluster import find_cluster, is_connect
from sparkdml.runtime.driver.preflight import must_encrypt_disks
from sparkdml.training.modules import build_module
from sparkdml.training.plan import ModelSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


LARGE_BYTES = 8 << 20
_CHUNK_BYTES = 4 << 20

# Spark serves a file for as long as its application runs, and tasks may ask for it when the model
# is long gone: files that were sent are kept.
_SENT: dict[tuple[str, str], Weights] = {}
_SENDING = threading.Lock()


@dataclass(frozen=True)
class ShippedWeights:
    """The weights as a worker receives them."""

    key: str  # the same for the same weights
    content: bytes | None = field(default=None, repr=False)
    file: str | None = None  # its name among Spark's files

    def state(self) -> dict[str, Tensor]:
        """Return the tensors; those of a file are its pages, copied only when written to."""
        if self.content is not None:
            return load_aligned(self.content)
        from pyspark import SparkFiles

        assert self.file is not None
        return safetensors.torch.load_file(SparkFiles.get(self.file))


class Weights:
    """Encoded as safetensors, at the driver; never changed."""

    def __init__(self, content: bytes | None, path: Path | None) -> None:
        self._content, self.path = content, path
        if path is not None:
            weakref.finalize(self, path.unlink, missing_ok=True)

    @classmethod
    def of(cls, value: Weights | bytes | bytearray | memoryview | Mapping[str, Tensor]) -> Weights:
        """Wrap what a run returned, in memory if it is small."""
        if isinstance(value, Weights):
            return value
        if isinstance(value, Mapping):
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in value.items()}
            num_bytes = sum(tensor.nbytes for tensor in tensors.values())
            if num_bytes < LARGE_BYTES or must_stay_in_memory():
                return cls(safetensors.torch.save(tensors), None)
            path = new_file()
            safetensors.torch.save_file(tensors, path)
            return cls(None, path)
        if len(value) < LARGE_BYTES or must_stay_in_memory():
            return cls(bytes(value), None)
        path = new_file()
        with path.open("wb") as file:
            view = memoryview(value)
            for start in range(0, len(view), _CHUNK_BYTES):
                file.write(view[start : start + _CHUNK_BYTES])
        return cls(None, path)

    @property
    def num_bytes(self) -> int:
        return len(self._content) if self._content is not None else self._file.stat().st_size

    @property
    def content(self) -> bytes:
        """Return all of them in memory."""
        return self._content if self._content is not None else self._file.read_bytes()

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the encoded weights."""
        if self._content is not None:
            return hashlib.sha256(self._content).hexdigest()
        return file_digest(self._file)

    def state(self) -> dict[str, Tensor]:
        if self._content is not None:
            return load_aligned(self._content)
        return safetensors.torch.load_file(self._file)

    def ship(self, spark: SparkSession) -> ShippedWeights:
        """Return what can be pickled; a file has been handed to Spark when this returns."""
        if self._content is not None:
            return ShippedWeights(self.digest, content=self._content)
        name = self._file.name
        remote: Any = spark
        connect = is_connect(spark)
        home = remote.session_id if connect else spark.sparkContext.applicationId
        with _SENDING:
            if (home, name) not in _SENT:
                if connect:
                    remote.addArtifacts(str(self._file), file=True)
                else:
                    spark.sparkContext.addFile(str(self._file))
                _SENT[home, name] = self
        return ShippedWeights(name, file=name)

    @property
    def _file(self) -> Path:
        assert self.path is not None
        return self.path

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Weights) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Weights({self.num_bytes:,} bytes)"


def load_aligned(content: bytes) -> dict[str, Tensor]:
    """Copy into torch's own memory: matrix products are faster, and their bits always the same."""
    return {name: tensor.clone() for name, tensor in safetensors.torch.load(content).items()}


def must_stay_in_memory() -> bool:
    """Whether Spark's settings ask that nothing is written as it is: weights go by Spark then."""
    from pyspark.sql import SparkSession

    spark = SparkSession.getActiveSession()
    return spark is not None and must_encrypt_disks(find_cluster(spark).setting)


def new_file() -> Path:
    """Create a file that only this user can read; its name is unique among Spark's files."""
    folder = Path(tempfile.gettempdir())
    path = folder / f"sparkdml-weights-{secrets.token_hex(12)}.safetensors"
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    return path


def file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@dataclass(frozen=True)
class ShippedModel:
    """A pickled structure without weights; for modules that can't be pickled, what makes them."""

    weights: ShippedWeights
    structure: bytes | None = field(default=None, repr=False)
    source: ModelSource | None = None

    def build(self) -> nn.Module:
        state = self.weights.state()
        if self.structure is not None:
            skeleton: nn.Module = cloudpickle.loads(self.structure)
            return fill(skeleton, state)
        assert self.source is not None
        module = build_module(self.source)
        module.load_state_dict(state)
        return module


_LOADED: OrderedDict[tuple[str, str], nn.Module] = OrderedDict()
_MAX_LOADED = 4
_LOADING = threading.Lock()


def load_module(model: ShippedModel, device: torch.device) -> nn.Module:
    """In eval mode, on the device. Its user keeps it: only a few stay in the cache."""
    key = model.weights.key, str(device)
    with _LOADING:
        if key not in _LOADED:
            if not _LOADED:
                # Spark's workers look for garbage after every task, which takes 0.2 s of going
                # through all that torch imports. None of that is ever garbage.
                gc.freeze()
            _LOADED[key] = model.build().eval().to(device)
            while len(_LOADED) > _MAX_LOADED:
                _LOADED.popitem(last=False)
        _LOADED.move_to_end(key)
        return _LOADED[key]
