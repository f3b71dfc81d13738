"""A run from its start to its end, as those who watch it see it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sparkdml.observe.observers import Event, Observer, Observers


@contextmanager
def watched(
    start: Event,
    observers: Sequence[Observer],
    last_words: Callable[[], dict[str, Any]] = dict,
) -> Iterator[Callable[[int, Event], None]]:
    """Tells that the run starts and how it ends; yields where its events go in between.

    `last_words` is asked at the end, for what is only known then.
    """
    everybody = Observers(observers, run=uuid.uuid4().hex[:12])
    everybody.handle(-1, {**start, "kind": "run-start"})
    began = time.monotonic()
    outcome, cause = "finished", None
    try:
        yield everybody.handle
    except BaseException as error:
        outcome = "failed" if isinstance(error, Exception) else "interrupted"
        cause = (str(error) or type(error).__name__).partition("\n")[0]
        raise
    finally:
        end = {"outcome": outcome, "cause": cause, "seconds": time.monotonic() - began}
        everybody.drain()  # the last words are of those who have seen it all
        everybody.handle(-1, {**end, **last_words(), "kind": "run-end"})
        everybody.close()
