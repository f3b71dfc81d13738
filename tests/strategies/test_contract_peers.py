"""Strategies whose workers send each other messages, through the contract suite."""

from __future__ import annotations

from functools import partial

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
    }
