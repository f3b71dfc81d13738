"""Layered SGD: groups of workers, each with a communicator, a rank that does not train.

Gradients are summed inside each group, through shared memory where it is on one host. Only the
communicators exchange these sums, while the workers read their next batch; then each group receives
the sum of all. So few ranks use the slow network, and their time on it is hidden behind reading.
The sum is that of AllReduce, but for the order of additions. (Yu et al. 2019, arXiv 1906.05936.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from sparkdml.comm.base import Communicator
from sparkdml.errors import ParameterError
from sparkdml.feed.batch import Batch
from sparkdml.feed.feed import ReadAhead
from sparkdml.runtime.protocol.roles import Role
from sparkdml.strategies.allreduce import BACKENDS
from sparkdml.strategies.base import StepStrategy
from sparkdml.training.epoch import Epoch
from sparkdml.training.flat import Bucket
from sparkdml.training.task import Task, Totals
from sparkdml.training.totals import ROWS
from sparkdml.training.training import Training

if TYPE_CHECKING:
    from sparkdml.runtime.worker.context import Context

ROOT = 0  # a group's communicator, in the group
GOODBYE = -1.0  # rows that no step has: the workers are done


class LayeredSGD(StepStrategy):
    """Sum gradients inside groups first, then between the groups' communicators.

    Each communicator takes a slot of its own, beside the workers': 4 workers with `group_size=2`
    need 6. Groups are made of workers on one host where that is possible.

    Args:
        group_size: how many workers share a communicator.
        backend: "horovod", "torch", "mpi", or "auto" for Horovod where it is installed.
        bucket_bytes: how much travels at once. The communicators send a bucket on while the next
            one is being summed.
    """

    def __init__(
        self, group_size: int = 4, backend: str = "auto", bucket_bytes: int = 8 << 20
    ) -> None:
        if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1:
            raise ParameterError("group_size", group_size, "a whole number of at least 1")
        if backend not in BACKENDS:
            raise ParameterError("backend", backend, f"one of {', '.join(map(repr, BACKENDS))}")
        if bucket_bytes < 1:
            raise ParameterError("bucket_bytes", bucket_bytes, "at least 1")
        self.group_size, self.backend, self.bucket_bytes = group_size, backend, bucket_bytes

    def roles(self, num_workers: int) -> list[Role]:
        num_groups = -(-num_workers // self.group_size)
        return [Role("worker", num_workers), Role("communicator", num_groups, reads="none")]

    def run(self, role: str, training: Training) -> None:
        self._batches: ReadAhead[Batch] | None = None  # of the epoch that is trained
        self._buckets: list[Bucket] = training.task.params.buckets(self.bucket_bytes)
        ctx = training.ctx
        with self._join(role, ctx) as group, self.open_wire(ctx, group) as self._group:
            if role == "communicator":
                self._relay(training)
                num_bytes, messages = ctx.traffic.take()
                ctx.event("communicator", bytes=num_bytes, messages=messages)
            else:
                super().run(role, training)
                self._batches = None  # no step comes after this
                training.task.params.zero()
                training.task.params.stats[ROWS] = GOODBYE
                self.agree(training.task)

    def _join(self, role: str, ctx: Context) -> Communicator:
        is_root = role == "communicator"
        num_groups = ctx.size if is_root else ctx.world.size - ctx.size
        groups = make_groups(ctx.world.hosts, num_groups, self.group_size)
        return ctx.gang.split(groups[ctx.world.rank], -1 if is_root else ctx.world.rank)

    # -- a worker -------------------------------------------------------------------------------

    def start(self, training: Training) -> None:
        training.ctx.comm.broadcast_(training.task.params.values)
        for buffer in training.task.module.buffers():
            training.ctx.comm.broadcast_(buffer)

    def batches(self, training: Training, epoch: Epoch) -> Iterator[Batch]:
        self._batches = ReadAhead(super().batches(training, epoch), training.reading)
        return self._batches

    def agree(self, task: Task) -> Totals:
        for bucket in self._buckets:
            self._group.reduce_(bucket.tensor, ROOT)
        if self._batches is not None:
            self._batches.advance()  # the communicators are at work
        for bucket in self._buckets:
            self._group.broadcast_(bucket.tensor, ROOT)
        return task.totals()

    # -- a communicator -------------------------------------------------------------------------

    def _relay(self, training: Training) -> None:
        """Step by step, until the workers say goodbye."""
        params, others = training.task.params, training.ctx.comm
        while params.stats[ROWS] >= 0:
            works = []
            params.zero()  # its own share of the sum
            for bucket in self._buckets:
                self._group.reduce_(bucket.tensor, ROOT)
                works.append(others.allreduce_async_(bucket.tensor))
            for bucket, work in zip(self._buckets, works, strict=True):
                work.wait()
                self._group.broadcast_(bucket.tensor, ROOT)

    def __repr__(self) -> str:
        return (
            f"LayeredSGD(group_size={self.group_size}, backend={self.backend!r}, "
            f"bucket_bytes={self.bucket_bytes})"
        )


def make_groups(hosts: Sequence[str], num_groups: int, group_size: int) -> list[int]:
    """The group of every rank: the last `num_groups` ranks are the communicators, one for each.

    Workers of one host stay together where that is possible, and so does their communicator.
    """
    num_workers = len(hosts) - num_groups
    groups = group_workers(hosts[:num_workers], group_size) + [-1] * num_groups
    free = list(range(num_workers, len(hosts)))
    for group in range(num_groups):
        home = {hosts[rank] for rank in range(num_workers) if groups[rank] == group}
        near = next((rank for rank in free if hosts[rank] in home), free[0])
        groups[near] = group
        free.remove(near)
    return groups


def group_workers(hosts: Sequence[str], group_size: int) -> list[int]:
    """The group of every worker: rank 0 is in the first, and who shares a host stays together."""
    seen = list(dict.fromkeys(hosts))
    ordered = sorted(range(len(hosts)), key=lambda rank: (seen.index(hosts[rank]), rank))
    groups = [0] * len(hosts)
    for place, rank in enumerate(ordered):
        groups[rank] = place // group_size
    return groups
