"""From a topology's name to a communicator that reduces by it.

Which topology is the fastest, by message size, number of ranks and hosts: `topology="auto"`.

Inside one host memory is taken at every size: between two ranks, and among three and four on two
cores, it was the fastest at all that were measured.

Between hosts with one rank each, the table below says up to which size a tree of our own messages
is faster than what the backend does. It was measured at 4 kB, 48 kB, 400 kB, 4 MB and 40 MB over
loopback sockets, not over a real network, on 2 cores that had other work too (torch 2.13's gloo and
Horovod 0.28.1 on Gloo, 2026-11-17): so it says what the software costs for each message, which is
what short tensors pay for. This measures it, and the memory above:

`python benchmarks/collectives.py --only sums --ranks 2 3 4 --sizes 1000 12000 100000 1000000
10000000`

"hierarchical", where some ranks share a host and others don't, isn't from a table, since no such
hosts were at hand: what goes through memory need not go through a network, of which each host then
carries one tensor in place of one for each of its ranks.
"""

from __future__ import annotations

from sparkdml.comm.base import Communicator
from sparkdml.comm.own_allreduce import DelegatingCommunicator
from sparkdml.comm.shared_memory.communicator import SharedMemoryCommunicator
from sparkdml.comm.shared_memory.hosts import Host, find_host
from sparkdml.comm.topologies.base import Topology
from sparkdml.comm.topologies.classic.double_tree import double_tree
from sparkdml.comm.topologies.classic.halving_doubling import halving_doubling
from sparkdml.comm.topologies.classic.ring import ring
from sparkdml.comm.topologies.communicator import MessagesCommunicator
from sparkdml.comm.topologies.hierarchical import HierarchicalCommunicator
from sparkdml.comm.topologies.tree import tree
from sparkdml.errors import SetupError

# Number of ranks -> the bytes up to which "tree" is faster than "native".
TREE_UP_TO_BYTES = {2: 400_000, 3: 400_000, 4: 400_000}


def choose(num_bytes: int, size: int, num_hosts: int) -> str:
    """The topology for a message of this size among `size` ranks on `num_hosts` hosts."""
    if size == 1:
        return "native"
    if num_hosts == 1:
        return "shared-memory"
    if num_hosts < size:
        return "hierarchical"
    return "tree" if num_bytes <= tree_limit(size) else "native"


def tree_limit(size: int) -> int:
    """0 where nothing was measured: the backend knows best."""
    return TREE_UP_TO_BYTES.get(size, 0)


BY_MESSAGES: dict[str, Topology] = {
    "ring": ring,
    "tree": tree,
    "double-tree": double_tree,
    "halving-doubling": halving_doubling,
}
TOPOLOGIES = ("auto", "native", *BY_MESSAGES, "hierarchical", "shared-memory")


def open_topology(name: str, comm: Communicator) -> DelegatingCommunicator:
    """What reduces by this topology among the ranks of `comm`, which is borrowed.

    Every rank calls it. "native" is what the backend does by itself. `topology` of what is opened
    says in words what it came to.
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
            f"{host.num_hosts} hosts, or the kernel refused memory that they could share. Choose "
            "'hierarchical', which shares memory inside each host, or 'auto'."
        )
    return _open_shared_memory(comm, host)


def _open_fastest(comm: Communicator, host: Host) -> DelegatingCommunicator:
    """By `choose`, for every size that may come; without memory, as if each rank had a host."""
    if host.is_whole_world:
        return _open_shared_memory(comm, host)
    if host.has_threads:  # they have one another's tensors at hand already
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
    """Memory inside the hosts, or sockets where it was refused; the backend's own between them."""
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
