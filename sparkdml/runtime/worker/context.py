"""`ctx`, what a worker's function is given: its rank, its communicator, its rows, its checkpoints.

Lives in a task's process, on its main thread, for as long as the function runs, and owns the
communicators, the feed with its spool, and the checkpointer, which open when they are first used.
Where rows move between workers, it also opens others' rows and serves its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from sparkdml.comm.base import Traffic
from sparkdml.errors import (
    CheckpointError,
    CommunicationError,
    DataError,
    ParameterError,
    SetupError,
)
from sparkdml.feed.agreement import check_any_full, read_all_first
from sparkdml.feed.batch import Batch
from sparkdml.feed.dataset import Dataset
from sparkdml.feed.epoch_order import BatchRequest
from sparkdml.feed.feed import Chunk, Feed
from sparkdml.feed.leased import LeasedBatch, LeaseReader, SpoolSource
from sparkdml.feed.order import Ints
from sparkdml.feed.shared_rows import Pool, SharedRows, exchange_positions, share_among
from sparkdml.network.connection import address_towards
from sparkdml.network.timeouts import RUN_END_SECONDS
from sparkdml.observe.timeline.recorder import NO_SPANS, NoSpans
from sparkdml.runtime.protocol.kept_spools import find_spool
from sparkdml.runtime.protocol.messages import (
    FactsQuestion,
    RowsReport,
    ServiceQuestion,
    SpoolLost,
)
from sparkdml.runtime.worker.tracing import open_traced, start_recorder

if TYPE_CHECKING:
    from sparkdml.checkpoint.checkpointer import Checkpointer
    from sparkdml.comm.base import Communicator, World
    from sparkdml.runtime.protocol.messages import Hello
    from sparkdml.runtime.protocol.plan import Plan
    from sparkdml.runtime.worker.control_client import ControlClient


NO_ROWS = "the data has no rows, so there is nothing to train on"


class Context:
    """One worker of a run. The communicator and the feed open when they are first asked for.

    `rank` and `size` count the workers of this role, and `comm` is theirs. Where a strategy has
    several roles in its gang, `gang` is the communicator of them all, in which `world.rank` and
    `world.size` count. A worker that is no part of a gang has a communicator of its own alone.
    """

    def __init__(
        self,
        plan: Plan,
        world: World,
        client: ControlClient,
        chunks: Iterator[Chunk] | None,
        rows: Iterator[Any] | None,
        spool_directory: str,
        task: Hello,
    ) -> None:
        self.plan = plan
        self.world = world
        self.rank = task.rank
        self.size = plan.role.count
        self.number = task.number
        self.attempt = task.attempt
        self.is_training_role = plan.is_training_role  # whether its role is the one that trains
        self.host = world.hosts[world.rank]
        self.local_rank = world.local_rank
        self.local_size = world.local_size
        self.device = torch.device(world.device)
        self.seed = plan.seed
        self._client = client
        # What the timeline shows of this rank; nothing is recorded in a run without one.
        self.spans: NoSpans = start_recorder(world, client) if plan.timeline else NO_SPANS
        self.traffic = Traffic()  # what this rank sends to its peers, by whichever way
        self._chunks = chunks
        self._rows = rows
        self._spool_directory = spool_directory
        self._gang: Communicator | None = None
        self._comm: Communicator | None = None
        self._feed: Feed | None = None
        self._moving: MovingRows | None = None
        self._checkpoint: Checkpointer | None = None
        if plan.checkpoint is not None and plan.checkpoint.resume is not None:
            client.step = plan.checkpoint.resume.step
        self.facts: dict[str, Any] | None = None  # of the data, once the feed is open

    @property
    def comm(self) -> Communicator:
        """The communicator among all workers; the first use, on every rank, opens it."""
        return self._open_communicators()[1]

    @property
    def gang(self) -> Communicator:
        """The communicator of all roles of the gang: `comm` itself where there is but one."""
        return self._open_communicators()[0]

    def use_communicator(self, comm: Communicator) -> None:
        """Another communicator for the workers of this role, where they are no gang."""
        assert not self.plan.role.gang, "a gang has one"
        comm.count_into(self.traffic)
        self._gang = self._comm = comm

    def _open_communicators(self) -> tuple[Communicator, Communicator]:
        if self._gang is None or self._comm is None:
            self._gang = open_traced(self.spans, self.plan.backend, self.world)
            self._gang.count_into(self.traffic)  # and with it what is split off
            roles = self.plan.job_roles
            self._comm = self._gang
            if len(roles) > 1:
                self._comm = self._gang.split(roles.index(self.plan.role))
        return self._gang, self._comm

    @property
    def checkpoint(self) -> Checkpointer | None:
        """Where to resume from and where to save, if the run was given a place for checkpoints."""
        if self._checkpoint is None and self.plan.checkpoint is not None and self.is_training_role:
            from sparkdml.checkpoint.checkpointer import Checkpointer

            worker = {
                "host": self.host,
                "device": self.world.device,
                "backend": self.plan.backend,
            }
            self._checkpoint = Checkpointer(
                self.plan.checkpoint,
                self.rank,
                size=self.size,
                worker=worker,
                reporter=self._client,
                spans=self.spans,
            )
        return self._checkpoint

    @property
    def data(self) -> Feed:
        """This worker's rows."""
        if self._feed is None:
            self._feed = self._open_feed()
            if self.plan.role.reads == "validation":
                return self._feed  # those who train judge the rows
            self.facts = self._client.ask(FactsQuestion())
            if self.facts is not None:
                self._check_facts(self.facts)
            elif self.plan.counts_rows:
                self._feed.ingest()  # raises at a bad row, before the first step
                num_rows = self._feed.num_rows + self._feed.num_validation_rows
                self._client.ask(RowsReport(num_rows))
            read_all_first(self._feed, self)
        return self._feed

    def feed(
        self,
        batch_size: int,
        epoch: int = 0,
        shuffle: bool = True,
        position: Ints | None = None,
    ) -> Iterator[Batch]:
        """One epoch of this worker's own rows; workers may differ in how many batches they get."""
        return self.read(BatchRequest(batch_size, epoch, shuffle, position))

    def read(self, request: BatchRequest) -> Iterator[Batch]:
        """As `feed`, with everything that is asked for in one value."""
        batches = self.data.batches(request)
        if self.data.plan.drop_last and request.epoch == 0 and request.position is None:
            return check_any_full(batches, request.batch_size, self)
        return batches

    def pool(self, epoch: int = 0, shuffle: bool = True, position: Ints | None = None) -> Pool:
        """One epoch of all workers' rows, to be read in pieces by any of them; all ranks call it.

        All rows are read from Spark first.
        """
        return self._moving_rows().pool(epoch, shuffle, position)

    def leased_batches(
        self,
        batch_size: int,
        epoch: int = 0,
        shuffle: bool = True,
        position: Ints | None = None,
        until: int | None = None,
        like_epoch: int | None = None,
    ) -> Iterator[LeasedBatch]:
        """What this worker is given of all workers' rows: a faster worker gets more.

        Needs a `LeaseService` at the driver, and no communicator. In each epoch, every row goes to
        one worker. All rows are read from Spark first. With `like_epoch` they come in the order and
        with the random numbers of that epoch, under whatever number they are leased.
        """
        request = BatchRequest(
            batch_size,
            epoch,
            shuffle=shuffle,
            position=position,
            until=until,
            like_epoch=like_epoch,
        )
        return self.leases.batches(request)

    @property
    def leases(self) -> LeaseReader:
        return self._moving_rows().leases

    def _moving_rows(self) -> MovingRows:
        if self._moving is None:
            self._moving = MovingRows(self)
        return self._moving

    def dataset(self, epoch: int = 0) -> Dataset:
        """This worker's own rows as a dataset to be built up as in tf.data; see `dml.Dataset`.

        Each pass over it is the next epoch, from `epoch` on.
        """
        return Dataset.over(self.data, epoch)

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

    def ask(self, what: str, timeout_seconds: float | None = None, **fields: Any) -> Any:
        """A question to the run's driver service; None if there is no answer in time."""
        return self._client.ask(ServiceQuestion(what, fields), timeout_seconds)

    def wait_for_the_end(self, timeout_seconds: float) -> bool:
        """For tasks that serve others: whether the driver has said by then that the run is over."""
        return self._client.wait_for_the_end(timeout_seconds)

    def reached(self, step: int) -> None:
        """Record where this rank is, for the report of a failure."""
        self._client.step = step

    def on_stop_request(self, handle: Callable[[str], None]) -> None:
        """Call `handle(reason)`, on another thread, when the driver asks for an early end."""
        self._client.on_stop_request(handle)

    def log(self, **values: float | int | str) -> None:
        """Send numbers and short texts to the driver, where `on_event` sees them."""
        self._client.event("log", values={name: _loggable(name, values[name]) for name in values})

    def event(self, kind: str, **fields: Any) -> None:
        self._client.event(kind, **fields)

    def flush_events(self) -> None:
        self._client.flush()

    def close_feed(self, failed: bool = False) -> None:
        """Stop reading ahead, and free the spool, unless the run may be started again."""
        if self._moving is not None:
            self._moving.close()
        if self._feed is not None:
            goes_on = self.plan.checkpoint is not None and self.plan.role.gang
            self._feed.close(keep=failed and goes_on)

    def close(self, failed: bool) -> None:
        """Release everything; after a failure without waiting for the other ranks."""
        try:
            if self._checkpoint is not None and not failed:
                self._checkpoint.wait()  # its last parts need the feed
        except BaseException:
            failed = True
            raise
        finally:
            if self._checkpoint is not None:
                self._checkpoint.close()
            self.spans.close()  # before Horovod ends, whose timeline it reads
            self.close_feed(failed)
            for comm in (self._comm, self._gang):
                if comm is not None:
                    comm.abort() if failed else comm.close()  # a second call does nothing

    def _open_feed(self) -> Feed:
        """From Spark, or from what an earlier attempt at this run has left on this host."""
        plan = self.plan.feed
        if plan is None:
            raise SetupError("this run has no data: pass data= to dml.run")
        if self.plan.role.reads == "none":
            raise SetupError(f"the role {self.plan.role.name!r} reads no data")
        kept = self.plan.spools.get(self.rank)
        if kept is not None:
            try:
                feed = Feed.reopen(str(find_spool(kept.name)), plan, self.device, self.rank)
            except (OSError, ValueError) as error:
                self._client.ask(SpoolLost())  # the next attempt gets these rows from Spark
                raise CommunicationError(f"the spool {kept.name} is gone: {error}") from error
            self._spooled(str(feed.folder))
            return feed
        assert self._chunks is not None, "a run with data has chunks"
        if self.plan.checkpoint is None:
            return Feed(self._chunks, plan, self._spool_directory, self.device, rank=self.rank)
        feed = Feed(
            self._chunks,
            plan,
            directory=self._spool_directory,
            device=self.device,
            on_sealed=self._spooled,
            rank=self.rank,
        )
        self._spooled(str(feed.folder), whole=False)  # to be removed, should this process die
        return feed

    def _spooled(self, folder: str, whole: bool = True) -> None:
        name = os.path.basename(folder)  # without its path, which the driver must not rely on
        self._client.event("spooled", host=self.host, name=name, whole=whole)
        self._client.flush()

    def _check_facts(self, facts: dict[str, Any]) -> None:
        if facts["refusal"]:
            raise CheckpointError(facts["refusal"])  # the same on every rank
        if not facts["num_rows"]:
            raise DataError(NO_ROWS)
        if facts["problem"]:
            assert self._feed is not None
            self._feed.ingest()  # raises if the row is one of ours
            # The rank that has the row is about to report it; this rank must not step without it.
            self._client.wait_for_the_end(RUN_END_SECONDS)
            raise CommunicationError(f"another rank has the row: {facts['problem']}")


