"""The job's key, and the seal on every message between workers and servers.

A message is sealed by AES-256-GCM (NIST SP 800-38D). Where the job is encrypted, its body and its
payloads are enciphered; elsewhere they are tagged as they lie in memory, without a copy (GMAC). The
envelope, in the clear but tagged too, names sender and receiver and counts up.

A nonce must never be used twice under one key. Every sealer has a key of its own, derived by HKDF
(RFC 5869) from the job's key, a salt that it draws at random, the numbers of both ends, and whether
it seals requests or answers: no two directions share a key, and an answer that is sent back as a
request doesn't open. A nonce is the number of the message, which the sealer alone counts, and the
index of the frame in it. Why AES-GCM: docs/decisions/0020-a-seal-of-aes-gcm.md.

Runs in workers and servers. Sealers and openers belong to an end in sockets.py, and to its thread.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

MAGIC = b"sdps"
VERSION = 2
TAG_BYTES = 16
SALT_BYTES = 16

Buffer = bytes | bytearray | memoryview

# Magic, version, sender, receiver, number, salt, how many payloads.
_ENVELOPE = struct.Struct(f"<4sBxxxQQQ{SALT_BYTES}sI")
_NONCE = struct.Struct("<QI")  # the message's number and the frame's index: 0 for the body
# Of buffers: malloc itself keeps smaller ones, and a window of parts on its way fits the larger.
_MIN_KEPT_BYTES, _MAX_KEPT_BYTES = 64 << 10, 32 << 20
_FREE = 3  # references to a buffer that only its pool has: the list's, the loop's, the call's
_INFO = struct.Struct("<12s??QQ")


class BadFrame(ValueError):
    """A message that is not ours, or not whole: why, in one word for the counters."""


@dataclass(frozen=True)
class JobKey:
    """The secret that the members of one job share. Travels in Spark's closure."""

    secret: bytes = field(repr=False)
    encrypted: bool = False

    @classmethod
    def new(cls, encrypted: bool = False) -> JobKey:
        return cls(secrets.token_bytes(32), encrypted)

    @classmethod
    def derive(cls, secret: bytes, encrypted: bool = False) -> JobKey:
        """The same key in every task of a run, made of what only they know."""
        own = hashlib.blake2b(secret, digest_size=32, person=b"sparkdml-tag").digest()
        return cls(own, encrypted)

    def word_for(self, server: int) -> bytes:
        """The message by which a client authenticates itself, which grants nothing else."""
        word = hashlib.blake2b(
            server.to_bytes(8, "little"), key=self.secret, digest_size=16, person=b"door"
        )
        return word.hexdigest().encode()

    def cipher(self, salt: bytes, sender: int, receiver: int, answers: bool) -> AESGCM:
        """Of one sealer. Whether it enciphers is part of the key: no mode opens the other's."""
        info = _INFO.pack(b"sparkdmlseal", self.encrypted, answers, sender, receiver)
        return AESGCM(HKDF(SHA256(), 32, salt, info).derive(self.secret))


class Buffers:
    """Memory for enciphered and deciphered payloads, used again once nothing views it.

    Fresh memory comes from the kernel page by page, which takes longer than the cipher. Frames and
    tensors hold references to what they view, so the count of references says what is free.
    """

    def __init__(self) -> None:
        self._kept: list[bytearray] = []
        self._num_bytes = 0

    def take(self, size: int) -> memoryview:
        """Writable memory with any content."""
        for buffer in self._kept:
            if size <= len(buffer) <= 2 * size and sys.getrefcount(buffer) <= _FREE:
                return memoryview(buffer)[:size]
        made = bytearray(size)
        if size >= _MIN_KEPT_BYTES and self._num_bytes + size <= _MAX_KEPT_BYTES:
            self._kept.append(made)
            self._num_bytes += size
        return memoryview(made)


