"""Opens a communicator by the name of its topology, and chooses one for `topology="auto"`.

`auto` chooses by message size, number of ranks and number of hosts. Within one host it uses shared
memory at every size: between two ranks, and among three and four on two cores, it was the fastest
at all measured sizes.

Between hosts with one rank each, the table below has the size up to which a tree of our own
messages is faster than the backend. It was measured at 4 kB, 48 kB, 400 kB, 4 MB and 40 MB over
loopback sockets, not over a real network, on 2 cores with other load (torch 2.13's gloo and Horovod
0.28.1 on Gloo, 2026-11-17). So it reflects the software's cost per message, which dominates for
short tensors. This command measures it, and the shared memory:

`python benchmarks/collectives.py --only sums --ranks 2 3 4 --sizes 1000 12000 100000 1000000
10000000`

"hierarchical", for ranks of which some share a host, was not measured, as no such hosts were
available. Data that goes through memory need not cross the network, which then carries one tensor
per host instead of one per rank.
"""

from __future__ import annotations

from sparkdml.comm.base import Communicator
from sparkdml.comm.own_allreduce import DelegatingCommunicator
from sparkdml.comm.shared_memory.communicator import SharedMemoryCommunicator
from sparkdml.comm.shared_memory.hosts import Host, find_host
from sparkdml.comm.topologies.base import MessagesCommunicator, Topology
from sparkdml.comm.topologies.classic.double_tree import double_tree
from sparkdml.comm.topologies.classic.halving_doubling import halving_doubling
from sparkdml.comm.topologies.classic.ring import ring
from sparkdml.comm.topologies.hierarchical import HierarchicalCommunicator
from sparkdml.comm.topologies.tree import tree
from sparkdml.errors import SetupError

# Number of ranks -> the bytes up to which "tree" is faster than "native".
TREE_UP_TO_BYTES = {2: 400_000, 3: 400_000, 4: 400_000}


def choose(num_bytes: int, size: int, num_hosts: int) -> str:
    """Choose the topology for a message of this size among `size` ranks on `num_hosts` hosts."""
    if size == 1:
        return "native"
    if num_hosts == 1:
        return "shared-memory"
    if num_hosts < size:
        return "hierarchical"
    return "tree" if num_bytes <= tree_limit(size) else "native"


def tree_limit(size: int) -> int:
    """Return the size up to which a tree is faster; 0, for the backend's own, if not measured."""
    return TREE_UP_TO_BYTES.get(size, 0)


BY_MESSAGES: dict[str, Topology] = {
    "ring": ring,
    "tree": tree,
    "double-tree": double_tree,
    "halving-doubling": halving_doubling,
}
TOPOLOGIES = ("auto", "native", *BY_MESSAGES, "hierarchical", "shared-memory")


def open_topology(name: str, comm: Communicator) -> DelegatingCommunicator:
    """Open a communicator that reduces with this topology among the ranks of `comm`.

    Every rank calls it, and still owns `comm`. "native" is the backend's own allreduce. The
    result's `topology` describes what was opened.
    """
    if name == "native" or comm.size == 1:
        return DelegatingCommunicator(comm)
    if name in BY_MESSAGES:
        return MessagesCommunicator(comm, name, BY_MESSAGES[name])
    host = find_host(comm)
    if name == "auto":
        return _open_fastest(comm, host)
    if name == "hierarchical":
        return _open_hierarchical(comm, host)
    if not host.is_whole_world:
        host.close()
        raise SetupError(
            f"topology='shared-memory' can't be used: the {comm.size} ranks are on "
            f"{host.num_hosts} hosts, or the kernel refused shared memory. Choose "
            "'hierarchical', which shares memory within each host, or 'auto'."
        )
    return _open_shared_memory(comm, host)


def _open_fastest(comm: Communicator, host: Host) -> DelegatingCommunicator:
    """Open what `choose` chooses at every size; without shared memory, as if on separate hosts."""
    if host.is_whole_world:
        return _open_shared_memory(comm, host)
    if host.has_threads:  # they already share all tensors
        host.close()
        return DelegatingCommunicator(comm)
    num_hosts = host.num_hosts if host.num_hosts > 1 else comm.size
    if choose(0, comm.size, num_hosts) == "hierarchical":
        return _open_hierarchical(comm, host)
    host.close()
    limit = tree_limit(comm.size)
    if not limit:
        return DelegatingCommunicator(comm)
    return MessagesCommunicator(comm, "tree", tree, max_bytes=limit)


def _open_shared_memory(comm: Communicator, host: Host) -> SharedMemoryCommunicator:
    assert host.exchange is not None
    return SharedMemoryCommunicator(comm, host.exchange)


def _open_hierarchical(comm: Communicator, host: Host) -> HierarchicalCommunicator:
    """Use memory within hosts, or sockets if it was refused, and the backend between hosts."""
    leader = host.leaders[comm.rank]
    inside = comm.split(leader)
    if host.exchange is not None:
        inside = SharedMemoryCommunicator(inside, host.exchange, owns_base=True)
    is_training_role = leader == comm.rank
    across = comm.split(int(not is_training_role))
    if not is_training_role or across.size == 1:
        across.close()
    return HierarchicalCommunicator(
        comm, inside, across if is_training_role and across.size > 1 else None
    )
