"""Layered SGD: groups of several workers come to AllReduce's sums, and read while others speak."""

import threading
from collections import Counter

import pytest

from sparkdml.errors import CommunicationError
from sparkdml.feed.feed import ReadAhead
from sparkdml.strategies.allreduce import AllReduce
from sparkdml.strategies.layered_sgd import LayeredSGD
from sparkdml.testing.digits import cut, digits, digits_plan
from sparkdml.testing.strategy_contract import assert_alike
from sparkdml.testing.threads import train_on_threads
from sparkdml.training.plan import Schedule

SIZES = [40, 17, 0, 33]


@pytest.mark.parametrize("bucket_bytes", [8 << 20, 512])
@pytest.mark.parametrize("group_size", [2, 3])
def test_groups_of_several_equal_allreduce(group_size, bucket_bytes):
    plan, parts = digits_plan(lr=0.1, momentum=0.9), cut(digits(90), SIZES)
    layered = train_on_threads(
        lambda: LayeredSGD(group_size, bucket_bytes=bucket_bytes), plan, Schedule(2, 8), parts
    )
    expected = train_on_threads(AllReduce, plan, Schedule(2, 8), parts)
    assert_alike(layered, expected[0].task.module, rtol=1e-4, atol=1e-5)
    assert [row["rows"] for row in layered[0].history] == [90.0] * 2


class Reads:
    """How many batches each worker has read, for communicators to wait for."""

    def __init__(self):
        self.counts, self.changed = Counter(), threading.Condition()

    def add(self, rank):
        with self.changed:
            self.counts[rank] += 1
            self.changed.notify_all()

    def wait_for(self, count):
        with self.changed:
            return self.changed.wait_for(lambda: min(self.counts.values()) >= count, timeout=20)


class HeldUp(LayeredSGD):
    """Its communicators finish a step only once the workers have read their next batch."""

    def __init__(self, reads):
        super().__init__(2)
        self._reads = reads

    def batches(self, training, epoch):
        self._batches = ReadAhead(self._noted(super().batches(training, epoch), training.ctx.rank))
        return self._batches

    def _noted(self, batches, rank):
        for batch in batches:
            self._reads.add(rank)
            yield batch

    def _relay(self, training):
        comm, step = training.ctx.comm, 0
        plain = comm.allreduce_async_

        def allreduce_async_(tensor, op="sum"):
            nonlocal step
            step += 1
            num_batches = 3  # each worker's; then there is nothing to read ahead
            assert self._reads.wait_for(min(step + 1, num_batches)), "no thread reads meanwhile"
            return plain(tensor, op)

        comm.allreduce_async_ = allreduce_async_
        super()._relay(training)


def test_workers_read_their_next_batch_while_communicators_speak():
    reads = Reads()
    reads.counts.update(dict.fromkeys(range(4), 0))
    trainings = train_on_threads(
        lambda: HeldUp(reads), digits_plan(lr=0.1), Schedule(1, 8), cut(digits(96), [24] * 4)
    )
    assert trainings[0].step == 3


def test_its_group_is_closed_with_the_run():
    strategies = []

    def make():
        strategies.append(LayeredSGD(2))
        return strategies[-1]

    train_on_threads(make, digits_plan(lr=0.1), Schedule(1, 8), cut(digits(32), [16, 16]))
    groups = [one._group for one in strategies if hasattr(one, "_group")]
    assert len(groups) == 3
    for group in groups:
        with pytest.raises(CommunicationError, match="closed"):
            group.barrier()
