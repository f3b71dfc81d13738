"""A store of the user's own: checked at the driver, shipped to the workers as a pickle.

The driver uses the object that it was given, from several threads; each worker unpickles a copy. If
the class is defined in a notebook or a script, it is pickled with the store.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

from pyspark import cloudpickle

from sparkdml.checkpoint.stores.base import CheckpointStore
from sparkdml.errors import ParameterError, SetupError

_METHODS = ("write", "read", "names", "remove")


def check_store(store: Any) -> CheckpointStore:
    """Return the store if it has all attributes of a `CheckpointStore` and can be pickled."""
    missing = [f"{name}()" for name in _METHODS if not callable(getattr(store, name, None))]
    if not isinstance(getattr(store, "url", None), str):
        missing.append("url, a text for messages")
    if missing or isinstance(store, type):
        hint = f"It lacks {', '.join(missing)}." if missing else "Pass an object, not its class."
        raise ParameterError("store", store, "a dml.CheckpointStore", hint)
    _pickled(store)
    checked: CheckpointStore = store
    return checked


def _pickled(store: CheckpointStore) -> bytes:
    try:
        content: bytes = cloudpickle.dumps(store)  # type: ignore[no-untyped-call]
    except Exception as error:  # pickling runs the object's own code
        raise ParameterError(
            "store",
            store,
            "an object that can be pickled, since each worker uses a copy of it",
            f"{type(error).__name__}: {error}. Open connections and files in the methods, or leave "
            "them out in __getstate__.",
        ) from error
    return content


class GivenPlace:
    """The store itself at the driver; workers get a `PickledPlace`."""

    def __init__(self, store: CheckpointStore) -> None:
        self.url = store.url
        self._store = store
        # Pickled now, before the driver writes its probe: if the store keeps objects in its own
        # memory, a copy must not contain the probe.
        self._content = _pickled(store)

    def open(self) -> CheckpointStore:
        return self._store

    def __reduce__(self) -> tuple[Any, ...]:
        return PickledPlace, (self.url, self._content)


@dataclass(frozen=True)
class PickledPlace:
    """Unpickled only when it is opened, so that the worker's error says what is missing."""

    url: str
    content: bytes = field(repr=False)

    def open(self) -> CheckpointStore:
        try:
            store: CheckpointStore = pickle.loads(self.content)
        except Exception as error:  # unpickling runs the object's own code
            raise SetupError(
                f"the store for {self.url} can't be unpickled in a worker: "
                f"{type(error).__name__}: {error}. The workers must be able to import its module: "
                "use spark.sparkContext.addPyFile, --py-files, or install its package there"
            ) from error
        return store
