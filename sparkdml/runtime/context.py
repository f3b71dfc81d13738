"""What a worker's function sees: who it is, whom it can talk to, and its rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from sparkdml.errors import CommunicationError, DataError, SetupError
from sparkdml.feed.batch import Batch
from sparkdml.feed.feed import Chunk, Feed

if TYPE_CHECKING:
    from sparkdml.comm.base import Communicator, World
    from sparkdml.runtime.link import Link
    from sparkdml.runtime.plan import Plan


class Context:
    """One worker of a run. The communicator and the feed open when they are first asked for."""

    def __init__(
        self,
        plan: Plan,
        world: World,
        link: Link,
        chunks: Iterator[Chunk] | None,
        rows: Iterator[Any] | None,
        spool_directory: str,
    ) -> None:
        self.plan = plan
        self.world = world
        self.rank = world.rank
        self.size = world.size
        self.local_rank = world.local_rank
        self.local_size = world.local_size
        self.device = torch.device(world.device)
        self.seed = plan.seed
        self._link = link
        self._chunks = chunks
        self._rows = rows
        self._spool_directory = spool_directory
        self._comm: Communicator | None = None
        self._feed: Feed | None = None
        self.facts: dict[str, Any] | None = None  # of the data, once the feed is open

    @property
    def comm(self) -> Communicator:
        """The communicator among all workers; the first use, on every rank, opens it."""
        if self._comm is None:
            from sparkdml.comm.backends import open_communicator

            self._comm = open_communicator(self.plan.backend, self.world)
        return self._comm

    @property
    def data(self) -> Feed:
        """This worker's rows."""
        if self._feed is None:
            if self._chunks is None:
                raise SetupError("this run has no data: pass data= to dml.run")
            self._feed = Feed(self._chunks, self._feed_plan(), self._spool_directory, self.device)
            self.facts = self._link.ask("facts")
            if self.facts is not None:
                self._check_facts(self.facts)
        return self._feed

    def feed(self, batch_size: int, epoch: int = 0, shuffle: bool = True) -> Iterator[Batch]:
        """One epoch of this worker's own rows; workers may differ in how many batches they get."""
        return self.data.batches(batch_size, epoch, shuffle)

    def batches(self, batch_size: int, epoch: int = 0, shuffle: bool = True) -> Iterator[Batch]:
        """As `feed`, but equally many on every rank: empty ones until the last rank is done."""
        own = self.feed(batch_size, epoch, shuffle)
        while True:
            batch = next(own, None) or Batch.empty()
            rows = torch.tensor([float(batch.num_rows)], device=self.device)
            if not self.comm.allreduce_(rows).item():
                return
            yield batch

    def rows(self) -> Iterator[Any]:
        """This worker's rows of an RDD as they are, once, in the order of their hashes."""
        if self._rows is None:
            raise SetupError("ctx.rows() reads an RDD: pass one as data=, or use ctx.feed()")
        return self._rows

    def log(self, **values: float | int | str) -> None:
        """Send values to the driver, where `on_event` sees them."""
        self._link.event("log", values=values)

    def event(self, kind: str, **fields: Any) -> None:
        self._link.event(kind, **fields)

    def flush_events(self) -> None:
        self._link.flush()

    def close_feed(self) -> None:
        """Stop reading ahead, and free the spool."""
        if self._feed is not None:
            self._feed.close()

    def close(self, failed: bool) -> None:
        """Give everything back; after a failure without waiting for the other ranks."""
        self.close_feed()
        if self._comm is not None:
            self._comm.abort() if failed else self._comm.close()

    def _feed_plan(self) -> Any:
        assert self.plan.feed is not None, "a run with data has a feed"
        return self.plan.feed

    def _check_facts(self, facts: dict[str, Any]) -> None:
        if not facts["num_rows"]:
            raise DataError("the data has no rows, so there is nothing to train on")
        if facts["problem"]:
            assert self._feed is not None
            self._feed.ingest()  # raises if the row is one of ours
            # The rank that has the row is about to report it; this rank must not step without it.
            self._link.wait_for_the_end(timeout_seconds=60)
            raise CommunicationError(f"another rank has the row: {facts['problem']}")
