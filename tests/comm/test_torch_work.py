"""Waiting for torch's work: a time-out is no failure, and what has failed is told to all."""

from datetime import timedelta

import pytest

from sparkdml.comm.torch_work import TorchWork
from sparkdml.errors import CommunicationError


class Alarm:
    def __init__(self):
        self.num_checks, self.sounded = 0, []

    def check(self):
        self.num_checks += 1

    def sound(self, text):
        self.sounded.append(text)


class Work:
    """As torch's: `wait` with a time raises when it is up, and what went wrong once it is over.

    `after` is the number of waits after which it is over; it may be between the time-out and the
    next question.
    """

    def __init__(self, after, failure=None):
        self.num_waits, self.after, self.failure = 0, after, failure

    def wait(self, timeout: timedelta | None = None):
        self.num_waits += 1
        if self.num_waits <= self.after:
            assert timeout is not None, "this would never end"
            raise RuntimeError("Operation timed out!")
        if self.failure is not None:
            raise RuntimeError(self.failure)

    def is_completed(self):
        return self.num_waits >= self.after


@pytest.mark.parametrize("after", [0, 1, 3])
def test_work_that_ends_just_after_a_time_out_has_not_failed(after):
    work, alarm = Work(after), Alarm()
    TorchWork(work, alarm).wait()
    assert alarm.sounded == []
    assert alarm.num_checks == max(0, after - 1)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_what_has_failed_is_told_in_its_own_words(after):
    alarm = Alarm()
    with pytest.raises(CommunicationError, match="Connection reset") as raised:
        TorchWork(Work(after, "Connection reset by peer\nat somewhere"), alarm).wait()
    assert alarm.sounded == [str(raised.value)]
