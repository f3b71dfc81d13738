"""What gradients and models are added up by, beside the worker's own communicator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdml.comm.base import NATIVE, Communicator
from sparkdml.comm.topologies.opening import open_topology
from sparkdml.errors import ParameterError
from sparkdml.observe.timeline.tracing import traced

if TYPE_CHECKING:
    from sparkdml.runtime.context import Context


def open_wire(comm: Communicator, ctx: Context, topology: str = "auto") -> Communicator:
    """What reduces by this topology among the ranks of `comm`, which is borrowed.

    Every rank calls it. "auto" is the fastest way: memory, where all ranks are on one host. What is
    on a GPU is always reduced natively.
    """
    if ctx.device.type != "cpu":
        if topology not in ("auto", NATIVE):
            allowed = "'auto' or 'native' where gradients are on a GPU"
            raise ParameterError("topology", topology, allowed, "NCCL knows the links between them")
        topology = NATIVE
    wire = open_topology(topology, comm)
    return wire if wire.topology == NATIVE else traced(wire, ctx.spans)
