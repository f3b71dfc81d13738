"""The definition of a Param: all that is known of it stands where it is defined.

It has the converter, the default, whether the Param is part of the fingerprint, which strategies
refuse it, and whether a saved estimator holds it as an object. A converter checks a plain value,
and its error names the Param. Estimators derive their defaults, fingerprints, refusals and saved
files from the definitions. Driver only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from pyspark.ml.param import Param, Params

from sparkdml.checkpoint.fingerprint import describe
from sparkdml.errors import ParameterError

if TYPE_CHECKING:
    from sparkdml.strategies.base import Strategy

Converter = Callable[[Any], Any]


def whole(name: str, least: int) -> Converter:
    def convert(value: Any) -> int:
        if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:
            raise ParameterError(name, value, f"a whole number of at least {least}")
        return int(value)

    return convert


def number(name: str, allowed: str, test: Callable[[float], bool]) -> Converter:
    def convert(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not test(value):
            raise ParameterError(name, value, allowed)
        return float(value)

    return convert


def one_of(name: str, *choices: object) -> Converter:
    def convert(value: Any) -> Any:
        if value not in choices or isinstance(value, bool):
            raise ParameterError(name, value, f"one of {', '.join(map(repr, choices))}")
        return value

    return convert


def text(name: str) -> Converter:
    def convert(value: Any) -> str:
        if not isinstance(value, str) or not value:
            raise ParameterError(name, value, "the name of a column")
        return value

    return convert


def path(name: str) -> Converter:
    def convert(value: Any) -> str:
        if not isinstance(value, str | os.PathLike) or not os.fspath(value):
            raise ParameterError(name, value, "the path of a file")
        return str(os.fspath(value))

    return convert


def function(name: str, what: str) -> Converter:
    def convert(value: Any) -> Any:
        if not callable(value):
            raise ParameterError(name, value, what)
        return value

    return convert


def flag(name: str) -> Converter:
    def convert(value: Any) -> bool:
        if not isinstance(value, bool):
            raise ParameterError(name, value, "True or False")
        return value

    return convert


def columns(name: str) -> Converter:
    """Convert to a list of columns' names."""

    def convert(value: Any) -> list[str]:
        names = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
        if not names or not all(isinstance(n, str) and n for n in names):
            raise ParameterError(name, value, "a list of columns' names")
        if len(set(names)) < len(names):
            raise ParameterError(name, value, "a list without repetitions")
        return names

    return convert


def flag_or_arguments(name: str, of: str) -> Converter:
    """Convert True, False, or the keyword arguments of a function."""

    def convert(value: Any) -> bool | dict[str, Any]:
        if isinstance(value, bool):
            return value
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise ParameterError(name, value, f"True, False, or a dict of arguments for {of}")
        return dict(value)

    return convert


class Fingerprint(Enum):
    """Whether the states of a run depend on a Param: a run resumes only with an equal fingerprint.

    A new Param on which they depend is WHEN_USED: the checkpoints of runs without it stay valid.
    """

    ALWAYS = "always"
    WHEN_USED = "where it differs from its default"
    NEVER = "never"


@dataclass(frozen=True)
class Refusal:
    """The strategies with which a Param must keep its default: those with such an attribute."""

    attribute: str
    value: bool
    allowed: str  # for the ParameterError; {} is the strategy's name

    def check(self, name: str, value: Any, strategy: Strategy) -> None:
        if getattr(strategy, self.attribute) == self.value:
            raise ParameterError(name, value, self.allowed.format(type(strategy).__name__))


BY_LONE_WORKERS = Refusal("communicates", False, "left out with {}, whose workers train alone")
BY_OWN_STEPS = Refusal("has_own_optimizer", True, "left out with {}, which makes its own steps")
BY_SEPARATE_STEPS = Refusal(
    "is_synchronous", False, "False with {}, whose workers don't step together"
)

_NONE = object()


