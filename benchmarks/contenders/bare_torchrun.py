"""Bare torchrun: a script of one's own, no Spark. And the limit: the same without agreeing."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from benchmarks.contenders.base import Bench, Contender
from benchmarks.contenders.processes import launch, read_training
from benchmarks.measurement import EPOCH_METRICS, WHOLE_CALL, Measurement
from benchmarks.training import as_seconds
from benchmarks.workloads import WORKERS, Allreduce, Training, Workload, ensure_data


class BareTorchrun(Contender):
    name = "torchrun"
    title = "bare torchrun DDP, tensors in memory"
    shuffle = "a random permutation of the rank's rows, every epoch"
    kind = "ddp"

    def missing(self) -> str | None:
        return None  # torchrun is a part of torch, which everything here needs

    def measure(self, workload: Workload, bench: Bench) -> Measurement:
        if isinstance(workload, Allreduce):
            return Measurement(launch(self._command("allreduce", workload, "-"), bench))
        folder = str(ensure_data(workload, bench.cache))
        called_at = time.monotonic()
        result = read_training(launch(self._command(self.kind, workload, folder), bench))
        whole_call = time.monotonic() - called_at
        measured = as_seconds(result, called_at)
        return replace(measured, seconds={WHOLE_CALL: whole_call, **measured.seconds})

    @staticmethod
    def _command(kind: str, workload: Workload, folder: str) -> list[str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1"]
        script = [f"--nproc_per_node={WORKERS}", "-m", "benchmarks.contenders.ddp_rank"]
        return [*torchrun, *script, kind, workload.to_json(), folder]


class NoCommunication(BareTorchrun):
    """Nothing that agrees can be faster than this, on the same machine in the same minute."""

    name = "limit"
    title = "the limit: as many processes, tensors in memory, no communication"
    kind = "alone"

    def does(self, workload: Workload) -> bool:
        return isinstance(workload, Training) and workload.model != "linear"

    def measure(self, workload: Workload, bench: Bench) -> Measurement:
        measured = super().measure(workload, bench)
        # It ends with as many models as processes, so only its loop can be compared.
        loop = {name: measured.seconds[name] for name in EPOCH_METRICS if name in measured.seconds}
        return replace(measured, seconds=loop)