MAX_LOGGED_CHARACTERS = 10_000


def _loggable(name: str, value: Any) -> Any:
    """A value that JSON can carry; a tensor or array of one number counts as that number."""
    if not isinstance(value, (bool, int, float, str, type(None))) and hasattr(value, "item"):
        try:
            value = value.item()
        except (ValueError, RuntimeError) as error:
            raise ParameterError(
                f"ctx.log({name}=...)", value, "a single number or a text", "Reduce it first"
            ) from error
    if not isinstance(value, (bool, int, float, str, type(None))):
        raise ParameterError(f"ctx.log({name}=...)", value, "a number or a text")
    if isinstance(value, str) and len(value) > MAX_LOGGED_CHARACTERS:
        return f"{value[:MAX_LOGGED_CHARACTERS]}…"
    return value


class MovingRows:
    """A worker's part in rows that move between workers; closed with its feed."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._shared = SharedRows(ctx.data, ctx.rank, ctx.plan.token, timeouts=ctx.plan.timeouts)
        self._know_each_other = False
        self._leases: LeaseReader | None = None

    def pool(self, epoch: int, shuffle: bool, position: Ints | None) -> Pool:
        """By way of the communicator; every rank calls it."""
        if not self._know_each_other:
            share_among(self._shared, self._ctx, self._serve)
            self._know_each_other = True
        positions = exchange_positions(position, self._ctx)
        return Pool(self._ctx.data, self._shared, epoch=epoch, shuffle=shuffle, positions=positions)

    @property
    def leases(self) -> LeaseReader:
        """By way of the driver service; also for a worker that can't map its peers' rows."""
        if self._leases is None:
            if self._ctx.size > 1:
                self._serve()
            source = SpoolSource(self._ctx.data, self._shared, self._ctx.rank)
            self._leases = LeaseReader(self._ctx.ask, source, self._ctx.rank)
        return self._leases

    def _serve(self) -> None:
        host = address_towards(self._ctx.plan.driver_host) or self._ctx.host
        self._shared.serve(host, self._ctx.traffic)

    def close(self) -> None:
        self._shared.close()
