"""The jar's own build: its unit tests, and that the committed jar is what the sources make."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("gradle") is None, reason="Gradle is not installed")
def test_gradle_builds_a_jar_and_its_unit_tests_pass(tmp_path):
    built = subprocess.run(
        [
            *("gradle", "--offline", "--no-daemon", "--project-cache-dir", str(tmp_path / "cache")),
            *(f"-PjarFolder={tmp_path}", f"-PbuildFolder={tmp_path / 'build'}", "jar", "test"),
        ],
        cwd=REPOSITORY,
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert built.returncode == 0, built.stdout[-4000:] + built.stderr[-2000:]
    results = list((tmp_path / "build/test-results/test").glob("*.xml"))
    assert len(results) >= 5, "no unit test ran"
    assert (tmp_path / "sparkdml-ui.jar").stat().st_size > 20_000
