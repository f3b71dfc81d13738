"""A worker of a parameter server: compute a gradient, push it, finish the clock, pull the model.

Within an epoch workers wait for each other only as the consistency model says, and never for one
that is gone. Epochs end together: who is done leaves the clocks, so that it holds nobody up, and
comes to a meeting at the driver, for which a lost worker is waited for, since Spark starts it
again. How far each worker is stands on the servers, pushed with its gradients: so one that comes
back goes on behind the last batch that the servers know of.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparkdml.comm.meetings import MeetingCommunicator
from sparkdml.errors import CommunicationError, NonFiniteLoss
from sparkdml.feed.leased import LeasedBatch
from sparkdml.feed.position import nothing_read
from sparkdml.server.client import WorkerClient
from sparkdml.server.optimizers import Add, Updater
from sparkdml.strategies.served_buffers import ToldBuffers
from sparkdml.strategies.updaters import updater_of
from sparkdml.training.epoch import Epoch
from sparkdml.training.optimizers import ONLY
from sparkdml.training.totals import Totals
from sparkdml.training.training import Training

if TYPE_CHECKING:
    from sparkdml.strategies.parameter_server import ParameterServer

VALUES, SUMS, PROGRESS = "values", "sums", "progress"
NUM_PROGRESS = 3  # of a worker: its epoch, its rows in it, its steps
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
        tells = strategy.evaluator and not ctx.rank
        self.buffers = ToldBuffers(self.task.module) if tells else None
        # What the servers hold lies in this process's memory, whatever device computes.
        self.pulled = torch.empty_like(self.task.params.values, device="cpu")
        self.initial = self.task.params.values.detach().cpu().clone()
        self.sums = torch.zeros(len(self.task.params.stats), dtype=torch.float64)
        self.before = self.sums.clone()  # what they were when the epoch began
        self.told = torch.zeros(3, dtype=torch.float64)  # this worker's progress, as pushed
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
                    if isinstance(batch, LeasedBatch) and not batch.confirm():
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
        if self.buffers is not None:
            self.buffers.tell(self.client)
        self.exchange(totals, num_rows)
        training.clock.lap("communication")
        training.spans.lap("communication")
        epoch.count(replace(totals, wishes=0.0, objections=0.0, stops=0.0))
        epoch.tick()

    def exchange(self, totals: Totals, num_rows: int) -> None:
        """Push this batch's gradients with all that counts them, and pull the model."""
        client, params = self.client, self.task.params
        client.push(VALUES, params.grads, weight=totals.weight)
        self.tell(num_rows)
        client.clock()
        self.fetch()

    def tell(self, num_rows: int) -> None:
        """Push what was measured, and how far this worker is."""
        self.client.push(SUMS, self.task.params.stats.double().cpu())
        self._tell_progress(self.told + torch.tensor([0.0, num_rows, 1.0], dtype=torch.float64))

    def fetch(self) -> None:
        tickets = [self.client.pull(VALUES, out=self.pulled), self.client.pull(SUMS, out=self.sums)]
        for ticket in tickets:
            ticket.wait()
        self.task.params.values.copy_(self.pulled)

    def _tell_progress(self, progress: Tensor) -> None:
        change = (progress - self.told).view(1, -1)
        self.told = progress
        self.client.push(PROGRESS, change, rows=[self.ctx.rank])

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
        rows = torch.tensor([epoch.number, epoch.own_rows, self.training.step]).double()
        if not torch.equal(rows, self.told):
            self._tell_progress(rows)
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
            nothing = torch.zeros(self.ctx.size, len(self.told), dtype=torch.float64)
            client.init(PROGRESS, nothing, rows=True, updater=Add(), exact=True)
        except BaseException:
            client.abort()
            raise
        return client

    def _resume(self) -> None:
        """Where an earlier attempt at this task has come to."""
        self.told = self.client.pull(PROGRESS, rows=[self.ctx.rank]).wait().view(-1).clone()
        if not self.ctx.attempt or not self.told.any():
            return
        training = self.training
        number, num_rows, step = (int(value) for value in self.told)
        training.step = step
        training.history = list(self.ctx.ask("history") or [])[:number]
        epoch = Epoch(training, number)
        epoch.own_rows = epoch.rows_before = float(num_rows)
        if num_rows and self.leases is None:  # else the desk knows what is left
            self.ctx.data.ingest()
            epoch.start = self.ctx.data.position_after(
                num_rows, number, training.schedule.shuffle, nothing_read()
            )
        training.first_epoch = epoch
        self.ctx.reached(step)
