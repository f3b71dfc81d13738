"""torch's process groups, one per kind of device, and a run's alarm: both on the driver's store.

Groups are called directly, not through the functions of `torch.distributed`, whose checks and
dispatcher slow down small allreduces.

When a process dies, gloo raises in the ranks that were reading from it. In a ring of three or more,
the others would wait for a neighbour that has already failed, until a time-out of minutes. So the
rank that notices a failure writes it to the driver's TCPStore, and waiting ranks poll that key. The
driver writes there too when a worker hangs.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from sparkdml.comm.base import World
from sparkdml.comm.environment import temporary_environment
from sparkdml.errors import CommunicationError, ParameterError
from sparkdml.network.timeouts import COLLECTIVE_SECONDS

_KEY = "sparkdml/alarm"


class Alarm:
    """The alarm of a run; `store` is the driver's, without a prefix."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def sound(self, reason: str) -> None:
        """Notify all ranks; the first reason is kept. Never raises, as it is called on an error."""
        try:
            self._store.compare_set(_KEY, "", reason)
        except RuntimeError:
            return  # The store closed with the driver, so no rank is left to notify.

    def check(self) -> None:
        """Raise CommunicationError if a rank or the driver has sounded the alarm."""
        try:
            if not self._store.check([_KEY]):
                return
            reason = self._store.get(_KEY).decode()
        except RuntimeError as error:
            raise CommunicationError("the driver's store is gone") from error
        raise CommunicationError(f"the run failed: {reason}")


# torch's default. A lost peer is noticed at once, as its sockets close, and a hanging one by the
# driver; a collective that waits for a slow rank must not fail.
COLLECTIVE_TIMEOUT = timedelta(seconds=COLLECTIVE_SECONDS)

# "cpu" or "cuda" -> torch's backend for it; typed Any because torch's stubs lack its collectives
Groups = dict[str, Any]


def connect_store(world: World, arrival_timeout_seconds: float) -> tuple[Store, Alarm]:
    """Connect to the driver's store, under a fresh prefix, and wait for all ranks."""
    address = f"{world.rendezvous_host}:{world.store_port}"
    try:
        server = TCPStore(
            world.rendezvous_host,
            world.store_port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=arrival_timeout_seconds),
        )
        alarm = Alarm(server)
        alarm.check()
        store = fresh_prefix(server, world.rank)
        _wait_for_all_ranks(store, world, arrival_timeout_seconds)
        server.set_timeout(COLLECTIVE_TIMEOUT)
    except CommunicationError:
        raise
    except RuntimeError as error:
        raise CommunicationError(f"rank {world.rank} can't use the store at {address}") from error
    return store, alarm


def fresh_prefix(server: Store, rank: int) -> Store:
    """Return a part of the store that no earlier call used; all ranks call it equally often."""
    opening = server.add(f"sparkdml/openings/{rank}", 1)
    return PrefixStore(f"sparkdml/{opening}", server)


def _wait_for_all_ranks(store: Store, world: World, timeout_seconds: float) -> None:
    names = [f"arrived/{rank}" for rank in range(world.size)]
    store.set(names[world.rank], "")
    try:
        store.wait(names, timedelta(seconds=timeout_seconds))
    except dist.DistStoreError as error:
        missing = [rank for rank, name in enumerate(names) if not store.check([name])]
        raise CommunicationError(
            f"ranks {missing} did not arrive within {timeout_seconds:g} s (arrival_timeout_seconds)"
        ) from error


def init_default_group(store: Store, world: World) -> Groups:
    """Initialise torch's default group, so that the user's `torch.distributed` calls also work."""
    on_cuda = world.device.startswith("cuda")
    with temporary_environment(interface_variables(world.interface)):
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
                store=store,
                rank=world.rank,
                world_size=world.size,
                timeout=COLLECTIVE_TIMEOUT,
                device_id=torch.device(world.device) if on_cuda else None,
            )
        except RuntimeError as error:
            raise CommunicationError(f"rank {world.rank} can't reach its peers") from error
    return default_groups()


def default_groups() -> Groups:
    """Return the backends of torch's default group, ours or the user's, by kind of device."""
    group = dist.group.WORLD
    assert group is not None
    # Gloo reports that it supports every kind of device, even those that torch was built without.
    kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    served = {device.type for device in group._device_types}
    return {kind: group._get_backend(torch.device(kind)) for kind in kinds if kind in served}


def group_for(groups: Groups, device: torch.device) -> Any:
    if not groups:
        raise CommunicationError("this communicator is closed")
    if device.type not in groups:
        allowed = f"on {' or '.join(sorted(groups))}"
        raise ParameterError("tensor.device", device, allowed, "Move the tensor there first.")
    return groups[device.type]


def make_groups(
    store: Store, rank: int, size: int, kinds: Iterable[str], interface: str | None
) -> Groups:
    """Create groups outside torch's registry: ranks in any order, and freed when closed."""
    groups: Groups = {}
    with temporary_environment(interface_variables(interface)):
        try:
            for kind in kinds:
                backend: Any = dist.ProcessGroupNCCL if kind == "cuda" else dist.ProcessGroupGloo
                place = PrefixStore(kind, store)
                groups[kind] = backend(place, rank, size, COLLECTIVE_TIMEOUT)
        except RuntimeError as error:
            raise CommunicationError(f"rank {rank} of a group can't reach the others") from error
    return groups


def interface_variables(interface: str | None) -> dict[str, str]:
    if interface is None:
        return {}
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
