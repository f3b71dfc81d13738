"""Messages over torch: into tensors whose memory is not their content, and from who never sends."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from sparkdml.comm.base import Communicator
from sparkdml.comm.torch_work import THREAD_NAME
from sparkdml.errors import CommunicationError
from sparkdml.testing.rank_processes import RankProcesses
from sparkdml.testing.waiting import wait_until


def receive_into_marked_tensors(comm: Communicator, from_anyone: bool) -> list[bool]:
    from sparkdml.testing.communicator_checks import (
        marked_tensors,  # the contract imports it first
    )

    messages = comm.point_to_point
    assert messages is not None
    if comm.rank == 0:
        for tensor in marked_tensors(0):
            messages.send(tensor, 1)
        return []
    received = marked_tensors(1)
    for tensor in received:
        messages.recv_(tensor, None if from_anyone else 0)
    return [torch.equal(*pair) for pair in zip(received, marked_tensors(0), strict=True)]


def test_what_is_conjugated_or_negated_by_a_mark_is_filled() -> None:
    with RankProcesses("torch", 2) as ranks:
        for from_anyone in (False, True):
            assert ranks.run(receive_into_marked_tensors, from_anyone) == [[], [True, True]]


def wait_for_a_message(comm: Communicator, hanging: int, sends: bool) -> str:
    """From or to a rank that hangs, when another one aborts."""
    with comm.split(0) as wire:
        messages = wire.point_to_point
        assert messages is not None
        messages_begun = [messages.isend(torch.ones(3), to) for to in range(3) if to != comm.rank]
        for source in range(3):
            if source != comm.rank:
                messages.recv_(torch.zeros(3), source)
        for work in messages_begun:
            work.wait()
        if comm.rank == hanging:
            time.sleep(600)
        if comm.rank:
            wire.abort()
            return "aborted"
        long = torch.zeros(30_000_000)  # more than sockets hold
        work = messages.isend(long, hanging) if sends else messages.irecv_(long, hanging)
        with pytest.raises(CommunicationError) as caught:
            work.wait()
        wire.abort()
        return str(caught.value)


def watches_after_messages(comm: Communicator, closes: bool) -> bool:
    """Whether a thread is left of a group that was closed or garbage-collected."""
    wire = comm.split(0)
    messages = wire.point_to_point
    assert messages is not None
    work = messages.isend(torch.ones(3), 1 - comm.rank)
    messages.recv_(torch.zeros(3), 1 - comm.rank)
    work.wait()
    assert THREAD_NAME in [thread.name for thread in threading.enumerate()]
    comm.barrier()
    if closes:
        wire.close()
    del wire, messages, work
    return wait_until(lambda: THREAD_NAME not in [thread.name for thread in threading.enumerate()])


def test_no_watch_is_left_behind() -> None:
    with RankProcesses("torch", 2) as ranks:
        for closes in (True, False):
            assert ranks.run(watches_after_messages, closes) == [True, True]


@pytest.mark.parametrize(("hanging", "sends"), [(1, False), (2, False), (2, True)])
def test_who_waits_is_released_though_others_are_gone_already(hanging: int, sends: bool) -> None:
    with RankProcesses("torch", 3) as ranks:
        ranks.begin(wait_for_a_message, hanging, sends)
        gone = 3 - hanging
        results, errors = ranks.finish([0, gone])
    assert not errors
    assert results == {0: f"the run failed: rank {gone} of 3 aborted", gone: "aborted"}
