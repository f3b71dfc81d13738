"""The contract suite of communicators: subclass it, and implement running a function on every rank.

    class TestMine(CommunicatorContract):
        @pytest.fixture
        def on_every_rank(self):
            return lambda check: my_run(2, check)

A new check is a function in one of the modules below; it then runs for every communicator.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import pytest

# Registered before the import, so that a failed assert shows its values.
_MODULES = [f"sparkdml.testing.{name}_checks" for name in ("communicator", "collective", "message")]
pytest.register_assert_rewrite(*_MODULES)

from sparkdml.testing.communicator_checks import CHECKS, Check  # noqa: E402

for _module in _MODULES:
    import_module(_module)  # registers its checks in CHECKS

OnEveryRank = Callable[[Check], object]


class CommunicatorContract:
    """Runs every check; checks of point to point pass with backends that have none."""

    @pytest.fixture
    def on_every_rank(self) -> OnEveryRank:
        """Runs a check with each rank's communicator and raises if it fails on any of them."""
        raise NotImplementedError("override this fixture")

    @pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())
    def test_contract(self, on_every_rank: OnEveryRank, check: Check) -> None:
        on_every_rank(check)