class DefinedParam(Param[Any]):
    """Spark's Param with the rest of its definition; made by `param`."""

    fingerprint: Fingerprint
    described_by: Callable[[Any], str]
    make_default: Callable[[], Any] | None
    refused: Refusal | None
    is_object: bool


def param(
    name: str,
    doc: str,
    convert: Converter,
    *,
    fingerprint: Fingerprint,
    described_by: Callable[[Any], str] = describe,
    default: Any = _NONE,
    default_factory: Callable[[], Any] | None = None,
    refused: Refusal | None = None,
    is_object: bool = False,
) -> DefinedParam:
    """Define a Param, as an attribute of a subclass of `AccessibleParams`.

    Args:
        name: in camelCase, as Spark ML names its own.
        doc: a line for `explainParams()` and docs/reference.md.
        convert: checks a value, and returns the one to keep.
        fingerprint: whether the states of a run depend on the value.
        described_by: makes the text of the fingerprint.
        default: the value if the Param is not set; without it, the Param has no default.
        default_factory: makes the default, if stages must not share one.
        refused: which strategies refuse any value but the default.
        is_object: whether a saved stage holds it by reference or in separate files, not as JSON.
    """
    made = DefinedParam(Params._dummy(), name, doc, convert)
    made.fingerprint, made.described_by = fingerprint, described_by
    made.make_default = default_factory
    if default is not _NONE:
        made.make_default = lambda: default
    made.refused, made.is_object = refused, is_object
    return made


class AccessibleParams(Params):
    """Params with definitions, and Spark's `setX` and `getX` for each of them."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in [name for name, value in vars(cls).items() if isinstance(value, Param)]:
            _add_accessors(cls, name)

    def value(self, name: str) -> Any:
        """Return a Param's value, or None if it has none."""
        param = self.getParam(name)
        return self.getOrDefault(param) if self.isDefined(param) else None

    def _set_defaults(self) -> None:
        """Set the defaults of all Params; called by a stage's constructor."""
        makers = {one.name: one.make_default for one in definitions(type(self))}
        self._setDefault(**{name: make() for name, make in makers.items() if make is not None})

    def _is_used(self, param: DefinedParam, value: Any) -> bool:
        default = None if param.make_default is None else param.make_default()
        return value is not None and value != default

    def _fingerprint(self, resolved: Mapping[str, Any]) -> dict[str, str]:
        """Return what the states of a run depend on.

        `resolved` has the run's values where they differ from the Params': the model as it was
        built, the columns as they are read.
        """
        found = {}
        for one in definitions(type(self)):
            value = resolved[one.name] if one.name in resolved else self.value(one.name)
            if one.fingerprint is Fingerprint.ALWAYS or (
                one.fingerprint is Fingerprint.WHEN_USED and self._is_used(one, value)
            ):
                found[one.name] = one.described_by(value)
        return found

    def _check_strategy(self, strategy: Strategy) -> None:
        """Raise a ParameterError for a Param that is set and that the strategy refuses."""
        for one in definitions(type(self)):
            value = self.value(one.name)
            if one.refused is not None and self._is_used(one, value):
                one.refused.check(one.name, value, strategy)


def definitions(kind: type[Params]) -> Iterator[DefinedParam]:
    """Return the definitions of a class and its bases, by name."""
    for name in sorted(dir(kind)):
        value = getattr(kind, name)
        if isinstance(value, DefinedParam):
            yield value


def _add_accessors(cls: type, name: str) -> None:
    title = name[0].upper() + name[1:]

    def setter(self: Any, value: Any) -> Any:
        return self._set(**{name: value})

    def getter(self: Any) -> Any:
        return self.value(name)

    setter.__doc__ = f"Set `{name}`."
    getter.__doc__ = f"The value of `{name}`, or None."
    for prefix, method in (("set", setter), ("get", getter)):
        method.__name__ = f"{prefix}{title}"
        if not hasattr(cls, method.__name__):
            setattr(cls, method.__name__, method)
