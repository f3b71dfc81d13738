"""The membership of a server group, at the driver: its servers, its workers, and which are silent.

Pure: it is told what happened and when, and computes the group's state. Members ask questions
(`answer`), each of which also counts as a heartbeat. Only the membership makes generations, so it
is always unambiguous which server serves a part; `node.py` has what servers do for a new one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sparkdml.network.timeouts import Timeouts
from sparkdml.parameter_server.config import ServerConfig
from sparkdml.parameter_server.consistency import Watch
from sparkdml.parameter_server.view import Member, View


class Membership:
    """Safe to call from several threads. `now` is a clock in seconds."""

    def __init__(self, config: ServerConfig, now: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._now = now
        self._lock = threading.Lock()
        replication = min(config.replication, config.num_servers)
        self._view = View(replication=replication)
        self._num_workers = config.num_workers
        self._watch = Watch(config.expulsion) if config.expulsion else None
        self._clocks: dict[int, int] = {}  # as the workers last reported
        self._waiting: dict[int, Member] = {}  # servers, before the group begins
        self._last_look = now()
        self._last_sign: dict[tuple[str, int], float] = {}
        self._settled: dict[int, int] = {}  # server_id -> generation whose copies it has handed out
        self._barriers: dict[str, dict[int, int]] = {}  # name -> worker -> how often it arrived
        self._lives: dict[int, list[int]] = {}  # worker -> the numbers of its clients, in order
        self._lost: set[int] = set()  # servers lost since all copies were last in place
        self.failure: str | None = None  # why the group can't continue
        self.stopped = False
        self.events: list[dict[str, Any]] = []

    def use_timeouts(self, timeouts: Timeouts) -> None:
        """Use the time-outs of the run that this group is part of, instead of the config's."""
        with self._lock:
            self._config = replace(self._config, lost_after_seconds=timeouts.server_lost)

    @property
    def view(self) -> View:
        with self._lock:
            return self._view

    def answer(self, what: str, fields: Mapping[str, Any]) -> dict[str, Any] | None:
        """Answer a member's question; None if the question is not for the membership."""
        handlers = {
            "server.join": self._join,
            "server.beat": self._beat,
            "server.worker_join": self._worker_join,
            "server.worker_beat": self._worker_beat,
            "server.worker_leave": self._worker_leave,
            "server.barrier": self._barrier,
            "server.view": self._show,
        }
        handle = handlers.get(what)
        if handle is None:
            return None
        with self._lock:
            self._find_the_silent()
            answer = handle(dict(fields))
            # A view is sent only to members that have an older one.
            known = (fields.get("generation", -1), fields.get("roster", -1))
            if known != (self._view.generation, self._view.roster) or "started" in answer:
                answer["view"] = self._view.to_dict()
            answer["stop"] = self.stopped
            if self.failure is not None:
                answer["failed"] = self.failure
            return answer

    def check(self) -> None:
        """Look for members that have been silent for too long; call it periodically."""
        with self._lock:
            self._find_the_silent()

    def stop(self) -> None:
        """Tell the servers to end, when they next ask."""
        with self._lock:
            self.stopped = True

    def fail(self, why: str) -> None:
        """Tell all members that the group can't continue; the first reason counts."""
        with self._lock:
            self.failure = self.failure or why

    def lost_server(self, server_id: int) -> None:
        with self._lock:
            self._remove_server(server_id, "lost")

    def lost_worker(self, worker: int) -> None:
        with self._lock:
            self._remove_worker(worker, "lost")

    def expect_workers(self, count: int) -> None:
        """How many workers to wait for, the next time that all begin together."""
        with self._lock:
            self._num_workers = count
            if len(self._view.workers) >= count and not self._view.started:
                self._view = replace(self._view, roster=self._view.roster + 1, started=True)

    # Servers ------------------------------------------------------------------------------------

    def _join(self, fields: dict[str, Any]) -> dict[str, Any]:
        server_id, member = (
            int(fields["server_id"]),
            Member(str(fields["address"]), int(fields["number"])),
        )
        self._sign("server", server_id)
        if self._view.generation == 0:
            self._waiting[server_id] = member
            if len(self._waiting) >= self._config.num_servers:
                self._change_servers("begin", servers=dict(self._waiting), joining={})
            return {}
        if self._view.members.get(server_id) == member:
            return {}  # the answer to an earlier question was lost
        if server_id in self._view.members:
            self._remove_server(server_id, "restarted")
        self._change_servers("join", server_id, joining={**self._view.joining, server_id: member})
        return {}

    def _beat(self, fields: dict[str, Any]) -> dict[str, Any]:
        server_id, number = int(fields["server_id"]), int(fields["number"])
        member = self._view.members.get(server_id) or self._waiting.get(server_id)
        if member is None or member.number != number:
            return {"expelled": True}  # declared dead: it must rejoin, without its tables
        self._sign("server", server_id)
        self._settled[server_id] = max(
            self._settled.get(server_id, 0), int(fields.get("settled", 0))
        )
        self._promote()
        return {}

    def _promote(self) -> None:
        """Put servers that have all their copies onto the ring."""
        view = self._view
        if any(self._settled.get(server_id, 0) < view.generation for server_id in view.servers):
            return
        self._lost.clear()
        if view.joining:
            self._change_servers(
                "promote", *view.joining, servers={**view.servers, **view.joining}, joining={}
            )

    def _remove_server(self, server_id: int, why: str) -> None:
        view = self._view
        self._waiting.pop(server_id, None)
        self._settled.pop(server_id, None)
        self._last_sign.pop(("server", server_id), None)
        if server_id in view.servers:
            self._lost.add(server_id)
            if len(self._lost) >= view.replication:
                self.failure = self.failure or (
                    f"{len(self._lost)} servers were lost before others had copies of what they "
                    f"held, with replication={view.replication}: parts of tables may be gone. "
                    "Resume from a checkpoint"
                )
        if server_id in view.members:
            self._change_servers(
                why,
                server_id,
                servers={s: m for s, m in view.servers.items() if s != server_id},
                joining={s: m for s, m in view.joining.items() if s != server_id},
            )

    def _change_servers(self, why: str, *server_ids: int, **changes: Any) -> None:
        self._view = replace(self._view, generation=self._view.generation + 1, **changes)
        self._note(f"server {why}", server_ids)

    # Workers ------------------------------------------------------------------------------------

    def _worker_join(self, fields: dict[str, Any]) -> dict[str, Any]:
        worker, number = int(fields["worker"]), int(fields["number"])
        lives = self._lives.setdefault(worker, [])
        if number not in lives:
            lives.append(number)
        elif number != lives[-1]:
            # It was disconnected, not dead. The state that the new one resumes must not change.
            return {"failed": f"worker {worker} has been started again elsewhere"}
        self._sign("worker", worker)
        if self._view.workers.get(worker) != number:
            workers = {**self._view.workers, worker: number}
            started = self._view.started or len(workers) >= self._num_workers
            self._change_workers("join", worker, workers=workers, started=started)
        return {"started": self._view.started}

    def _worker_beat(self, fields: dict[str, Any]) -> dict[str, Any]:
        worker = int(fields["worker"])
        if self._view.workers.get(worker) != int(fields["number"]):
            return {"expelled": True}  # it joins again, if it hasn't been replaced
        self._sign("worker", worker)
        clock = int(fields.get("clock", 0))
        if self._watch is not None and clock > self._clocks.get(worker, 0):
            self._clocks[worker] = clock
            self._watch.finished(worker, float(fields.get("busy_seconds", 0.0)))
            self._expel()
        return {}

    def _expel(self) -> None:
        assert self._watch is not None
        now, before = self._watch.expelled, set(self._view.expelled)
        for worker in now ^ before:
            why = "expelled" if worker in now else "waited for again"
            self._change_workers(why, worker, expelled=tuple(sorted(now)))

    def _worker_leave(self, fields: dict[str, Any]) -> dict[str, Any]:
        worker = int(fields["worker"])
        if self._view.workers.get(worker) == int(fields["number"]):
            self._remove_worker(worker, "leave")
        return {}

    def _remove_worker(self, worker: int, why: str) -> None:
        self._last_sign.pop(("worker", worker), None)
        for on_join in self._barriers.values():
            on_join.pop(worker, None)
        self._clocks.pop(worker, None)
        if self._watch is not None:
            self._watch.gone(worker)
            self._expel()
        if worker in self._view.workers:
            workers = {w: n for w, n in self._view.workers.items() if w != worker}
            # When all have gone, the next ones wait for each other again, as at first.
            started = self._view.started and bool(workers)
            self._change_workers(why, worker, workers=workers, started=started)

    def _change_workers(self, why: str, worker: int, **changes: Any) -> None:
        self._view = replace(self._view, roster=self._view.roster + 1, **changes)
        self._note(f"worker {why}", (worker,))

    def _barrier(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Whether all workers that are alive have come to their n-th barrier."""
        worker, name, times = int(fields["worker"]), str(fields["name"]), int(fields["times"])
        self._sign("worker", worker)
        on_join = self._barriers.setdefault(name, {})
        on_join[worker] = max(on_join.get(worker, 0), times)
        passed = all(on_join.get(other, 0) >= times for other in self._view.workers)
        return {"passed": passed and self._view.started}

    def _show(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Answer a snapshot reader, which is not a member."""
        return {}

    # Signs of life ------------------------------------------------------------------------------

    def _sign(self, role: str, which: int) -> None:
        self._last_sign[role, which] = self._now()

    def _find_the_silent(self) -> None:
        now, patience = self._now(), self._config.lost_after_seconds
        asleep, self._last_look = now - self._last_look > patience / 2, now
        silent = [who for who, last in self._last_sign.items() if now - last > patience]
        if asleep:
            # The driver itself was stalled: give all members another interval.
            self._last_sign = {
                who: max(t, now - patience / 2) for who, t in self._last_sign.items()
            }
            return
        for role, which in silent:
            if role == "worker":
                self._remove_worker(which, "silent")
        servers = [which for role, which in silent if role == "server"]
        if servers:
            # One at a time: losing two replicas at once loses what they hold, and the second
            # may report again while the first one's parts are being copied.
            self._remove_server(servers[0], "silent")
            for server_id in servers[1:]:
                self._last_sign["server", server_id] = now - patience / 2

    def _note(self, what: str, which: tuple[int, ...]) -> None:
        view = self._view
        self.events.append(
            {
                "what": what,
                "which": list(which),
                "generation": view.generation,
                "roster": view.roster,
            }
        )
