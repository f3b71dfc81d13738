"""Ranks as threads: no hang whatever goes wrong; Hypothesis over shapes; the pure parts."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparkdml.comm.base import Communicator, members, reduce_in_rank_order
from sparkdml.comm.layout import Layout, to_words
from sparkdml.comm.threads import run_threads
from sparkdml.errors import CommunicationError, ParameterError


def test_results_are_in_rank_order() -> None:
    assert run_threads(3, lambda comm: (comm.rank, comm.size)) == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize("size", [0, -1])
def test_at_least_one_rank(size: int) -> None:
    with pytest.raises(ParameterError, match="size must be at least 1"):
        run_threads(size, lambda comm: comm.rank)


@pytest.mark.parametrize("wait", ["allreduce", "recv", "recv any", "barrier of a group"])
def test_the_error_of_one_rank_releases_the_others(wait: str) -> None:
    released = []

    def program(comm: Communicator) -> None:
        group = comm.split(color=0)
        if comm.rank == 1:
            time.sleep(0.02)
            raise KeyError("the cause")
        try:
            messages = comm.point_to_point
            assert messages is not None
            if wait == "allreduce":
                comm.allreduce_(torch.ones(1))
            elif wait == "recv":
                messages.recv_(torch.ones(1), 1)
            elif wait == "recv any":
                messages.recv_(torch.ones(1))
            else:
                group.barrier()
        except CommunicationError as error:
            released.append(str(error))
            raise

    begun = time.monotonic()
    with pytest.raises(KeyError, match="the cause"):
        run_threads(3, program)
    assert time.monotonic() - begun < 5
    assert released == ["rank 1 aborted"] * 2
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank-")]


def test_a_rank_that_leaves_early_is_noticed() -> None:
    def program(comm: Communicator) -> None:
        if comm.rank != 0:
            comm.allreduce_(torch.ones(1))

    with pytest.raises(CommunicationError, match="rank 0 has already left"):
        run_threads(3, program)


def test_different_collectives_are_noticed() -> None:
    def program(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.barrier()
        else:
            comm.allreduce_(torch.ones(2))

    with pytest.raises(CommunicationError, match=r"rank 0: barrier, rank 1: allreduce\(.*\(2,\)"):
        run_threads(2, program)


def test_different_shapes_are_noticed() -> None:
    with pytest.raises(CommunicationError, match="different collectives"):
        run_threads(2, lambda comm: comm.allreduce_(torch.ones(1 + comm.rank)))


def test_a_wait_without_end_is_an_error() -> None:
    def program(comm: Communicator) -> None:
        messages = comm.point_to_point
        assert messages is not None
        messages.recv_(torch.ones(1), 1 - comm.rank)

    with pytest.raises(CommunicationError, match=r"timed out after 0\.1 s \(timeout_seconds\)"):
        run_threads(2, program, timeout_seconds=0.1)


def test_a_closed_communicator_refuses() -> None:
    def program(comm: Communicator) -> None:
        comm.close()
        comm.close()
        with pytest.raises(CommunicationError, match="closed"):
            comm.barrier()

    run_threads(2, program)


def test_the_message_must_fit() -> None:
    def program(comm: Communicator) -> None:
        messages = comm.point_to_point
        assert messages is not None
        if comm.rank == 0:
            messages.send(torch.ones(2), 1)
        else:
            with pytest.raises(ParameterError, match="like the message"):
                messages.recv_(torch.ones(3), 0)

    run_threads(2, program)


shapes = st.lists(st.integers(0, 5), max_size=2).map(tuple)


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 4), length=st.integers(0, 9), rest=shapes, seed=st.integers(0, 99))
def test_reduce_scatter_is_a_part_of_allreduce(
    size: int, length: int, rest: tuple[int, ...], seed: int
) -> None:
    def program(comm: Communicator) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed + comm.rank)
        tensor = torch.randn((length, *rest), generator=generator)
        part = comm.reduce_scatter(tensor)
        return part, comm.allreduce_(tensor)

    results = run_threads(size, program)
    assert torch.equal(torch.cat([part for part, _ in results]), results[0][1])
    for rank, (part, whole) in enumerate(results):
        assert torch.equal(part, torch.tensor_split(whole, size)[rank])


@settings(max_examples=40, deadline=None)
@given(data=st.data(), size=st.integers(1, 4))
def test_alltoall_is_a_transpose(data: st.DataObject, size: int) -> None:
    lengths = data.draw(
        st.lists(
            st.lists(st.integers(0, 4), min_size=size, max_size=size), min_size=size, max_size=size
        )
    )

    def program(comm: Communicator) -> list[Tensor]:
        row = lengths[comm.rank]
        sent = [torch.full((row[to],), 10 * comm.rank + to) for to in range(size)]
        received = comm.alltoall(sent)
        assert [len(tensor) for tensor in received] == [lengths[r][comm.rank] for r in range(size)]
        # Sending everything back restores what was sent.
        for tensor, original in zip(comm.alltoall(received), sent, strict=True):
            assert torch.equal(tensor, original)
        return received

    for to, received in enumerate(run_threads(size, program)):
        for source, tensor in enumerate(received):
            assert (tensor == 10 * source + to).all()


@given(
    colors=st.lists(st.integers(0, 2), min_size=1, max_size=6),
    keys=st.lists(st.integers(-2, 2), min_size=6, max_size=6),
)
def test_split_members_partition_the_ranks(colors: list[int], keys: list[int]) -> None:
    groups = [members(colors, keys, rank) for rank in range(len(colors))]
    for rank, group in enumerate(groups):
        assert rank in group
        assert all(groups[other] == group for other in group)
        assert [(keys[r], r) for r in group] == sorted((keys[r], r) for r in group)


@given(shape=st.lists(st.integers(0, 3), max_size=8).map(tuple))
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex128, torch.uint8]
)
def test_a_tensor_survives_its_travel(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 3).to(dtype)
    layout = Layout.decode(Layout.of(tensor).encode())
    words = to_words(tensor)
    assert words.numel() == layout.num_words
    assert torch.equal(layout.from_words(words), tensor)


def test_too_many_dimensions_are_refused() -> None:
    with pytest.raises(ParameterError, match="at most 8 dimensions"):
        Layout.of(torch.ones([1] * 9)).encode()


def test_the_order_of_additions_is_the_order_of_ranks() -> None:
    # 1e8 absorbs a single 1 in float32 but not the sum of many.
    tensors = [torch.tensor([1e8]), *[torch.tensor([1.0])] * 8]
    assert reduce_in_rank_order(tensors, "sum").item() == 1e8
    assert reduce_in_rank_order(tensors[::-1], "sum").item() == 1e8 + 8
    assert tensors[0].item() == 1e8
