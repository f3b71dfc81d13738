"""Every topology and W1's loop at the smallest size, by the command that users type."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.collectives import SUM_AIMS, continued_at_the_end, judge, parse, turn_of
from benchmarks.measurement import Measurement
from sparkdml.comm.backends import horovod_available
from sparkdml.comm.base import World
from sparkdml.comm.topologies import opening
from sparkdml.testing.rank_processes import RankProcesses

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "collectives.py"


def test_the_aims_say_of_how_many_ranks() -> None:
    aim = SUM_AIMS[0]
    seconds = {aim.contender: 1.0, aim.other: aim.at_least}
    sums = [{name: Measurement({aim.metric: each}) for name, each in seconds.items()}]
    (row,) = judge(sums, SUM_AIMS, "4 ranks")
    assert row.startswith(f"| 4 ranks, {aim.metric}: ")
    assert row.endswith(" yes |")


def test_the_command_behind_the_choice_measures_what_it_says() -> None:
    assert opening.__doc__ is not None
    found = re.search(r"python benchmarks/collectives\.py ([^`]*)`", opening.__doc__)
    assert found is not None
    options = parse(shlex.split(found[1]))
    assert options.ranks == list(opening.TREE_UP_TO_BYTES)
    measured = [4 * size for size in options.sizes]
    assert measured == [4_000, 48_000, 400_000, 4_000_000, 40_000_000]
    assert set(opening.TREE_UP_TO_BYTES.values()) <= set(measured)


def is_stopped(gang: RankProcesses) -> bool:
    """Whether all its processes are; a signal takes its time."""
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        stats = [Path(f"/proc/{pid}/stat").read_text() for pid in gang.pids]
        if all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats):
            return True
        time.sleep(0.01)
    return False


def take_a_turn_and_fail(gang: RankProcesses) -> None:
    with turn_of(gang):
        raise KeyError


def test_only_the_gang_whose_turn_it_is_runs() -> None:
    with RankProcesses(None, 2) as first, RankProcesses(None, 1) as second:
        for gang in (first, second):
            with turn_of(gang):
                gang.run(ranks_of)
        assert is_stopped(first)
        with turn_of(first):
            assert first.run(ranks_of) == [0, 1]
            assert is_stopped(second)
        with pytest.raises(KeyError):
            take_a_turn_and_fail(first)
        assert is_stopped(first)
        pids = [*first.pids, *second.pids]
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_stopped_ranks_continue_when_the_benchmark_ends() -> None:
    with RankProcesses(None, 2) as gang:
        with continued_at_the_end(gang):
            with turn_of(gang):
                gang.run(ranks_of)
            assert is_stopped(gang)
        assert not is_stopped(gang)


def ranks_of(world: World) -> int:
    return world.rank


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_quick_run_measures_every_topology_and_the_loop(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--quick", "--rounds", "1", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)

    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "collectives.md").read_text().splitlines()
    for name in ("ring", "tree", "double-tree", "halving-doubling", "hierarchical"):
        assert len([line for line in lines if line.startswith(f"| {name} |")]) == 2, name
    for ranks in (2, 4) if horovod_available() else ():
        assert any(line.startswith(f"| {ranks} ranks, 1,000 floats: shared") for line in lines)
    assert any(line.startswith("| sparkdml-torch-shared-memory |") for line in lines)
    assert any("against feed-limit" in line for line in lines)
