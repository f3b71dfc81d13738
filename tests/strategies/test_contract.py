"""Every strategy through the contract suite: on threads all of it, on real processes the sums."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from sparkdml.comm.backends import why_no_horovod
from sparkdml.compression.half import BF16, FP16
from sparkdml.compression.one_bit import OneBit
from sparkdml.compression.power_sgd import PowerSGD
from sparkdml.compression.top_k import TopK
from sparkdml.server.consistency import BSP
from sparkdml.server.optimizers import SGD
from sparkdml.strategies.allreduce import AllReduce
from sparkdml.strategies.block_momentum import BlockMomentum
from sparkdml.strategies.downpour import Downpour
from sparkdml.strategies.easgd import EASGD
from sparkdml.strategies.hogwild import Hogwild
from sparkdml.strategies.hybrid import Hybrid
from sparkdml.strategies.layered_sgd import LayeredSGD
from sparkdml.strategies.local_sgd import LocalSGD
from sparkdml.strategies.parameter_server import ParameterServer
from sparkdml.strategies.slow_mo import SlowMo
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
    # One worker has no wire, so nothing is compressed.
    "AllReduce-FP16": Case(
        partial(AllReduce, compression=FP16()),
        bad=[
            (partial(AllReduce, compression="fp16"), "compression"),
            (partial(AllReduce, compression=OneBit(), topology="ring"), "topology"),
            (partial(AllReduce, compression=TopK(), topology="shared-memory"), "topology"),
            (partial(TopK, fraction=0.0), "fraction"),
            (partial(TopK, fraction=1.5), "fraction"),
            (partial(PowerSGD, rank=0), "rank"),
        ],
    ),
    "AllReduce-BF16": Case(partial(AllReduce, compression=BF16(), bucket_bytes=512), slow=True),
    "AllReduce-OneBit": Case(partial(AllReduce, compression=OneBit())),
    "AllReduce-TopK": Case(
        partial(AllReduce, compression=TopK(0.1)),
        plain=partial(AllReduce, compression=TopK(1.0)),
        plain_workers=3,
        slow=True,  # as OneBit, which keeps debts too
    ),
    "AllReduce-PowerSGD": Case(
        partial(AllReduce, compression=PowerSGD(2)),
        plain=partial(AllReduce, compression=PowerSGD(64)),  # no matrix would get smaller
        plain_workers=3,
        slow=True,
    ),
    "LocalSGD": Case(
        partial(LocalSGD, steps=4),
        plain=partial(LocalSGD, steps=1),
        plain_workers=3,
        bad=[
            (partial(LocalSGD, steps=0), "steps"),
            (partial(LocalSGD, optimizer_state="lose"), "optimizer_state"),
            (partial(LocalSGD, backend="single"), "backend"),
        ],
    ),
    "BlockMomentum": Case(
        partial(BlockMomentum, block=4, momentum=0.5),
        plain=partial(BlockMomentum, block=1, momentum=0.0),
        plain_workers=3,
        bad=[
            (partial(BlockMomentum, block=0), "block"),
            (partial(BlockMomentum, momentum=1.0), "momentum"),
            (partial(BlockMomentum, lr=0.0), "lr"),
        ],
    ),
    "BlockMomentum-Nesterov": Case(
        partial(BlockMomentum, block=4, nesterov=True, optimizer_state="keep"),
        plain=partial(BlockMomentum, block=1, momentum=0.0, nesterov=True),
        plain_workers=2,
        slow=True,
    ),
    "SlowMo": Case(
        partial(SlowMo, steps=4),
        plain=partial(SlowMo, steps=1, momentum=0.0),
        plain_workers=3,
        bad=[
            (partial(SlowMo, steps=0), "steps"),
            (partial(SlowMo, momentum=-0.1), "momentum"),
            (partial(SlowMo, lr=-1.0), "lr"),
        ],
    ),
    "EASGD": Case(
        partial(EASGD, steps=4),
        plain=partial(EASGD, steps=1, rho=5.0),  # half the way, with the suite's rate of 0.1
        plain_lr=0.5,
        bad=[(partial(EASGD, steps=0), "steps"), (partial(EASGD, rho=0.0), "rho")],
    ),
    "Hogwild": Case(
        partial(Hogwild, steps=4),
        lr=0.2,
        resumes_exactly=False,  # who comes first is never the same
        bad=[(partial(Hogwild, steps=0), "steps")],
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
    "Hybrid": Case(
        partial(Hybrid, 2),
        plain=partial(Hybrid, 2, consistency=BSP()),
        plain_workers=3,
        resumes_exactly=False,  # a checkpoint is taken at the end of an epoch, never within
        train=train_served,
        bad=[
            (partial(Hybrid, 0), "group_size"),
            (partial(Hybrid, backend="smoke signals"), "backend"),
            (partial(Hybrid, num_servers=0), "num_servers"),
        ],
    ),
    "ParameterServer": Case(
        ParameterServer,
        plain_workers=2,
        train=train_served,
        bad=[
            (partial(ParameterServer, num_servers=0), "num_servers"),
            (partial(ParameterServer, replication=0), "replication"),
            (partial(ParameterServer, consistency="loose"), "consistency"),
            (partial(ParameterServer, updater="sgd"), "updater"),
            (partial(ParameterServer, timeout_seconds=0), "timeout_seconds"),
        ],
    ),
    "Downpour": Case(
        partial(Downpour, n_fetch=3, n_push=2, warm_start=4, num_servers=1),
        plain=partial(Downpour, n_fetch=1, n_push=1, num_servers=1, updater=SGD(lr=0.1)),
        lr=0.1,
        resumes_exactly=False,  # who comes first is never the same
        train=train_served,
        bad=[
            (partial(Downpour, n_fetch=0), "n_fetch"),
            (partial(Downpour, n_push=0), "n_push"),
            (partial(Downpour, warm_start=-1), "warm_start"),
            (partial(Downpour, num_servers=0), "num_servers"),
        ],
    ),
}
# Those whose result on 2 processes must be that on 2 threads: a tenth of a second each.
ON_PROCESSES = [
    "AllReduce",
    "AllReduce-FP16",
    "AllReduce-BF16",
    "AllReduce-OneBit",
    "AllReduce-TopK",
    "AllReduce-PowerSGD",
    "LocalSGD",
    "BlockMomentum",
    "SlowMo",
    "EASGD",
]


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
