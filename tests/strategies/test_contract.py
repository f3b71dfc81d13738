"""Every strategy through the contract suite: on threads all of it, on real processes the sums."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from sparkdml.comm.backends import why_no_horovod
from sparkdml.strategies.allreduce import AllReduce
from sparkdml.strategies.layered_sgd import LayeredSGD
from sparkdml.strategies.parameter_server import ParameterServer
from sparkdml.testing.digits import cut, digits, digits_plan
from sparkdml.testing.rank_processes import RankProcesses
from sparkdml.testing.served_threads import train_served
from sparkdml.testing.strategy_contract import BATCH, Case, StrategyContract, train_process
from sparkdml.testing.threads import train_on_threads
from sparkdml.training.training import Schedule

# One line (or a few) a strategy: that's all that is needed to run it through everything.
CASES = {
    "AllReduce": Case(
        AllReduce,
        plain_workers=3,
        bad=[
            (partial(AllReduce, backend="smoke signals"), "backend"),
            (partial(AllReduce, bucket_bytes=0), "bucket_bytes"),
        ],
    ),
    "LayeredSGD": Case(
        partial(LayeredSGD, 2),
        plain=partial(LayeredSGD, 1),
        plain_workers=3,
        bad=[
            (partial(LayeredSGD, 0), "group_size"),
            (partial(LayeredSGD, 2, backend="smoke signals"), "backend"),
            (partial(LayeredSGD, 2, bucket_bytes=0), "bucket_bytes"),
        ],
    ),
    "ParameterServer": Case(
        ParameterServer,
        plain_workers=2,
        resumes_exactly=False,  # a checkpoint is taken at the end of an epoch, never within
        train=train_served,
        bad=[
            (partial(ParameterServer, num_servers=0), "num_servers"),
            (partial(ParameterServer, replication=0), "replication"),
            (partial(ParameterServer, consistency="loose"), "consistency"),
            (partial(ParameterServer, updater="sgd"), "updater"),
            (partial(ParameterServer, timeout_seconds=0), "timeout_seconds"),
        ],
    ),
}
ON_PROCESSES = ["AllReduce"]  # whose result on 2 processes must be that on 2 threads


class TestStrategies(StrategyContract):
    cases = CASES


def train_by_name(comm, name):
    return train_process(comm, CASES[name].make, parts_of_two())


def parts_of_two():
    return cut(digits(60), [38, 22])


@pytest.fixture(scope="module")
def processes(request: pytest.FixtureRequest) -> Iterator[RankProcesses]:
    with RankProcesses(request.param, 2) as ranks:
        yield ranks


@pytest.mark.parametrize(
    "processes",
    [
        "torch",
        pytest.param(
            "horovod",
            marks=pytest.mark.skipif(why_no_horovod() is not None, reason=str(why_no_horovod())),
        ),
    ],
    indirect=True,
)
@pytest.mark.parametrize("name", ON_PROCESSES)
class TestProcesses:
    @pytest.fixture(autouse=True)
    def no_leaks(self) -> None:
        """In place of the suite's: the processes outlive a test."""

    def test_processes_equal_threads(self, processes, name):
        expected = train_on_threads(
            CASES[name].make, digits_plan(lr=0.1), Schedule(2, BATCH), parts_of_two()
        )
        for rank, parameters in enumerate(processes.run(train_by_name, name)):
            theirs = [p.detach() for p in expected[rank].task.module.parameters()]
            for ours, other in zip(parameters, theirs, strict=True):
                torch.testing.assert_close(torch.from_numpy(ours), other, rtol=1e-5, atol=1e-6)
