"""Another worker's rows over our wire and Arrow Flight: `python benchmarks/row_wire.py --help`.

One process owns a spool and serves it both ways; this one requests pieces of rows, drawn at random
as in an epoch's order, and receives numpy arrays. Both servers read the rows from the same spool,
there is one reader at a time, and all traffic stays on the loopback interface. The contenders take
turns; ratios are computed within a round. Flight runs without authentication or encryption, ours
with its handshake, once per reader.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run by its path: the repository isn't on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import pyarrow as pa
from pyarrow import flight

from benchmarks.measurement import Measurement
from benchmarks.ratios import Round, Spread, seconds_of, times_as_fast
from sparkdml.feed.plan import Arrays
from sparkdml.feed.shared_spool import Card, RemoteRows, RowServer, card_of
from sparkdml.feed.spool import Spool
from sparkdml.network.timeouts import Timeouts

OURS, FLIGHT = "our wire", "Arrow Flight"
TOKEN, HOST = "benchmark", "127.0.0.1"
CASES = ((32, 64), (32, 1024), (32, 16384), (784, 64), (784, 1024), (784, 16384))
QUICK = ((32, 64),)  # floats in a row, rows in a piece
NUM_ROWS = 50_000
METRIC = "piece"

Take = Callable[[np.ndarray], Arrays]


def make_spool(num_floats: int) -> Spool:
    """Rows as a feed has them: features, a label and a number."""
    rng = np.random.default_rng(0)
    spool = Spool(tempfile.gettempdir())
    columns = {
        "features": rng.random((NUM_ROWS, num_floats), dtype=np.float32),
        "label": rng.integers(0, 10, NUM_ROWS),
    }
    spool.append(columns, np.zeros(NUM_ROWS, np.int64))
    spool.seal()
    return spool


class FlightRows(flight.FlightServerBase):  # type: ignore[misc]
    """The ticket has the numbers of the requested rows, as on our wire."""

    def __init__(self, spool: Spool) -> None:
        super().__init__(f"grpc://{HOST}:0")
        self._spool = spool

    def do_get(self, context: Any, ticket: flight.Ticket) -> flight.RecordBatchStream:
        batch = to_record_batch(self._spool.take(np.frombuffer(ticket.ticket, np.int64)))
        return flight.RecordBatchStream(pa.Table.from_batches([batch]))


def to_record_batch(arrays: Arrays) -> pa.RecordBatch:
    columns = {}
    for name, values in arrays.items():
        assert isinstance(values, np.ndarray)
        flat = pa.array(values.reshape(-1))
        width = values[0].size
        columns[name] = flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, width)
    return pa.RecordBatch.from_pydict(columns)


def from_table(table: pa.Table) -> Arrays:
    arrays: Arrays = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        values = column.combine_chunks() if column.num_chunks > 1 else column.chunk(0)
        if pa.types.is_fixed_size_list(values.type):
            arrays[name] = values.flatten().to_numpy().reshape(len(values), -1)
        else:
            arrays[name] = values.to_numpy()
    return arrays


def own(num_floats: int, pipe: Pipe) -> None:
    """The owner's process: serves until it is asked to end."""
    spool = make_spool(num_floats)
    with closing(RowServer(spool, HOST, TOKEN, Timeouts())) as ours, FlightRows(spool) as other:
        pipe.send((card_of(spool), ours.address, other.port))
        pipe.recv()


def contenders(num_floats: int, stack: ExitStack) -> dict[str, Take]:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=own, args=(num_floats, theirs), daemon=True)
    process.start()
    theirs.close()  # so that its end is noticed
    stack.callback(process.join, 10)
    stack.callback(pipe.send, None)
    card, address, port = pipe.recv()
    client = stack.enter_context(flight.FlightClient(f"grpc://{HOST}:{port}"))
    return {OURS: _ours(card, address, stack), FLIGHT: _flight(client)}


def _ours(card: Card, address: tuple[str, int], stack: ExitStack) -> Take:
    return stack.enter_context(closing(RemoteRows(card, address, TOKEN, Timeouts()))).take


def _flight(client: flight.FlightClient) -> Take:
    return lambda rows: from_table(client.do_get(flight.Ticket(rows.tobytes())).read_all())


def measure(num_floats: int, num_rows: int, rounds: int) -> list[Round]:
    times = max(5, min(500, (64 << 20) // (num_rows * num_floats * 4)))
    found: list[Round] = []
    with ExitStack() as stack:
        takes = contenders(num_floats, stack)
        check_alike(takes, num_rows)
        names = list(takes)
        for number in range(-1, rounds):  # the first is not counted
            first = number % len(names)
            entry = {
                name: Measurement({METRIC: seconds(takes[name], num_rows, times)})
                for name in names[first:] + names[:first]
            }
            if number >= 0:
                found.append(entry)
    return found


def check_alike(takes: dict[str, Take], num_rows: int) -> None:
    rows = next(pieces(num_rows))
    one, other = (take(rows) for take in takes.values())
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


def pieces(num_rows: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(1)
    while True:
        yield rng.integers(0, NUM_ROWS, num_rows)


def seconds(take: Take, num_rows: int, times: int) -> float:
    wanted = [rows for rows, _ in zip(pieces(num_rows), range(times), strict=False)]
    start = time.perf_counter()
    for rows in wanted:
        take(rows)
    return (time.perf_counter() - start) / times


def to_markdown(found: dict[tuple[int, int], list[Round]]) -> str:
    lines = [
        f"| a row | rows in a piece | {OURS}, ms | MB/s | {FLIGHT}, ms | MB/s | times as fast |",
        "|---|---|---|---|---|---|---|",
    ]
    for (num_floats, num_rows), rounds in found.items():
        num_bytes = num_rows * (num_floats * 4 + 8)
        cells = [f"{num_floats} floats and a label", f"{num_rows:,}"]
        for name in (OURS, FLIGHT):
            spread = Spread.of(seconds_of(rounds, name, METRIC))
            assert spread is not None
            cells += [f"{spread.median * 1e3:,.2f}", f"{num_bytes / spread.median / 1e6:,.0f}"]
        ratio = times_as_fast(rounds, OURS, [FLIGHT], METRIC)
        assert ratio is not None
        cells.append(f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks/row_wire.py", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="one case, to check that it works")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1 but got {options.rounds}")
    cases = QUICK if options.quick else CASES
    print(to_markdown({case: measure(*case, options.rounds) for case in cases}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
