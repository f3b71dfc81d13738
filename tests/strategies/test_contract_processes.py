"""Every strategy whose workers speak by a communicator, on processes, through each backend.

In the ordinary suite two processes come to what two threads come to; the slow one has the whole
contract.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sparkdml.comm.backends import why_no_horovod
from sparkdml.testing.digits import cut, digits, digits_plan
from sparkdml.testing.processes import ProcessTrainer
from sparkdml.testing.strategy_contract import BATCH, Case, StrategyContract, assert_alike, slowly
from sparkdml.testing.threads import Rows, train_on_threads
from sparkdml.training.plan import Schedule

sys.path.insert(0, str(Path(__file__).parent))
from strategy_cases import GANGS, SECOND_ORDER, SecondOrderContract

BACKENDS = [
    "torch",
    pytest.param(
        "horovod",
        marks=pytest.mark.skipif(why_no_horovod() is not None, reason=str(why_no_horovod())),
    ),
]
CASES = {**GANGS, **SECOND_ORDER}
# Two runs of these differ, as their workers take what comes first.
BY_CHANCE = ("Hogwild", "ADPSGD", "LBFGS-backups")


@pytest.fixture(scope="module", params=BACKENDS)
def trainer(request: pytest.FixtureRequest) -> Iterator[ProcessTrainer]:
    trainer = ProcessTrainer(request.param)
    yield trainer
    trainer.close()


class OnProcesses:
    """The contract with another `train`."""

    @pytest.fixture(autouse=True)
    def no_leaks(self) -> None:
        """In place of the suite's: the processes outlive a test."""

    @pytest.fixture
    def case(self, request: pytest.FixtureRequest, trainer: ProcessTrainer) -> Case:
        return replace(request.param, train=trainer)


def parts_of_two() -> list[Rows]:
    return cut(digits(60), [38, 22])


@pytest.mark.parametrize(
    "name",
    [
        slowly(name) if name == "LayeredSGD" else name  # which has processes more to start
        for name in CASES
        if name not in BY_CHANCE
    ],
)
class TestProcesses(OnProcesses):
    def test_processes_equal_threads(self, trainer: ProcessTrainer, name: str) -> None:
        run = (CASES[name].make, digits_plan(lr=0.1), Schedule(2, BATCH), parts_of_two())
        for ours, theirs in zip(trainer(*run), train_on_threads(*run), strict=True):
            assert_alike([ours], theirs.task.module, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
class TestContract(OnProcesses, StrategyContract):
    cases = GANGS


@pytest.mark.slow
class TestSecondOrderContract(OnProcesses, SecondOrderContract):
    cases = SECOND_ORDER
