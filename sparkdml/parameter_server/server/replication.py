"""Primary-backup replication: no acknowledged push is lost or applied twice. Pure.

The primary of a part gives every change to the part's replicas, in order, and acknowledges a push
to its worker when all of them have it. All messages carry the generation that their sender knows:

- a replica takes changes only from the primary of its own generation, and only if they follow
  what it has; otherwise it asks for a whole copy, which replaces all earlier changes;
- a new generation whose primary was a replica before therefore has every acknowledged push, and
  from its first moment a primary of the old generation gets nothing acknowledged any more.

(Alsberg and Day 1976; the generations are the views of Oki and Liskov 1988.) The enumeration in
tests/parameter_server/server/test_failover_model.py goes through all orders of small cases of
these rules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

Token = TypeVar("Token")
Stamp = tuple[int, int]  # the generation of a copy's last change, and its version


class Verdict(Enum):
    """What a replica does with a change that it is sent."""

    TAKE = "take"
    KNOWN = "known"  # it has it already
    WANT_COPY = "want copy"  # it doesn't follow on what is here
    STALE = "stale"  # the sender's generation is over
    BEHIND = "behind"  # the receiver hasn't heard of the sender's generation yet


def judge_generation(own: int, sender: int) -> Verdict:
    if sender < own:
        return Verdict.STALE
    return Verdict.BEHIND if sender > own else Verdict.TAKE


def judge_change(own: int, sender: int, have: Stamp | None, before: Stamp) -> Verdict:
    """`before` is the stamp of the primary's copy before the change."""
    verdict = judge_generation(own, sender)
    if verdict is not Verdict.TAKE or have == before:
        return verdict
    # In one generation there is one primary, so a higher version can only be its own later one.
    if have is not None and have[0] == sender and have[1] > before[1]:
        return Verdict.KNOWN
    return Verdict.WANT_COPY


def judge_copy(own: int, sender: int, have: Stamp | None, offered: Stamp) -> Verdict:
    """`offered` is the stamp of a whole copy. It wins over anything but the sender's own later."""
    verdict = judge_generation(own, sender)
    if verdict is Verdict.TAKE and have is not None and have[0] == sender and have >= offered:
        return Verdict.KNOWN
    return verdict


@dataclass
class _Replica:
    sent: int | None = None  # the version up to which it was sent everything; None: no copy yet
    acked: int = -1  # the version that it is known to have


class Standing(Generic[Token]):
    """What a primary knows of the replicas of one part, and which answers wait for them."""

    def __init__(self, server_ids: Iterable[int]) -> None:
        self._replicas = {server_id: _Replica() for server_id in server_ids}
        self._waiting: deque[tuple[int, Token]] = deque()

    def renewed(self, server_ids: Iterable[int]) -> Standing[Token]:
        """Start the next generation: servers of the same processes as before keep their copies.

        But not while answers wait: what was in flight in the old generation may be refused.
        """
        after: Standing[Token] = Standing(server_ids)
        if not self._waiting:
            for server_id, replica in self._replicas.items():
                if server_id in after._replicas and replica.sent == replica.acked:
                    after._replicas[server_id] = replica
        after._waiting = self._waiting
        return after

    @property
    def followers(self) -> list[int]:
        """The replicas that are sent each change."""
        return [
            server_id for server_id, replica in self._replicas.items() if replica.sent is not None
        ]

    @property
    def without_copy(self) -> list[int]:
        """The replicas that must be sent a whole copy first."""
        return [server_id for server_id, replica in self._replicas.items() if replica.sent is None]

    @property
    def committed(self) -> float:
        """The version that every replica has."""
        return min((replica.acked for replica in self._replicas.values()), default=float("inf"))

    def has_copy(self, server_id: int) -> bool:
        replica = self._replicas.get(server_id)
        return replica is None or replica.acked >= 0

    def sent(self, server_id: int, version: int) -> None:
        self._replicas[server_id].sent = version

    def lost_track(self, server_id: int) -> None:
        """It refused, or was silent for too long: it gets a whole copy again."""
        if server_id in self._replicas:
            self._replicas[server_id].sent = None

    def wait(self, version: int, token: Token) -> list[Token]:
        """Let an answer wait for `version`; those that need wait no more."""
        self._waiting.append((version, token))
        return self._committed_tokens()

    def acknowledged(self, server_id: int, version: int) -> list[Token]:
        """A replica has everything up to `version`; the answers that may go now."""
        replica = self._replicas.get(server_id)
        if replica is not None:
            replica.acked = max(replica.acked, version)
        return self._committed_tokens()

    def _committed_tokens(self) -> list[Token]:
        done = []
        committed = self.committed
        while self._waiting and self._waiting[0][0] <= committed:
            done.append(self._waiting.popleft()[1])
        return done

    def give_up(self) -> list[Token]:
        """End being the primary: return all answers that still wait."""
        tokens = [token for _, token in self._waiting]
        self._waiting.clear()
        return tokens

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)
