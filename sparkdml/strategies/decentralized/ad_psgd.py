"""AD-PSGD: steps on local replicas, averaged in pairs in the background, without waiting.

Each rank takes its gradient at a copy of its replica, adds the step to the replica as it is by
then, and averages with a random partner while it computes the next (Lian et al. 2018, "Asynchronous
decentralized parallel stochastic gradient descent", arXiv 1710.06952). Rows are leased, so that a
quick rank trains on more of them. Now and then all ranks meet, to count, and for checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from sparkdml.checkpoint.state import State
from sparkdml.errors import ParameterError
from sparkdml.feed.batch import Batch
from sparkdml.feed.leases import LeaseService
from sparkdml.runtime.protocol.roles import Role
from sparkdml.strategies.base import Strategy, check_backend
from sparkdml.strategies.decentralized.pairwise import Exchange, Replica
from sparkdml.strategies.replicas import (
    CONSENSUS_DISTANCE,
    Replicas,
    make_alike,
    refuse_gradient_monitor,
)
from sparkdml.training.epoch import Epoch
from sparkdml.training.totals import VOTES, Totals
from sparkdml.training.training import Training, TrainingPlan


class ADPSGD(Strategy):
    """Asynchronous averaging in pairs; the model is the average over ranks.

    Slow ranks don't delay others: rows move to fast ranks, and each counts once per epoch. Which
    rank trains on which rows, and when it averages with whom, depends on timing: two runs differ.
    The history has the replicas' distance from their average, as `consensus_distance`. All rows are
    read from Spark before the first step.

    Args:
        every: after how many steps, of each rank on average, all ranks meet. To callbacks, the
            history's `steps`, checkpoints and requests to stop, what lies between two
            synchronizations is one step.
        seed: of the choice of partners.
        backend: "horovod", "torch", "mpi", or "auto", as in `AllReduce`. Partners' messages
            go by torch.
    """

    columns = (CONSENSUS_DISTANCE,)

    def __init__(self, every: int = 16, seed: int = 0, backend: str = "auto") -> None:
        if every < 1:
            raise ParameterError("every", every, "at least 1")
        self.every, self.seed = every, seed
        self.backend = check_backend(backend)

    def roles(self, num_workers: int) -> list[Role]:
        return [Role("worker", num_workers, reads="leases")]

    def driver_service(self, num_workers: int) -> LeaseService:
        return LeaseService(num_workers)

    def check(self, plan: TrainingPlan) -> None:
        refuse_gradient_monitor(self, plan)

    def run(self, role: str, training: Training) -> None:
        task, comm = training.task, training.ctx.comm
        make_alike(task, comm)
        self._replicas = Replicas(training)
        self._replica = Replica(task.params.values)
        with Exchange(self._replica, task.params.values, comm, self.seed) as exchange:
            for epoch in training.epochs(self):
                self._replica.set(task.params.values)  # of a checkpoint, perhaps
                training.ctx.leases.begin(training.request(epoch))
                comm.barrier()  # no rank averages with one that has not begun, or needs its rows
                for batches in epoch.rounds_of(self._rounds(training, epoch)):
                    own = self._train(training, batches, exchange)
                    exchange.rest()
                    if not epoch.count(self._meet(training, epoch, own)):
                        break  # no rank had a row left
                    training.clock.lap("communication")
                    training.spans.lap("communication")
                    epoch.tick()
                epoch.measured[CONSENSUS_DISTANCE] = self._replicas.judge_average()

    def _rounds(self, training: Training, epoch: Epoch) -> Iterator[Iterator[Batch]]:
        """This rank's rows between two synchronizations."""
        rows = self.every * training.global_batch
        for number in count(1):
            request = replace(training.request(epoch), until=number * rows)
            yield training.ctx.leases.batches(request)

    def _train(self, training: Training, batches: Iterator[Batch], exchange: Exchange) -> Tensor:
        """Make steps until the next synchronization; return the sums of their stats."""
        task, values = training.task, training.task.params.values
        sums = torch.zeros_like(task.params.stats, dtype=torch.float64)
        for batch in batches:
            self._replica.read_into(values)
            task.grad(batch)
            sums += task.params.stats
            own = task.totals()
            if not math.isfinite(own.loss):
                break  # raised on all ranks at the synchronization
            before = values.clone()
            task.apply(own)
            self._replica.add(values - before)
            training.clock.lap("compute")
            training.spans.lap("optimizer")
            exchange.poke()
        sums[VOTES] = sums.new_tensor(task.vote)  # those of now, and once, not once a step
        return sums

    def _meet(self, training: Training, epoch: Epoch, own: Tensor) -> Totals:
        """All ranks are here, and nothing is under way between the two collectives."""
        ctx, task = training.ctx, training.task
        totals = task.totals(ctx.comm.allreduce_(own))
        self._replica.read_into(task.params.values)
        epoch.used_rows = ctx.leases.used_rows(epoch.number)
        ctx.comm.barrier()
        return totals

    def state(self) -> State:
        return self._replicas.state()

    def load(self, state: Mapping[str, Any]) -> None:
        self._replicas.load(state)

    def __repr__(self) -> str:
        return f"ADPSGD(every={self.every}, seed={self.seed}, backend={self.backend!r})"
