"""Lists of rows that travel once: whoever names the same rows again sends their signature.

(The key caching of Li et al. 2014.) A server keeps the last list of each client for each part, up
to a bound; what it has forgotten is sent in full again.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from torch import Tensor

from sparkdml.server.frames import bytes_of
from sparkdml.server.keys import Key

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
