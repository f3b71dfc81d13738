"""Every strategy through the contract suite, on threads."""

from __future__ import annotations

import sys
from pathlib import Path

from sparkdml.testing.strategy_contract import StrategyContract

sys.path.insert(0, str(Path(__file__).parent))
from strategy_cases import GANGS, SERVED


class TestStrategies(StrategyContract):
    cases = {**GANGS, **SERVED}
