"""Splits a checkpoint's URL: its scheme, and a password, which must not be shown. Pure."""

from __future__ import annotations

import re

# A single letter would be a Windows drive.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+):")
_PASSWORD = re.compile(r"^([A-Za-z][A-Za-z0-9+.\-]+://[^/:@]*):([^/]*)@")

_PASSWORDS = re.compile(r"(://[^/:@\s]*):[^/\s]*@")


def scheme_of(url: str) -> str:
    """Return the scheme in lower case; "" for a bare path."""
    match = _SCHEME.match(url)
    return match.group(1).lower() if match else ""


def split_password(url: str) -> tuple[str, str | None]:
    """Split `ftp://user:password@host/` into `ftp://user@host/` and the password, if any."""
    match = _PASSWORD.match(url)
    if match is None:
        return url, None
    return f"{match.group(1)}@{url[match.end() :]}", match.group(2)


def without_passwords(text: str) -> str:
    """Return a message without passwords: its URLs keep their user."""
    return _PASSWORDS.sub(r"\1@", text)
