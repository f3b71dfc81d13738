"""The recorder of a worker's spans, and the clock that converts their times to the driver's.

Runs in a worker, for as long as its task. Recording a span costs its thread two readings of the
clock and an append; the recorder's own thread sends what has gathered to the driver about twice a
second, over the worker's control connection. Where steps are too quick to record them all, whole
steps are recorded, the same ones on all ranks: those whose number is a multiple of a power of two.

The driver's clock is estimated as by NTP: ask for the time, assume that it was read in the middle
between question and answer, and trust the quickest of several round trips, whose error is at most
half of its duration (Cristian 1989, "Probabilistic clock synchronization"). Clocks drift apart by
some parts in a million, which is several steps in an hour, so this is repeated; a correction is
spread over time, lest a span begin before the previous one.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any

from sparkdml.observe.timeline.horovod import HorovodTimeline
from sparkdml.observe.timeline.trace_file import CHECKPOINT_WRITER, TRAINING

ROUND_TRIPS = 8
SPREAD_NS = 10_000_000_000  # over which a correction is spread
MAX_KNOTS = 64

AskTime = Callable[[], float | None]  # the driver's time.time(), or None without an answer


class AlignedClock:
    """From this process's `perf_counter_ns` to nanoseconds since 1970 by the driver's clock."""

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now = now
        # The offset as a line between knots: (perf_counter_ns, offset).
        self._knots: list[tuple[int, int]] = []
        self.uncertainty_ns: int | None = None  # None: not aligned, the worker's own clock

    @property
    def is_aligned(self) -> bool:
        return self.uncertainty_ns is not None

    def align(self, ask: AskTime, round_trips: int = ROUND_TRIPS) -> None:
        """Measure the offset to the driver's clock, and convert by it from now on."""
        measured = measure_offset(ask, self._now, round_trips)
        now = self._now()
        if measured is None:
            if not self._knots:  # the driver will shift these by the time of their arrival
                self._knots = [(now, time.time_ns() - now)]
            return
        offset, uncertainty = measured
        if not self.is_aligned:
            self._knots = [(now, offset)]
        elif abs(offset - self.offset_at(now)) > uncertainty:
            before = [knot for knot in self._knots if knot[0] < now]
            corrected = (now + SPREAD_NS, offset)
            self._knots = [*before[-MAX_KNOTS:], (now, self.offset_at(now)), corrected]
        self.uncertainty_ns = uncertainty

    def offset_at(self, moment: int) -> int:
        place = bisect_right(self._knots, (moment, 1 << 63))
        if place == 0:
            return self._knots[0][1]
        if place == len(self._knots):
            return self._knots[-1][1]
        (start, before), (end, after) = self._knots[place - 1], self._knots[place]
        return before + (after - before) * (moment - start) // (end - start)

    def to_driver(self, moment: int) -> int:
        return moment + self.offset_at(moment)


