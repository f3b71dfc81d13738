"""Messages survive the wire; anything else is dropped, without a crash or a large allocation."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdml.parameter_server.wire.frames import Entry, Kind, Message, decode, encode
from sparkdml.parameter_server.wire.seal import BadFrame, Buffer, JobKey, Opener, Sealer

KEYS = [JobKey(b"k" * 32), JobKey(b"k" * 32, encrypted=True)]
SENDER, ME = 8, 77

both = pytest.mark.parametrize("key", KEYS, ids=["authenticated", "encrypted"])


def a_message() -> Message:
    rows = torch.tensor([0, 5], dtype=torch.int32)
    return Message(
        Kind.PUSH,
        [
            Entry(1, 2, number=3, weight=0.5, rows=rows, values=torch.arange(6.0)),
            Entry(1, 3, values=torch.arange(4, dtype=torch.float16)),
            Entry(9, 0),
        ],
        clock=4,
        generation=5,
        roster=6,
        text={"a": 1},
    )


def sealed(key: JobKey) -> list[bytearray]:
    return wire(encode(a_message(), Sealer(key, SENDER, ME)))


def wire(frames: list[Buffer]) -> list[bytearray]:
    return [bytearray(frame) for frame in frames]


@both
def test_a_message_survives(key: JobKey) -> None:
    sent = a_message()
    got = decode(wire(encode(sent, Sealer(key, SENDER, ME))), Opener(key, ME))
    assert (got.kind, got.clock, got.generation, got.roster) == (Kind.PUSH, 4, 5, 6)
    assert (got.sender, got.receiver, got.number, got.text) == (SENDER, ME, 1, {"a": 1})
    assert (sent.sender, sent.receiver, sent.number) == (SENDER, ME, 1)
    for entry, other in zip(sent.entries, got.entries, strict=True):
        assert (entry.key, entry.number, entry.weight) == (other.key, other.number, other.weight)
        for a, b in ((entry.rows, other.rows), (entry.values, other.values)):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert a.dtype == b.dtype
                assert torch.equal(a, b)


@both
@settings(deadline=None, max_examples=200)
@given(st.data())
def test_one_changed_bit_anywhere_is_noticed(key: JobKey, data: st.DataObject) -> None:
    frames = sealed(key)
    frame = data.draw(st.sampled_from(frames))
    position = data.draw(st.integers(0, len(frame) - 1))
    frame[position] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(BadFrame):
        decode(frames, Opener(key, ME))


@both
@settings(deadline=None, max_examples=300)
@given(st.lists(st.binary(max_size=300), max_size=5))
def test_random_bytes_are_refused(key: JobKey, frames: list[bytes]) -> None:
    with pytest.raises(BadFrame):
        decode(frames, Opener(key, ME))


@both
@settings(deadline=None, max_examples=300)
@given(st.data())
def test_nonsense_with_a_true_tag_is_refused_or_read(key: JobKey, data: st.DataObject) -> None:
    """What someone with the key might send by mistake: any body, sealed as it should be."""
    opened = Opener(KEYS[0], ME).open(sealed(KEYS[0]))
    body = bytearray(opened.body)
    for _ in range(data.draw(st.integers(1, 8))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    frames = wire(Sealer(key, SENDER, ME).seal(bytes(body), opened.frames))
    with contextlib.suppress(BadFrame):
        assert isinstance(decode(frames, Opener(key, ME)), Message)


@both
def test_lengths_that_are_claimed_are_not_allocated(key: JobKey) -> None:
    header = sealed(key)[0]
    tracemalloc.start()
    try:
        for position in range(len(header) - 4):
            forged = bytearray(header)
            forged[position : position + 4] = struct.pack("<I", 0x7FFFFFFF)
            with pytest.raises(BadFrame):
                decode([forged, bytearray(24)], Opener(key, ME))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@both
def test_the_reasons_are_told_apart(key: JobKey) -> None:
    frames = sealed(key)
    for given_frames, other, receiver, reason in (
        (frames, JobKey(b"x" * 32, key.encrypted), ME, "tag"),
        (frames, JobKey(key.secret, not key.encrypted), ME, "tag|length"),
        (frames, key, ME + 1, "stranger"),
        (frames[:-1], key, ME, "length"),
        ([frames[0], frames[1][:-4], *frames[2:]], key, ME, "length"),
        ([], key, ME, "length"),
        ([bytearray(b"x" * 100)], key, ME, "magic"),
    ):
        with pytest.raises(BadFrame, match=reason):
            decode(given_frames, Opener(other, receiver))
