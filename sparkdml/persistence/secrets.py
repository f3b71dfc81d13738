"""Secrets that a saved stage would hold in plain text: refused, since the folder is copied around.

Driver only, while saving. A secret is recognized by its name or by its form; others are saved.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from sparkdml.checkpoint.stores.urls import without_passwords

_NAME = re.compile(
    r"passw(or)?d|passphrase|secret|credential|(api|access|account|private|sas)_?key"
    r"|(access|api|auth|bearer|refresh|sas|session|security)_?token|^(token|pwd|auth)$",
    re.IGNORECASE,
)


class Secret(Exception):
    """A value to be saved is a secret; the encoder turns this into an error about the Param."""


def check_text(text: str) -> None:
    """Raise if the text is or has a URL with a password."""
    if without_passwords(text) != text:
        raise Secret(f"{without_passwords(text)!r}, a URL with a password")


def check_named(name: Any, value: Any) -> None:
    """Raise if the name says that the value is a secret."""
    if isinstance(value, str | bytes) and value and _NAME.search(str(name)):
        raise Secret(f"{name}=…, which may be a secret")


def check_bound(value: Any) -> None:
    """Raise if a partial binds a secret: references are checked as they are made, pickles not."""
    if isinstance(value, functools.partial):
        check_bound(value.func)
        check_bound(value.args)
        check_bound(value.keywords)
    elif isinstance(value, str):
        check_text(value)
    elif isinstance(value, list | tuple):
        for item in value:
            check_bound(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            check_named(name, item)
            check_bound(item)
