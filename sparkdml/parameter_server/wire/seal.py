"""The job's key, and the tag that it puts on every message.

A message's header names its sender, its receiver and its number, so no two headers are alike. A
one-time key is drawn from the header by keyed BLAKE2b, and the payload is tagged with it by
Poly1305 (Bernstein 2005), as in ChaCha20-Poly1305, but without the cipher. A change of one bit of
header or payload makes another tag. Why not a keyed hash of everything:
docs/decisions/0014-a-tag-on-every-message.md.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.poly1305 import Poly1305

TAG_BYTES = 16

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class JobKey:
    """What the members of one job share, and nobody else knows. Travels in Spark's closure."""

    secret: bytes = field(repr=False)
    # The servers' CURVE keys, where the wire is encrypted.
    curve_public: bytes | None = None
    curve_secret: bytes | None = field(default=None, repr=False)

    @classmethod
    def new(cls, encrypted: bool = False) -> JobKey:
        if not encrypted:
            return cls(secrets.token_bytes(32))
        import zmq

        public, secret = zmq.curve_keypair()
        return cls(secrets.token_bytes(32), public, secret)

    @classmethod
    def derive(cls, secret: bytes, encrypted: bool = False) -> JobKey:
        """The same key in every task of a run, made of what only they know."""
        own = hashlib.blake2b(secret, digest_size=32, person=b"sparkdml-tag").digest()
        if not encrypted:
            return cls(own)
        import zmq
        from zmq.utils import z85

        curve = hashlib.blake2b(secret, digest_size=32, person=b"sparkdml-curve").digest()
        encoded = z85.encode(curve)
        return cls(own, zmq.curve_public(encoded), encoded)

    @property
    def encrypted(self) -> bool:
        return self.curve_public is not None

    def word_for(self, server: int) -> bytes:
        """What a client says at a server's door. It opens no more than the door."""
        word = hashlib.blake2b(
            server.to_bytes(8, "little"), key=self.secret, digest_size=16, person=b"door"
        )
        return word.hexdigest().encode()

    def tag(self, header: Buffer, payloads: Iterable[Buffer]) -> bytes:
        """`header` must be unlike that of any other message, and fix the payloads' lengths."""
        one_time = hashlib.blake2b(header, key=self.secret, digest_size=32).digest()
        sum_of_all = Poly1305(one_time)
        for payload in payloads:
            sum_of_all.update(payload)
        return sum_of_all.finalize()

    def fits(self, tag: Buffer, header: Buffer, payloads: Iterable[Buffer]) -> bool:
        return hmac.compare_digest(bytes(tag), self.tag(header, payloads))