class Sealer:
    """Seals the requests, or the answers, of one end to another, numbered from 1."""

    def __init__(self, key: JobKey, sender: int, receiver: int, answers: bool = False) -> None:
        self.sender, self.receiver = sender, receiver
        self.number = 0  # of the last message
        self._encrypted = key.encrypted
        self._salt = secrets.token_bytes(SALT_BYTES)
        self._cipher = key.cipher(self._salt, sender, receiver, answers)
        self._buffers = Buffers()

    def seal(self, body: bytes, payloads: Sequence[Buffer]) -> list[Buffer]:
        """The frames. Without encryption the payloads are frames as they are."""
        self.number += 1
        envelope = _ENVELOPE.pack(
            MAGIC, VERSION, self.sender, self.receiver, self.number, self._salt, len(payloads)
        )
        if self._encrypted:
            first = envelope + self._cipher.encrypt(self._nonce(0), body, envelope)
            return [first, *(self._encrypt(i, payload) for i, payload in enumerate(payloads, 1))]
        tags = [self._tag(i, payload) for i, payload in enumerate(payloads, 1)]
        first = b"".join((envelope, body, *tags))
        return [first + self._tag(0, first), *payloads]

    def _nonce(self, frame: int) -> bytes:
        return _NONCE.pack(self.number, frame)

    def _tag(self, frame: int, content: Buffer) -> bytes:
        return self._cipher.encrypt(self._nonce(frame), b"", content)

    def _encrypt(self, frame: int, payload: Buffer) -> memoryview:
        sealed = self._buffers.take(len(payload) + TAG_BYTES)
        self._cipher.encrypt_into(self._nonce(frame), payload, None, sealed)
        return sealed


class Opener:
    """Opens the requests, or the answers, that come to one end from any end with the job's key."""

    def __init__(self, key: JobKey, receiver: int, answers: bool = False) -> None:
        self._key, self.receiver, self._answers = key, receiver, answers
        self._ciphers: dict[int, tuple[bytes, AESGCM]] = {}  # of senders that have proved theirs
        self._buffers = Buffers()

    def open(self, frames: Sequence[Buffer]) -> Opened:
        """The message, if it is for this receiver and its first frame is good."""
        if not frames or len(frames[0]) < _ENVELOPE.size + TAG_BYTES:
            raise BadFrame("length")
        first = memoryview(frames[0])
        magic, version, sender, receiver, number, salt, num_payloads = _ENVELOPE.unpack_from(first)
        if (magic, version) != (MAGIC, VERSION):
            raise BadFrame("magic")
        tags_start = len(first) - TAG_BYTES * (1 if self._key.encrypted else 1 + num_payloads)
        if num_payloads != len(frames) - 1 or tags_start < _ENVELOPE.size:
            raise BadFrame("length")
        if receiver != self.receiver:
            raise BadFrame("stranger")
        cipher = self._cipher_of(sender, salt)
        nonce = _NONCE.pack(number, 0)
        body: Buffer = first[_ENVELOPE.size : tags_start]
        tags = None if self._key.encrypted else first[tags_start:-TAG_BYTES]
        if tags is None:
            envelope, sealed = first[: _ENVELOPE.size], first[_ENVELOPE.size :]
            body = _checked(cipher, nonce, sealed, envelope)
        else:
            _checked(cipher, nonce, first[-TAG_BYTES:], first[:-TAG_BYTES])
        self._ciphers[sender] = salt, cipher
        return Opened(
            sender,
            number,
            body=body,
            frames=frames[1:],
            tags=tags,
            cipher=cipher,
            buffers=self._buffers,
        )

    def _cipher_of(self, sender: int, salt: bytes) -> AESGCM:
        known = self._ciphers.get(sender)
        if known is not None and known[0] == salt:
            return known[1]
        return self._key.cipher(salt, sender, self.receiver, self._answers)


@dataclass(frozen=True)
class Opened:
    """A message whose first frame is good, and whose payloads have not been looked at yet."""

    sender: int
    number: int
    body: Buffer
    frames: Sequence[Buffer]
    tags: memoryview | None  # of the payloads; None where they are encrypted, each with its own
    cipher: AESGCM
    buffers: Buffers

    def payloads(self, lengths: Sequence[int]) -> list[memoryview]:
        """The payloads, which must have these lengths: the frames themselves, or decrypted."""
        views = [memoryview(frame).cast("B") for frame in self.frames]
        more = TAG_BYTES if self.tags is None else 0
        if [length + more for length in lengths] != [len(view) for view in views]:
            raise BadFrame("length")
        return [self._payload(i, view) for i, view in enumerate(views, 1)]

    def _payload(self, frame: int, content: memoryview) -> memoryview:
        nonce = _NONCE.pack(self.number, frame)
        if self.tags is not None:
            tag = self.tags[TAG_BYTES * (frame - 1) : TAG_BYTES * frame]
            _checked(self.cipher, nonce, tag, content)
            return content
        plain = self.buffers.take(len(content) - TAG_BYTES)
        try:
            self.cipher.decrypt_into(nonce, content, None, plain)
        except InvalidTag:
            raise BadFrame("tag") from None
        return plain


def _checked(cipher: AESGCM, nonce: bytes, sealed: Buffer, additional: Buffer) -> bytes:
    try:
        return cipher.decrypt(nonce, sealed, additional)
    except InvalidTag:
        raise BadFrame("tag") from None
