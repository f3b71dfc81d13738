"""Work in order: who waits does it or hears what became of it."""

import threading

import pytest

from sparkdml.comm.in_order import InOrder, InOrderOnThread
from sparkdml.errors import CommunicationError


def fail():
    raise MemoryError("no room for the sum")


@pytest.fixture(params=[InOrder, lambda: InOrderOnThread("work")], ids=["waiting", "thread"])
def order(request):
    order = request.param()
    yield order
    order.close()


def test_all_is_done_in_the_order_of_its_beginning(order):
    done = []
    steps = [order.begin(lambda number=number: done.append(number)) for number in range(50)]
    steps[-1].wait()
    assert done == list(range(50))
    assert order.is_idle


def test_a_failure_is_raised_as_it_is_and_then_fails_all_that_follows(order):
    first, second = order.begin(fail), order.begin(lambda: None)
    with pytest.raises(MemoryError, match="no room"):
        first.wait()
    for step in (first, second):
        with pytest.raises(CommunicationError, match="earlier allreduce failed: no room"):
            step.wait()
    assert not order.is_idle


def test_on_a_thread_it_is_kept_until_a_caller_waits():
    """As the rank's own fault, with its traceback: the driver must not take it for another's."""
    order, over = InOrderOnThread("work"), threading.Event()

    def fail_on_the_thread():
        assert threading.current_thread().name == "work"
        over.set()
        fail()

    step = order.begin(fail_on_the_thread)
    assert over.wait(10)
    with pytest.raises(MemoryError):
        step.wait()
    order.close()


def test_after_closing_no_caller_waits_in_vain(order):
    step = order.begin(lambda: None)
    order.close()
    if not step.is_done:
        with pytest.raises(CommunicationError, match="closed"):
            step.wait()
