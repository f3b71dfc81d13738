"""Writes a worker's snapshots in the background, one at a time, and hashes what it writes.

The training thread pays only for a copy of the state into host memory, which is kept and reused:
allocating fresh pages would cost more than the copy. The rest happens on a thread of its own, named
`sparkdml-checkpoint`. It lives as long as the writer: where memory is short, `Thread.start()` can
wait indefinitely for a thread that has died already, while heartbeats go on.
"""

from __future__ import annotations

import errno
import hashlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparkdml.checkpoint.encoding import Stream, Tensors, take_apart
from sparkdml.checkpoint.manifest import Part, part_name
from sparkdml.checkpoint.state import State
from sparkdml.checkpoint.stores.base import CheckpointStore


class Staging:
    """Host memory for one state, reused once its write is done."""

    def __init__(self) -> None:
        self._buffers: Tensors = {}

    def copy(self, tensors: Tensors) -> Tensors:
        self._buffers = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        if tensors:
            sources = [tensor.contiguous() for tensor in tensors.values()]
            torch._foreach_copy_(list(self._buffers.values()), sources, non_blocking=True)
            if any(source.is_cuda for source in sources):
                torch.cuda.synchronize()
        return self._buffers

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        old = self._buffers.get(name)
        if old is not None and old.shape == tensor.shape and old.dtype == tensor.dtype:
            return old
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


@dataclass(frozen=True)
class Outgoing:
    """A state that is being written to a file of its own."""

    name: str
    rank: int | None  # the rank whose state it is; None: shared by all
    state: State
    # Small values that can be computed later, so that the training thread need not wait for them.
    later: Callable[[], State] = dict


@dataclass(frozen=True)
class Written:
    """The outcome of a snapshot: its parts, or why they could not be written."""

    parts: tuple[Part, ...]
    copy_seconds: float
    write_seconds: float
    error: Exception | None = None


class Hashed:
    """Chunks for the store, hashed as they are read."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()

    def __iter__(self) -> Iterator[memoryview]:
        self._digest = hashlib.sha256()  # from the start: the store may be retrying
        for chunk in self._stream:
            self._digest.update(chunk)
            yield chunk

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


@dataclass
class _Job:
    """One snapshot's write; what its thread raises is raised again for the one that waits."""

    done: threading.Event = field(default_factory=threading.Event)
    failure: BaseException | None = None


Jobs = queue.SimpleQueue[tuple[_Job, Callable[[], None]] | None]


def _run_jobs(jobs: Jobs) -> None:
    while (given := jobs.get()) is not None:
        job, work = given
        try:
            work()
        except BaseException as error:
            job.failure = error
        job.done.set()
        del given, job, work  # they refer to the writer: unused, it ends this thread


class Writer:
    """The worker's background writer. `busy` while a write is in flight."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._staging: dict[str, Staging] = {}
        self._jobs: Jobs = queue.SimpleQueue()
        self._job: _Job | None = None
        self._thread = threading.Thread(
            target=_run_jobs, args=(self._jobs,), name="sparkdml-checkpoint", daemon=True
        )
        self._thread.start()
        self._end = weakref.finalize(self, self._jobs.put, None)

    @property
    def busy(self) -> bool:
        return self._job is not None and not self._job.done.is_set() and self._thread.is_alive()

    def write(self, id: str, outgoing: Sequence[Outgoing], then: Callable[[Written], None]) -> None:
        """Copy the states and return; the rest happens on the thread.

        Raises what ended the write before: lack of memory, or an error of `then`.
        """
        self.wait()
        started = time.perf_counter()
        copies = []
        for file in outgoing:
            skeleton, tensors = take_apart(file.state)
            copies.append((skeleton, self._staging.setdefault(file.name, Staging()).copy(tensors)))
        copy_seconds = time.perf_counter() - started

        def work() -> None:
            begun = time.perf_counter()
            parts: list[Part] = []
            error: Exception | None = None
            try:
                for file, (skeleton, tensors) in zip(outgoing, copies, strict=True):
                    more_skeleton, more_tensors = take_apart(file.later())
                    stream = Stream({**skeleton, **more_skeleton}, {**tensors, **more_tensors})
                    hashed = Hashed(stream)
                    self._store.write(part_name(id, file.name), hashed)
                    parts.append(Part(file.name, file.rank, stream.num_bytes, hashed.sha256))
            except Exception as problem:  # reported; training continues
                error = problem
            then(Written(tuple(parts), copy_seconds, time.perf_counter() - begun, error))
            if lacks_memory(error):
                raise out_of_memory(f"writing checkpoint {id}") from error

        self._job = _Job()
        self._jobs.put((self._job, work))

    def wait(self) -> None:
        """Wait until no write is in flight; raise the error that ended it, as `write` does."""
        job = self._job
        if job is None:
            return
        while not job.done.wait(_LOOK_SECONDS):
            if not self._thread.is_alive() and not job.done.is_set():
                raise out_of_memory("the thread that writes checkpoints")
        self._job = None
        if job.failure is not None:
            raise job.failure

    def close(self) -> None:
        """End the thread after the write in flight, without waiting for it."""
        self._end()


_LOOK_SECONDS = 1.0


def lacks_memory(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is a lack of memory."""
    while error is not None:
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            return True
        error = error.__cause__
    return False


def out_of_memory(what: str) -> MemoryError:
    return MemoryError(
        f"{what} ran out of memory. Raise spark.executor.memoryOverhead or the limit that the "
        "worker's process has (container, RLIMIT_AS), or use smaller batches or fewer workers "
        "on each host"
    )
