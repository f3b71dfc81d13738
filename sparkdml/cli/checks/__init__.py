"""The checks of `sparkdml doctor`: one file per group of checks, and the probes that they start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "FAIL"]


@dataclass(frozen=True)
class Check:
    """One check's result. `warn`: training works, but could be better. `FAIL`: it can't work."""

    name: str
    status: Status
    found: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert self.status == "ok" or self.fix, f"{self.name}: a problem needs its fix"
