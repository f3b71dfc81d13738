"""The parameter server as a strategy: servers hold the model, workers push gradients and pull it.

Servers and workers are ordinary tasks of two Spark jobs, so Spark restarts each one by itself while
the others continue; the driver keeps the membership. The consistency model says which version of
the model may be read (Li et al. 2014, OSDI; Ho et al. 2013; Hsieh et al. 2017); with `BSP()` every
step equals one of AllReduce. This file has the driver's side; a worker's loop is in `worker.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from sparkdml.comm.driver_exchange import DriverExchange
from sparkdml.errors import ParameterError
from sparkdml.feed.batch import Batch
from sparkdml.feed.leases import LeaseService
from sparkdml.network.connection import Message
from sparkdml.network.timeouts import LEASE_SECONDS, Timeouts
from sparkdml.parameter_server.application import Applications, StandingServers
from sparkdml.parameter_server.arguments import (
    check_expulsion,
    check_overlap,
    check_overlap_with,
    may_overlap,
    updater_of,
)
from sparkdml.parameter_server.config import ServerConfig
from sparkdml.parameter_server.consistency import BSP, Consistency, Expulsion
from sparkdml.parameter_server.evaluator import EVALUATOR, Evaluator, check_evaluator
from sparkdml.parameter_server.membership import Membership
from sparkdml.parameter_server.optimizers import Updater
from sparkdml.parameter_server.server_task import serve_until_the_end
from sparkdml.parameter_server.wire.seal import JobKey
from sparkdml.parameter_server.worker import STALENESS, WAIT_SECONDS, ServedTraining
from sparkdml.runtime.protocol.roles import Role
from sparkdml.runtime.protocol.service import TaskIdentity
from sparkdml.strategies.base import Strategy
from sparkdml.training.callbacks import LearningRateSchedule
from sparkdml.training.callbacks.base import overriding
from sparkdml.training.epoch import Epoch
from sparkdml.training.optimizers import ONLY
from sparkdml.training.training import Training, TrainingPlan

if TYPE_CHECKING:
    from sparkdml.parameter_server.application import Application
    from sparkdml.runtime.worker.context import Context
    from sparkdml.training.task import Task

NUM_SERVERS = 2


class ParameterServer(Strategy):
    """Train through servers that hold the model in parts.

    The history has `wait_seconds`, what a worker waited in the epoch on average, and `staleness`,
    how many clocks what it read was behind. Under `BSP` checkpoints are taken after any step, and
    a resumed run ends with the same bits; under the others, and with `expulsion`, they are taken at
    the ends of epochs.

    Args:
        num_servers: the number of servers, besides the workers: each takes a slot.
        consistency: how far workers may run apart within an epoch: `BSP()`, `SSP(staleness)`,
            `ASP(significance)` or `TAP()`.
        replication: how many servers hold each part, so that none is lost with a server.
        updater: what the servers do with gradients; None takes the settings of the estimator's
            optimizer, which must be torch's SGD, Adagrad or Adam.
        encrypted: whether messages are encrypted; None: if Spark's settings ask for it. They are
            always authenticated.
        timeout_seconds: how long a worker tries to reach a server before it gives up.
        leased: whether rows are leased to workers in small portions, so that a slow worker trains
            on fewer of them; each row is used once per epoch. (A run that was stopped within an
            epoch resumes with as many rows as were left, but perhaps not with the same ones.) For
            `ASP` and `TAP`: under the others, workers wait for the slowest in any case.
        expulsion: `Expulsion(…)`: a worker that stays far slower than the others is no longer
            waited for, until it keeps up again. For `BSP` and `SSP`; None waits for all workers.
            With `BSP(stand_in=True)` its last gradient is used again if it has sent none.
        overlap: whether a worker continues with its current model, after applying its own last step
            to it, while the next model is being pulled: within the bound of `SSP`, always under
            `ASP` and `TAP`. None: if the servers use SGD without momentum, whose steps a worker can
            make by itself.
        evaluator: whether one more task, which takes a slot, evaluates the rows that `validation=`
            holds out while the workers train. It repeatedly takes a snapshot of the model that is
            consistent over all servers: with every worker's pushes of its first c clocks and no
            others. No worker waits for it. Its results are events of the kind `evaluation`, and
            are in `fitted.history.evaluations`; the epochs' own `val_loss` is measured by the
            workers, on the model at the epoch's end.
        servers: a `ServerGroup` to use, instead of starting `num_servers` servers; other runs may
            use it at the same time.
    """

    columns = (WAIT_SECONDS, STALENESS)

    def __init__(
        self,
        num_servers: int = NUM_SERVERS,
        consistency: Consistency | None = None,
        replication: int = 2,
        updater: Updater | None = None,
        encrypted: bool | None = None,
        timeout_seconds: float = 60.0,
        leased: bool = False,
        expulsion: Expulsion | None = None,
        overlap: bool | None = None,
        evaluator: bool = False,
        servers: StandingServers | None = None,
    ) -> None:
        if servers is not None:
            num_servers = check_servers(servers, num_servers)
        for name, value in (("num_servers", num_servers), ("replication", replication)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ParameterError(name, value, "a whole number of at least 1")
        consistency = BSP() if consistency is None else consistency
        if not isinstance(consistency, Consistency):
            raise ParameterError(
                "consistency", consistency, "BSP(), SSP(staleness), ASP(significance) or TAP()"
            )
        if updater is not None and not isinstance(updater, Updater):
            raise ParameterError(
                "updater", updater, "one of sparkdml.parameter_server.optimizers or None"
            )
        if not timeout_seconds > 0:
            raise ParameterError("timeout_seconds", timeout_seconds, "more than 0")
        if leased and consistency.waits:
            raise ParameterError(
                "leased",
                leased,
                f"False with {consistency!r}, under which workers wait for the slowest",
                "Use consistency=TAP() or ASP().",
            )
        check_expulsion(consistency, expulsion)
        check_overlap(overlap, consistency)
        self.num_servers, self.consistency, self.replication = num_servers, consistency, replication
        self.updater, self.encrypted, self.timeout_seconds = updater, encrypted, timeout_seconds
        self.leased, self.expulsion, self.overlap = leased, expulsion, overlap
        self.evaluator, self.servers = evaluator, servers

    def roles(self, num_workers: int) -> list[Role]:
        roles = [
            Role("worker", num_workers, gang=False, reads="leases" if self.leased else "shards"),
        ]
        if self.servers is None:
            roles.append(Role("server", self.num_servers, gang=False, reads="none"))
        if self.evaluator:
            roles.append(Role(EVALUATOR, 1, gang=False, reads="validation"))
        return roles

    def check(self, plan: TrainingPlan) -> None:
        """The servers make the steps, and know of one gradient over all parameters."""
        if self.evaluator:
            check_evaluator(plan)
        task = plan.task
        refused: list[tuple[str, Any, object]] = [
            ("clipNorm", task.clip_norm, None),
            ("parameterGroups", task.parameter_groups, None),
            ("precision", task.precision if task.precision == "fp16" else None, None),
            ("optimizer", task.optimizer if isinstance(task.optimizer, Mapping) else None, None),
        ]
        for name, value, allowed in refused:
            if value is not allowed:
                raise ParameterError(
                    name, value, f"left out with {type(self).__name__}: the servers make the steps"
                )
        assert not isinstance(task.optimizer, Mapping)
        updater = self.updater
        if updater is None:
            updater = updater_of(task.optimizer([torch.nn.Parameter(torch.zeros(1))]))
        check_overlap_with(self.overlap, updater)
        for callback in overriding(plan.callbacks, "on_gradient"):
            if not isinstance(callback, LearningRateSchedule):  # which looks at no gradient
                raise ParameterError(
                    "callbacks",
                    callback,
                    f"without on_gradient with {type(self).__name__}: the servers add gradients up",
                )
        if self.updater is not None and any(
            isinstance(callback, LearningRateSchedule) for callback in plan.callbacks
        ):
            raise ParameterError(
                "callbacks",
                "LearningRateSchedule",
                "left out if updater= is given, whose learning rate it would not change",
            )
        if getattr(task.loss, "reduction", None) == "sum":
            raise ParameterError(
                "loss",
                task.loss,
                "one of reduction='mean' with servers, which divide by the examples pushed",
            )

    def driver_service(self, num_workers: int) -> ServerService:
        leases = LeaseService(num_workers, lease_seconds=LEASE_SECONDS) if self.leased else None
        if self.servers is None:
            return ServerService(Membership(self._config(JobKey.new())), leases, num_workers)
        application = self.servers.applications.open(self._config, self.encrypted)
        return SharedServerService(application, leases, num_workers)

    def updater_for(self, task: Task) -> Updater:
        """What the servers do with gradients, as the estimator's optimizer is set now."""
        return self.updater or updater_of(task.optimizers[ONLY])

    def overlaps(self, updater: Updater) -> bool:
        if self.overlap is not None:
            return self.overlap
        return may_overlap(self.consistency, updater)

    def config(self, ctx: Context) -> ServerConfig:
        """In a task: the key is known to this run's tasks alone."""
        encrypted = ctx.plan.must_encrypt if self.encrypted is None else self.encrypted
        return self._config(JobKey.derive(ctx.plan.secret, encrypted))

    def _config(self, key: JobKey) -> ServerConfig:
        return ServerConfig(
            key,
            num_servers=self.num_servers,
            num_workers=1,  # they synchronize before each epoch: no wait is needed here
            consistency=self.consistency,
            replication=self.replication,
            expulsion=self.expulsion,
            timeout_seconds=self.timeout_seconds,
        )

    def run(self, role: str, training: Training) -> None:
        if role == "server":
            self._serve(training.ctx)
        elif role == EVALUATOR:
            updater = self.updater_for(training.task)
            Evaluator(training, self.config(training.ctx), updater).run()
        else:
            ServedTraining(self, training).run()

    def batches(self, training: Training, epoch: Epoch) -> Iterator[Batch]:
        if not self.leased:
            return super().batches(training, epoch)
        return training.ctx.leases.batches(training.request(epoch))

    def _serve(self, ctx: Context) -> None:
        serve_until_the_end(ctx, self.config(ctx))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "servers": None}  # which stay at the driver

    def __repr__(self) -> str:
        """What a run's states depend on: a resumed run may add an evaluator."""
        return (
            f"{type(self).__name__}(num_servers={self.num_servers}, "
            f"consistency={self.consistency!r}, replication={self.replication}, "
            f"updater={self.updater!r}{', leased=True' if self.leased else ''}"
            f"{f', expulsion={self.expulsion!r}' if self.expulsion else ''}"
            f"{'' if self.overlap is None else f', overlap={self.overlap}'})"
        )


