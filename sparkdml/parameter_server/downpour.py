"""Downpour SGD: workers that train on local models and don't wait for each other.

A worker fetches the model every `n_fetch` steps, makes its own steps in between, and pushes the
gradients that it has gathered every `n_push` steps. The servers apply pushes in the order in which
they arrive, with Adagrad, whose steps shrink where gradients are large: that makes stale gradients
bearable. One worker alone may train first, until the model has left its first, steep region. (Dean
et al. 2012, "Large scale distributed deep networks", section 4.1; Adagrad: Duchi et al. 2011.)
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparkdml.errors import ParameterError
from sparkdml.parameter_server.client.client import WorkerClient
from sparkdml.parameter_server.consistency import TAP
from sparkdml.parameter_server.model_tables import SUMS
from sparkdml.parameter_server.optimizers import Adagrad, Add, Updater
from sparkdml.parameter_server.progress import mark_of_step
from sparkdml.parameter_server.strategy import ParameterServer
from sparkdml.parameter_server.worker import ServedTraining
from sparkdml.training.optimizers import ONLY
from sparkdml.training.totals import Totals
from sparkdml.training.training import Training

if TYPE_CHECKING:
    from sparkdml.training.epoch import Epoch
    from sparkdml.training.task import Task

WARM = "warm"  # more than 0 once the first worker has made its steps alone
LOOK_SECONDS = 0.02


class Downpour(ParameterServer):
    """Asynchronous SGD through servers.

    The estimator's optimizer makes a worker's own steps between two fetches; the servers use its
    learning rate.

    Args:
        n_fetch: steps from one fetch of the model to the next.
        n_push: steps whose gradients are pushed together.
        warm_start: steps that the first worker makes alone before the others begin.
        num_servers: the number of servers, besides the workers: each takes a slot.
        replication: how many servers hold each part.
        updater: what the servers do with gradients; None for Adagrad.
        encrypted: as in `ParameterServer`.
        timeout_seconds: how long a worker tries to reach a server before it gives up.
        evaluator: as in `ParameterServer`.
    """

    def __init__(
        self,
        n_fetch: int = 5,
        n_push: int = 5,
        warm_start: int = 0,
        num_servers: int = 2,
        replication: int = 2,
        updater: Updater | None = None,
        encrypted: bool | None = None,
        timeout_seconds: float = 60.0,
        evaluator: bool = False,
    ) -> None:
        super().__init__(
            num_servers=num_servers,
            consistency=TAP(),
            replication=replication,
            updater=updater,
            encrypted=encrypted,
            timeout_seconds=timeout_seconds,
            evaluator=evaluator,
        )
        for name, value, least in (
            ("n_fetch", n_fetch, 1),
            ("n_push", n_push, 1),
            ("warm_start", warm_start, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ParameterError(name, value, f"a whole number of at least {least}")
        self.n_fetch, self.n_push, self.warm_start = n_fetch, n_push, warm_start

    def run(self, role: str, training: Training) -> None:
        if role != "worker":
            super().run(role, training)
        else:
            DownpourTraining(self, training).run()

    def updater_for(self, task: Task) -> Updater:
        return self.updater or Adagrad(float(task.optimizers[ONLY].param_groups[0]["lr"]))

    def __repr__(self) -> str:
        return (
            f"Downpour(n_fetch={self.n_fetch}, n_push={self.n_push}, "
            f"warm_start={self.warm_start}, num_servers={self.num_servers}, "
            f"replication={self.replication}, updater={self.updater!r})"
        )


@dataclass
class Gathered:
    """What a worker has computed and not yet pushed."""

    grads: Tensor
    stats: Tensor
    weight: float = field(default=0.0)
    rows: int = field(default=0)
    steps: int = field(default=0)
    last_step: int = field(default=0)


class DownpourTraining(ServedTraining):
    """One worker's run."""

    strategy: Downpour

    def __init__(self, strategy: Downpour, training: Training) -> None:
        super().__init__(strategy, training)
        self._gathered = self._nothing()
        self._unfetched = 0  # steps since the last fetch
        self._is_warm = not strategy.warm_start

    def exchange(self, totals: Totals, num_rows: int) -> None:
        params, gathered = self.task.params, self._gathered
        gathered.grads += params.grads.cpu()  # sums over rows, before `apply` makes them means
        gathered.stats += params.stats.double().cpu()
        gathered.weight += totals.weight
        gathered.rows += num_rows
        gathered.steps += 1
        gathered.last_step = self.training.step + 1
        self._unfetched += 1
        if gathered.steps >= self.strategy.n_push:
            self._push()
        if self._unfetched >= self.strategy.n_fetch:
            self.client.clock()
            self.fetch()
            self._unfetched = 0
        else:
            self.task.apply(totals)  # a step of its own, until the next fetch
        if not self._is_warm and self.training.step + 1 >= self.strategy.warm_start:
            self._end_warm_start()

    def _push(self) -> None:
        gathered, self._gathered = self._gathered, self._nothing()
        client, mark = self.client, mark_of_step(gathered.last_step)
        client.flush()  # one push at most is in doubt when a worker dies
        if gathered.weight:
            self.tables.push(client, gathered.grads, gathered.weight, mark)
        client.push(SUMS, gathered.stats, mark=mark)
        place = self.progress.place.after(gathered.rows, gathered.steps)
        self.progress.tell(client, place, mark)

    def _nothing(self) -> Gathered:
        return Gathered(torch.zeros_like(self.initial), torch.zeros_like(self.sums))

    # -- beginning and end ------------------------------------------------------------------------

    def start_epoch(self, epoch: Epoch) -> bool:
        if not super().start_epoch(epoch):
            return False
        self._unfetched = 0
        if not self._is_warm and self.ctx.rank:
            # The first worker says so after its steps, or its epoch: and Spark starts it again,
            # should it die before.
            while not self.client.pull(WARM).wait().item():
                time.sleep(LOOK_SECONDS)
            self._is_warm = True
            self.fetch()
        return True

    def _end_warm_start(self) -> None:
        """At the first worker: let the others begin."""
        if self._gathered.steps:
            self._push()
            # A restarted worker that finds WARM then collects the usual number of steps.
            self.client.flush()
        self.client.push(WARM, torch.ones(1)).wait()
        self._is_warm = True

    def end_epoch(self, epoch: Epoch) -> None:
        if self._gathered.steps:
            self._push()
        if not self._is_warm:
            self._end_warm_start()  # it had fewer steps than that
        self.client.clock()  # all of it is on the servers
        super().end_epoch(epoch)

    def resume(self) -> None:
        super().resume()
        if self.ctx.attempt:
            self._is_warm = self._is_warm or bool(self.client.pull(WARM).wait().item())

    def join(self) -> WorkerClient:
        client = super().join()
        client.init(WARM, torch.zeros(1), updater=Add())
        return client
