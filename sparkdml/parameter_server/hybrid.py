"""Allreduce inside groups, a parameter server between them.

The workers of a group sum their gradients through their communicator, as one large worker; one of
them pushes the sum and broadcasts what it pulls to the others. There are fewer clients than
workers, so updates are less stale, and a slow host delays its own group alone. Workers are a gang,
since a collective needs all of a group. (Mamidala et al. 2018, "MXNET-MPI", arXiv 1801.03855.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from sparkdml.checkpoint.state import Entry, State
from sparkdml.comm.base import Communicator
from sparkdml.errors import NonFiniteLoss, ParameterError
from sparkdml.feed.batch import Batch
from sparkdml.parameter_server.arguments import updater_of
from sparkdml.parameter_server.client.client import WorkerClient
from sparkdml.parameter_server.consistency import TAP, Consistency
from sparkdml.parameter_server.optimizers import Updater
from sparkdml.parameter_server.strategy import ParameterServer
from sparkdml.runtime.protocol.roles import Role
from sparkdml.strategies.allreduce import BACKENDS
from sparkdml.strategies.layered_sgd import group_workers
from sparkdml.training.optimizers import ONLY
from sparkdml.training.totals import Totals

if TYPE_CHECKING:
    from sparkdml.training.epoch import Epoch
    from sparkdml.training.training import Training

VALUES = "values"
BUCKET_BYTES = 8 << 20
FIRST = 0  # of a group: the one that speaks to the servers


class Hybrid(ParameterServer):
    """Add gradients up inside groups of workers, and go through servers between the groups.

    Epochs end together. A checkpoint is taken at the end of an epoch, and within only where the run
    is asked to stop.

    Args:
        group_size: how many workers act as one. Workers of one host stay together.
        backend: of the groups' communicator, as in `AllReduce`.
        num_servers, consistency, replication, updater, encrypted, timeout_seconds: as for
            `ParameterServer`; groups are what may run apart. By default they never wait.
    """

    def __init__(
        self,
        group_size: int = 2,
        num_servers: int = 2,
        consistency: Consistency | None = None,
        replication: int = 2,
        updater: Updater | None = None,
        encrypted: bool | None = None,
        timeout_seconds: float = 60.0,
        backend: str = "auto",
    ) -> None:
        if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1:
            raise ParameterError("group_size", group_size, "a whole number of at least 1")
        if backend not in BACKENDS:
            raise ParameterError("backend", backend, f"one of {', '.join(map(repr, BACKENDS))}")
        super().__init__(
            num_servers=num_servers,
            consistency=TAP() if consistency is None else consistency,
            replication=replication,
            updater=updater,
            encrypted=encrypted,
            timeout_seconds=timeout_seconds,
        )
        self.group_size, self.backend = group_size, backend

    def roles(self, num_workers: int) -> list[Role]:
        servers = super().roles(num_workers)[1:]
        return [Role("worker", num_workers), *servers]

    def run(self, role: str, training: Training) -> None:
        if role == "server":
            super().run(role, training)
            return
        ctx = training.ctx
        groups = group_workers(ctx.world.hosts, self.group_size)
        with ctx.comm.split(groups[ctx.rank]) as group, self.open_wire(ctx, group) as wire:
            HybridTraining(self, training, wire, groups).run()

    def __repr__(self) -> str:
        return super().__repr__().replace("(", f"(group_size={self.group_size}, ", 1)


class HybridTraining:
    """One worker's run. Only the first of each group has a client."""

    def __init__(
        self, strategy: Hybrid, training: Training, group: Communicator, groups: Sequence[int]
    ) -> None:
        self.strategy, self.training, self.task = strategy, training, training.task
        ctx = self.ctx = training.ctx
        self.group = group
        self.members = [rank for rank, group in enumerate(groups) if group == groups[ctx.rank]]
        self.updater = strategy.updater or updater_of(self.task.optimizers[ONLY])
        self.initial = self.task.params.values.detach().cpu().clone()
        self.pulled = torch.empty_like(self.initial)
        self.buckets = self.task.params.buckets(BUCKET_BYTES)
        self.client: WorkerClient | None = None
        self._snapshot: Mapping[str, Any] | None = None  # of a checkpoint, for the servers
        self._stats = torch.zeros(len(self.task.params.stats), dtype=torch.float64)

    def run(self) -> None:
        training, task = self.training, self.task
        self._join()
        try:
            for epoch in training.epochs(self):
                before = self._start(epoch)
                for batch in epoch:
                    task.grad(batch)
                    training.clock.lap("compute")
                    for bucket in self.buckets:
                        self.group.allreduce_(bucket.tensor)
                    totals = task.totals()
                    if not totals.rows or not self._step(epoch, totals):
                        break
                self._end(epoch, before)
            self._leave()
        except BaseException:
            if self.client is not None:
                self.client.abort()
            raise

    def _step(self, epoch: Epoch, totals: Totals) -> bool:
        """With the group's sums; False if one of the group wants to end the run."""
        training = self.training
        if not math.isfinite(totals.loss):
            self._not_finite(epoch, totals.loss)
        if self.client is not None:
            self._stats += self.task.params.stats.double().cpu()
            self._follow_learning_rate(self.client)
            self.client.push(VALUES, self.task.params.grads, weight=totals.weight).wait()
            self.client.clock()
        self._fetch()
        training.clock.lap("communication")
        training.spans.lap("communication")
        epoch.count(totals.without_votes())
        epoch.tick()
        return not totals.stops

    def _fetch(self) -> None:
        values = self.task.params.values
        if self.client is not None:
            values.copy_(self.client.pull(VALUES, out=self.pulled).wait())
        self.group.broadcast_(values, FIRST)

    def _follow_learning_rate(self, client: WorkerClient) -> None:
        """A schedule sets it at the worker; the first worker tells the servers."""
        for set_rate in self.task.on_agreed:
            set_rate()
        if self.strategy.updater is not None or self.ctx.rank:
            return
        updater = updater_of(self.task.optimizers[ONLY])
        if updater != self.updater:
            self.updater = updater
            client.set_optimizer(updater, [VALUES])

    # -- an epoch -------------------------------------------------------------------------------

    def _start(self, epoch: Epoch) -> Totals:
        """From one model, that of a checkpoint if there is one; what had been counted before."""
        if self._snapshot is not None:
            if self.client is not None and not self.ctx.rank:
                self.client.restore(self._snapshot)
            self._snapshot = None
        self.ctx.comm.barrier()  # every group's client is there, so that their clocks begin alike
        self._fetch()
        self._stats.zero_()
        return epoch.totals

    def _end(self, epoch: Epoch, before: Totals) -> None:
        """Return all ranks' totals, and the groups' common model."""
        self._leave()  # the other groups no longer wait for this one's clock
        stats = self._stats.to(self.ctx.device)
        stats = self.ctx.comm.allreduce_(stats)  # and all groups are done
        steps = torch.tensor([epoch.steps, self.training.step], device=self.ctx.device)
        steps = self.ctx.comm.allreduce_(steps, "max")
        self._join()
        self._fetch()
        totals = self.task.totals(stats)
        epoch.steps, self.training.step = (int(value) for value in steps)
        epoch.totals = before + totals.without_votes()
        wish = torch.tensor([float(self.training.stop_request is not None)]).to(self.ctx.device)
        if self.ctx.comm.allreduce_(wish).item():
            self.training.interrupt()

    def _not_finite(self, epoch: Epoch, loss: float) -> None:
        own = self.task.forward.last_loss
        mine = torch.tensor([0.0 if own is None else float(own)], device=self.ctx.device)
        losses = torch.cat(self.group.allgather(mine)).tolist()
        place = next((p for p, value in enumerate(losses) if not math.isfinite(value)), 0)
        raise NonFiniteLoss(loss, epoch.number + 1, self.training.step + 1, self.members[place])

    # -- what the loop asks for -----------------------------------------------------------------

    def batches(self, training: Training, epoch: Epoch) -> Iterator[Batch]:
        return self.strategy.batches(training, epoch)

    def state(self) -> State:
        if self.ctx.rank or self.client is None:
            return {}
        return {"tables": Entry(dict(self.client.snapshot()))}

    def load(self, state: Mapping[str, Any]) -> None:
        self._snapshot = state["tables"]

    # -- the servers ----------------------------------------------------------------------------

    def _join(self) -> None:
        if self.group.rank != FIRST:
            return
        client = WorkerClient(self.ctx.rank, self.strategy.config(self.ctx), self.ctx.ask)
        try:
            client.init(VALUES, self.initial, updater=self.updater)
        except BaseException:
            client.abort()
            raise
        self.client = client

    def _leave(self) -> None:
        if self.client is not None:
            self.ctx.event("client", **self.client.stats.to_dict())
            self.ctx.traffic.sent(self.client.stats.bytes_pushed, self.client.stats.pushes)
            self.client.close()
            self.client = None
