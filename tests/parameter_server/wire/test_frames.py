"""Messages survive the wire; anything else is dropped, without a crash or a large allocation."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdml.parameter_server.wire.frames import BadFrame, Entry, Kind, Message, decode, encode
from sparkdml.parameter_server.wire.seal import Buffer, JobKey

KEY = JobKey(b"k" * 32)
ME = 77


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
        sender=8,
        receiver=ME,
        number=9,
    )


def wire(frames: list[Buffer]) -> list[bytearray]:
    return [bytearray(frame) for frame in frames]


def test_a_message_survives() -> None:
    sent = a_message()
    got = decode(wire(encode(sent, KEY)), KEY, ME)
    assert (got.kind, got.clock, got.generation, got.roster) == (Kind.PUSH, 4, 5, 6)
    assert (got.sender, got.receiver, got.number, got.text) == (8, ME, 9, {"a": 1})
    for entry, other in zip(sent.entries, got.entries, strict=True):
        assert (entry.key, entry.number, entry.weight) == (other.key, other.number, other.weight)
        for a, b in ((entry.rows, other.rows), (entry.values, other.values)):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert a.dtype == b.dtype
                assert torch.equal(a, b)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_one_changed_bit_anywhere_is_noticed(data: st.DataObject) -> None:
    frames = wire(encode(a_message(), KEY))
    frame = data.draw(st.sampled_from(frames))
    position = data.draw(st.integers(0, len(frame) - 1))
    frame[position] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(BadFrame):
        decode(frames, KEY, ME)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.binary(max_size=300), max_size=5))
def test_random_bytes_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(BadFrame):
        decode(frames, KEY, ME)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_nonsense_with_a_true_tag_is_refused_or_read(data: st.DataObject) -> None:
    """What someone with the key might send by mistake: any header, sealed as it should be."""
    header = bytearray(encode(a_message(), KEY)[0][:-16])
    for _ in range(data.draw(st.integers(1, 8))):
        header[data.draw(st.integers(5, len(header) - 1))] = data.draw(st.integers(0, 255))
    payloads = wire(encode(a_message(), KEY)[1:])
    header[16:24] = ME.to_bytes(8, "little")
    frames = [bytearray(bytes(header) + KEY.tag(bytes(header), payloads)), *payloads]
    with contextlib.suppress(BadFrame):
        assert isinstance(decode(frames, KEY, ME), Message)


def test_lengths_that_are_claimed_are_not_allocated() -> None:
    header = bytearray(encode(a_message(), KEY)[0])
    tracemalloc.start()
    try:
        for position in range(len(header) - 4):
            forged = bytearray(header)
            forged[position : position + 4] = struct.pack("<I", 0x7FFFFFFF)
            with pytest.raises(BadFrame):
                decode([forged, bytearray(24)], KEY, ME)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_the_reasons_are_told_apart() -> None:
    frames = wire(encode(a_message(), KEY))
    for given_frames, key, receiver, reason in (
        (frames, JobKey(b"x" * 32), ME, "tag"),
        (frames, KEY, ME + 1, "stranger"),
        (frames[:-1], KEY, ME, "length"),
        ([], KEY, ME, "length"),
        ([bytearray(b"x" * 100)], KEY, ME, "magic"),
    ):
        with pytest.raises(BadFrame, match=reason):
            decode(given_frames, key, receiver)
