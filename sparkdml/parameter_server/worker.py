"""A worker of a parameter server: compute a gradient, push it, finish the clock, pull the model.

Within an epoch workers wait for each other only as the consistency model says, and never for a lost
one. Epochs end together: a worker without rows leaves the clocks, so that no other waits for it,
and enters a collective through the driver. There the others wait for a lost worker, since Spark
restarts it. The servers hold how far each worker is, pushed with its gradients (`progress.py`), so
that a restarted worker continues where it was and no batch counts twice.

Runs in the worker's process, on the thread of the strategy's loop. It owns the client, whose
threads send and receive, and closes it at each epoch's end.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from sparkdml.checkpoint.state import Entry, State
from sparkdml.comm.driver_exchange import DriverCommunicator
from sparkdml.errors import CommunicationError, NonFiniteLoss
from sparkdml.feed.batch import Batch
from sparkdml.feed.feed import ReadAhead
from sparkdml.feed.leased import LeasedBatch
from sparkdml.feed.order import Ints, nothing_read, owned
from sparkdml.parameter_server.client.client import WorkerClient
from sparkdml.parameter_server.config import ServerConfig
from sparkdml.parameter_server.consistency import Consistency, Expulsion
from sparkdml.parameter_server.model_tables import (
    SUMS,
    ModelPull,
    ReportedBuffers,
    ServedTables,
    make_own_step,
)
from sparkdml.parameter_server.optimizers import Add, Updater
from sparkdml.parameter_server.progress import (
    PROGRESS,
    Lockstep,
    Place,
    Progress,
    mark_of_start,
    mark_of_step,
)
from sparkdml.runtime.worker.context import Context
from sparkdml.training.epoch import Epoch
from sparkdml.training.task import Task
from sparkdml.training.totals import EpochProgress, Totals
from sparkdml.training.training import Training


class Settings(Protocol):
    """What a worker asks of its strategy."""

    consistency: Consistency
    expulsion: Expulsion | None
    updater: Updater | None  # what the user chose for the servers, if anything
    leased: bool
    evaluator: bool

    def config(self, ctx: Context) -> ServerConfig: ...
    def updater_for(self, task: Task) -> Updater: ...
    def overlaps(self, updater: Updater) -> bool: ...
    def batches(self, training: Training, epoch: Epoch) -> Iterator[Batch]: ...


# Columns of the history: what a worker waited for the servers and for other workers' clocks, on
# average, and how many clocks the slowest was behind when it read.
WAIT_SECONDS, STALENESS = "wait_seconds", "staleness"


class ServedTraining:
    """One worker's run. `exchange` is what happens between a gradient and the next batch."""

    def __init__(self, strategy: Settings, training: Training) -> None:
        self.strategy, self.training, self.task = strategy, training, training.task
        ctx = self.ctx = training.ctx
        # No time-out: slow workers are waited for, and a worker lost for good ends the run.
        self.comm = DriverCommunicator(ctx.rank, ctx.size, self._ask_driver, math.inf)
        ctx.use_communicator(self.comm)
        self.leases = ctx.leases if strategy.leased else None
        self.updater = self.make_updater()
        tells = strategy.evaluator and not ctx.rank
        self.buffers = ReportedBuffers(self.task.module) if tells else None
        self.tables = ServedTables.of(self.task.module, self.task.params, self.updater)
        self.initial = self.task.params.values.detach().cpu().clone()
        self.sums = torch.zeros(len(self.task.params.stats), dtype=torch.float64)
        self.before = self.sums.clone()  # what they were when the epoch began
        self.begun = self.sums.clone()  # the same, or when the run was resumed within it
        self.progress = Progress(ctx.rank, ctx.size)
        self.pull = ModelPull(
            self.tables, self.task.params.values, self.sums, strategy.overlaps(self.updater)
        )
        self.lockstep = Lockstep(self.task, self.sums, self._is_lockstep_needed())
        self._num_rows_told = 0  # of the history
        self._is_with_others = not ctx.attempt
        self._is_told = False  # whether the servers know that this worker has begun the epoch
        self._batches: ReadAhead[Batch] | None = None  # of the epoch, where reading can overlap
        # Of a checkpoint, to be put onto the servers; and what had been counted before its epoch.
        self._snapshot: Mapping[str, Any] | None = None
        self._sums_before: list[float] | None = None
        self.client = self.join()

    def _is_lockstep_needed(self) -> bool:
        strategy, checkpoint = self.strategy, self.training.checkpoint
        saves = checkpoint is not None and checkpoint.writes
        return saves and strategy.consistency.aggregates and strategy.expulsion is None

    def make_updater(self) -> Updater:
        """What the servers do with gradients, as the estimator's optimizer is set now."""
        return self.strategy.updater_for(self.task)

    def run(self) -> None:
        training = self.training
        try:
            self.resume()
            for epoch in training.epochs(self):
                if not self.start_epoch(epoch):
                    training.finish(epoch, self)
                    break
                for batch in epoch:
                    self.lockstep.object_if_behind()
                    if not batch.num_rows:
                        if self.lockstep.applies and self._step_without_rows(epoch):
                            continue
                        break
                    self.pull.prepare_gradient(self.client)
                    began = time.perf_counter()
                    self.task.grad(batch)
                    self.pull.gradient_seconds = time.perf_counter() - began
                    training.clock.lap("compute")
                    mark = mark_of_step(training.step + 1)
                    if isinstance(batch, LeasedBatch) and not batch.confirm(mark):
                        epoch.rows_here -= batch.num_rows  # another worker trains on them now
                        continue
                    self._step(epoch, batch.num_rows)
                    if self._is_stopped:
                        break
                self.end_epoch(epoch)
            if training.stopped is not None and len(training.history) < training.schedule.epochs:
                self._agree_to_continue(len(training.history))
            self.client.close()
        except BaseException:
            self.client.abort()
            raise

    # -- a step ---------------------------------------------------------------------------------

    def _step(self, epoch: Epoch, num_rows: int) -> None:
        training = self.training
        totals = self.task.totals()
        if not math.isfinite(totals.loss):
            raise NonFiniteLoss(totals.loss, epoch.number + 1, training.step + 1, self.ctx.rank)
        self._follow_learning_rate()
        if self.buffers is not None:
            self.buffers.tell(self.client)
        self.exchange(totals, num_rows)
        training.clock.lap("communication")
        training.spans.lap("communication")
        epoch.count(self.lockstep.agreed(self.client, totals))
        epoch.tick()

    def _step_without_rows(self, epoch: Epoch) -> bool:
        """Make a step without a row, with workers that have some; False if none has."""
        self.task.grad(Batch.empty())
        self.client.push(SUMS, self.task.params.stats.double().cpu()).wait()
        self.client.clock()
        self.fetch()
        self.training.clock.lap("communication")
        totals = self.lockstep.agreed(self.client, Totals())
        if self._is_stopped or not self.lockstep.has_rows:
            return False
        if totals.rows:
            epoch.count(totals)
        epoch.tick()
        return True

    def exchange(self, totals: Totals, num_rows: int) -> None:
        """Push this batch's gradients with all that counts them, and pull the model."""
        client, params, pull = self.client, self.task.params, self.pull
        pull.end()
        client.flush()  # one step at most is in doubt when a worker dies
        mark = mark_of_step(self.training.step + 1)
        grads = params.grads.to("cpu", copy=True) if pull.overlaps else params.grads
        self.tables.push(client, grads, totals.weight, mark)
        client.push(SUMS, params.stats.double().cpu(), mark=mark)
        self.progress.tell(client, self.progress.place.after(num_rows, 1), mark)
        client.clock_behind()
        pull.begin(client)
        if pull.overlaps:
            make_own_step(params.values, params.grads, totals.weight, self.make_updater())
            return
        if self._batches is not None:
            self._batches.advance()
        pull.end()
        client.flush()  # before the next gradient is written where this one lies

    def fetch(self) -> None:
        self.pull.begin(self.client)
        self.pull.end()

    @property
    def _is_stopped(self) -> bool:
        return bool(self.task.totals(self.sums - self.begun).stops)

    def _totals(self) -> Totals:
        """Of all workers, since the epoch began."""
        return self.task.totals(self.sums - self.before)

    def _follow_learning_rate(self) -> None:
        """A schedule sets it at the worker; the first worker tells the servers."""
        for set_rate in self.task.on_agreed:
            set_rate()
        if self.strategy.updater is not None or self.ctx.rank:
            return
        updater = self.make_updater()
        if updater != self.updater:
            self.updater = updater
            self.client.set_optimizer(updater, self.tables.names)

    # -- an epoch -------------------------------------------------------------------------------

    def start_epoch(self, epoch: Epoch) -> bool:
        """Begin it together; False if another worker knows that the run is to end."""
        if not self._agree_to_continue(epoch.number):
            return False
        if not self._is_told:  # else an earlier attempt has reported it
            start = Place(epoch.number, 0, self.training.step)
            if start != self.progress.place:
                self.progress.tell(self.client, start, mark_of_start(start.step))
        self._is_told = False
        # One that was started again may be behind the others, until the epoch's end.
        self.lockstep.begin_epoch(self.client, is_in_step=self._is_with_others)
        self._is_with_others = True
        return True

    def _agree_to_continue(self, number: int) -> bool:
        training = self.training
        sums_before = self._sums_before
        if self._snapshot is not None:
            self.comm.begin("a checkpoint")  # which no worker enters that has trained since
            # Once only: a worker restarted after the barrier must not undo what the others did.
            if not self.ctx.rank and not self.ctx.ask("restored", done=False):
                self.tables.check(self._snapshot)
                self.client.restore(self._snapshot)
                self.ctx.ask("restored", done=True)
            self._snapshot = self._sums_before = None
            self.comm.barrier()
        self.comm.begin(f"start of epoch {number}")
        self.fetch()
        if not self.ctx.rank:
            for index in range(self._num_rows_told, len(training.history)):
                self.ctx.ask("row", number=index + 1, row=training.history[index])
            self._num_rows_told = len(training.history)
        own = {"sums": self.sums.tolist(), "stopped": training.stopped}
        own["before"] = own["sums"] if sums_before is None else sums_before
        met = self._exchange(own)
        self.begun = torch.tensor(met[0]["sums"], dtype=torch.float64)
        self.before = torch.tensor(met[0]["before"], dtype=torch.float64)
        reasons = [one["stopped"] for one in met if one["stopped"] is not None]
        training.stopped = reasons[0] if reasons else None
        return not reasons

    def end_epoch(self, epoch: Epoch) -> None:
        """Return all workers' totals, and their common model."""
        self.pull.drop()
        self.client.flush()
        stats = self.client.stats
        self.ctx.event("client", **stats.to_dict())
        self.ctx.traffic.sent(stats.bytes_pushed, stats.pushes)
        self.client.close()  # the others no longer wait for this worker's clock
        self.comm.begin(f"end of epoch {epoch.number}")
        self.comm.barrier()
        if self.leases is not None:
            epoch.used_rows = self.leases.used_rows(epoch.number)
        self.client = self.join()
        self.fetch()
        training = self.training
        own = {
            "sums": self.sums.tolist(),
            "steps": [epoch.steps, training.step],
            "stops": training.stop_request is not None,
            "waited": stats.wait_seconds,
            "behind": sum(clocks * reads for clocks, reads in stats.staleness.items()),
            "reads": stats.staleness.total(),
        }
        met = self._exchange(own)
        self.sums.copy_(torch.tensor(met[0]["sums"], dtype=torch.float64))
        epoch.totals = self._totals().without_votes()
        # Those with fewer rows have made fewer steps: the run is as far as the one with the most.
        epoch.steps, training.step = (max(one["steps"][i] for one in met) for i in range(2))
        epoch.measured[WAIT_SECONDS] = sum(one["waited"] for one in met) / len(met)
        epoch.measured[STALENESS] = sum(one["behind"] for one in met) / max(
            1, sum(one["reads"] for one in met)
        )
        if any(one["stops"] for one in met):
            training.interrupt()
        else:
            self.before = self.sums.clone()

    def _exchange(self, value: Any) -> list[Any]:
        return [json.loads(words) for words in self.comm.exchange(json.dumps(value).encode())]

    def _ask_driver(self, **fields: Any) -> Any:
        if self.ctx.wait_for_the_end(0):
            raise CommunicationError("the driver has ended the run, or is gone")
        return self.ctx.ask("collective", **fields)

    # -- what the loop asks for -----------------------------------------------------------------

    def batches(self, training: Training, epoch: Epoch) -> Iterator[Batch]:
        """With leases nothing is read ahead: a batch counts as this worker's once it has it."""
        own = self.strategy.batches(training, epoch)
        if self.leases is not None:
            return own
        self._batches = ReadAhead(own, training.reading)
        return self._batches

    def state(self) -> State:
        """The tables with what the updater remembers; how far workers are is the checkpoint's."""
        if self.ctx.rank:
            return {}
        tables = dict(self.client.snapshot())
        del tables[PROGRESS]
        return {"tables": Entry(tables), "sums_before": Entry(self.before.tolist())}

    def load(self, state: Mapping[str, Any]) -> None:
        self._snapshot, self._sums_before = state["tables"], state.get("sums_before")

    # -- joining, also after a restart ------------------------------------------------------------

    def resume(self) -> None:
        """In a restarted worker: begin with the last step that it made before it was lost."""
        if not self.ctx.attempt:
            return
        place = self.progress.place = self._find_place()
        if place == Place():
            return  # it had made none
        training, ctx = self.training, self.ctx
        training.step = place.step
        training.history = list(ctx.ask("history") or [])[: place.epoch]
        position, rows_before = _where_resumed(training, place.epoch)
        start = position if position.any() else None
        if place.rows and self.leases is None:
            ctx.data.ingest()
            begun = EpochProgress(place.epoch, position)
            start = ctx.data.position_after(place.rows, training.request(begun))
        training.begins_at = EpochProgress(place.epoch, start, rows_before + place.rows)
        self._is_told = True
        ctx.reached(place.step)

    def _find_place(self) -> Place:
        place = self.progress.read(self.client)
        if self.leases is None:
            return place.before_last
        # The driver may have counted rows as used whose push never reached the servers.
        repeated = self.leases.repeat_last(place.epoch)
        return place.before_last if repeated == mark_of_step(place.step) else place

    def join(self) -> WorkerClient:
        client = WorkerClient(self.ctx.rank, self.strategy.config(self.ctx), self.ctx.ask)
        try:
            self.tables.init(client, self.initial, self.updater)
            client.init(SUMS, torch.zeros_like(self.sums), updater=Add(), exact=True)
            self.progress.init(client)
        except BaseException:
            client.abort()
            raise
        return client


def _where_resumed(training: Training, number: int) -> tuple[Ints, float]:
    """Return where in this epoch's rows the run was resumed, and how many were read by then."""
    checkpoint = training.checkpoint
    state = None if checkpoint is None else checkpoint.load_entries()
    if state is None or state["progress"].value["epoch"]["number"] != number:
        return nothing_read(), 0.0
    position = owned(state["position"].value, training.ctx.rank, training.ctx.size)
    return position, float(state["own_rows"].value)
