"""Switches the timeline on in a worker: a recorder, and a communicator that uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdml.observe.timeline.horovod import HorovodTimeline
from sparkdml.observe.timeline.recorder import NoSpans, SpanRecorder

if TYPE_CHECKING:
    from sparkdml.comm.base import Communicator, World
    from sparkdml.runtime.link import Link

ASK_SECONDS = 2.0


def start_recorder(world: World, link: Link) -> SpanRecorder:
    return SpanRecorder(
        world.size,
        world.hosts[world.rank],
        link.event,
        link.flush,
        lambda: link.ask("clock", ASK_SECONDS),
    )


def open_traced(spans: NoSpans, backend: str, world: World) -> Communicator:
    """The communicator, as it is where nothing is recorded."""
    from sparkdml.comm.backends import open_communicator
    from sparkdml.comm.environment import temporary_environment

    if not isinstance(spans, SpanRecorder):
        return open_communicator(backend, world)
    from sparkdml.observe.timeline.communicator import TracedCommunicator

    traces_horovod = HorovodTimeline.is_possible(backend)
    setting = HorovodTimeline.ENVIRONMENT if traces_horovod else {}
    with temporary_environment(setting), spans.span("open communicator"):
        inner = open_communicator(backend, world)
    if traces_horovod and world.rank == 0:
        horovod = HorovodTimeline()
        horovod.start()
        spans.horovod = horovod
    return TracedCommunicator(inner, spans)


def traced(comm: Communicator, spans: NoSpans) -> Communicator:
    """One that a strategy has opened for itself, recorded too where anything is."""
    if not isinstance(spans, SpanRecorder):
        return comm
    from sparkdml.observe.timeline.communicator import TracedCommunicator

    return TracedCommunicator(comm, spans)