class ServerService:
    """The driver's part: the membership, the workers' collectives, the history, and the leases."""

    def __init__(
        self, membership: Membership, leases: LeaseService | None = None, num_workers: int = 1
    ) -> None:
        self._leases, self._num_workers = leases, num_workers
        self.membership = membership
        self._exchange = DriverExchange()
        self._history: dict[int, Message] = {}
        self._is_restored = False  # whether a checkpoint's tables are on the servers

    def use_timeouts(self, timeouts: Timeouts) -> None:
        self.membership.use_timeouts(timeouts)

    def answer(self, peer: TaskIdentity, about: str, fields: Message) -> Any:
        if about == "collective":
            return self._exchange.contribute(**fields)
        if about == EVALUATOR:
            return self._num_workers
        if about == "restored":
            self._is_restored |= bool(fields["done"])
            return self._is_restored
        if about == "row":
            self._history[int(fields["number"])] = fields["row"]
            return True
        if about == "history":
            return [self._history[number] for number in sorted(self._history)]
        if self._leases is not None and about.startswith("lease."):
            return self._leases.answer(peer, about, fields)
        return self.membership.answer(about, fields)

    def on_join(self, peer: TaskIdentity) -> None:
        """It will join by itself, when it is ready."""

    def on_leave(self, peer: TaskIdentity, outcome: str) -> None:
        if self._leases is not None and peer.role == "worker":
            self._leases.on_leave(peer, outcome)
        if outcome != "done" and peer.role != EVALUATOR:  # which is none of the members
            lose = self.membership.lost_server if peer.role == "server" else None
            (lose or self.membership.lost_worker)(peer.rank)


class SharedServerService(ServerService):
    """For a run on the servers of a group, of which it is one application."""

    def __init__(
        self, application: Application, leases: LeaseService | None, num_workers: int
    ) -> None:
        super().__init__(application.membership, leases, num_workers)
        self.secret, self.close = application.secret, application.close


def check_servers(servers: StandingServers, num_servers: int) -> int:
    """How many servers the group has, if it is one."""
    if not isinstance(getattr(servers, "applications", None), Applications):
        raise ParameterError("servers", servers, "a dml.ServerGroup, or None")
    own = servers.num_servers
    if num_servers not in (NUM_SERVERS, own):
        raise ParameterError("num_servers", num_servers, f"left out: the group has {own}")
    return own
