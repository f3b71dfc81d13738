"""AD-PSGD: steps on local replicas, averaged in pairs in the background, without waiting.

Each rank takes its gradient at a copy of its replica, adds the step to the replica as it is by
then, and averages with a random partner while it computes the next (Lian et al. 2018, "Asynchronous
decentralized parallel stochastic gradient descent", arXiv 1710.06952). Rows are leased, so that a
quick rank trains on more of them. Now and then all ranks meet, to count, and for checkpoints.

A thread beside the computation averages. Ranks are active (even) or passive (odd), and only an
active one begins an exchange, with a passive one: so no two can wait for each other in a circle
(section 3.4). Both go halfway towards what the other had, as differences: steps that are taken
meanwhile are kept, and the sum of the two replicas stays what it was.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from sparkdml.checkpoint.state import State
from sparkdml.comm.base import Communicator
from sparkdml.comm.peers import join, messages_of, open_peers
from sparkdml.errors import CommunicationError, ParameterError
from sparkdml.feed.batch import Batch
from sparkdml.feed.leases import LeaseService
from sparkdml.network.timeouts import PEERS_LOOK_SECONDS
from sparkdml.runtime.protocol.roles import Role
from sparkdml.strategies.base import Strategy, check_backend
from sparkdml.strategies.replicas import (
    CONSENSUS_DISTANCE,
    Replicas,
    make_alike,
    refuse_gradient_monitor,
)
from sparkdml.training.epoch import Epoch
from sparkdml.training.totals import VOTES, Totals
from sparkdml.training.training import Training, TrainingPlan

ASK, REPLY = 0, 1  # tags
EXCHANGE, FAREWELL = 0.0, 1.0  # what a message is, in its last number
JOIN_SECONDS = 1.0  # after a failure


class Replica:
    """Parameters that two threads change: by steps, and by averaging."""

    def __init__(self, values: Tensor) -> None:
        self._values = values.clone()
        self._lock = threading.Lock()

    def read_into(self, tensor: Tensor) -> None:
        with self._lock:
            tensor.copy_(self._values)

    def set(self, values: Tensor) -> None:
        with self._lock:
            self._values.copy_(values)

    def add(self, change: Tensor, factor: float = 1.0) -> None:
        with self._lock:
            self._values.add_(change.to(self._values.device), alpha=factor)

    def meet(self, theirs: Tensor, ours: Tensor) -> None:
        """Go halfway towards theirs; `ours` is filled with what was here before."""
        with self._lock:
            ours.copy_(self._values)
            self._values.add_((theirs - ours).to(self._values.device), alpha=0.5)


class Exchange:
    """One rank's thread of exchanges, on a wire of its own. A context manager; every rank opens it.

    `poke` asks for an exchange, if none is under way; `rest` waits until there is none. Passive
    ranks answer at any time.
    """

    def __init__(self, replica: Replica, values: Tensor, comm: Communicator, seed: int) -> None:
        self._replica, self._comm = replica, comm
        self._peers = open_peers(comm)
        self._messages = messages_of(self._peers)
        self._is_active = comm.rank % 2 == 0
        self._partners = [r for r in range(comm.size) if r % 2 != comm.rank % 2]
        self._random = random.Random(seed * comm.size + comm.rank)
        # By way of the host's memory, and one number more: what kind of message it is.
        self._ours = torch.zeros(values.numel() + 1, dtype=values.dtype)
        self._theirs = torch.zeros_like(self._ours)
        self._changed = threading.Condition()
        self._is_wanted = self._is_ending = False
        self._error: BaseException | None = None
        self.num_exchanges = 0
        self._thread = threading.Thread(target=self._run, name="sparkdml-pairs", daemon=True)

    def poke(self) -> None:
        with self._changed:
            self._check()
            self._is_wanted = self._is_active and bool(self._partners)
            self._changed.notify_all()

    def rest(self) -> None:
        with self._changed:
            while self._is_wanted and self._error is None:
                if not self._changed.wait(PEERS_LOOK_SECONDS):
                    self._comm.check()
            self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise CommunicationError(f"averaging in pairs failed: {self._error}") from self._error

    def _run(self) -> None:
        try:
            self._lead() if self._is_active else self._answer()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _lead(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_wanted or self._is_ending)
                if not self._is_wanted:
                    break
            partner = self._random.choice(self._partners)
            self._replica.read_into(self._ours[:-1])
            self._messages.send(self._ours, partner, ASK)
            self._messages.recv_(self._theirs, partner, REPLY)
            self._replica.add(self._theirs[:-1] - self._ours[:-1], 0.5)
            with self._changed:
                self.num_exchanges += 1
                self._is_wanted = False
                self._changed.notify_all()
        self._ours[-1] = FAREWELL
        for partner in self._partners:
            self._messages.send(self._ours, partner, ASK)

    def _answer(self) -> None:
        num_here = len(self._partners)
        while num_here:
            partner = self._messages.recv_(self._theirs, None, ASK)
            if self._theirs[-1] == FAREWELL:
                num_here -= 1
                continue
            self._replica.meet(self._theirs[:-1], self._ours[:-1])
            self._messages.send(self._ours, partner, REPLY)
            self.num_exchanges += 1

    def __enter__(self) -> Exchange:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
        if error is not None:
            self._peers.abort()  # wakes the thread, here and elsewhere
            self._thread.join(JOIN_SECONDS)
            return
        join(self._thread, self._comm)  # which ends when all active ranks have said farewell
        with self._changed:
            self._check()
        self._peers.close()


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
