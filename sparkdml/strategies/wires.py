"""What gradients and models are added up by, beside the worker's own communicator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdml.comm.base import Communicator
from sparkdml.comm.topologies.opening import open_topology
from sparkdml.observe.timeline.tracing import traced

if TYPE_CHECKING:
    from sparkdml.runtime.context import Context


def open_wire(comm: Communicator, ctx: Context) -> Communicator:
    """The fastest way to reduce among the ranks of `comm`, which is borrowed; every rank calls it.

    Memory, where all of them are on one host; NCCL's own between GPUs.
    """
    wire = open_topology("auto" if ctx.device.type == "cpu" else "native", comm)
    return wire if wire.is_native else traced(wire, ctx.spans)
