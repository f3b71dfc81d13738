"""What a worker records, and what it sends."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sparkdml.network.connection import MAX_LINE_BYTES
from sparkdml.observe.timeline import recorder as recorder_module
from sparkdml.observe.timeline.recorder import NO_SPANS, NoSpans, SpanRecorder
from sparkdml.observe.timeline.trace_file import CHECKPOINT_WRITER, TRAINING
from sparkdml.testing.waiting import wait_until

LAPS = ("feed wait", "forward", "backward", "communication", "optimizer")


class Sent:
    """A link that keeps what it is given."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.num_flushes = 0

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append(json.loads(json.dumps({"kind": kind, **fields})))

    def flush(self) -> None:
        self.num_flushes += 1

    @property
    def spans(self) -> list[list[Any]]:
        return [span for event in self.events for span in event["spans"]]


@pytest.fixture
def sent() -> Sent:
    return Sent()


@pytest.fixture
def spans(sent: Sent) -> Iterator[SpanRecorder]:
    recorder = SpanRecorder(2, "a-host", sent.event, sent.flush, time.time)
    yield recorder
    recorder.close()


def take_steps(spans: NoSpans, numbers: range, seconds: float = 0.0) -> None:
    for number in numbers:
        spans.start_step(number)
        for name in LAPS:
            time.sleep(seconds)
            spans.lap(name)
        spans.end_step()


def test_a_step_is_sent_as_a_whole_by_the_drivers_clock(spans: SpanRecorder, sent: Sent) -> None:
    before = time.time()
    take_steps(spans, range(7, 8), seconds=0.002)
    spans.close()
    after = time.time()
    assert [span[1] for span in sent.spans] == [*LAPS, "step"]
    assert {span[0] for span in sent.spans} == {TRAINING}
    assert {span[4] for span in sent.spans} == {7}
    (event,) = sent.events
    assert (event["kind"], event["host"], event["every"]) == ("spans", "a-host", 1)
    assert event["uncertainty"] < 1000
    *parts, step = sent.spans
    assert all(duration >= 2000 for _, _, _, duration, _, _ in sent.spans)
    assert sum(part[3] for part in parts) == pytest.approx(step[3], rel=0.2)
    begin = event["origin"] / 1e9 + step[2] / 1e6
    assert before - 1e-3 <= begin < begin + step[3] / 1e6 <= after + 1e-3


def test_spans_are_sent_while_a_step_is_under_way(spans: SpanRecorder, sent: Sent) -> None:
    spans.start_step(1)
    spans.lap("feed wait")
    wait_until(lambda: sent.spans, seconds=5)
    assert [span[1] for span in sent.spans] == ["feed wait"]
    assert sent.num_flushes >= 1


def test_quick_steps_are_sampled_as_wholes(spans: SpanRecorder, sent: Sent) -> None:
    step = 0
    end = time.monotonic() + 1.8
    while time.monotonic() < end:
        step += 1
        take_steps(spans, range(step, step + 1))
    spans.close()
    stride = max(event["every"] for event in sent.events)
    assert stride > 8
    assert stride & (stride - 1) == 0
    late = [span for event in sent.events[-1:] for span in event["spans"]]
    by_step: dict[int, list[str]] = {}
    for span in late:
        by_step.setdefault(span[4], []).append(span[1])
    whole = {number for number, names in by_step.items() if names == [*LAPS, "step"]}
    assert len(by_step) - len(whole) <= 1, "all but one that two messages share"
    assert all(number % 8 == 0 for number in by_step)
    assert len(sent.spans) < step * 6 / 2


def test_outside_of_steps_everything_is_recorded(spans: SpanRecorder, sent: Sent) -> None:
    spans._skip_mask = (1 << 20) - 1
    take_steps(spans, range(1, 4))
    with spans.span("validation", rows=5):
        pass
    spans.start_step(4)
    spans.lap("feed wait")
    spans.end_step("end of epoch")
    spans.add_write(0.25, 1000)
    spans.close()
    assert [(span[1], span[4], span[5]) for span in sent.spans] == [
        ("validation", None, {"rows": 5}),
        ("end of epoch", None, None),
        ("checkpoint write", None, {"bytes": 1000}),
    ]
    assert sent.spans[2][0] == CHECKPOINT_WRITER
    assert sent.spans[2][3] == pytest.approx(250_000)


def test_a_span_of_what_raises_is_recorded(spans: SpanRecorder, sent: Sent) -> None:
    with pytest.raises(KeyError), spans.span("validation"):
        raise KeyError
    spans.close()
    assert [span[1] for span in sent.spans] == ["validation"]


def test_messages_fit_the_wire_and_memory_is_bounded(
    spans: SpanRecorder, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "FLUSH_SECONDS", 60)
    take_steps(spans, range(1, 8001))
    spans.close()
    assert len(sent.spans) <= recorder_module.MAX_WAITING + 3000
    assert max(len(json.dumps(event)) for event in sent.events) < MAX_LINE_BYTES / 10


def test_without_a_timeline_nothing_happens() -> None:
    take_steps(NO_SPANS, range(1, 4))
    with NO_SPANS.span("validation"):
        pass
    NO_SPANS.add(TRAINING, "x", 0, 1)
    NO_SPANS.add_write(1.0, 1)
    NO_SPANS.close()
    assert not NO_SPANS.enabled
    assert not vars(NO_SPANS)


def test_a_driver_that_is_gone_does_no_harm() -> None:
    sent = Sent()
    spans = SpanRecorder(2, "h", sent.event, sent.flush, lambda: None)
    take_steps(spans, range(1, 3))
    spans.close()
    spans.close()
    assert {event["uncertainty"] for event in sent.events} == {None}
