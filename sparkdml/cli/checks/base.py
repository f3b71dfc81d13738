"""The result of one check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "FAIL"]


@dataclass(frozen=True)
class Check:
    """`warn`: training works, but not as well as it could. `FAIL`: it would not work."""

    name: str
    status: Status
    found: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert self.status == "ok" or self.fix, f"{self.name}: a problem needs its fix"
