"""Servers as real processes on this machine, which tests kill; the caller has the membership."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from sparkdml.parameter_server.client.base import Ask
from sparkdml.parameter_server.client.client import WorkerClient
from sparkdml.parameter_server.config import ServerConfig
from sparkdml.parameter_server.server.node import serve
from sparkdml.testing.server_cluster import ServerCluster

PRELOADED = ["sparkdml.testing.server_processes"]


class ServerProcesses(ServerCluster):
    """A group whose servers run in their own processes."""

    def __init__(self, num_servers: int = 2, num_workers: int = 1, **settings: Any) -> None:
        super().__init__(num_servers, num_workers, **settings)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._processes: dict[int, Any] = {}
        self._answering: list[threading.Thread] = []

    def start_server(self, server_id: int) -> None:
        self._processes[server_id] = self._start(_serve, (server_id, self.config), {})

    def run_workers(self, count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run a module's `function(client, *args)` in `count` processes; return their results."""
        results: dict[int, Any] = {}
        processes = [
            self._start(_work, (worker, self.config, function, args), results)
            for worker in range(count)
        ]
        for process in processes:
            process.join()
            process.close()
        for thread in self._answering[-count:]:
            thread.join(timeout=5)
        return [results[worker] for worker in range(count)]

    def _start(self, target: Any, args: tuple[Any, ...], results: dict[int, Any]) -> Any:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=(theirs, *args))
        process.start()
        theirs.close()
        thread = threading.Thread(
            target=self._answer, args=(ours, results), name="sparkdml-answers", daemon=True
        )
        thread.start()
        self._answering.append(thread)
        return process

    def _answer(self, pipe: Connection, results: dict[int, Any]) -> None:
        """Wait until the process has ended."""
        with pipe:
            while True:
                try:
                    what, fields = pipe.recv()
                    if what == "result":
                        results[fields["worker"]] = fields["value"]
                    else:
                        pipe.send(self.membership.answer(what, fields))
                except (EOFError, OSError):
                    return

    def kill(self, server_id: int) -> None:
        """Kill it without a final message; the membership notices the missing heartbeats."""
        process = self._processes.pop(server_id)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        process.close()

    def _stop_servers(self) -> None:
        for server_id, process in list(self._processes.items()):
            process.join(timeout=5)
            if process.is_alive():
                self.kill(server_id)
            else:
                process.close()
        for thread in self._answering:
            thread.join(timeout=5)


def _ask_through(pipe: Connection) -> Ask:
    import torch

    torch.set_num_threads(1)
    lock = threading.Lock()

    def ask(what: str, **fields: Any) -> Any:
        with lock:
            try:
                pipe.send((what, fields))
                return pipe.recv()
            except (EOFError, OSError):
                os._exit(1)  # the caller has ended

    return ask


def _serve(pipe: Connection, server_id: int, config: ServerConfig) -> None:
    serve(server_id, config, _ask_through(pipe))


def _work(
    pipe: Connection,
    worker: int,
    config: ServerConfig,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    with WorkerClient(worker, config, _ask_through(pipe)) as client:
        value = function(client, *args)
    pipe.send(("result", {"worker": worker, "value": value}))
