"""The contract, and what only ranks in one process can show."""

from __future__ import annotations

import pytest

from sparkdml.comm.single import SingleCommunicator
from sparkdml.comm.threads import run_threads
from sparkdml.testing.communicator_contract import CommunicatorContract, OnEveryRank


class TestSingle(CommunicatorContract):
    @pytest.fixture
    def on_every_rank(self) -> OnEveryRank:
        return lambda check: check(SingleCommunicator())


class TestThreads(CommunicatorContract):
    @pytest.fixture(params=[1, 2, 3, 4])
    def on_every_rank(self, request: pytest.FixtureRequest) -> OnEveryRank:
        return lambda check: run_threads(request.param, check, timeout_seconds=20)
