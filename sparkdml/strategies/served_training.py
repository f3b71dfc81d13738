"""A worker of a parameter server: compute a gradient, push it, finish the clock, pull the model.

Within an epoch workers wait for each other only as the consistency model says, and never for one
that is gone. Epochs end together: who is done leaves the clocks, so that it holds nobody up, and
comes to a meeting at the driver, for which a lost worker is waited for, since Spark starts it
again. How far each worker is stands on the servers, pushed with its gradients (see
`served_progress.py`): so one that comes back goes on where it was, and no batch counts twice.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from sparkdml.comm.meetings import MeetingCommunicator
from sparkdml.errors import CommunicationError, NonFiniteLoss
from sparkdml.feed.leased import LeasedBatch
from sparkdml.feed.position import nothing_read
from sparkdml.server.client import WorkerClient
from sparkdml.server.optimizers import Add, Updater
from sparkdml.strategies.served_progress import Place, Progress, mark_of_start, mark_of_step
from sparkdml.strategies.updaters import updater_of
from sparkdml.training.epoch import Epoch
from sparkdml.training.optimizers import ONLY
from sparkdml.training.totals import Totals
from sparkdml.training.training import Training

if TYPE_CHECKING:
    from sparkdml.strategies.parameter_server import ParameterServer

VALUES, SUMS = "values", "sums"
# Columns of the history: what a worker waited for the servers and for other workers' clocks, on
# average, and how many clocks the slowest was behind when it read.
WAIT_SECONDS, STALENESS = "wait_seconds", "staleness"


class ServedTraining:
    """One worker's run. `exchange` is what happens between a gradient and the next batch."""

    def __init__(self, strategy: ParameterServer, training: Training) -> None:
        self.strategy, self.training, self.task = strategy, training, training.task
        ctx = self.ctx = training.ctx
        # A slow worker is waited for as long as it takes: who is lost for good ends the run.
        self.comm = MeetingCommunicator(ctx.rank, ctx.size, self._ask_for_others, math.inf)
        ctx.speak_by(self.comm)
        self.leases = ctx.leases if strategy.leased else None
        self.updater = self.make_updater()
        # What the servers hold lies in this process's memory, whatever device computes.
        self.pulled = torch.empty_like(self.task.params.values, device="cpu")
        self.initial = self.task.params.values.detach().cpu().clone()
        self.sums = torch.zeros(len(self.task.params.stats), dtype=torch.float64)
        self.before = self.sums.clone()  # what they were when the epoch began
        self.progress = Progress(ctx.rank, ctx.size)
        self.client = self._join()

    def make_updater(self) -> Updater:
        """What the servers do with gradients, as the estimator's optimizer is set now."""
        return self.strategy.updater or updater_of(self.task.optimizers[ONLY])

    def run(self) -> None:
        training = self.training
        try:
            self._resume()
            for epoch in training.epochs():
                if not self._start(epoch):
                    training.finish(epoch)
                    break
                for batch in epoch:
                    if not batch.num_rows:
                        break
                    self.task.grad(batch)
                    training.clock.lap("compute")
                    mark = mark_of_step(training.step + 1)
                    if isinstance(batch, LeasedBatch) and not batch.confirm(mark):
                        epoch.own_rows -= batch.num_rows  # somebody else trains on them now
                        continue
                    self._step(epoch, batch.num_rows)
                    if self._is_stopped:
                        break
                self._end(epoch)
            if training.stopped is not None and len(training.history) < training.schedule.epochs:
                self._agree_to_go_on(len(training.history))
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
        self.exchange(totals, num_rows)
        training.clock.lap("communication")
        training.spans.lap("communication")
        epoch.count(replace(totals, wishes=0.0, objections=0.0, stops=0.0))
        epoch.tick()

    def exchange(self, totals: Totals, num_rows: int) -> None:
        """Push this batch's gradients with all that counts them, and pull the model."""
        client, params = self.client, self.task.params
        mark = mark_of_step(self.training.step + 1)
        client.push(VALUES, params.grads, weight=totals.weight, mark=mark)
        client.push(SUMS, params.stats.double().cpu(), mark=mark)
        self.progress.tell(client, self.progress.place.after(num_rows, 1), mark)
        client.clock()
        self.fetch()

    def fetch(self) -> None:
        tickets = [self.client.pull(VALUES, out=self.pulled), self.client.pull(SUMS, out=self.sums)]
        for ticket in tickets:
            ticket.wait()
        self.task.params.values.copy_(self.pulled)

    @property
    def _is_stopped(self) -> bool:
        return bool(self._totals().stops)

    def _totals(self) -> Totals:
        """Of all workers, since the epoch began."""
        return self.task.forward.totals(self.sums - self.before)

    def _follow_learning_rate(self) -> None:
        """A schedule sets it at the worker; the first worker tells the servers."""
        if self.strategy.updater is not None or self.ctx.rank:
            return
        updater = self.make_updater()
        if updater != self.updater:
            self.updater = updater
            self.client.set_optimizer(updater, [VALUES])

    # -- an epoch -------------------------------------------------------------------------------

    def _start(self, epoch: Epoch) -> bool:
        """Begin it together; False if another worker knows that the run is to end."""
        if not self._agree_to_go_on(epoch.number):
            return False
        step = self.training.step
        start = Place(epoch.number, int(epoch.own_rows), step)
        if start != replace(self.progress.place, last_rows=0, last_steps=0):
            self.progress.tell(self.client, start, mark_of_start(step))
        return True

    def _agree_to_go_on(self, number: int) -> bool:
        training = self.training
        self.comm.begin(f"start of epoch {number}")
        if self.strategy.snapshot is not None:
            if not self.ctx.rank:
                self.client.restore(self.strategy.snapshot)
            self.strategy.snapshot = None
            self.comm.barrier()
        self.fetch()
        if not self.ctx.rank and len(training.history) == number and number:
            self.ctx.ask("row", number=number, row=training.history[-1])
        met = self._exchange({"sums": self.sums.tolist(), "stopped": training.stopped})
        self.before = torch.tensor(met[0]["sums"], dtype=torch.float64)
        reasons = [one["stopped"] for one in met if one["stopped"] is not None]
        training.stopped = reasons[0] if reasons else None
        return not reasons

    def _end(self, epoch: Epoch) -> None:
        """Everybody's totals, and the model that all have come to."""
        stats = self.client.stats
        self.ctx.event("client", **stats.to_dict())
        self.ctx.traffic.sent(stats.bytes_pushed, stats.pushes)
        self.client.close()  # the others no longer wait for this worker's clock
        self.comm.begin(f"end of epoch {epoch.number}")
        self.comm.barrier()
        if self.leases is not None:
            epoch.used_rows = self.leases.used_rows(epoch.number)
        self.client = self._join()
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
        self.sums = torch.tensor(met[0]["sums"], dtype=torch.float64)
        epoch.totals = replace(self._totals(), wishes=0.0, objections=0.0, stops=0.0)
        # Those with fewer rows have made fewer steps: the run is as far as the one with the most.
        epoch.steps, training.step = (max(one["steps"][i] for one in met) for i in range(2))
        epoch.measured[WAIT_SECONDS] = sum(one["waited"] for one in met) / len(met)
        epoch.measured[STALENESS] = sum(one["behind"] for one in met) / max(
            1, sum(one["reads"] for one in met)
        )
        if any(one["stops"] for one in met):
            training.interrupt()

    def _exchange(self, value: Any) -> list[Any]:
        return [json.loads(words) for words in self.comm.exchange(json.dumps(value).encode())]

    def _ask_for_others(self, **fields: Any) -> Any:
        if self.ctx.wait_for_the_end(0):
            raise CommunicationError("the driver has ended the run, or is gone")
        return self.ctx.ask("meeting", **fields)

    # -- coming, and coming back ------------------------------------------------------------------

    def _join(self) -> WorkerClient:
        client = WorkerClient(self.ctx.rank, self.strategy.config(self.ctx), self.ctx.ask)
        try:
            client.init(VALUES, self.initial, updater=self.updater)
            client.init(SUMS, torch.zeros_like(self.sums), updater=Add(), exact=True)
            self.progress.init(client)
        except BaseException:
            client.abort()
            raise
        return client

    def _resume(self) -> None:
        """Where an earlier attempt at this task has come to, less the last step, to be sure."""
        if not self.ctx.attempt:
            return
        place = self.progress.read(self.client)
        if self.leases is None:
            place = place.before_last
        else:  # the desk has counted rows as used that the servers may never have heard of
            repeated = self.leases.repeat_last(place.epoch)
            if repeated == mark_of_step(place.step):
                place = place.before_last
        self.progress.place = place
        if place == Place():
            return
        training = self.training
        training.step = place.step
        training.history = list(self.ctx.ask("history") or [])[: place.epoch]
        epoch = Epoch(training, place.epoch)
        epoch.own_rows = epoch.rows_before = float(place.rows)
        if place.rows and self.leases is None:
            self.ctx.data.ingest()
            epoch.start = self.ctx.data.position_after(
                place.rows, place.epoch, training.schedule.shuffle, nothing_read()
            )
        training.first_epoch = epoch
        self.ctx.reached(place.step)
