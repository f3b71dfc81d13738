"""The communicator over Horovod, in a worker; the only module that imports Horovod.

It names Horovod's collectives, waits for them and translates their errors. Horovod's own background
thread does the communication.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from sparkdml.comm.base import Communicator, ReduceOp, Work, World
from sparkdml.comm.composed import ComposedCommunicator
from sparkdml.comm.environment import HOROVOD_DEFAULTS, process_environment, temporary_environment
from sparkdml.comm.torch import TorchCommunicator
from sparkdml.comm.torch_groups import Alarm, connect_store, make_groups
from sparkdml.errors import CommunicationError, SetupError
from sparkdml.network.timeouts import ALARM_LOOK_SECONDS, ARRIVAL_TIMEOUT_SECONDS

# How many reductions of one kind may be in flight before the oldest is awaited.
NAMES_PER_KIND = 8

# Horovod's own wait spins until the end, and on a busy host occupies the core that its background
# thread needs. Sleeping from the start costs half a millisecond per small allreduce, since an idle
# core wakes slowly. So spin first, yielding to other threads, and then sleep.
SPIN_SECONDS = 3e-3
PAUSE_SECONDS = 500e-6

# Without sched_yield, sleep(0) is the closest equivalent.
_yield_core: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))


class HorovodWork:
    """A collective in flight; `result` is set by `wait`."""

    __slots__ = ("_alarm", "_handle", "_hvd", "result")

    def __init__(self, hvd: Any, handle: Any, alarm: Alarm | None) -> None:
        self._hvd, self._handle, self._alarm = hvd, handle, alarm
        self.result: Any = None

    def wait(self) -> None:
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        with communication_errors(self._alarm):
            sleep_at = time.perf_counter() + SPIN_SECONDS
            while not self._hvd.poll(handle):
                if time.perf_counter() > sleep_at:
                    self._sleep_until_done(handle)
                    break
                _yield_core()
            self.result = self._hvd.synchronize(handle)

    def _sleep_until_done(self, handle: Any) -> None:
        look_at = time.monotonic() + ALARM_LOOK_SECONDS
        while not self._hvd.poll(handle):
            if self._alarm is not None and time.monotonic() > look_at:
                self._alarm.check()
                look_at = time.monotonic() + ALARM_LOOK_SECONDS
            time.sleep(PAUSE_SECONDS)


class Names:
    """The name of each collective: the same on all ranks, and reused.

    Horovod negotiates a tensor by its name, and caches the result for names that it has seen with
    the same shape. So names are numbered per kind of call, in the order of the calls, which is the
    same on all ranks, and are reused in turn. A name that is still in flight is awaited first.
    """

    def __init__(self) -> None:
        self._num_calls: dict[str, int] = {}
        self._under_way: dict[str, HorovodWork] = {}

    def next(self, kind: str) -> str:
        place = self._num_calls.get(kind, 0) % NAMES_PER_KIND
        self._num_calls[kind] = place + 1
        name = f"sparkdml.{kind}.{place}"
        earlier = self._under_way.pop(name, None)
        if earlier is not None:
            earlier.wait()
        return name

    def started(self, name: str, work: HorovodWork) -> None:
        self._under_way[name] = work


@contextmanager
def communication_errors(alarm: Alarm | None) -> Iterator[None]:
    """Raise HorovodInternalError, a RuntimeError, as CommunicationError, and sound the alarm."""
    try:
        yield
    except CommunicationError:
        raise
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        failure = CommunicationError(f"a collective failed; a rank is probably gone: {first_line}")
        if alarm is not None:
            alarm.sound(str(failure))
        raise failure from error


# Horovod reads these when it is initialised; the user's own settings take precedence.
SETTINGS = {
    # Fusion joins the tensors that happen to be ready, so the order of additions, and with three or
    # more ranks the result, would depend on timing.
    "HOROVOD_FUSION_THRESHOLD": "0",
    # How far apart ranks may arrive; a lost rank is still noticed immediately.
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "120",
}
# With both of these set, Horovod 0.28 crashes when it is initialised a second time in a process: it
# removes both from its tuner's values and then writes a default to neither. So the cycle time is
# left to the user, although a shorter one would answer small allreduces sooner.
TUNED = ("HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME")

ABORT_PATIENCE_SECONDS = 2.0


class HorovodCommunicator(ComposedCommunicator):
    """Created by `open`. Groups created by `split` use torch: see `_open_split`."""

    native_dtypes = frozenset(
        {torch.float32, torch.float64, torch.float16, torch.int64, torch.int32}
    )

    def __init__(
        self,
        hvd: Any,
        world: World,
        store: Store | None,
        alarm: Alarm | None,
        *,
        shut_down_on_close: bool,
    ) -> None:
        self.rank, self.size = world.rank, world.size
        self._hvd, self._world = hvd, world
        self._store, self._alarm = store, alarm
        self._shut_down_on_close = shut_down_on_close
        self._names = Names()
        self._ops = {"sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max, "product": hvd.Product}
        self._closed = False
        self._num_splits = 0

    @classmethod
    def open(
        cls, world: World, arrival_timeout_seconds: float = ARRIVAL_TIMEOUT_SECONDS
    ) -> HorovodCommunicator:
        """Initialise Horovod, or use it as the user's code has initialised it."""
        hvd = _import_horovod()
        ours = not hvd.is_initialized()
        if not ours and (hvd.rank(), hvd.size()) != (world.rank, world.size):
            raise SetupError(
                f"Horovod is already initialised as rank {hvd.rank()} of {hvd.size()}, but this "
                f"worker is rank {world.rank} of {world.size}. Call hvd.shutdown() first."
            )
        store, alarm = None, None
        if world.store_port:
            # If a rank is missing, Horovod ends the whole process. So first wait for all ranks in
            # the store, which raises an error that names the missing ones.
            store, alarm = connect_store(world, arrival_timeout_seconds)
        if ours:
            _initialise(hvd, world)
        return cls(hvd, world, store, alarm, shut_down_on_close=ours)

    def _run(self, kind: str, start: Callable[[str], Any]) -> HorovodWork:
        if self._closed:
            raise CommunicationError("this communicator is closed")
        name = self._names.next(kind)
        with communication_errors(self._alarm):
            work = HorovodWork(self._hvd, start(name), self._alarm)
        self._names.started(name, work)
        return work

    def _start_allreduce(self, tensor: Tensor, op: ReduceOp) -> Work:
        flat = tensor.view(-1)
        return self._run(
            f"allreduce.{op}.{tensor.dtype}.{flat.numel()}",
            lambda name: self._hvd.allreduce_async_(flat, name=name, op=self._ops[op]),
        )

    def _broadcast_words(self, words: Tensor, root: int) -> None:
        self._run(
            f"broadcast.{root}.{words.dtype}.{words.numel()}",
            lambda name: self._hvd.broadcast_async_(words, root, name=name),
        ).wait()

    def _allgather_words(self, words: Tensor, counts: Sequence[int]) -> Tensor:
        # The name must not contain this rank's count, which differs between ranks.
        work = self._run(
            f"allgather.{words.dtype}.{sum(counts)}",
            lambda name: self._hvd.allgather_async(words, name=name),
        )
        work.wait()
        gathered: Tensor = work.result
        return gathered

    def _exchange_words(
        self, words: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Tensor:
        splits = torch.tensor(send_counts, dtype=torch.int32)
        work = self._run(
            f"alltoall.{words.dtype}",
            lambda name: self._hvd.alltoall_async(words, splits, name=name),
        )
        work.wait()
        received: Tensor = work.result[0]
        assert received.numel() == sum(receive_counts)
        return received

    def barrier(self) -> None:
        # Not hvd.barrier, which spins while it waits.
        self.allreduce_(torch.zeros(1, dtype=torch.int32))

    def _payload_device(self) -> torch.device:
        return torch.device(self._world.device)

    def _open_split(self, ranks: Sequence[int], color: int) -> Communicator:
        # Horovod's process sets are not used: all ranks of the world would have to add and remove
        # each set together, so a group could be neither split nor closed by its members alone; they
        # double the latency of every allreduce, even unused; and with a process set, a lost rank
        # ends the other processes.
        if self._store is None or self._alarm is None:
            raise SetupError("split needs World.store_port, the port of the driver's TCPStore")
        self._num_splits += 1
        store = PrefixStore(f"split/{self._num_splits}/{color}", self._store)
        rank, size = list(ranks).index(self.rank), len(ranks)
        kinds = ["cpu", "cuda"] if self._world.device.startswith("cuda") else ["cpu"]
        groups = make_groups(store, rank, size=size, kinds=kinds, interface=self._world.interface)
        return TorchCommunicator(
            groups, rank, size=size, store=store, alarm=self._alarm, interface=self._world.interface
        )

    def check(self) -> None:
        if self._alarm is not None:
            self._alarm.check()

    def close(self) -> None:
        if self._closed:
            return
        try:
            # Horovod shuts down on all ranks as soon as one of them does.
            self.barrier()
        except CommunicationError:
            self.abort()
            raise
        self._closed = True
        if self._shut_down_on_close:
            self._hvd.shutdown()

    def abort(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._alarm is not None:
            self._alarm.sound(f"rank {self.rank} of {self.size} aborted")
        if self._shut_down_on_close:
            # A shutdown is negotiated with the peers; one that hangs must not block this rank.
            leaving = threading.Thread(
                target=self._hvd.shutdown, name="sparkdml-abort", daemon=True
            )
            leaving.start()
            leaving.join(ABORT_PATIENCE_SECONDS)


def _import_horovod() -> Any:
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise SetupError(
            f"Horovod can't be imported: {error}. Run `sparkdml install-horovod`, which builds it "
            "for the installed torch, or choose backend='torch'."
        ) from error
    return hvd


def _is_the_users(name: str) -> bool:
    """Whether the user set the variable, not `process_environment` with Horovod's default."""
    return name in os.environ and os.environ[name] != HOROVOD_DEFAULTS.get(name)


_tuned_so_far: set[str] = set()


def _initialise(hvd: Any, world: World) -> None:
    if _tuned_so_far.issuperset(TUNED):
        raise SetupError(
            f"{' and '.join(TUNED)} were both set when Horovod was first initialised in this "
            "process, so a second time would crash it. Unset HOROVOD_CYCLE_TIME, or set "
            "spark.python.worker.reuse=false."
        )
    settings = {name: value for name, value in SETTINGS.items() if not _is_the_users(name)}
    with temporary_environment({**process_environment(world), **settings}):
        _tuned_so_far.update(name for name in TUNED if name in os.environ)
        try:
            hvd.init()
        except (RuntimeError, ValueError) as error:
            raise CommunicationError(f"rank {world.rank} can't reach its peers") from error
