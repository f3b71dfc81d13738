"""Messages between two ranks, whatever the backend: where it has none, on a wire beside it."""

from __future__ import annotations

from sparkdml.comm.base import Communicator, PointToPoint


def open_peers(comm: Communicator) -> Communicator:
    """A communicator of all ranks that has point to point, for messages alone.

    It is a group of its own, so that a thread may use it beside the collectives of another; and
    Horovod, which has no messages, makes its groups by torch. Every rank calls it.
    """
    return comm.split(0)


def messages_of(peers: Communicator) -> PointToPoint:
    messages = peers.point_to_point
    assert messages is not None, "a split communicator has point to point"
    return messages
