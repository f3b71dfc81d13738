"""How long a rank waits for its turn to join the others over MPI; without MPI itself."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import HashStore

from sparkdml.comm import mpi
from sparkdml.comm.base import World
from sparkdml.comm.mpi_names import SERVER_KEY
from sparkdml.comm.torch_groups import Alarm
from sparkdml.errors import CommunicationError


@pytest.mark.timeout(20)
def test_a_rank_waits_for_its_turn_as_long_as_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = HashStore()
    driver.set(SERVER_KEY, "a server")
    store = PrefixStore("opening", driver), Alarm(driver)
    monkeypatch.setattr(mpi, "connect_store", lambda world, seconds: store)
    library = SimpleNamespace(COMM_SELF=None, Exception=ConnectionError)
    monkeypatch.setattr(mpi, "_initialise", lambda server, interface: library)
    monkeypatch.setattr(mpi, "ARRIVAL_TIMEOUT_SECONDS", 4.0)  # what is used where none is told
    world = World(rank=1, size=2, hosts=("127.0.0.1", "127.0.0.1"))
    begun = time.monotonic()
    with pytest.raises(CommunicationError, match=r"rank 1 waited 0\.2 s"):  # rank 0 never comes
        mpi.MPICommunicator.open(world, arrival_timeout_seconds=0.2)
    assert time.monotonic() - begun < 2
