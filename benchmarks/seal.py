"""The cost of sealing a message, by its size: `python benchmarks/seal.py --help`.

A message of one payload is sealed and opened in one process, on one core: by the construction that
decision 14 describes (a one-time key by keyed BLAKE2b, and a tag by Poly1305), and by the seal of
the servers' wire, without and with encryption. They take turns; ratios are computed within a round.
Times are CPU time, including the kernel's, so that other load matters little.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

if __name__ == "__main__":  # run by its path: the repository isn't on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cryptography.hazmat.primitives.poly1305 import Poly1305

from benchmarks.measurement import Measurement
from benchmarks.ratios import Round, Spread, seconds_of, times_as_fast
from sparkdml.parameter_server.wire.seal import Buffer, JobKey, Opener, Sealer

POLY1305, TAGGED, ENCRYPTED = "Poly1305", "AES-GCM, tagged", "AES-GCM, encrypted"
SIZES = (64, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
QUICK = (64, 64 << 10)
_BYTES_A_ROUND = 64 << 20
_HEADER = bytes(90)  # about the size of a message with one entry


def poly1305_both_ways(secret: bytes) -> Callable[[Buffer], object]:
    """Decision 14: a key for each message, derived from a header that no other message has."""
    number = 0

    def tag(header: bytes, payload: Buffer) -> bytes:
        one_time = hashlib.blake2b(header, key=secret, digest_size=32).digest()
        poly = Poly1305(one_time)
        poly.update(payload)
        return poly.finalize()

    def both_ways(payload: Buffer) -> None:
        nonlocal number
        number += 1
        header = number.to_bytes(8, "little") + _HEADER
        sealed = header + tag(header, payload)
        assert hmac.compare_digest(sealed[-16:], tag(sealed[:-16], payload))

    return both_ways


def aes_gcm_both_ways(encrypted: bool) -> Callable[[Buffer], object]:
    key = JobKey.new(encrypted)
    sealer, opener = Sealer(key, 1, 2), Opener(key, 2)

    def both_ways(payload: Buffer) -> object:
        return opener.open(sealer.seal(_HEADER, [payload])).payloads([len(payload)])

    return both_ways


def measure(sizes: Sequence[int], rounds: int) -> dict[int, list[Round]]:
    contenders = {
        POLY1305: poly1305_both_ways(bytes(32)),
        TAGGED: aes_gcm_both_ways(encrypted=False),
        ENCRYPTED: aes_gcm_both_ways(encrypted=True),
    }
    names = list(contenders)
    found: dict[int, list[Round]] = {}
    for size in sizes:
        payload = memoryview(bytearray(size))
        times = max(2, min(2000, _BYTES_A_ROUND // (size + 20_000)))
        metric = metric_of(size)
        found[size] = []
        for number in range(-1, rounds):  # the first is not counted
            first = number % len(names)
            entry = {
                name: Measurement({metric: seconds(contenders[name], payload, times)})
                for name in names[first:] + names[:first]
            }
            if number >= 0:
                found[size].append(entry)
    return found


def seconds(both_ways: Callable[[Buffer], object], payload: Buffer, times: int) -> float:
    start = time.process_time()
    for _ in range(times):
        both_ways(payload)
    return (time.process_time() - start) / times


def count_copies(both_ways: Callable[[Buffer], object], size: int) -> int:
    """Return the number of copies of the payload that are made until it is opened."""
    payload = bytearray(size)
    tracemalloc.start()
    try:
        opened = both_ways(payload)
        del opened
        return round(tracemalloc.get_traced_memory()[1] / size)
    finally:
        tracemalloc.stop()


def metric_of(size: int) -> str:
    return f"{size:,} bytes"


def to_markdown(found: dict[int, list[Round]]) -> str:
    lines = [
        f"| sealed and opened | {POLY1305}, µs | {TAGGED}, µs | times as fast | {ENCRYPTED}, µs "
        "| times as fast |",
        "|---|---|---|---|---|---|",
    ]
    for size, rounds in found.items():
        metric = metric_of(size)
        cells = [metric, _micros(rounds, POLY1305, metric)]
        for name in (TAGGED, ENCRYPTED):
            ratio = times_as_fast(rounds, name, [POLY1305], metric)
            assert ratio is not None
            spread = f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
            cells += [_micros(rounds, name, metric), spread]
        lines.append("| " + " | ".join(cells) + " |")
    copies = [
        count_copies(both_ways, 1 << 20)
        for both_ways in (
            poly1305_both_ways(bytes(32)),
            aes_gcm_both_ways(encrypted=False),
            aes_gcm_both_ways(encrypted=True),
        )
    ]
    lines.append("| copies of the payload | {} | {} | | {} | |".format(*copies))
    return "\n".join(lines) + "\n"


def _micros(rounds: list[Round], name: str, metric: str) -> str:
    spread = Spread.of(seconds_of(rounds, name, metric))
    assert spread is not None
    return f"{spread.median * 1e6:,.1f}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks/seal.py", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="two sizes, to check that it works")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1 but got {options.rounds}")
    print(to_markdown(measure(QUICK if options.quick else SIZES, options.rounds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
