"""The key of a job, and the seal: no nonce twice, no key for two directions, nothing readable."""

from __future__ import annotations

from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from sparkdml.parameter_server.wire import seal
from sparkdml.parameter_server.wire.seal import BadFrame, Buffers, JobKey, Opener, Sealer

both = pytest.mark.parametrize("encrypted", [False, True], ids=["authenticated", "encrypted"])
A, B = 5, 9  # the numbers of two ends


def test_the_key_is_the_same_for_all_tasks_of_a_run_and_for_no_other() -> None:
    first = JobKey.derive(b"a", encrypted=True)
    assert first == JobKey.derive(b"a", encrypted=True)
    assert JobKey.derive(b"a").secret == first.secret
    assert first.secret != JobKey.derive(b"b", encrypted=True).secret
    assert not JobKey.derive(b"a").encrypted


def test_what_is_secret_is_never_shown() -> None:
    key = JobKey.derive(b"a", encrypted=True)
    assert repr(key.secret) not in repr(key)


@both
def test_what_is_sealed_is_opened(encrypted: bool) -> None:
    key = JobKey.new(encrypted)
    sealer, opener = Sealer(key, A, B), Opener(key, B)
    for number in (1, 2):
        frames = sealer.seal(b"body", [b"first", b"", b"third"])
        opened = opener.open(frames)
        assert (opened.sender, opened.number, bytes(opened.body)) == (A, number, b"body")
        assert [bytes(p) for p in opened.payloads([5, 0, 5])] == [b"first", b"", b"third"]


@both
def test_no_nonce_comes_twice_under_one_key(
    encrypted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []

    class Recorder:
        def __init__(self, key: bytes) -> None:
            self._key, self._cipher = key, AESGCM(key)

        def encrypt(self, nonce: bytes, *rest: Any) -> bytes:
            used.append((self._key, nonce))
            return self._cipher.encrypt(nonce, *rest)

        def encrypt_into(self, nonce: bytes, *rest: Any) -> int:
            used.append((self._key, nonce))
            return self._cipher.encrypt_into(nonce, *rest)

    monkeypatch.setattr(seal, "AESGCM", Recorder)
    key = JobKey.new(encrypted)
    # The same two ends, connected twice; the answers; and the other direction.
    for sender, receiver, answers in ((A, B, False), (A, B, False), (A, B, True), (B, A, False)):
        sealer = Sealer(key, sender, receiver, answers)
        for _ in range(20):
            sealer.seal(b"body", [b"payload"] * 3)
    assert len(used) == 4 * 20 * 4
    assert len(set(used)) == len(used)
    assert len({key for key, _ in used}) == 4


@both
def test_frames_cannot_change_places_messages_or_directions(encrypted: bool) -> None:
    key = JobKey.new(encrypted)
    sealer = Sealer(key, A, B)
    first = sealer.seal(b"body", [b"one", b"two"])
    second = sealer.seal(b"body", [b"one", b"six"])
    for frames in (
        [first[0], first[2], first[1]],
        [first[0], first[1], second[2]],
        [second[0], first[1], first[2]],
    ):
        with pytest.raises(BadFrame, match="tag"):
            Opener(key, B).open(frames).payloads([3, 3])
    turned = bytearray(first[0])
    turned[8:16], turned[16:24] = turned[16:24], turned[8:16]
    with pytest.raises(BadFrame, match="tag"):
        Opener(key, A).open([turned, *first[1:]])


@both
def test_an_answer_is_never_taken_for_a_request(encrypted: bool) -> None:
    """Two servers are clients of each other: A answers B, and asks it, under the same numbers."""
    key = JobKey.new(encrypted)
    request, answer = (Sealer(key, A, B, answers).seal(b"body", []) for answers in (False, True))
    for frames, answers in ((request, True), (answer, False)):
        with pytest.raises(BadFrame, match="tag"):
            Opener(key, B, answers).open(frames)


def test_only_encryption_hides_what_is_said() -> None:
    for encrypted in (False, True):
        frames = Sealer(JobKey.new(encrypted), A, B).seal(b"a secret body", [b"a secret tensor"])
        joined = b"".join(bytes(frame) for frame in frames)
        assert (b"a secret body" not in joined) == encrypted
        assert (b"a secret tensor" not in joined) == encrypted


def test_a_payload_is_sealed_where_it_lies() -> None:
    payload = memoryview(bytearray(1000))
    assert Sealer(JobKey.new(), A, B).seal(b"", [payload])[1] is payload


def test_senders_that_prove_nothing_are_not_remembered() -> None:
    opener = Opener(JobKey.new(), B)
    for sender in range(100):
        with pytest.raises(BadFrame, match="tag"):
            opener.open(Sealer(JobKey.new(), sender, B).seal(b"body", []))
    assert not opener._ciphers


def test_a_buffer_is_used_again_only_when_nothing_views_it() -> None:
    buffers = Buffers()
    first = buffers.take(1 << 17)
    view = first[10:20]
    del first
    second = buffers.take(1 << 17)
    assert second.obj is not view.obj
    used = id(view.obj)
    del view
    assert id(buffers.take(100_000).obj) == used
    assert len(buffers.take(1 << 20)) == 1 << 20


def test_what_was_opened_stays_as_it_is_while_more_comes() -> None:
    key = JobKey.new(encrypted=True)
    sealer, opener = Sealer(key, A, B), Opener(key, B)
    kept = []
    for number in range(10):
        payload = bytes([number]) * (1 << 17)
        kept += opener.open(sealer.seal(b"", [payload])).payloads([len(payload)])
    assert [set(bytes(payload)) for payload in kept] == [{number} for number in range(10)]
