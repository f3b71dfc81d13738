"""The environment variables with which unmodified Horovod and torch scripts find their peers.

They are set in a worker's process, for the time of the run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from sparkdml.comm.base import World

# Horovod's defaults, set explicitly: when it is initialised again in a process, it would keep the
# value that our communicator used, and ranks with different values crash.
HOROVOD_DEFAULTS = {"HOROVOD_FUSION_THRESHOLD": str(128 << 20)}


def process_environment(world: World) -> dict[str, str]:
    """Return what a plain `hvd.init()` or `init_process_group()` needs to find the other ranks."""
    return {**_horovod(world), **_torch(world), **_gloo(world)}


def _horovod(world: World) -> dict[str, str]:
    variables = {
        "HOROVOD_RANK": str(world.rank),
        "HOROVOD_SIZE": str(world.size),
        "HOROVOD_LOCAL_RANK": str(world.local_rank),
        "HOROVOD_LOCAL_SIZE": str(world.local_size),
        "HOROVOD_CROSS_RANK": str(world.cross_ranks.index(world.rank)),
        "HOROVOD_CROSS_SIZE": str(len(world.cross_ranks)),
        "HOROVOD_HOSTNAME": world.hosts[world.rank],
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        **{name: os.environ.get(name, value) for name, value in HOROVOD_DEFAULTS.items()},
    }
    if world.kv_port:
        variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = world.rendezvous_host
        variables["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(world.kv_port)
    if world.interface is not None:
        variables["HOROVOD_GLOO_IFACE"] = world.interface
    return variables


def _torch(world: World) -> dict[str, str]:
    variables = {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_size),
    }
    if world.store_port:
        variables["MASTER_ADDR"] = world.rendezvous_host
        variables["MASTER_PORT"] = str(world.store_port)
        # Makes every rank, including rank 0, a client of the driver's store, so that no rank has to
        # find a free port and publish it.
        variables["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    return variables


def _gloo(world: World) -> dict[str, str]:
    return {} if world.interface is None else {"GLOO_SOCKET_IFNAME": world.interface}


@contextmanager
def temporary_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set the variables and restore them afterwards, as Spark reuses its Python workers."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
