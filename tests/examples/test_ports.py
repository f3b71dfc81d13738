"""Horovod and TorchDistributor code, before and after: how many lines differ, and that both run."""

from __future__ import annotations

import ast
import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparkdml.comm.backends import why_no_horovod

ROOT = Path(__file__).resolve().parents[2]
PORTS = ROOT / "examples" / "ports"
needs_horovod = pytest.mark.skipif(why_no_horovod() is not None, reason=str(why_no_horovod()))


def code_lines(path: Path) -> list[str]:
    """Without blank lines and the module's docstring, which say nothing."""
    text = path.read_text()
    docstring = ast.parse(text).body[0]
    lines = text.splitlines()[docstring.end_lineno :]
    return [line for line in lines if line.strip()]


def changed(name: str) -> tuple[list[str], list[str]]:
    before, after = (code_lines(PORTS / f"{name}_{when}.py") for when in ("before", "after"))
    difference = list(difflib.ndiff(before, after))
    written = [line[2:].strip() for line in difference if line.startswith("+ ")]
    gone = [line[2:].strip() for line in difference if line.startswith("- ")]
    return written, gone


@pytest.mark.parametrize("name", ["horovod", "torch_distributor"])
def test_the_docs_count_the_changed_lines_right(name: str) -> None:
    written, gone = changed(name)
    page = (ROOT / "docs" / f"how-to-from-{name.replace('_', '-')}.md").read_text()
    said = f"{len(written)} lines replace {len(gone)}"
    assert said in " ".join(page.split())
    for sign, lines in (("+", written), ("-", gone)):
        for line in lines:
            assert f"{sign} {line}" in page, "the page shows each of them"


def test_the_counts_are_these() -> None:
    assert [tuple(map(len, changed(name))) for name in ("horovod", "torch_distributor")] == [
        (2, 1),
        (2, 3),
    ]


def run_port(name: str, *arguments: str, launcher: tuple[str, ...] = ()) -> str:
    done = subprocess.run(
        [*launcher, sys.executable, str(PORTS / name), *arguments],
        env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr  # what workers print comes through the JVM


@needs_horovod
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_horovod_before_and_after_say_the_same() -> None:
    said = run_port("horovod_after.py", "--epochs", "10")
    horovodrun = str(Path(sys.executable).with_name("horovodrun"))
    before = run_port("horovod_before.py", "--epochs", "10", launcher=(horovodrun, "-np", "2"))
    accuracies = [float(text.split("test accuracy: ")[1].split("%")[0]) for text in (said, before)]
    assert min(accuracies) > 80
    assert abs(accuracies[0] - accuracies[1]) < 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_torch_distributor_after() -> None:
    said = run_port("torch_distributor_after.py")
    assert float(said.split("loss:")[1].split()[0]) < 0.01
