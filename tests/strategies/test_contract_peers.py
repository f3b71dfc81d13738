"""Strategies whose workers send each other messages, through the contract suite."""

from __future__ import annotations

from functools import partial

from sparkdml.strategies.ad_psgd import ADPSGD
from sparkdml.strategies.adaptive_balance import AdaptiveBalance
from sparkdml.strategies.backup_workers import BackupWorkers
from sparkdml.strategies.gossip import Gossip
from sparkdml.testing.strategy_contract import Case, StrategyContract


class TestStrategies(StrategyContract):
    cases = {
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
            partial(BackupWorkers, backup=0),  # nobody is dropped: each row comes once
            plain_workers=3,
            bad=[
                (partial(BackupWorkers, backup=-1), "backup"),
                (partial(BackupWorkers, max_lag=0), "max_lag"),
                (partial(BackupWorkers, backend="pigeons"), "backend"),
            ],
        ),
    }
