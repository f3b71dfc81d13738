"""The form of every message between workers and servers, and nothing else.

The first frame is a header of fixed layout, then entries of fixed layout (one for each part of a
table that the message is about), then a short JSON text where a kind of message has one, then the
tag. The other frames are tensors' bytes as they lie in memory, two at most for each entry: row
numbers and values, of just the lengths that the entry says. Nothing is unpickled. What doesn't keep
to the form raises `BadFrame`, before anything is allocated for it.

Lists of rows that travel once: whoever names the same rows again sends their signature.

(The key caching of Li et al. 2014.) A server keeps the last list of each client for each part, up
to a bound; what it has forgotten is sent in full again.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparkdml.parameter_server.partition import DTYPES, Indexes, Key
from sparkdml.parameter_server.wire.seal import TAG_BYTES, Buffer, JobKey

MAGIC = b"sdps"
VERSION = 1
MAX_ENTRIES = 4096
MAX_TEXT_BYTES = 1 << 20
MAX_FRAME_BYTES = 64 << 20  # of one tensor's bytes

_HEADER = struct.Struct("<4sBBHQQQQIIqII")
_ENTRY = struct.Struct("<QIBBHQIIQqQIIdII")
_ALL_ROWS = 0xFFFFFFFF

# Flags of messages.
CREATE, RESTORE, SET_UPDATER, PROBE = 0, 1, 2, 3  # of INIT
LEAVE = 1  # of HELLO
HALF, WHOLE = 1, 2  # of PULL
AT_CLOCK, FETCH = 4, 8  # of PULL, by who looks on: as it is after a clock; and bring it
# Flags of entries.
ROWS_NAMED = 1  # of PUSH and PULL: in place of the rows, `session` has their signature
PUSH, STEP, SKIP = 0, 1, 2  # of REPLICATE: what the change is


class Kind(IntEnum):
    """From a worker: HELLO to PULL. Between servers: REPLICATE and INSTALL. ANSWER: to any."""

    HELLO = 1
    INIT = 2
    PUSH = 3
    PULL = 4
    REPLICATE = 5
    INSTALL = 6
    ANSWER = 7


class Status(IntEnum):
    """What became of one entry."""

    OK = 0
    MOVED = 1  # another server has this part now: look at the view again
    GAP = 2  # an earlier push of this worker to this part is missing
    UNKNOWN = 3  # there is no such table, or no copy of this part (yet)
    WAIT = 8  # the clock that was asked for is not over yet
    LATE = 9  # it is too late for that clock: the entry's own says which can still be had
    REFUSED = 4  # it makes no sense here: another shape, wrong rows
    NOT_FINITE = 6  # NaN or infinity, where these are dropped
    ROWS_UNKNOWN = 5  # the rows were named by a signature that is no longer known here
    REPEATED = 7  # a push under a mark that this part has had from this worker: nothing was done


class BadFrame(ValueError):
    """A message that is not ours, or not whole: why, in one word for the counters."""


@dataclass
class Entry:
    """One part of a table in a message. Which fields count depends on the kind."""

    table: int
    part: int
    number: int = 0  # of this push among the worker's pushes to this part
    session: int = 0  # of the worker's client (between servers)
    worker: int = 0
    clock: int = 0
    version: int = 0  # of the copy
    generation: int = 0  # of the copy's last change
    weight: float = 1.0
    status: int = 0
    flags: int = 0
    mark: int = 0  # of a push that counts once, though its worker is started again; 0: none
    rows: Tensor | None = None  # int32, counted from the part's first row, ascending
    values: Tensor | None = None

    @property
    def key(self) -> Key:
        return self.table, self.part


@dataclass
class Message:
    kind: Kind
    entries: list[Entry] = field(default_factory=list)
    clock: int = 0
    generation: int = 0  # of the servers, as the sender knows them
    roster: int = 0  # of the workers, as the sender knows them
    answers: int = 0  # the number of the message that this one answers
    text: dict[str, Any] | None = None
    flags: int = 0
    sender: int = 0
    receiver: int = 0
    number: int = 0

    @property
    def num_bytes(self) -> int:
        """Of the tensors in it."""
        return sum(
            tensor.nbytes
            for entry in self.entries
            for tensor in (entry.rows, entry.values)
            if tensor is not None
        )


def encode(message: Message, key: JobKey) -> list[Buffer]:
    """The frames. Those of tensors are views: the tensors must stay as they are until sent."""
    text = b"" if message.text is None else json.dumps(message.text).encode()
    assert len(message.entries) <= MAX_ENTRIES, len(message.entries)
    assert len(text) <= MAX_TEXT_BYTES, len(text)
    parts = [
        _HEADER.pack(
            MAGIC,
            VERSION,
            message.kind,
            message.flags,
            message.sender,
            message.receiver,
            message.number,
            message.answers,
            message.generation,
            message.roster,
            message.clock,
            len(message.entries),
            len(text),
        )
    ]
    payloads: list[Buffer] = []
    for entry in message.entries:
        parts.append(_pack(entry))
        payloads += [bytes_of(t) for t in (entry.rows, entry.values) if t is not None and len(t)]
    parts.append(text)
    header = b"".join(parts)
    return [header + key.tag(header, payloads), *payloads]


def _pack(entry: Entry) -> bytes:
    rows, values = entry.rows, entry.values
    return _ENTRY.pack(
        entry.table,
        entry.part,
        entry.status,
        0 if values is None else DTYPES.index(values.dtype),
        entry.flags,
        entry.session,
        entry.worker,
        _ALL_ROWS if rows is None else len(rows),
        entry.number,
        entry.clock,
        entry.version,
        entry.generation,
        entry.mark,
        entry.weight,
        0 if rows is None else rows.nbytes,
        0 if values is None else values.nbytes,
    )


def decode(frames: Sequence[Buffer], key: JobKey, receiver: int) -> Message:
    """The message, if it is for this receiver and whole. Its tensors are views of the frames."""
    if not frames:
        raise BadFrame("length")
    first = memoryview(frames[0])
    if len(first) < _HEADER.size + TAG_BYTES:
        raise BadFrame("length")
    fields = _HEADER.unpack_from(first)
    if fields[:2] != (MAGIC, VERSION):
        raise BadFrame("magic")
    num_entries, num_text = fields[11], fields[12]
    if num_entries > MAX_ENTRIES or num_text > MAX_TEXT_BYTES:
        raise BadFrame("length")
    entries_end = _HEADER.size + num_entries * _ENTRY.size
    if len(first) != entries_end + num_text + TAG_BYTES:
        raise BadFrame("length")
    packed = list(_ENTRY.iter_unpack(first[_HEADER.size : entries_end]))
    wanted = [length for entry in packed for length in entry[14:16] if length]
    payloads = frames[1:]
    if wanted != [len(memoryview(payload).cast("B")) for payload in payloads]:
        raise BadFrame("length")
    if fields[5] != receiver:
        raise BadFrame("stranger")
    if not key.fits(first[-TAG_BYTES:], first[:-TAG_BYTES], payloads):
        raise BadFrame("tag")
    # From here on the sender is known to have the key; its mistakes must still not harm.
    try:
        kind = Kind(fields[2])
        text = json.loads(bytes(first[entries_end:-TAG_BYTES])) if num_text else None
        remaining = iter(payloads)
        entries = [_unpack(entry, remaining) for entry in packed]
    except (ValueError, IndexError, RecursionError) as error:
        raise BadFrame("form") from error
    if not (text is None or isinstance(text, dict)):
        raise BadFrame("form")
    return Message(
        kind=kind,
        flags=fields[3],
        sender=fields[4],
        receiver=fields[5],
        number=fields[6],
        answers=fields[7],
        generation=fields[8],
        roster=fields[9],
        clock=fields[10],
        entries=entries,
        text=text,
    )


def _unpack(packed: tuple[Any, ...], payloads: Any) -> Entry:
    entry = Entry(
        table=packed[0],
        part=packed[1],
        status=packed[2],
        flags=packed[4],
        session=packed[5],
        worker=packed[6],
        number=packed[8],
        clock=packed[9],
        version=packed[10],
        generation=packed[11],
        mark=packed[12],
        weight=packed[13],
    )
    num_rows, row_bytes, value_bytes = packed[7], packed[14], packed[15]
    if num_rows != _ALL_ROWS:
        if row_bytes != 4 * num_rows:
            raise BadFrame("form")
        entry.rows = (
            torch.frombuffer(next(payloads), dtype=torch.int32)
            if num_rows
            else torch.empty(0, dtype=torch.int32)
        )
    elif row_bytes:
        raise BadFrame("form")
    dtype = DTYPES[packed[3]]
    if value_bytes:
        if value_bytes % dtype.itemsize:
            raise BadFrame("form")
        entry.values = torch.frombuffer(next(payloads), dtype=dtype)
    return entry


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's memory, without a copy."""
    flat = tensor.detach().reshape(-1)
    data: memoryview = flat.view(torch.uint8).numpy().data
    return data


def rows_tensor(rows: Indexes) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int32))


MIN_BYTES = 256  # shorter lists are as quickly sent
MAX_BYTES = 64 << 20


def signature_of(rows: Tensor) -> int:
    digest = hashlib.blake2b(bytes_of(rows), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


class RowCache:
    """At a server. The least recently used lists go first."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._lists: OrderedDict[tuple[int, Key], tuple[int, Tensor]] = OrderedDict()

    def find(self, client: int, key: Key, signature: int) -> Tensor | None:
        found = self._lists.get((client, key))
        if found is None or found[0] != signature:
            return None
        self._lists.move_to_end((client, key))
        return found[1]

    def keep(self, client: int, key: Key, signature: int, rows: Tensor) -> None:
        old = self._lists.pop((client, key), None)
        self._num_bytes += rows.nbytes - (old[1].nbytes if old else 0)
        self._lists[client, key] = signature, rows.clone()  # a view would keep the whole frame
        while self._num_bytes > self._max_bytes:
            _, (_, dropped) = self._lists.popitem(last=False)
            self._num_bytes -= dropped.nbytes
