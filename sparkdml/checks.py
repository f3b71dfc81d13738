"""Checks of arguments that several public functions share. Pure: each raises a ParameterError."""

from __future__ import annotations

from sparkdml.errors import ParameterError


def check_whole(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ParameterError(name, value, f"a whole number of at least {least}")
    return value


def check_seconds(name: str, value: float, or_zero: bool = False) -> float:
    if not (value > 0 or (or_zero and value == 0)):
        raise ParameterError(name, value, "0 or more seconds" if or_zero else "more than 0 seconds")
    return value
