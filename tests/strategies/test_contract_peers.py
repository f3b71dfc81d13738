"""Strategies whose workers send each other messages, through the contract suite."""

from __future__ import annotations

from functools import partial

from sparkdml.strategies.adaptive_balance import AdaptiveBalance
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
                (partial(Gossip, backend="mpi"), "backend"),
            ],
        ),
        "AdaptiveBalance": Case(
            partial(AdaptiveBalance, every=2),
            plain_workers=3,
            resumes_exactly=False,  # speeds are measured, and additions ordered by them
            bad=[
                (partial(AdaptiveBalance, every=0), "every"),
                (partial(AdaptiveBalance, backend="mpi"), "backend"),
            ],
        ),
    }