def measure_offset(
    ask: AskTime, now: Callable[[], int], round_trips: int
) -> tuple[int, int] | None:
    """The offset of the quickest round trip and its uncertainty; None if there was no answer."""
    best: tuple[int, int] | None = None
    for _ in range(round_trips):
        sent = now()
        answer = ask()
        received = now()
        if answer is None:
            break  # the driver is gone or busy: don't wait for it repeatedly
        uncertainty = (received - sent) // 2
        if best is None or uncertainty < best[1]:
            best = (int(answer * 1e9) - (sent + received) // 2, uncertainty)
    return best


FLUSH_SECONDS = 0.5
ALIGN_SECONDS = 30.0
STEPS_PER_SECOND = 40.0  # recorded by a rank of a small run
DRIVER_STEPS_PER_SECOND = 1000.0  # recorded by all ranks of a large one together
MAX_WAITING = 20_000
SPANS_PER_MESSAGE = 500  # far below the longest message of a control connection

Args = dict[str, Any]
# Track, name, begin and end by perf_counter_ns, step, what else is known.
Span = tuple[int, str, int, int, int | None, Args | None]


class NoSpans:
    """The recorder of a run without a timeline: every call returns at once."""

    enabled = False
    recording = False

    def start_step(self, number: int) -> None:
        """Begin a step, with the wait for its batch."""

    def lap(self, name: str) -> None:
        """End a part of the step, which began with the last lap or the step."""

    def end_step(self, name: str = "step") -> None:
        """End the step; what follows belongs to no step."""

    @contextmanager
    def span(self, name: str, **args: Any) -> Iterator[None]:
        """Record work of the training thread that is no part of a step."""
        yield

    def add(self, track: int, name: str, begin: int, end: int, args: Args | None = None) -> None:
        """Record a span, in times of `time.perf_counter_ns()`; from any thread."""

    def add_write(self, seconds: float, num_bytes: int) -> None:
        """Record a checkpoint's write, which ends now; from the writer's thread."""

    def close(self) -> None:
        """Send what is left."""


NO_SPANS = NoSpans()


class SpanRecorder(NoSpans):
    """`event` and `flush` are the control client's; `ask_time` asks for the driver's time."""

    enabled = True

    def __init__(
        self,
        size: int,
        host: str,
        event: Callable[..., None],
        flush: Callable[[], None],
        ask_time: AskTime,
    ) -> None:
        self.recording = True  # off in steps that are skipped
        self._host, self._event, self._flush = host, event, flush
        self._ask_time = ask_time
        self.horovod: HorovodTimeline | None = None  # whose spans are sent too
        self._clock = AlignedClock()
        self._aligned_at = 0.0
        self._spans: deque[Span] = deque(maxlen=MAX_WAITING)
        self._step: int | None = None
        self._step_began = self._mark = perf_counter_ns()
        self._num_steps = self._steps_seen = 0
        self._skip_mask = 0  # steps with one of these bits in their number are skipped
        self._target = min(STEPS_PER_SECOND, max(1.0, DRIVER_STEPS_PER_SECOND / size))
        self._looked_at = perf_counter_ns()
        self._look_at_step = int(self._target)  # the first look, which may come before a flush
        self._closing = threading.Event()
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._send, name="sparkdml-timeline", daemon=True)
        self._thread.start()

    # -- the training thread --------------------------------------------------------------------

    def start_step(self, number: int) -> None:
        self._step = number
        self.recording = not number & self._skip_mask
        self._step_began = self._mark = perf_counter_ns()
        if not self._num_steps:
            self._looked_at = self._mark  # the time before the first step says nothing of steps

    def lap(self, name: str) -> None:
        now = perf_counter_ns()
        if self.recording:
            self._spans.append((TRAINING, name, self._mark, now, self._step, None))
        self._mark = now

    def end_step(self, name: str = "step") -> None:
        is_step = name == "step"  # else it only began as one, and is always recorded
        if self.recording or not is_step:
            number = self._step if is_step else None
            self._spans.append((TRAINING, name, self._step_began, perf_counter_ns(), number, None))
        self._num_steps += 1
        self._step = None
        self.recording = True
        if self._num_steps == self._look_at_step:
            self._choose_steps()

    @contextmanager
    def span(self, name: str, **args: Any) -> Iterator[None]:
        begin = perf_counter_ns()
        try:
            yield
        finally:
            end = perf_counter_ns()
            step = self._step if self.recording else None
            self._spans.append((TRAINING, name, begin, end, step, args or None))

    # -- any thread -----------------------------------------------------------------------------

    def add(self, track: int, name: str, begin: int, end: int, args: Args | None = None) -> None:
        self._spans.append((track, name, begin, end, self._step, args))

    def add_write(self, seconds: float, num_bytes: int) -> None:
        end = perf_counter_ns()
        args = {"bytes": num_bytes}
        begin = end - int(seconds * 1e9)
        self._spans.append((CHECKPOINT_WRITER, "checkpoint write", begin, end, None, args))

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(timeout=5)
        self._send_waiting()
        if self.horovod is not None:
            self.horovod.close()

    # -- the sending thread ---------------------------------------------------------------------

    def _send(self) -> None:
        while not self._closing.wait(FLUSH_SECONDS):
            self._send_waiting()

    def _send_waiting(self) -> None:
        with self._sending:
            if time.monotonic() - self._aligned_at > ALIGN_SECONDS or not self._clock.is_aligned:
                self._clock.align(self._ask_time)
                self._aligned_at = time.monotonic()
            spans = [self._spans.popleft() for _ in range(len(self._spans))]
            if self.horovod is not None:
                spans.extend(self.horovod.take())
            for start in range(0, len(spans), SPANS_PER_MESSAGE):
                self._send_some(spans[start : start + SPANS_PER_MESSAGE])
            if spans:
                self._flush()
            self._choose_steps()

    def _choose_steps(self) -> None:
        """Record about as many steps per second as are worth looking at.

        A span is expensive beside a step of a millisecond: another thread encodes it, but under
        the same interpreter lock. So the first look comes once a second's worth is recorded.
        """
        now, num_steps = perf_counter_ns(), self._num_steps
        seconds = max(1, now - self._looked_at) / 1e9
        rate = (num_steps - self._steps_seen) / seconds
        self._looked_at, self._steps_seen = now, num_steps
        if not rate:
            return  # waiting for the first batch, or validating: nothing new is known
        stride = 1
        while rate / stride > self._target:
            stride *= 2
        self._skip_mask = stride - 1

    def _send_some(self, spans: list[Span]) -> None:
        origin = self._clock.to_driver(spans[0][2])
        uncertainty = self._clock.uncertainty_ns
        self._event(
            "spans",
            host=self._host,
            origin=origin,
            uncertainty=None if uncertainty is None else uncertainty / 1e3,
            every=self._skip_mask + 1,
            spans=[self._encode(span, origin) for span in spans],
        )

    def _encode(self, span: Span, origin: int) -> list[Any]:
        track, name, begin, end, step, args = span
        start = self._clock.to_driver(begin)
        duration = max(0, self._clock.to_driver(end) - start)
        return [track, name, (start - origin) / 1e3, duration / 1e3, step, args]
