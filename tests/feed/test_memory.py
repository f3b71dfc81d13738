"""The feed's memory stays bounded, however large a partition is."""

import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import sparkdml as dml
from sparkdml.feed.epoch_order import BatchRequest
from sparkdml.feed.feed import Chunk, Feed, FeedPlan
from sparkdml.feed.ragged import RaggedArray

MB = 1 << 20


class PeakMemory:
    """The most anonymous memory that this process had, above what it had at first."""

    def __enter__(self):
        self.base = self.peak = anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _watch(self):
        while not self._stop.wait(0.02):
            self.peak = max(self.peak, anonymous_bytes())

    @property
    def growth(self):
        return self.peak - self.base


def anonymous_bytes():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024


def test_a_partition_ten_times_the_memory_allowed_for_it(tmp_path):
    allowed, width = 32 * MB, 1024
    num_rows = 10 * allowed // (4 * width)
    hashes = np.sort(np.random.default_rng(0).integers(-(2**63), 2**63 - 1, num_rows))

    def chunks():
        for start in range(0, num_rows, 1000):
            rows = np.arange(start, min(start + 1000, num_rows))
            yield Chunk(
                {"id": rows, "x": np.repeat(rows, width).reshape(-1, width).astype(np.float32)},
                hashes[rows],
            )

    plan = FeedPlan((), max_window_bytes=allowed)
    with PeakMemory() as memory:
        feed = Feed(chunks(), plan, str(tmp_path))
        for epoch in range(2):
            seen = np.concatenate(
                [batch["id"].numpy() for batch in feed.batches(BatchRequest(256, epoch))]
            )
            assert np.array_equal(np.sort(seen), np.arange(num_rows))
        feed.close()
    assert memory.growth < 3 * allowed, f"{memory.growth / MB:.0f} MB"


def test_ragged_rows_of_ten_times_the_memory_allowed_for_them(tmp_path):
    allowed, width = 16 * MB, 1024
    num_rows = 20 * allowed // (4 * width)  # half as long as the widest, in the mean
    rng = np.random.default_rng(0)
    hashes = np.sort(rng.integers(-(2**63), 2**63 - 1, num_rows))
    lengths = rng.integers(0, width, num_rows)

    def chunks():
        for start in range(0, num_rows, 1000):
            rows = np.arange(start, min(start + 1000, num_rows))
            values = np.repeat(rows, lengths[rows]).astype(np.float32)
            ragged = RaggedArray.of_lengths(values, lengths[rows])
            yield Chunk({"id": rows, "x": ragged}, hashes[rows])

    plan = FeedPlan((), max_window_bytes=allowed, collate=first_and_length)
    with PeakMemory() as memory:
        feed = Feed(chunks(), plan, str(tmp_path))
        for epoch in range(2):
            seen = 0
            for batch in feed.batches(BatchRequest(256, epoch)):
                seen += batch.num_rows
                ids = batch["id"].numpy()
                assert np.array_equal(batch["length"].numpy(), lengths[ids])
                assert np.array_equal(batch["first"].numpy(), np.where(lengths[ids] > 0, ids, -1))
            assert seen == num_rows
        feed.close()
    assert memory.growth < 4 * allowed, f"{memory.growth / MB:.0f} MB"


def first_and_length(columns):
    ragged = columns["x"]
    first = ragged.values[ragged.offsets[:-1].clamp(max=len(ragged.values) - 1)].long()
    return {"length": ragged.lengths, "first": first.where(ragged.lengths > 0, -1)}


def read_two_epochs(ctx):
    with PeakMemory() as memory:
        began = time.monotonic()
        rows = [sum(batch.num_rows for batch in ctx.feed(256, epoch)) for epoch in range(2)]
        seconds = time.monotonic() - began
    return rows, memory.growth, seconds


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_partition_of_two_gigabytes(spark):
    width, num_rows = 1024, 500_000
    rows = spark.range(num_rows).selectExpr(f"transform(sequence(1, {width}), i -> float(id)) as x")
    ((read, growth, _),) = dml.run(read_two_epochs, rows, num_workers=1)
    assert read == [num_rows, num_rows]
    assert growth < 256 * MB, f"{growth / MB:.0f} MB"
