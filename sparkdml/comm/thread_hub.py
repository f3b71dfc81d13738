"""Where ranks that are threads of one process meet: their deposits, their mail, their failures."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from sparkdml.errors import CommunicationError

Result = TypeVar("Result")


@dataclass
class _Meeting:
    """One collective call: what each rank called, what it brought, who has taken the result."""

    calls: dict[int, str] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)
    num_taken: int = 0


@dataclass
class _Mailbox:
    """Messages from one rank to another with one tag; receivers claim them in order."""

    messages: dict[int, Tensor] = field(default_factory=dict)
    num_arrived: int = 0
    num_claimed: int = 0

    def arrive(self, tensor: Tensor) -> None:
        self.messages[self.num_arrived] = tensor
        self.num_arrived += 1

    def claim(self) -> int:
        self.num_claimed += 1
        return self.num_claimed - 1

    @property
    def has_unclaimed(self) -> bool:
        return self.num_claimed < self.num_arrived

    def take(self, number: int) -> Tensor | None:
        return self.messages.pop(number, None)


class ThreadHub:
    """Shared by all ranks of one run. Waiting ends with an error, never with a hang.

    `who` below is always a rank of the whole world, so that one departed rank is noticed in every
    group that it belonged to.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._changed = threading.Condition()
        self._meetings: dict[tuple[str, int], _Meeting] = {}
        self._mail: defaultdict[tuple[str, int, int, int], _Mailbox] = defaultdict(_Mailbox)
        self._departed: set[int] = set()
        self._failure: str | None = None

    def fail(self, reason: str) -> None:
        """Wake everybody that waits, with an error; the first reason is kept."""
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()

    def depart(self, who: int) -> None:
        """This rank will take part in nothing more."""
        with self._changed:
            self._departed.add(who)
            self._changed.notify_all()

    def deposit(self, group: str, sequence: int, who: int, call: str, value: Any) -> None:
        with self._changed:
            meeting = self._meetings.setdefault((group, sequence), _Meeting())
            meeting.calls[who] = call
            meeting.values[who] = value
            self._changed.notify_all()

    def collect(self, group: str, sequence: int, members: Sequence[int]) -> list[Any]:
        """What every member deposited, in the order of `members`."""
        key = (group, sequence)

        def everybody_came() -> list[Any] | None:
            meeting = self._meetings[key]
            missing = [who for who in members if who not in meeting.values]
            self._check_not_departed(missing, all_needed=True)
            return None if missing else [meeting.values[who] for who in members]

        with self._changed:
            values = self._wait_until(everybody_came, f"call {sequence} of group {group!r}")
            meeting = self._meetings[key]
            meeting.num_taken += 1
            if meeting.num_taken == len(members):
                del self._meetings[key]
            if len(set(meeting.calls.values())) > 1:
                calls = ", ".join(f"rank {who}: {meeting.calls[who]}" for who in members)
                raise CommunicationError(f"ranks called different collectives: {calls}")
            return values

    def post(self, group: str, source: int, to: int, tag: int, tensor: Tensor) -> None:
        with self._changed:
            self._check_not_departed([to], all_needed=True)
            self._mail[group, source, to, tag].arrive(tensor)
            self._changed.notify_all()

    def claim(self, group: str, source: int, to: int, tag: int) -> int:
        """The number of the next message that nobody waits for yet."""
        with self._changed:
            return self._mail[group, source, to, tag].claim()

    def receive(self, group: str, source: int, to: int, tag: int, number: int) -> Tensor:
        def it_came() -> Tensor | None:
            message = self._mail[group, source, to, tag].take(number)
            if message is None:
                self._check_not_departed([source], all_needed=True)
            return message

        with self._changed:
            return self._wait_until(it_came, f"a message with tag {tag} to rank {to}")

    def receive_any(
        self, group: str, sources: Sequence[int], to: int, tag: int
    ) -> tuple[int, Tensor]:
        """The oldest unclaimed message of the first of the sources that has one."""

        def any_came() -> tuple[int, Tensor] | None:
            for source in sources:
                box = self._mail[group, source, to, tag]
                if box.has_unclaimed:
                    message = box.take(box.claim())
                    assert message is not None
                    return source, message
            self._check_not_departed(sources, all_needed=False)
            return None

        with self._changed:
            return self._wait_until(any_came, f"a message with tag {tag} to rank {to}")

    def _wait_until(self, attempt: Callable[[], Result | None], what: str) -> Result:
        results: list[Result] = []

        def attempted() -> bool:
            if self._failure is not None:
                raise CommunicationError(self._failure)
            result = attempt()
            if result is not None:
                results.append(result)
            return bool(results)

        if not self._changed.wait_for(attempted, self._timeout_seconds):
            raise CommunicationError(
                f"waited {self._timeout_seconds} s (timeout_seconds) in vain for {what}"
            )
        return results[0]

    def _check_not_departed(self, needed: Sequence[int], *, all_needed: bool) -> None:
        departed = [who for who in needed if who in self._departed]
        if departed and (all_needed or len(departed) == len(needed)):
            raise CommunicationError(f"rank {departed[0]} has left already")
