"""Checks that Horovod is built for this torch, and that two processes can run an allreduce."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time

from sparkdml.cli.checks import Check
from sparkdml.cli.horovod_probe import HorovodProbe, probe_horovod, without_launcher

_INSTALL = "sparkdml install-horovod"
_REBUILD = "sparkdml install-horovod --force"
_NUM_RANKS = 2
_LOOPBACK = "127.0.0.1"


def check_horovod() -> list[Check]:
    import torch

    probe = probe_horovod()
    installation = judge_probe(probe, torch.__version__, torch.version.cuda)
    if installation.status == "FAIL":
        return [installation]
    return [installation, check_allreduce("horovod" if probe.installed else "torch")]


def judge_probe(probe: HorovodProbe, torch_version: str, cuda: str | None) -> Check:
    if not probe.installed:
        found = "not installed; the torch backend will be used"
        return Check("Horovod", "warn", found, _INSTALL)
    found = f"Horovod {probe.version}"
    if probe.problem:
        return Check("Horovod", "FAIL", f"{found} does not work: {probe.problem}", _REBUILD)
    if probe.built_for != torch_version:
        return Check(
            "Horovod",
            "FAIL",
            f"{found} was built for torch {probe.built_for or '(unknown)'}, not {torch_version}",
            _REBUILD,
        )
    if not probe.gloo:
        return Check("Horovod", "FAIL", f"{found} was built without Gloo", _REBUILD)
    if cuda and not probe.nccl:
        return Check(
            "Horovod", "warn", f"{found} has no NCCL: GPU tensors are reduced on the CPU", _REBUILD
        )
    backends = "Gloo and NCCL" if probe.nccl else "Gloo"
    return Check("Horovod", "ok", f"{found} with {backends}, built for torch {probe.built_for}")


def check_allreduce(backend: str, timeout_seconds: float = 30.0) -> Check:
    """Run an allreduce between two processes, with a rendezvous in this process."""
    from sparkdml.comm.base import World
    from sparkdml.comm.rendezvous import Rendezvous
    from sparkdml.network.connection import interface_towards

    with Rendezvous(_LOOPBACK) as rendezvous:
        started = time.monotonic()
        processes = []
        for rank in range(_NUM_RANKS):
            world = World(
                rank=rank,
                size=_NUM_RANKS,
                hosts=(_LOOPBACK,) * _NUM_RANKS,
                rendezvous_host=rendezvous.host,
                store_port=rendezvous.store_port,
                kv_port=rendezvous.kv_port,
                interface=interface_towards(_LOOPBACK),
            )
            fields = json.dumps(dataclasses.asdict(world))
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "sparkdml.cli.checks.allreduce_probe", backend, fields],
                    env=without_launcher(os.environ),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        failures = _failures(processes, started + timeout_seconds)
    if failures:
        fix = "see the ports below" + (f"; then {_REBUILD}" if backend == "horovod" else "")
        return Check("allreduce", "FAIL", "; ".join(failures), fix)
    seconds = time.monotonic() - started
    found = f"{_NUM_RANKS} processes with {backend}, {seconds:.1f} s including their start"
    return Check("allreduce", "ok", found)


def _failures(processes: list[subprocess.Popen[str]], deadline: float) -> list[str]:
    """Wait for the processes, kill those that are late, and return the failures by rank."""
    failures = []
    for rank, process in enumerate(processes):
        try:
            _, errors = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            failures.append(f"rank {rank} did not finish in time")
            continue
        if process.returncode != 0:
            lines = [line.strip() for line in errors.splitlines() if line.strip()]
            said = lines[-1] if lines else f"exit code {process.returncode}"
            failures.append(f"rank {rank}: {said}")
    return failures
