"""Converters of plain values of Params: each checks a value, and its error names the Param.

Driver only; pure.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparkdml.errors import ParameterError

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
