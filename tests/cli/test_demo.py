"""The demo, as a user runs it."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparkdml.cli import demo


def test_without_horovod_the_demo_says_so_and_takes_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "why_no_horovod", lambda: "the package horovod is not installed")
    assert demo.choose_backend() == "torch"
    (line,) = capsys.readouterr().out.splitlines()
    assert "sparkdml install-horovod" in line
    monkeypatch.setattr(demo, "why_no_horovod", lambda: None)
    assert demo.choose_backend() == "horovod"


@pytest.mark.slow
def test_the_demo_learns_digits_in_under_a_minute(tmp_path: Path) -> None:
    started = time.monotonic()
    trial = subprocess.run(
        [sys.executable, "-m", "sparkdml.cli.main", "demo", "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - started
    assert trial.returncode == 0, trial.stderr[-2000:]
    accuracy = re.search(r"Test accuracy: ([\d.]+)% on 360 held-out digits", trial.stdout)
    assert accuracy is not None, trial.stdout
    assert float(accuracy[1]) >= 96.0
    picture = (tmp_path / "digits-loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert "What to try next" in trial.stdout
    assert seconds < 60
