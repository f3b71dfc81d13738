"""Running a contender's own launcher as a child process, and reading what its rank 0 wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.contenders.base import Bench, ContenderFailed
from benchmarks.training import RankResult

_TAIL_CHARACTERS = 3000


def launch(command: list[str], bench: Bench, environment: Mapping[str, str] | None = None) -> Any:
    """Run `command RESULT_FILE` and return the JSON that its rank 0 left in that file."""
    with tempfile.TemporaryDirectory(prefix="sparkdml-bench-") as folder:
        result_file = Path(folder) / "result.json"
        log_file = Path(folder) / "output.log"
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                [*command, str(result_file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # so that its grandchildren can be ended with it
            )
            try:
                code = process.wait(bench.timeout_seconds)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if isinstance(error, subprocess.TimeoutExpired):
                    waited = f"no result after {bench.timeout_seconds:g} s (--timeout)"
                    raise ContenderFailed(f"{waited}\n{_tail(log_file)}") from error
                raise
        if code != 0 or not result_file.exists():
            raise ContenderFailed(f"{' '.join(command)} exited with {code}\n{_tail(log_file)}")
        return json.loads(result_file.read_text())


def _tail(log_file: Path) -> str:
    return log_file.read_text(errors="replace")[-_TAIL_CHARACTERS:]


def write_training(result: RankResult, result_file: str) -> None:
    Path(result_file).write_text(json.dumps(asdict(result)))


def read_training(result: Any) -> RankResult:
    return RankResult(**result)
