"""How a checkpoint's URL is taken apart: its scheme, and the password it had better not carry."""

from __future__ import annotations

import re

# A single letter would be a Windows drive.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+):")
_PASSWORD = re.compile(r"^([A-Za-z][A-Za-z0-9+.\-]+://[^/:@]*):([^/@]*)@")

_PASSWORDS = re.compile(r"(://[^/:@\s]*):[^/@\s]*@")


def scheme_of(url: str) -> str:
    """In lower case; "" for a bare path."""
    match = _SCHEME.match(url)
    return match.group(1).lower() if match else ""


def split_password(url: str) -> tuple[str, str | None]:
    """`ftp://user:password@host/` as `ftp://user@host/` and the password, if there is one."""
    match = _PASSWORD.match(url)
    if match is None:
        return url, None
    return f"{match.group(1)}@{url[match.end() :]}", match.group(2)


def without_passwords(text: str) -> str:
    """A message as it may be shown: the URLs in it keep their user, not the password."""
    return _PASSWORDS.sub(r"\1@", text)
