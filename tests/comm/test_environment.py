"""The variables that scripts of others read, and that they go away again."""

from __future__ import annotations

import os

import pytest

from sparkdml.comm.base import World
from sparkdml.comm.environment import process_environment, temporary_environment
from sparkdml.network.connection import interface_towards

# Ranks 0, 2 and 3 on host a, 1 and 4 on host b.
HOSTS = ("a", "b", "a", "a", "b")


def world(rank: int, **fields: object) -> World:
    return World(rank, 5, HOSTS, rendezvous_host="10.0.0.1", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rank", "host", "local_rank", "local_size", "cross_rank", "cross_size"),
    [
        (0, "a", 0, 3, 0, 2),
        (1, "b", 0, 2, 1, 2),
        (2, "a", 1, 3, 0, 2),
        (3, "a", 2, 3, 0, 1),
        (4, "b", 1, 2, 1, 2),
    ],
)
def test_ranks_among_hosts(
    rank: int, host: str, local_rank: int, local_size: int, cross_rank: int, cross_size: int
) -> None:
    variables = process_environment(world(rank))
    assert variables["HOROVOD_RANK"] == variables["RANK"] == str(rank)
    assert variables["HOROVOD_SIZE"] == variables["WORLD_SIZE"] == "5"
    assert variables["HOROVOD_HOSTNAME"] == host
    assert variables["HOROVOD_LOCAL_RANK"] == variables["LOCAL_RANK"] == str(local_rank)
    assert variables["HOROVOD_LOCAL_SIZE"] == variables["LOCAL_WORLD_SIZE"] == str(local_size)
    assert variables["HOROVOD_CROSS_RANK"] == str(cross_rank)
    assert variables["HOROVOD_CROSS_SIZE"] == str(cross_size)


def test_addresses_are_there_only_when_known() -> None:
    unknown = process_environment(world(0))
    known = process_environment(world(0, store_port=11, kv_port=22, interface="eth7"))
    assert {name: value for name, value in known.items() if name not in unknown} == {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "22",
        "HOROVOD_GLOO_IFACE": "eth7",
        "GLOO_SOCKET_IFNAME": "eth7",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "11",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def test_the_environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKDML_TEST_OLD", "old")
    monkeypatch.delenv("SPARKDML_TEST_NEW", raising=False)
    before = dict(os.environ)

    def use() -> None:
        with temporary_environment({"SPARKDML_TEST_OLD": "other", "SPARKDML_TEST_NEW": "new"}):
            assert os.environ["SPARKDML_TEST_OLD"] == "other"
            assert os.environ["SPARKDML_TEST_NEW"] == "new"
            raise KeyError

    with pytest.raises(KeyError):
        use()
    assert dict(os.environ) == before


def test_the_interface_towards_this_machine_is_the_loopback() -> None:
    name = interface_towards("127.0.0.1")
    assert name is not None
    assert name.startswith("lo")


def test_the_interface_towards_nowhere_is_unknown() -> None:
    assert interface_towards("no-such-host.invalid") is None
