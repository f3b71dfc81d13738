"""What the caller of `load` allows: pickles, and the packages that a saved model may name.

Loading a pickle executes the code in its file, and importing a module executes the module: neither
happens unless the caller allows it, in this thread or by a variable in the whole process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from sparkdml.errors import ParameterError

ALLOW_PICKLE_VARIABLE = "SPARKDML_ALLOW_PICKLE"
ALLOW_PACKAGES_VARIABLE = "SPARKDML_ALLOW_PACKAGES"

_pickle: ContextVar[bool] = ContextVar("sparkdml_allow_pickle", default=False)
_packages: ContextVar[frozenset[str]] = ContextVar("sparkdml_allow_packages", default=frozenset())


@contextmanager
def allow_pickle() -> Iterator[None]:
    """Let `load` read pickles and call anything, in this thread and within this block alone.

    Use only with trusted files: loading them executes their code.

    >>> with sparkdml.allow_pickle():
    ...     model = sparkdml.TorchModel.load(path)
    """
    token = _pickle.set(True)
    try:
        yield
    finally:
        _pickle.reset(token)


@contextmanager
def allow_packages(*names: str) -> Iterator[None]:
    """Let `load` import these packages, in this thread and within this block alone.

    The file may then use their module, optimizer, scheduler, strategy and callback classes, what
    is marked by `@sparkdml.factory`, and plain functions as `loss`, `step`, `metrics`, `predict`,
    `preprocess`, `collate`, `augment` and `parameterGroups`.

    Args:
        names: of packages, "mycompany", or of parts of them, "mycompany.models". The environment
            variable SPARKDML_ALLOW_PACKAGES allows packages in a whole process, separated by
            commas.

    >>> with sparkdml.allow_packages("mycompany"):
    ...     model = sparkdml.TorchModel.load(path)
    """
    for name in names:
        check_package(name)
    token = _packages.set(_packages.get() | set(names))
    try:
        yield
    finally:
        _packages.reset(token)


def is_pickle_allowed() -> bool:
    return _pickle.get() or os.environ.get(ALLOW_PICKLE_VARIABLE) == "1"


def is_package_allowed(module: str) -> bool:
    """Whether the caller has allowed this module, or a package above it."""
    everywhere = os.environ.get(ALLOW_PACKAGES_VARIABLE, "").split(",")
    allowed = _packages.get() | {name.strip() for name in everywhere if name.strip()}
    for name in allowed:
        check_package(name)
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


def check_package(name: str) -> None:
    """Only packages of models: torch has functions that call what they are given, os runs all."""
    if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
        raise ParameterError("allow_packages", name, "names of packages, such as 'mycompany'")
    if not is_extendable(name):
        raise ParameterError(
            "allow_packages",
            name,
            "names of packages of models, neither torch nor the standard library",
            "torch's layers, losses, optimizers and schedulers are allowed anyway. For all else "
            "that you trust, use allow_pickle()",
        )


def is_extendable(module: str) -> bool:
    """Whether a caller may allow this module."""
    top = module.partition(".")[0]
    return top != "torch" and top not in sys.stdlib_module_names
