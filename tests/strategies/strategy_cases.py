"""Strategies as the contract suite runs them, on threads and on processes: a few lines each."""

from __future__ import annotations

import math
from functools import partial

import pytest
from torch import nn

from sparkdml.compression.half import BF16, FP16
from sparkdml.compression.one_bit import OneBit
from sparkdml.compression.power_sgd import PowerSGD
from sparkdml.compression.top_k import TopK
from sparkdml.parameter_server.consistency import BSP
from sparkdml.parameter_server.downpour import Downpour
from sparkdml.parameter_server.hybrid import Hybrid
from sparkdml.parameter_server.optimizers import SGD
from sparkdml.parameter_server.strategy import ParameterServer
from sparkdml.strategies.adaptive_balance import AdaptiveBalance
from sparkdml.strategies.allreduce import AllReduce
from sparkdml.strategies.backup_workers import BackupWorkers
from sparkdml.strategies.decentralized.ad_psgd import ADPSGD
from sparkdml.strategies.decentralized.gossip import Gossip
from sparkdml.strategies.layered_sgd import LayeredSGD
from sparkdml.strategies.local.block_momentum import BlockMomentum
from sparkdml.strategies.local.easgd import EASGD
from sparkdml.strategies.local.hogwild import Hogwild
from sparkdml.strategies.local.local_sgd import LocalSGD
from sparkdml.strategies.local.slow_mo import SlowMo
from sparkdml.strategies.second_order.lbfgs import LBFGS
from sparkdml.strategies.second_order.newton_cg import NewtonCG
from sparkdml.testing.digits import cut, digits, digits_plan, loss_of, make_normed_reader
from sparkdml.testing.faults import FailsAt, Injected
from sparkdml.testing.memory_checkpoints import MemoryCheckpoints
from sparkdml.testing.served_threads import train_served
from sparkdml.testing.strategy_contract import (
    BATCH,
    Case,
    StrategyContract,
    assert_alike,
    slowly,
    told,
)
from sparkdml.training.plan import Schedule

# Those whose workers speak by a communicator alone, so that any backend carries them.
GANGS = {
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
        slow=True,  # as OneBit, which keeps residuals too
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
    "Gossip": Case(
        Gossip,
        bad=[
            (partial(Gossip, "star"), "graph"),
            (partial(Gossip, degree=3), "degree"),
            (partial(Gossip, "random", degree=1), "degree"),
            (partial(Gossip, backend="pigeons"), "backend"),
        ],
    ),
    "AdaptiveBalance": Case(
        partial(AdaptiveBalance, every=2),
        plain_workers=3,
        rows_move=True,
        resumes_exactly=False,  # speeds are measured, and additions ordered by them
        bad=[
            (partial(AdaptiveBalance, every=0), "every"),
            (partial(AdaptiveBalance, backend="pigeons"), "backend"),
        ],
    ),
    "ADPSGD": Case(
        partial(ADPSGD, every=4),
        rows_move=True,
        resumes_exactly=False,  # who trains on which rows depends on timing
        bad=[
            (partial(ADPSGD, every=0), "every"),
            (partial(ADPSGD, backend="pigeons"), "backend"),
        ],
    ),
    "BackupWorkers": Case(
        partial(BackupWorkers, backup=0),  # no gradient is dropped: each row is used once
        plain_workers=3,
        bad=[
            (partial(BackupWorkers, backup=-1), "backup"),
            (partial(BackupWorkers, max_lag=0), "max_lag"),
            (partial(BackupWorkers, backend="pigeons"), "backend"),
        ],
    ),
}

# Those with servers, each of which serves on threads here.
SERVED = {
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

SECOND_ORDER = {
    "LBFGS": Case(
        LBFGS,
        epochs=20,
        bad=[
            (partial(LBFGS, history=0), "history"),
            (partial(LBFGS, tolerance=-1.0), "tolerance"),
            (partial(LBFGS, tolerance=math.nan), "tolerance"),
            (partial(LBFGS, l2=-0.1), "l2"),
            (partial(LBFGS, max_trials=0), "max_trials"),
            (partial(LBFGS, backend="pigeons"), "backend"),
        ],
    ),
    "LBFGS-backups": Case(
        partial(LBFGS, backups=True),
        epochs=20,
        rows_move=True,
        resumes_exactly=False,  # to rounding: who adds up what is left to chance
        slow=True,
    ),
    "NewtonCG": Case(
        NewtonCG,
        epochs=20,
        slow=True,  # the same loop as LBFGS
        bad=[
            (partial(NewtonCG, tolerance=-1.0), "tolerance"),
            (partial(NewtonCG, l2=-0.1), "l2"),
            (partial(NewtonCG, backend="pigeons"), "backend"),
        ],
    ),
}


class SecondOrderContract(StrategyContract):
    """As all strategies; but its steps are whole passes, and no setting of it is plain SGD."""

    def test_the_degenerate_setting_is_plain_sgd(self, case):
        """In its place: several ranks take the steps of one that has all rows."""
        rows = digits(128)
        plan = digits_plan(model=make_double_reader)
        rows["x"] = rows["x"].double()
        alone = case.train(case.make, plan, Schedule(6, BATCH), [rows])
        spread = case.train(case.make, plan, Schedule(6, BATCH), cut(rows, [70, 3, 0, 55]))
        assert_alike(spread, alone[0].task.module, rtol=1e-6, atol=1e-9)

    def test_losses_and_metrics_are_means_over_rows(self, case):
        """The row tells of the point that the iteration has reached."""
        rows = digits(60)
        first = case.train(case.make, digits_plan(), Schedule(3, BATCH), cut(rows, [44, 16]))[0]
        right = first.task.module(rows["x"]).argmax(1) == rows["y"]
        assert first.history[-1]["loss"] == pytest.approx(
            loss_of(first.task.module, rows), rel=1e-5
        )
        assert first.history[-1]["accuracy"] == pytest.approx(right.float().mean().item())
        losses = [row["loss"] for row in first.history]
        assert losses == sorted(losses, reverse=True)

    @pytest.mark.parametrize("num_workers", [slowly(1), 3])
    def test_a_resumed_run_is_the_uninterrupted_one(self, case, num_workers):
        if not case.resumes_exactly:
            pytest.skip("it promises no exact resumption")
        parts = cut(digits(220), [70 + 4 * rank for rank in range(num_workers)])
        plan = digits_plan(model=make_normed_reader)

        def train(checkpoints, fails_at=0):
            callbacks = [FailsAt(num_workers - 1, fails_at)]
            return case.train(
                case.make,
                plan,
                Schedule(7, BATCH),
                parts,
                callbacks=callbacks,
                checkpoints=checkpoints,
            )

        expected = train(MemoryCheckpoints(every=2))
        for fails_at in (1, 4):
            kept = MemoryCheckpoints(every=2)
            with pytest.raises(Injected):
                train(kept, fails_at)
            for ours, theirs in zip(train(kept), expected, strict=True):
                assert ours.step == theirs.step == 7
                assert told(ours) == told(theirs)
                assert_alike([ours], theirs.task.module, rtol=0, atol=0)


def make_double_reader():
    return nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10)).double()
