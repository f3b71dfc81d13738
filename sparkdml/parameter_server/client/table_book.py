"""The tables that a client knows, and operations on whole tables: create, change, save, restore.

Runs on the caller's thread. A few parts are in flight at a time, so a table that is too large for a
worker need not be in memory. In a checkpoint, tables are whole tensors, whatever parts and servers
they came from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from sparkdml.errors import CommunicationError, ParameterError
from sparkdml.parameter_server.client.cutting import parts_of
from sparkdml.parameter_server.client.requests import PartsTicket, Request
from sparkdml.parameter_server.optimizers import Add, Updater, updater_from
from sparkdml.parameter_server.partition import Table
from sparkdml.parameter_server.stats import ClientStats
from sparkdml.parameter_server.stored_partition import Partition
from sparkdml.parameter_server.wire.frames import (
    CREATE,
    PROBE,
    RESTORE,
    SET_UPDATER,
    WHOLE,
    Entry,
    Kind,
    Message,
    Status,
)


def join_parts(table: Table, parts: list[Partition]) -> dict[str, Any]:
    """The parts of a table as one state of tensors, numbers and text."""
    assert len(parts) == table.num_parts
    slots = {}
    for name, slot in parts[0].slots.items():
        by_row = all(len(part.slots[name]) == len(part.values) for part in parts)
        slots[name] = torch.cat([part.slots[name] for part in parts]) if by_row else slot
    return {
        "values": torch.cat([part.values for part in parts]).reshape(table.shape),
        "rows": table.by_row,
        "updater": parts[0].updater.to_dict(),
        "slots": slots,
    }


def split_state(name: str, state: Mapping[str, Any], part_bytes: int) -> list[Partition]:
    """The inverse, for any size of parts."""
    values: Tensor = state["values"]
    table = Table.of(name, values, state["rows"], part_bytes)
    matrix = table.matrix(values.contiguous())
    updater = updater_from(state["updater"])
    partitions = []
    for part in range(table.num_parts):
        start, stop = table.range(part)
        partition = Partition.new(table, part, updater, matrix[start:stop])
        for slot_name, fresh in partition.slots.items():
            slot: Tensor = state["slots"][slot_name]
            by_row = len(slot) == table.num_rows
            partition.slots[slot_name] = (
                (slot[start:stop] if by_row else slot).clone().view_as(fresh)
            )
        partitions.append(partition)
    return partitions


BYTES_AT_ONCE = 32 << 20

Snapshot = Mapping[str, Mapping[str, Any]]


@dataclass
class Known:
    """What a client knows about a table."""

    table: Table
    updater: Updater
    exact: bool = False


class TableBook:
    """The tables of a client; `submit` passes requests to its sender."""

    def __init__(
        self, part_bytes: int, submit: Callable[[list[Request]], None], stats: ClientStats
    ) -> None:
        self._part_bytes, self._submit, self._stats = part_bytes, submit, stats
        self._known: dict[str, Known] = {}

    def find(self, name: str) -> Known:
        known = self._known.get(name)
        if known is None:
            names = ", ".join(map(repr, self._known)) or "none yet"
            raise ParameterError("name", name, f"a table that init was called for ({names})")
        return known

    def init(
        self, name: str, tensor: Tensor, rows: bool, updater: Updater | None, exact: bool
    ) -> None:
        table = Table.of(name, tensor, rows, self._part_bytes)
        updater = updater or Add()
        self._known[name] = Known(table, updater, exact)
        text = {"table": table.to_dict(), "updater": updater.to_dict()}
        missing = self._missing_parts(table)
        if missing:
            self._change_all(
                (Entry(table.number, part, values=values), CREATE, text, ())
                for part, values in parts_of(table, tensor.detach().cpu(), missing)
            )

    def set_updater(self, updater: Updater, names: Sequence[str] | None) -> None:
        chosen = [self.find(name) for name in (self._known if names is None else names)]
        for known in chosen:
            known.updater = updater
        text = {"updater": updater.to_dict()}
        self._change_all(
            (Entry(known.table.number, part), SET_UPDATER, text, ())
            for known in chosen
            for part in range(known.table.num_parts)
        )

    def snapshot(self, clock: int) -> Snapshot:
        found = {}
        for name, known in list(self._known.items()):
            partitions: list[Partition] = []
            parts = iter(range(known.table.num_parts))
            while batch := list(islice(parts, self._at_once)):
                partitions += self._whole_parts(known.table, batch, clock)
            found[name] = join_parts(known.table, partitions)
        return found

    def restore(self, snapshot: Snapshot) -> None:
        for name, state in snapshot.items():
            partitions = split_state(name, state, self._part_bytes)
            exact = name in self._known and self._known[name].exact
            self._known[name] = Known(partitions[0].table, partitions[0].updater, exact)
            copies = (partition.to_parts() for partition in partitions)
            self._change_all(
                (entries[0], RESTORE, text, tuple(entries[1:])) for text, entries in copies
            )

    @property
    def _at_once(self) -> int:
        return max(1, BYTES_AT_ONCE // self._part_bytes)

    def _missing_parts(self, table: Table) -> list[int]:
        """Those that the servers don't have: only these need be sent."""
        missing: list[int] = []
        others: list[int] = []

        def note(message: Message, answer: Entry) -> None:
            if answer.status == Status.UNKNOWN:
                missing.append(answer.part)
            elif answer.status == Status.REFUSED:
                others.append(answer.part)

        entries = [
            Entry(table.number, part, version=table.layout) for part in range(table.num_parts)
        ]
        self._send_all(Kind.INIT, entries, note, flags=PROBE, may_be_unknown=True)
        if others:
            raise ParameterError(
                "tensor",
                f"{table.shape} of {table.dtype}, rows={table.by_row}",
                f"like the table {table.name!r} that is there already, which differs",
            )
        return sorted(missing)

    def _whole_parts(self, table: Table, parts: Iterable[int], clock: int) -> list[Partition]:
        partitions: dict[int, Partition] = {}

        def note(message: Message, answer: Entry) -> None:
            partitions[answer.part] = Partition.from_parts(message.text or {}, message.entries)

        entries = [Entry(table.number, part) for part in parts]
        self._send_all(Kind.PULL, entries, note, flags=WHOLE, clock=clock, alone=True)
        return [partitions[entry.part] for entry in entries]

    def _send_all(
        self,
        kind: Kind,
        entries: list[Entry],
        note: Callable[[Message, Entry], None],
        **fields: Any,
    ) -> None:
        """A request for each entry; waits for all answers."""
        ticket: PartsTicket[None] = PartsTicket(len(entries), lambda: None, self._stats)

        def done(message: Message, answer: Entry) -> None:
            note(message, answer)
            ticket.part_done()

        self._submit([Request(kind, entry, done, ticket.failed, **fields) for entry in entries])
        ticket.wait()

    def _change_all(
        self, changes: Iterator[tuple[Entry, int, dict[str, Any], tuple[Entry, ...]]]
    ) -> None:
        """A message for each change: its entry, flags, text, and further entries."""
        while batch := list(islice(changes, self._at_once)):
            ticket: PartsTicket[None] = PartsTicket(len(batch), lambda: None, self._stats)
            done = _count_down(ticket)
            self._submit(
                [
                    Request(
                        Kind.INIT,
                        entry,
                        done,
                        ticket.failed,
                        flags=flags,
                        text=text,
                        more=more,
                        alone=True,
                    )
                    for entry, flags, text, more in batch
                ]
            )
            ticket.wait()


def _count_down(ticket: PartsTicket[None]) -> Callable[[Message, Entry], None]:
    def done(message: Message, answer: Entry) -> None:
        if answer.status == Status.REFUSED:
            ticket.failed(CommunicationError("a server rejected a malformed part of a table"))
        else:
            ticket.part_done()

    return done
