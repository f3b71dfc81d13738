"""The cost of the parameter server's wire: `python benchmarks/server.py --help`.

1. Bandwidth: one worker pushes a tensor and pulls it again, as a ratio to a plain socket between
   two processes that carries the same bytes in both directions. First with one server, so without
   replicas, authenticated and encrypted; then with two servers, where every push is replicated
   before it is acknowledged (so the bytes cross the wire once more).
2. Small keys: pushes of ten floats, one at a time and many at once, beside a plain socket's round
   trips.
3. Workers: seconds of a BSP step (push, clock, pull) as their number grows on these cores.

The contenders take turns; ratios are computed within a round, and their median is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run by its path: the repository isn't on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from benchmarks.measurement import Measurement
from benchmarks.ratios import Round, Spread, seconds_of, times_as_fast
from benchmarks.report import describe_machine
from sparkdml.parameter_server.client.client import WorkerClient
from sparkdml.parameter_server.consistency import BSP, TAP
from sparkdml.parameter_server.optimizers import SGD
from sparkdml.testing.server_processes import ServerProcesses

RESULTS = Path(__file__).resolve().parent / "results"
BYTES, ONE_BY_ONE, AT_ONCE = "push and pull", "one at a time", "many at once"
SOCKET = "a plain socket"
GROUPS: dict[str, tuple[int, bool]] = {
    "authenticated": (1, False),
    "encrypted": (1, True),
    "authenticated, a replica": (2, False),
    "encrypted, a replica": (2, True),
}
AIMS = {"authenticated": 0.5, "encrypted": 0.15}


@dataclass(frozen=True)
class Size:
    """How much there is to do."""

    megabytes: int
    small: int
    workers: tuple[int, ...]
    steps: int
    step_floats: int


FULL = Size(64, 500, (1, 2, 4, 8), 20, 1 << 20)
QUICK = Size(2, 50, (1, 2), 3, 1 << 10)


class PlainSocket:
    """Another process that echoes bytes: the wire is compared with it."""

    def __init__(self, num_bytes: int) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        context = get_context("forkserver")
        self._process = context.Process(
            target=_give_back, args=(listener.getsockname(), num_bytes), daemon=True
        )
        self._process.start()
        self._connection, _ = listener.accept()
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.close()
        self._out = bytearray(num_bytes)

    def there_and_back(self, data: memoryview) -> None:
        self._connection.sendall(data)
        _receive(self._connection, memoryview(self._out))

    def small_round_trips(self, count: int) -> None:
        answer = memoryview(bytearray(40))
        for _ in range(count):
            self._connection.sendall(answer)
            _receive(self._connection, answer)

    def close(self) -> None:
        self._connection.close()
        self._process.join()


def _give_back(address: tuple[str, int], num_bytes: int) -> None:
    """Receives the large piece completely before echoing it, and echoes everything else at once."""
    connection = socket.create_connection(address)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    piece = memoryview(bytearray(num_bytes))
    while True:
        first = connection.recv_into(piece)
        if not first:
            return
        if first <= 40:
            connection.sendall(piece[:first])
        else:
            _receive(connection, piece[first:])
            connection.sendall(piece)


def _receive(connection: socket.socket, into: memoryview) -> None:
    while into:
        into = into[connection.recv_into(into) :]


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure_wire(size: Size, rounds: int) -> list[Round]:
    data = torch.rand(size.megabytes * (1 << 20) // 4)
    with ExitStack() as stack:
        plain = PlainSocket(data.nbytes)
        stack.callback(plain.close)
        clients = {}
        for name, (num_servers, encrypted) in GROUPS.items():
            group = ServerProcesses(num_servers, encrypted=encrypted, consistency=TAP())
            clients[name] = stack.enter_context(group).client()
            clients[name].init("large", data, updater=SGD(lr=0.1))
            for number in range(size.small):
                if number < 100:
                    clients[name].init(f"small {number}", torch.zeros(10), updater=SGD(lr=0.1))
        measured: list[Round] = []
        names = [SOCKET, *GROUPS]
        for number in range(-1, rounds):  # the first is not counted
            entry: Round = {}
            first = number % len(names)
            for name in names[first:] + names[:first]:
                load = os.getloadavg()[0]
                seconds = (
                    _time_socket(plain, data, size)
                    if name == SOCKET
                    else _time_client(clients[name], data, size)
                )
                entry[name] = Measurement(seconds, load_average=load)
            if number >= 0:
                measured.append(entry)
                text = ", ".join(f"{entry[name].seconds[BYTES]:.3f}" for name in names)
                print(f"round {number + 1} of {rounds}: {text} s", file=sys.stderr)
        return measured


def _time_socket(plain: PlainSocket, data: Tensor, size: Size) -> dict[str, float]:
    view = data.numpy().data.cast("B")
    return {
        BYTES: timed(lambda: plain.there_and_back(view)),
        ONE_BY_ONE: timed(lambda: plain.small_round_trips(size.small)) / size.small,
    }


def _time_client(client: WorkerClient, data: Tensor, size: Size) -> dict[str, float]:
    out = torch.empty_like(data)
    small = torch.zeros(10)
    names = [f"small {number % min(100, size.small)}" for number in range(size.small)]

    def there_and_back() -> None:
        client.push("large", data).wait()
        client.pull("large", out=out).wait()

    def one_by_one() -> None:
        for name in names:
            client.push(name, small).wait()

    def at_once() -> None:
        for ticket in [client.push(name, small) for name in names]:
            ticket.wait()

    return {
        BYTES: timed(there_and_back),
        ONE_BY_ONE: timed(one_by_one) / size.small,
        AT_ONCE: timed(at_once) / size.small,
    }


def measure_workers(size: Size) -> list[tuple[int, float]]:
    """Return the median seconds of a step by number of workers, on one server without replicas."""
    found = []
    for count in size.workers:
        with ServerProcesses(1, num_workers=count, consistency=BSP()) as group:
            seconds = group.run_workers(count, time_steps, size.steps, size.step_floats)
            found.append((count, max(seconds)))
    return found


def time_steps(client: WorkerClient, steps: int, floats: int) -> float:
    gradient, out = torch.ones(floats), torch.empty(floats)
    client.init("w", gradient, updater=SGD(lr=0.1))
    taken = []
    for _ in range(steps):
        client.pull("w", out=out).wait()
        started = time.perf_counter()
        client.push("w", gradient)
        client.clock()
        client.pull("w", out=out).wait()
        taken.append(time.perf_counter() - started)
    return sorted(taken)[len(taken) // 2]


def to_markdown(size: Size, rounds: list[Round], workers: list[tuple[int, float]]) -> str:
    lines = [
        f"| {size.megabytes} MiB in both directions | GB/s | ratio to the socket | target |",
        "|---|---|---|---|",
    ]
    num_bytes = 2 * size.megabytes * (1 << 20)
    for name in (SOCKET, *GROUPS):
        spread = Spread.of(seconds_of(rounds, name, BYTES))
        ratio = times_as_fast(rounds, name, [SOCKET], BYTES)
        assert spread is not None
        assert ratio is not None
        speed = num_bytes / spread.median / 1e9
        cell = f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
        wanted = AIMS.get(name)
        if wanted is not None and ratio.median < wanted:
            cell += ": missed"
        lines.append(f"| {name} | {speed:.2f} | {cell} | {wanted or ''} |")
    lines += [
        "",
        "| small keys: requests/s | one at a time | many at once |",
        "|---|---|---|",
    ]
    for name in (SOCKET, *GROUPS):
        cells = []
        for metric in (ONE_BY_ONE, AT_ONCE):
            spread = Spread.of(seconds_of(rounds, name, metric))
            cells.append("" if spread is None else f"{1 / spread.median:,.0f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    megabytes = size.step_floats * 4 / (1 << 20)
    lines += ["", f"| workers, BSP, {megabytes:g} MiB | ms per step |", "|---|---|"]
    lines += [f"| {count} | {1000 * seconds:.1f} |" for count, seconds in workers]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks/server.py", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="small sizes, to check that it works")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for data and tables")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1 but got {options.rounds}")
    torch.set_num_threads(1)  # as in a worker
    size = QUICK if options.quick else FULL
    rounds = measure_wire(size, options.rounds)
    workers = measure_workers(size)
    text = to_markdown(size, rounds, workers)
    options.results.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "machine": describe_machine(),
        "rounds": [{name: m.to_dict() for name, m in entry.items()} for entry in rounds],
        "workers": workers,
    }
    (options.results / "server.json").write_text(json.dumps(record, indent=2))
    (options.results / "server.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
