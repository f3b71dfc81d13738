"""Ranks as real processes on this machine, for tests that need them.

They are forked from a server that has imported torch once, and stay for many calls.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from types import ModuleType, TracebackType
from typing import Any

from sparkdml.comm.backends import horovod_available, open_communicator
from sparkdml.comm.base import Communicator, World
from sparkdml.comm.rendezvous import Rendezvous

PRELOADED = ["sparkdml.testing.rank_processes", "sparkdml.comm.torch"]
if horovod_available():
    PRELOADED.append("horovod.torch")


class RankFailed(AssertionError):
    """Some ranks raised errors; `errors` has the traceback of each."""

    def __init__(self, errors: dict[int, str]) -> None:
        self.errors = errors
        super().__init__("\n".join(f"rank {rank}:\n{text}" for rank, text in errors.items()))


class RankProcesses:
    """`size` processes, each with an open communicator, that run functions when told to.

    With backend None nothing is opened, and functions get the rank's `World`.
    """

    def __init__(
        self,
        backend: str | None,
        size: int,
        timeout_seconds: float = 60.0,
        patience_seconds: float = 3.0,
    ) -> None:
        self.backend, self.size = backend, size
        self.timeout_seconds = timeout_seconds  # for a whole call
        self.patience_seconds = patience_seconds  # for the others, once a rank has failed
        self._rendezvous: Rendezvous | None = None
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def start(self) -> RankProcesses:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._rendezvous = Rendezvous("127.0.0.1")
        self._rendezvous.serve(self.backend or "")
        for rank in range(self.size):
            world = World(
                rank=rank,
                size=self.size,
                hosts=("127.0.0.1",) * self.size,
                rendezvous_host="127.0.0.1",
                store_port=self._rendezvous.store_port,
                kv_port=self._rendezvous.kv_port,
                interface="lo",
            )
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, self.backend, world), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        return self

    @property
    def rendezvous(self) -> Rendezvous:
        assert self._rendezvous is not None, "not started"
        return self._rendezvous

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def run(
        self, function: Callable[..., Any], *args: Any, ranks: list[int] | None = None
    ) -> list[Any]:
        """Run a module-level `function(comm, *args)` on every rank (or these); results in order.

        After a failure the ranks may disagree on the next call, so they are restarted.
        """
        chosen = list(range(self.size)) if ranks is None else ranks
        self.begin(function, *args, ranks=chosen)
        results, errors = self.finish(chosen)
        if errors:
            self.stop()
            self.start()
            raise RankFailed(errors)
        return [results[rank] for rank in chosen]

    def begin(
        self, function: Callable[..., Any], *args: Any, ranks: list[int] | None = None
    ) -> None:
        """Start the function on the ranks, without waiting for it."""
        if not self._processes:
            self.start()
        place = (function.__module__, inspect.getfile(function), function.__qualname__)
        for rank in range(self.size) if ranks is None else ranks:
            self._pipes[rank].send((place, args))

    def finish(self, ranks: list[int]) -> tuple[dict[int, Any], dict[int, str]]:
        """Return results, and tracebacks of the ranks that raised, died or don't respond."""
        deadline = time.monotonic() + self.timeout_seconds
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        awaited = {self._pipes[rank]: rank for rank in ranks}
        while awaited:
            ready = wait(list(awaited), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = awaited.pop(pipe)
                try:
                    raised, value = pipe.recv()
                    (errors if raised else results)[rank] = value
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join()
                    errors[rank] = f"the process ended with {self._processes[rank].exitcode}\n"
            if errors:  # the others are probably waiting for it
                deadline = min(deadline, time.monotonic() + self.patience_seconds)
        for rank in awaited.values():
            errors[rank] = "no answer\n"
        return results, errors

    def kill(self, rank: int) -> None:
        os.kill(self._processes[rank].pid, signal.SIGKILL)
        self._processes[rank].join()

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        if self._rendezvous is not None:
            self._rendezvous.close()
        self._processes, self._pipes, self._rendezvous = [], [], None

    def __enter__(self) -> RankProcesses:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def _serve(pipe: Connection, backend: str | None, world: World) -> None:
    """A rank's process: open once, then run the requested functions until the pipe closes."""
    import torch

    torch.set_num_threads(1)
    subject: Communicator | World | None = None if backend is not None else world
    while True:
        try:
            place, args = pipe.recv()
        except EOFError:
            return
        try:
            if subject is None:
                assert backend is not None
                subject = open_communicator(backend, world)
            pipe.send((False, _load(*place)(subject, *args)))
        except BaseException:
            pipe.send((True, traceback.format_exc()))


def _load(module_name: str, path: str, name: str) -> Callable[..., Any]:
    """Find a function by its module, or by its file if it is in a test file."""
    module: ModuleType
    if module_name in sys.modules:
        module = sys.modules[module_name]
    elif module_name.startswith("sparkdml."):
        module = importlib.import_module(module_name)
    else:
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, name)
    return function
