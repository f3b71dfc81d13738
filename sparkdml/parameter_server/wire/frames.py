"""The form of every message between workers and servers, and nothing else.

The body is a header of fixed layout, then entries of fixed layout (one for each part of a table
that the message is about), then a short JSON text where a kind of message has one. The payloads are
tensors' bytes as they lie in memory, two at most for each entry: row numbers and values, of just
the lengths that the entry says. Nothing is unpickled. A message in another form raises `BadFrame`,
before anything is allocated for it. How a message is sealed: seal.py.

A list of rows crosses the network once: a sender that names the same rows again sends their
signature (the key caching of Li et al. 2014). A server keeps the last list of each client for each
part, up to a bound; a list that it has forgotten is sent in full again.

Runs in workers and servers, in the thread that owns the socket.
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
from sparkdml.parameter_server.wire.seal import BadFrame, Buffer, Opener, Sealer

MAX_ENTRIES = 4096
MAX_TEXT_BYTES = 1 << 20
MAX_FRAME_BYTES = 64 << 20  # of one tensor's bytes

_HEADER = struct.Struct("<BxHQIIqII")
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
    """The result of one entry."""

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


def encode(message: Message, sealer: Sealer) -> list[Buffer]:
    """The frames, under the sealer's next number.

    Without encryption those of tensors are views: the tensors must stay as they are until sent.
    """
    text = b"" if message.text is None else json.dumps(message.text).encode()
    assert len(message.entries) <= MAX_ENTRIES, len(message.entries)
    assert len(text) <= MAX_TEXT_BYTES, len(text)
    parts = [
        _HEADER.pack(
            message.kind,
            message.flags,
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
    frames = sealer.seal(b"".join(parts), payloads)
    message.sender, message.receiver = sealer.sender, sealer.receiver
    message.number = sealer.number
    return frames


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


def decode(frames: Sequence[Buffer], opener: Opener) -> Message:
    """The message, if it is whole. Its tensors are views of the frames, or of what they hid."""
    opened = opener.open(frames)
    # From here on the sender is known to have the key; its mistakes must still not harm.
    body = memoryview(opened.body)
    if len(body) < _HEADER.size:
        raise BadFrame("length")
    kind, flags, answers, generation, roster, clock, num_entries, num_text = _HEADER.unpack_from(
        body
    )
    if num_entries > MAX_ENTRIES or num_text > MAX_TEXT_BYTES:
        raise BadFrame("length")
    entries_end = _HEADER.size + num_entries * _ENTRY.size
    if len(body) != entries_end + num_text:
        raise BadFrame("length")
    packed = list(_ENTRY.iter_unpack(body[_HEADER.size : entries_end]))
    payloads = opened.payloads([length for entry in packed for length in entry[14:16] if length])
    try:
        text = json.loads(bytes(body[entries_end:])) if num_text else None
        remaining = iter(payloads)
        message = Message(
            Kind(kind),
            [_unpack(entry, remaining) for entry in packed],
            clock=clock,
            generation=generation,
            roster=roster,
            answers=answers,
            text=text,
            flags=flags,
            sender=opened.sender,
            receiver=opener.receiver,
            number=opened.number,
        )
    except (ValueError, IndexError, RecursionError) as error:
        raise BadFrame("form") from error
    if not (text is None or isinstance(text, dict)):
        raise BadFrame("form")
    return message


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
