"""From a topology's name to a communicator that reduces by it."""

from __future__ import annotations

from sparkdml.comm.base import Communicator
from sparkdml.comm.delegating import DelegatingCommunicator
from sparkdml.comm.shared_memory.communicator import SharedMemoryCommunicator
from sparkdml.comm.shared_memory.hosts import Host, find_host
from sparkdml.comm.topologies.base import Topology
from sparkdml.comm.topologies.choice import choose, tree_limit
from sparkdml.comm.topologies.communicator import MessagesCommunicator
from sparkdml.comm.topologies.double_tree import double_tree
from sparkdml.comm.topologies.halving_doubling import halving_doubling
from sparkdml.comm.topologies.hierarchical import HierarchicalCommunicator
from sparkdml.comm.topologies.ring import ring
from sparkdml.comm.topologies.tree import tree
from sparkdml.errors import SetupError

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
    leads = leader == comm.rank
    across = comm.split(int(not leads))
    if not leads or across.size == 1:
        across.close()
    return HierarchicalCommunicator(comm, inside, across if leads and across.size > 1 else None)
