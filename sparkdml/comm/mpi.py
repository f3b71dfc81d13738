"""The communicator over MPI, for tensors on the CPU: mpi4py on Open MPI, in a worker.

It is optional, for clusters whose network MPI supports best. Spark starts the processes, so they
are joined one by one by accept and connect (see `mpi_names`), which costs one round trip per rank
when a run begins. All collectives are non-blocking ones that are polled. Open MPI does not report
that a rank is gone: the ranks that wait for it poll the alarm, which the driver sounds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from sparkdml.comm.base import PointToPoint, ReduceOp, Traffic, Work, World, check_peer
from sparkdml.comm.composed import ComposedCommunicator
from sparkdml.comm.environment import temporary_environment
from sparkdml.comm.layout import in_memory, to_words
from sparkdml.comm.mpi_names import INSTALL_MPI, SERVER_KEY, open_mpi_settings, why_no_mpi
from sparkdml.comm.torch_groups import Alarm, connect_store
from sparkdml.errors import CommunicationError, SetupError
from sparkdml.network.timeouts import ALARM_LOOK_SECONDS, ARRIVAL_TIMEOUT_SECONDS

LONGEST_SLEEP = 0.001  # seconds between two polls
SPINS = 200  # polls without a sleep, in which a short message arrives

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SERVER_SETTING = "OMPI_MCA_pmix_server_uri"
_initialised_with: str | None = None  # MPI can be initialised only once in a process
# Requests abandoned at an alarm. MPI continues in this process and may still write to the buffers.
_abandoned: list[MPIWork] = []


class MPIWork:
    """An MPI request; it keeps its buffers alive until it is complete."""

    __slots__ = ("_alarm", "_buffers", "_mpi", "_request", "source")

    def __init__(self, mpi: Any, request: Any, alarm: Alarm, *buffers: Any) -> None:
        self._mpi, self._request, self._alarm, self._buffers = mpi, request, alarm, buffers
        self.source = -1  # after `wait`: the rank that sent the message

    def wait(self) -> None:
        if self._request is None:
            return
        status = self._mpi.Status()
        looks, looked = 0, time.monotonic()
        try:
            while not self._request.Test(status):
                looks += 1
                if looks > SPINS:
                    time.sleep(min(LONGEST_SLEEP, 1e-5 * (looks - SPINS)))
                if time.monotonic() - looked > ALARM_LOOK_SECONDS:
                    self._alarm.check()
                    looked = time.monotonic()
        except CommunicationError:
            _abandoned.append(self)
            raise
        except self._mpi.Exception as error:
            raise _failed(error, self._alarm) from error
        self.source = status.Get_source()
        self._request, self._buffers = None, ()


class MPICommunicator(ComposedCommunicator):
    """Created by `open` or `split`."""

    native_dtypes = frozenset(
        {torch.float32, torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8}
    )

    def __init__(self, mpi: Any, comm: Any, alarm: Alarm) -> None:
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._mpi, self._comm, self._alarm = mpi, comm, alarm
        self._ops = {"sum": mpi.SUM, "min": mpi.MIN, "max": mpi.MAX, "product": mpi.PROD}

    @classmethod
    def open(
        cls, world: World, arrival_timeout_seconds: float = ARRIVAL_TIMEOUT_SECONDS
    ) -> MPICommunicator:
        """Initialise MPI, once per process, and join the other ranks."""
        if world.device != "cpu":
            raise SetupError("backend='mpi' supports only CPU tensors: choose backend='torch'")
        store, alarm = connect_store(world, arrival_timeout_seconds)
        driver: Any = store.underlying_store  # type: ignore[attr-defined]
        if not driver.check([SERVER_KEY]):
            raise SetupError("backend='mpi' needs a name server: call Rendezvous.serve('mpi')")
        server = driver.get(SERVER_KEY).decode()
        mpi = _initialise(server, world.interface)
        try:
            return cls(mpi, _unite(mpi, store, world, arrival_timeout_seconds), alarm)
        except mpi.Exception as error:
            raise _failed(error, alarm) from error

    def _begin(self, request: Any, *buffers: Any) -> MPIWork:
        return MPIWork(self._mpi, request, self._alarm, *buffers)

    def _start_allreduce(self, tensor: Tensor, op: ReduceOp) -> Work:
        self._check_open()
        target = tensor.numpy()
        request = self._comm.Iallreduce(self._mpi.IN_PLACE, target, self._ops[op])
        return self._begin(request, tensor, target)

    def _broadcast_words(self, words: Tensor, root: int) -> None:
        self._check_open()
        self._begin(self._comm.Ibcast(_array(words), root), words).wait()

    def _allgather_words(self, words: Tensor, counts: Sequence[int]) -> Tensor:
        self._check_open()
        gathered = words.new_empty(sum(counts))
        request = self._comm.Iallgatherv(_array(words), [_array(gathered), list(counts)])
        self._begin(request, words, gathered).wait()
        return gathered

    def _exchange_words(
        self, words: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Tensor:
        self._check_open()
        received = words.new_empty(sum(receive_counts))
        request = self._comm.Ialltoallv(
            [_array(words), list(send_counts)], [_array(received), list(receive_counts)]
        )
        self._begin(request, words, received).wait()
        return received

    def barrier(self) -> None:
        self._check_open()
        self._begin(self._comm.Ibarrier()).wait()

    def _open_split(self, ranks: Sequence[int], color: int) -> MPICommunicator:
        self.barrier()  # Split can't be interrupted, so first wait for all ranks
        # The color is the group's lowest rank, since MPI takes no negative colors.
        part = self._comm.Split(min(ranks), list(ranks).index(self.rank))
        return MPICommunicator(self._mpi, part, self._alarm)

    @property
    def point_to_point(self) -> PointToPoint:
        self._check_open()
        return MPIMessages(self._mpi, self._comm, self._alarm, self.traffic)

    def check(self) -> None:
        self._alarm.check()

    def close(self) -> None:
        if self._comm is None:
            return
        try:
            self.barrier()  # a rank that left first would cut off the others' reads
        except CommunicationError:
            self.abort()
            raise
        self._comm = None  # not freed: that is collective, and MPI continues in this process

    def abort(self) -> None:
        if self._comm is None:
            return
        self._comm = None
        self._alarm.sound(f"rank {self.rank} of {self.size} aborted")

    def _check_open(self) -> None:
        if self._comm is None:
            raise CommunicationError("this communicator is closed")


class MPIMessages:
    """Point to point. Sender and receiver must use the same dtype and shape."""

    def __init__(self, mpi: Any, comm: Any, alarm: Alarm, traffic: Traffic) -> None:
        self._mpi, self._comm, self._alarm, self._traffic = mpi, comm, alarm, traffic

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> None:
        self.isend(tensor, to, tag).wait()

    def recv_(self, tensor: Tensor, source: int | None = None, tag: int = 0) -> int:
        return self._receive(tensor, self._mpi.ANY_SOURCE if source is None else source, tag)

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work:
        check_peer("to", to, self._comm.Get_rank(), self._comm.Get_size())
        self._traffic.sent(tensor.nbytes)
        words = to_words(tensor)
        return MPIWork(self._mpi, self._comm.Isend(_array(words), to, tag), self._alarm, words)

    def irecv_(self, tensor: Tensor, source: int, tag: int = 0) -> Work:
        check_peer("source", source, self._comm.Get_rank(), self._comm.Get_size())
        return _Receiving(self, tensor, source, tag)

    def _receive(self, tensor: Tensor, source: int, tag: int) -> int:
        if source != self._mpi.ANY_SOURCE:
            check_peer("source", source, self._comm.Get_rank(), self._comm.Get_size())
        work = _Receiving(self, tensor, source, tag)
        work.wait()
        return work.source

    def start(self, words: Tensor, source: int, tag: int) -> MPIWork:
        return MPIWork(self._mpi, self._comm.Irecv(_array(words), source, tag), self._alarm, words)


class _Receiving:
    """A message being received into a buffer, and copied from there to its target."""

    def __init__(self, messages: MPIMessages, tensor: Tensor, source: int, tag: int) -> None:
        self._target = tensor.detach()
        self._buffer = in_memory(self._target)
        self._work = messages.start(to_words(self._buffer), source, tag)

    def wait(self) -> None:
        self._work.wait()
        if self._buffer is not self._target:
            self._target.copy_(self._buffer)

    @property
    def source(self) -> int:
        return self._work.source


def _array(words: Tensor) -> Any:
    """View the words as integers of the same size, as MPI has no half-precision type."""
    return words.view(_WHOLE[words.dtype.itemsize]).numpy()


def _initialise(server: str, interface: str | None) -> Any:
    reason = why_no_mpi()
    if reason is not None:
        raise SetupError(f"backend='mpi' can't be used: {reason}. {INSTALL_MPI}")
    global _initialised_with
    if _initialised_with not in (None, server):
        raise SetupError(
            "MPI was already initialised in this Python process for another driver, and can't be "
            "initialised twice. Set spark.python.worker.reuse=false."
        )
    settings = {_SERVER_SETTING: server, **open_mpi_settings(interface)}
    with temporary_environment({**settings, **_set_by_the_user(settings)}):
        mpi = import_module("mpi4py.MPI")  # the import initialises MPI
    _initialised_with = server
    return mpi


def _set_by_the_user(settings: Mapping[str, str]) -> dict[str, str]:
    return {name: os.environ[name] for name in settings if name in os.environ}


def _unite(mpi: Any, store: Any, world: World, arrival_timeout_seconds: float) -> Any:
    """Build one communicator of all ranks: rank 0 opens a port, and the others join in order."""
    comm = mpi.COMM_SELF
    wait = timedelta(seconds=arrival_timeout_seconds)
    if world.rank == 0:
        port = mpi.Open_port()
        store.set("mpi/port", port)
    for newcomer in range(1, world.size):
        if newcomer < world.rank:
            continue
        if newcomer == world.rank:
            try:
                store.wait([f"mpi/turn/{newcomer}"], wait)
            except RuntimeError as error:
                raise CommunicationError(
                    f"rank {newcomer} waited {arrival_timeout_seconds:g} s for its turn to join "
                    "the others over MPI: check the ranks before it"
                ) from error
            port = store.get("mpi/port").decode()
            comm = mpi.COMM_SELF.Connect(port).Merge(high=True)
            continue
        if world.rank == 0:
            store.set(f"mpi/turn/{newcomer}", "now")
        # Only rank 0's port is used; the other members of the group pass it as well.
        comm = comm.Accept(port).Merge(high=False)
    if world.rank == 0:
        mpi.Close_port(port)
    return comm


def _failed(error: Any, alarm: Alarm) -> CommunicationError:
    """Convert MPI's error to a CommunicationError to raise, and sound the alarm."""
    first_line = str(error).partition("\n")[0]
    failure = CommunicationError(f"MPI failed; a rank is probably gone: {first_line}")
    alarm.sound(str(failure))
    return failure
