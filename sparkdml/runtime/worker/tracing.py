"""Communicators in a worker, with the timeline's recorder around them where a run has a timeline.

Runs in a task's process, on its main thread. Strategies open here what reduces their gradients and
models beside the worker's own communicator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from sparkdml.comm.base import NATIVE, Communicator
from sparkdml.comm.topologies.opening import open_topology
from sparkdml.errors import ParameterError
from sparkdml.network.timeouts import CLOCK_ANSWER_SECONDS
from sparkdml.observe.timeline.horovod import HorovodTimeline
from sparkdml.observe.timeline.recorder import NoSpans, SpanRecorder
from sparkdml.runtime.protocol.messages import ClockQuestion

if TYPE_CHECKING:
    from sparkdml.comm.base import World
    from sparkdml.runtime.worker.control_client import ControlClient


class RankContext(Protocol):
    """The part of a `Context` that is needed here."""

    rank: int
    device: torch.device
    spans: NoSpans

    def event(self, kind: str, **fields: Any) -> None: ...


def start_recorder(world: World, client: ControlClient) -> SpanRecorder:
    return SpanRecorder(
        world.size,
        world.hosts[world.rank],
        event=client.event,
        flush=client.flush,
        ask_time=lambda: client.ask(ClockQuestion(), CLOCK_ANSWER_SECONDS),
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


def open_wire(comm: Communicator, ctx: RankContext, topology: str = "auto") -> Communicator:
    """What reduces by this topology among the ranks of `comm`, which is borrowed.

    Every rank calls it. "auto" is the fastest way: memory, where all ranks are on one host. What is
    on a GPU is always reduced natively. An event tells the driver which topology was chosen.
    """
    asked = topology
    if ctx.device.type != "cpu":
        if topology not in ("auto", NATIVE):
            allowed = "'auto' or 'native' where gradients are on a GPU"
            raise ParameterError("topology", topology, allowed, "NCCL knows the links between them")
        topology = NATIVE
    wire = open_topology(topology, comm)
    if ctx.rank == 0:
        ctx.event("topology", asked=asked, used=wire.topology)
    return wire if wire.topology == NATIVE else traced(wire, ctx.spans)
