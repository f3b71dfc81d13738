"""Bare horovodrun on Gloo: a script of one's own, no Spark."""

from __future__ import annotations

import importlib.util
import sys
import time
from dataclasses import replace
from typing import Any

from benchmarks.contenders.base import Bench, Contender
from benchmarks.contenders.processes import launch, read_training
from benchmarks.measurement import WHOLE_CALL, Measurement
from benchmarks.training import as_seconds
from benchmarks.workloads import WORKERS, Allreduce, Workload, ensure_data


class BareHorovodrun(Contender):
    name = "horovodrun"
    title = "bare horovodrun, tensors in memory"
    shuffle = "a random permutation of the rank's rows, every epoch"
    environment: dict[str, str] = {}

    def missing(self) -> str | None:
        if importlib.util.find_spec("horovod") is None:
            return "horovod (`sparkdml install-horovod`)"
        return None

    def measure(self, workload: Workload, bench: Bench) -> Measurement:
        if isinstance(workload, Allreduce):
            return Measurement(self._launch("allreduce", workload, "-", bench))
        folder = str(ensure_data(workload, bench.cache))
        called_at = time.monotonic()
        result = read_training(self._launch("train", workload, folder, bench))
        whole_call = time.monotonic() - called_at
        measured = as_seconds(result, called_at)
        return replace(measured, seconds={WHOLE_CALL: whole_call, **measured.seconds})

    def _launch(self, kind: str, workload: Workload, folder: str, bench: Bench) -> Any:
        horovodrun = [sys.executable, "-m", "horovod.runner.launch", "--gloo"]
        hosts = ["-np", str(WORKERS), "-H", f"localhost:{WORKERS}"]
        script = [sys.executable, "-m", "benchmarks.contenders.horovod_rank"]
        command = [*horovodrun, *hosts, *script, kind, workload.to_json(), folder]
        return launch(command, bench, self.environment)


class TunedHorovodrun(BareHorovodrun):
    """The floor of a small allreduce is Horovod's cycle time: this peer has it lowered."""

    name = "horovodrun-tuned"
    title = "bare horovodrun, cycle time 0.1 ms"
    environment = {"HOROVOD_CYCLE_TIME": "0.1"}
