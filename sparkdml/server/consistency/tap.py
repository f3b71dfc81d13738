"""Totally asynchronous: no waiting at all (Niu et al. 2011; Dean et al. 2012)."""

from __future__ import annotations

from dataclasses import dataclass

from sparkdml.server.consistency.base import Consistency


@dataclass(frozen=True)
class TAP(Consistency):
    waits = False

    def may_read(self, clock: int, slowest: int) -> bool:
        return True

    def may_go_on(self, stamp: int, clock: int) -> bool:
        return True
