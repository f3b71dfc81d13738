"""Averaging in pairs beside the computation: a replica, and a thread that meets others' replicas.

Ranks are active (even) or passive (odd), and only an active one begins an exchange, with a passive
one: so no two can wait for each other in a circle (Lian et al. 2018, section 3.4). Both go halfway
towards what the other had, as differences: steps that are taken meanwhile are kept, and the sum of
the two replicas stays what it was.
"""

from __future__ import annotations

import random
import threading
from types import TracebackType

import torch
from torch import Tensor

from sparkdml.comm.base import Communicator
from sparkdml.comm.peers import join, messages_of, open_peers
from sparkdml.errors import CommunicationError
from sparkdml.network.timeouts import PEERS_LOOK_SECONDS

ASK, REPLY = 0, 1  # tags
EXCHANGE, FAREWELL = 0.0, 1.0  # what a message is, in its last number
JOIN_SECONDS = 1.0  # after a failure


class Replica:
    """Parameters that two threads change: by steps, and by averaging."""

    def __init__(self, values: Tensor) -> None:
        self._values = values.clone()
        self._lock = threading.Lock()

    def read_into(self, tensor: Tensor) -> None:
        with self._lock:
            tensor.copy_(self._values)

    def set(self, values: Tensor) -> None:
        with self._lock:
            self._values.copy_(values)

    def add(self, change: Tensor, factor: float = 1.0) -> None:
        with self._lock:
            self._values.add_(change.to(self._values.device), alpha=factor)

    def meet(self, theirs: Tensor, ours: Tensor) -> None:
        """Go halfway towards theirs; `ours` is filled with what was here before."""
        with self._lock:
            ours.copy_(self._values)
            self._values.add_((theirs - ours).to(self._values.device), alpha=0.5)


class Exchange:
    """One rank's thread of exchanges, on a wire of its own. A context manager; every rank opens it.

    `poke` asks for an exchange, if none is under way; `rest` waits until there is none. Passive
    ranks answer at any time.
    """

    def __init__(self, replica: Replica, values: Tensor, comm: Communicator, seed: int) -> None:
        self._replica, self._comm = replica, comm
        self._peers = open_peers(comm)
        self._messages = messages_of(self._peers)
        self._is_active = comm.rank % 2 == 0
        self._partners = [r for r in range(comm.size) if r % 2 != comm.rank % 2]
        self._random = random.Random(seed * comm.size + comm.rank)
        # By way of the host's memory, and one number more: what kind of message it is.
        self._ours = torch.zeros(values.numel() + 1, dtype=values.dtype)
        self._theirs = torch.zeros_like(self._ours)
        self._changed = threading.Condition()
        self._is_wanted = self._is_ending = False
        self._error: BaseException | None = None
        self.num_exchanges = 0
        self._thread = threading.Thread(target=self._run, name="sparkdml-pairs", daemon=True)

    def poke(self) -> None:
        with self._changed:
            self._check()
            self._is_wanted = self._is_active and bool(self._partners)
            self._changed.notify_all()

    def rest(self) -> None:
        with self._changed:
            while self._is_wanted and self._error is None:
                if not self._changed.wait(PEERS_LOOK_SECONDS):
                    self._comm.check()
            self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise CommunicationError(f"averaging in pairs failed: {self._error}") from self._error

    def _run(self) -> None:
        try:
            self._lead() if self._is_active else self._answer()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _lead(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_wanted or self._is_ending)
                if not self._is_wanted:
                    break
            partner = self._random.choice(self._partners)
            self._replica.read_into(self._ours[:-1])
            self._messages.send(self._ours, partner, ASK)
            self._messages.recv_(self._theirs, partner, REPLY)
            self._replica.add(self._theirs[:-1] - self._ours[:-1], 0.5)
            with self._changed:
                self.num_exchanges += 1
                self._is_wanted = False
                self._changed.notify_all()
        self._ours[-1] = FAREWELL
        for partner in self._partners:
            self._messages.send(self._ours, partner, ASK)

    def _answer(self) -> None:
        num_here = len(self._partners)
        while num_here:
            partner = self._messages.recv_(self._theirs, None, ASK)
            if self._theirs[-1] == FAREWELL:
                num_here -= 1
                continue
            self._replica.meet(self._theirs[:-1], self._ours[:-1])
            self._messages.send(self._ours, partner, REPLY)
            self.num_exchanges += 1

    def __enter__(self) -> Exchange:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
        if error is not None:
            self._peers.abort()  # wakes the thread, here and elsewhere
            self._thread.join(JOIN_SECONDS)
            return
        join(self._thread, self._comm)  # which ends when all active ranks have said farewell
        with self._changed:
            self._check()
        self._peers.close()
