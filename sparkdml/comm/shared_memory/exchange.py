"""Reductions and broadcasts among ranks that have mapped the same memory.

Each rank copies its tensor into a buffer of its own, and once all have done so, adds all buffers in
rank order: the result has the same bits on every rank and in every run. Every rank adds up all of a
short tensor, which takes one barrier. Of a long tensor, with three or more ranks, each rank adds up
a part and copies the others' parts, which takes two. (The latter is the reduce-scatter and
allgather of Rabenseifner 2004, with memory instead of messages.)

Of a long tensor between two ranks, the next chunk is copied before the barrier of the current one,
because ranks are never equally fast and this work shortens the wait. A rank uses four buffers in
turn. It writes chunk k + 4 after the barrier of chunk k + 2, and a rank reports k + 2 only after
having read chunk k: so no rank ever waits for a free buffer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from sparkdml.comm.shared_memory.segment import Segment, Signals
from sparkdml.errors import CommunicationError

# Long tensors are cut into chunks of this size, which stay in a processor's cache between the copy
# and the sum. 10 M floats took 9 to 14 ms between 2 ranks with 1 MB, 12 to 15 with 4 MB, and 16 to
# 24 with 64 kB, which takes more barriers; 4 ranks on 2 cores took 67 to 76 ms with 256 kB, and 40
# to 46 with 1 MB. Copying them once takes 6 ms.
CHUNK_BYTES = 1 << 20
# Tensors of at least this size are added up in parts, with three or more ranks.
PARTS_BYTES = 64 << 10
MAX_KEPT_VIEWS = 64

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
)

Combine = Callable[..., Tensor]
_COMBINE: dict[str, Combine] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}
_CALLS = (*_COMBINE, "broadcast")
_TURNS = 4
_PAGE_BYTES = 4096


class Exchange:
    """One rank's view of the segment that the `size` ranks of a host share."""

    def __init__(self, segment: Segment, rank: int, size: int, check: Callable[[], None]) -> None:
        self._segment, self._rank, self.size = segment, rank, size
        self._signals = Signals(
            segment.address, rank, size=size, has_left=segment.has_left, check=check
        )
        self._turn = 0
        self._views: dict[tuple[torch.dtype, int, int], list[Tensor]] = {}
        notes_at, places_at = _notes_at(size), _places_at(size)
        self._notes = (ctypes.c_int64 * (_TURNS * size)).from_address(segment.address + notes_at)
        self._addresses = [
            [
                segment.address + places_at + (_TURNS * place + turn) * CHUNK_BYTES
                for turn in range(_TURNS)
            ]
            for place in range(size)
        ]
        self._places = torch.split(segment.bytes[places_at:], CHUNK_BYTES)

    @staticmethod
    def num_bytes(size: int) -> int:
        return _places_at(size) + (_TURNS * size + 1) * CHUNK_BYTES

    @staticmethod
    def initialise(segment: Segment, size: int) -> None:
        """Prepare the mapped segment; one rank calls it before the others begin."""
        Signals.initialise(segment.address, size)

    def reduce_(self, flat: Tensor, op: str) -> None:
        """Reduce in place: flat, contiguous, not empty, of the same length and dtype everywhere."""
        Reduction(self, flat, op).finish()

    def broadcast_(self, flat: Tensor, root: int) -> None:
        note = note_of(flat, "broadcast")
        for chunk in torch.split(flat, CHUNK_BYTES // flat.itemsize):
            turn = self.write(chunk if self._rank == root else None, note)
            self._wait_for_all(turn, note)
            if self._rank != root:
                ctypes.memmove(chunk.data_ptr(), self._addresses[root][turn], chunk.nbytes)

    def write(self, chunk: Tensor | None, note: int) -> int:
        """Write the chunk to this rank's buffer, signal the others, and return its turn."""
        turn = self._turn
        self._turn = (turn + 1) % _TURNS
        if chunk is not None:
            place = self._addresses[self._rank][turn]
            ctypes.memmove(place, chunk.data_ptr(), chunk.nbytes)
        self._notes[turn * self.size + self._rank] = note
        self._signals.post()
        return turn

    def _wait_for_all(self, turn: int, note: int) -> None:
        """Wait until every rank has written, and check that all make the same call."""
        self._signals.wait_for_all()
        notes, first = self._notes, turn * self.size
        for other in range(self.size):
            if notes[first + other] != note:
                self._refuse([notes[first + rank] for rank in range(self.size)])

    def add_whole(self, chunk: Tensor, turn: int, note: int, combine: Combine) -> None:
        self._wait_for_all(turn, note)
        places = self._places_of(chunk.dtype, chunk.numel(), turn)
        if self.size == 2:  # this rank's data is still in the chunk, and in the cache
            combine(chunk, places[1 - self._rank], out=chunk)
        else:
            _combine_all(places, combine, chunk)

    def add_by_parts(self, chunk: Tensor, turn: int, note: int, combine: Combine) -> None:
        self._wait_for_all(turn, note)
        room = self._places[_TURNS * self.size]
        sums = room.view(chunk.dtype)[: chunk.numel()].tensor_split(self.size)
        places = self._places_of(chunk.dtype, chunk.numel(), turn)
        own = [place.tensor_split(self.size)[self._rank] for place in places]
        _combine_all(own, combine, sums[self._rank])
        # No rank writes here again before the next barrier, and so before all have read it.
        self._signals.barrier()
        ctypes.memmove(chunk.data_ptr(), room.data_ptr(), chunk.nbytes)

    def _places_of(self, dtype: torch.dtype, count: int, turn: int) -> list[Tensor]:
        """Return the first items of every rank's buffer; cached, as training repeats its calls."""
        key = (dtype, count, turn)
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= MAX_KEPT_VIEWS:
                self._views.clear()
            places = self._places[turn : _TURNS * self.size : _TURNS]
            views = self._views[key] = [place.view(dtype)[:count] for place in places]
        return views

    def _refuse(self, notes: Sequence[int]) -> None:
        calls = ", ".join(f"rank {rank}: {_read_note(note)}" for rank, note in enumerate(notes))
        raise CommunicationError(f"ranks called different collectives: {calls}")

    def leave(self) -> None:
        """Let the others see that this rank is gone; a thread may still be using the memory."""
        self._segment.close()

    def close(self) -> None:
        """Leave, and release the memory, which no thread may be using any more."""
        self.leave()
        self._segment.unmap()
        self._views.clear()
        self._places, self._addresses = (), []


class Reduction:
    """A prepared reduction of one tensor, which can be repeated."""

    def __init__(self, exchange: Exchange, flat: Tensor, op: str) -> None:
        self._exchange, self._combine = exchange, _COMBINE[op]
        self._note = note_of(flat, op)
        self.num_bytes = flat.nbytes
        self._chunks: tuple[Tensor, ...] = (flat,)
        if flat.nbytes > CHUNK_BYTES:
            self._chunks = torch.split(flat, CHUNK_BYTES // flat.itemsize)
        self._by_parts = exchange.size > 2 and flat.nbytes >= PARTS_BYTES
        self._begun: int | None = None

    def begin(self) -> None:
        """Write the first chunk now, for the others to read; no other call may be in flight."""
        self._begun = self._exchange.write(self._chunks[0], self._note)

    def finish(self) -> None:
        exchange, note, combine = self._exchange, self._note, self._combine
        if self._begun is None:
            self.begin()
        assert self._begun is not None
        turn, self._begun = self._begun, None
        for chunk, following in zip_longest(self._chunks, self._chunks[1:]):
            if self._by_parts:
                exchange.add_by_parts(chunk, turn, note, combine)
                turn = turn if following is None else exchange.write(following, note)
            else:
                next_turn = turn if following is None else exchange.write(following, note)
                exchange.add_whole(chunk, turn, note, combine)
                turn = next_turn


def _combine_all(tensors: Sequence[Tensor], combine: Combine, out: Tensor) -> None:
    combine(tensors[0], tensors[1], out=out)
    for tensor in tensors[2:]:
        combine(out, tensor, out=out)


def note_of(flat: Tensor, call: str) -> int:
    """Encode the call as one number, which must be the same on all ranks."""
    kind = DTYPES.index(flat.dtype) * len(_CALLS) + _CALLS.index(call)
    return flat.numel() * len(DTYPES) * len(_CALLS) + kind


def _read_note(note: int) -> str:
    count, kind = divmod(note, len(DTYPES) * len(_CALLS))
    dtype, call = divmod(kind, len(_CALLS))
    return f"{_CALLS[call]} of {count} {DTYPES[dtype]}"


def _notes_at(size: int) -> int:
    return Signals.num_bytes(size)


def _places_at(size: int) -> int:
    """The offset of the buffers: on pages of their own, after the semaphores and the notes."""
    return -(-(_notes_at(size) + 8 * _TURNS * size) // _PAGE_BYTES) * _PAGE_BYTES
