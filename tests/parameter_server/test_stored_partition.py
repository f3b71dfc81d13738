"""One copy of one part: order, sums, rows, and a copy that is sent elsewhere."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparkdml.parameter_server.filters import Largest, Residual, Significant
from sparkdml.parameter_server.optimizers import SGD, Adam, Add, Updater
from sparkdml.parameter_server.partition import Table
from sparkdml.parameter_server.stored_partition import Partition
from sparkdml.parameter_server.wire.frames import Entry, Status


def partition_of(updater: Updater, rows: int = 6) -> Partition:
    values = torch.zeros(rows, 2)
    return Partition.new(Table.of("t", values, rows=True), 0, updater, values)


def push(worker: int, number: int, values: Tensor, clock: int = 0, weight: float = 1.0) -> Entry:
    return Entry(
        0,
        0,
        session=worker + 10,
        worker=worker,
        number=number,
        clock=clock,
        weight=weight,
        values=values.reshape(-1),
    )


def test_pushes_are_taken_in_order_and_once() -> None:
    partition = partition_of(Add())
    ones = torch.ones(6, 2)
    assert partition.check(push(0, 2, ones), False) is Status.GAP
    assert partition.check(push(0, 1, ones), False) is Status.OK
    partition.take(partition.push_from(push(0, 1, ones)), keep=False)
    assert partition.applied == {10: 1}
    assert partition.check(push(0, 2, ones), False) is Status.OK


@settings(deadline=None, max_examples=50)
@given(st.permutations(range(4)))
def test_a_step_does_not_depend_on_the_order_of_arrival(order: list[int]) -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(6, 2) * 10**w for w in range(4)]
    partition = partition_of(SGD(lr=1.0))
    for worker in order:
        entry = push(worker, 1, gradients[worker], weight=worker + 1.0)
        partition.take(partition.push_from(entry), keep=True)
    partition.step()
    total = torch.zeros(6, 2)
    for gradient in gradients:
        total += gradient
    assert torch.equal(partition.values, -(total / 10.0))


def test_examples_of_weight_zero_change_nothing() -> None:
    partition = partition_of(SGD(lr=1.0, weight_decay=1.0))
    partition.values.fill_(1.0)
    partition.take(partition.push_from(push(0, 1, torch.zeros(6, 2), weight=0.0)), keep=True)
    partition.step()
    assert partition.values.eq(1.0).all()


def test_a_push_after_its_step_joins_the_next_one() -> None:
    partition = partition_of(Add())
    partition.step()
    partition.step()
    partition.take(partition.push_from(push(0, 1, torch.ones(6, 2), clock=0)), keep=True)
    assert partition.values.eq(0).all()
    partition.step()
    assert partition.values.eq(1).all()


def test_the_last_push_of_an_absent_worker_stands_in() -> None:
    partition = partition_of(SGD(lr=1.0))
    for worker in (0, 1):
        gradient = torch.full((6, 2), 2.0 + 2 * worker)
        partition.take(partition.push_from(push(worker, 1, gradient)), True, stand_in=True)
    partition.step()
    assert partition.values.eq(-3).all()
    partition.take(partition.push_from(push(0, 2, torch.zeros(6, 2), clock=1)), True, stand_in=True)
    partition.step(absent=[1])
    assert partition.values.eq(-3 - 2).all()
    late = push(1, 2, torch.full((6, 2), 10.0), clock=1)
    partition.take(partition.push_from(late), True, stand_in=True)
    partition.step(absent=[1])
    assert partition.values.eq(-5 - 10).all(), "its own late push goes in its place"


def test_nothing_stands_in_for_what_is_counted() -> None:
    partition = partition_of(Add())
    partition.take(partition.push_from(push(1, 1, torch.ones(6, 2))), True, stand_in=True)
    partition.step()
    partition.step(absent=[1])
    assert partition.values.eq(1).all()


def test_a_copy_is_the_same_in_everything() -> None:
    partition = partition_of(Adam(lr=0.1))
    partition.take(partition.push_from(push(0, 1, torch.randn(6, 2))), keep=False)
    entry = push(1, 1, torch.randn(2, 2), clock=3, weight=2.5)
    entry.rows = torch.tensor([1, 4], dtype=torch.int32)
    partition.take(partition.push_from(entry), keep=True)
    partition.generation, partition.stepped = 7, 2
    text, entries = partition.to_parts()
    copy = Partition.from_parts(text, entries)
    assert torch.equal(copy.values, partition.values)
    assert copy.applied == partition.applied
    assert (copy.version, copy.generation, copy.stepped) == (partition.version, 7, 2)
    for name, slot in partition.slots.items():
        assert torch.equal(copy.slots[name], slot)
    for each in (partition, copy):
        each.step()
        each.step()
    assert torch.equal(copy.values, partition.values)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.dictionaries(st.integers(0, 9), st.integers(-5, 5)), max_size=8),
    st.floats(0.05, 1.0),
)
def test_what_a_filter_holds_back_is_never_lost(
    updates: list[dict[int, int]], fraction: float
) -> None:
    held, sent = Residual(1, torch.float32), torch.zeros(10)
    for update in updates:
        rows = torch.tensor(sorted(update), dtype=torch.int64)
        held.add(rows.numpy(), torch.tensor([[float(update[int(r)])] for r in rows]).reshape(-1, 1))
        where, sums = held.take(Largest(fraction).choose(held.sums, None))
        sent[torch.from_numpy(where)] += sums[:, 0]
    sent[torch.from_numpy(held.rows)] += held.sums[:, 0]
    total = torch.zeros(10)
    for update in updates:
        for row, value in update.items():
            total[row] += value
    assert torch.equal(sent, total)


def test_significance_is_measured_against_the_row() -> None:
    values = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    updates = torch.tensor([[0.1, 0.0], [0.1, 0.0], [1e-9, 0.0]])
    assert Significant(0.05).choose(updates, values).tolist() == [False, True, True]


def test_a_mark_is_taken_once_though_its_worker_is_another_client_now() -> None:
    partition = partition_of(Add())
    first = push(0, 1, torch.ones(6, 2))
    first.mark = 4
    assert not partition.has_had(first)
    partition.take(partition.push_from(first), keep=False)
    again, other, next_one = (push(w, 1, torch.ones(6, 2)) for w in (0, 1, 0))
    again.mark, other.mark, next_one.mark = 4, 4, 6
    again.session = next_one.session = 99
    copy = Partition.from_parts(*partition.to_parts())
    for here in (partition, copy):
        assert here.has_had(again)
        assert not here.has_had(other)
        assert not here.has_had(next_one)
        assert not here.has_had(push(0, 2, torch.ones(6, 2)))  # without a mark
