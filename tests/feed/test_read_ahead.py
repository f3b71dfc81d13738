"""Reading ahead: the same items in the same order, each read once, whether asked for or ahead."""

from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdml.feed.read_ahead import ReadAhead


@given(st.integers(0, 6), st.lists(st.booleans(), max_size=12))
def test_whenever_it_reads_ahead_the_items_are_the_same(num_items, turns):
    items = ReadAhead(iter(range(num_items)))
    found = []
    for advances in turns:
        if advances:
            items.advance()
        elif (item := next(items, None)) is not None:
            found.append(item)
    assert found + list(items) == list(range(num_items))


def test_one_item_is_read_ahead_and_its_time_is_told():
    read, timed = [], []

    def source():
        for item in range(3):
            read.append(item)
            yield item

    @contextmanager
    def timing():
        timed.append(len(read))
        yield

    items = ReadAhead(source(), timing)
    items.advance()
    items.advance()
    assert read == [0]
    assert timed == [0]
    assert [next(items), next(items)] == [0, 1]
    assert timed == [0]


def test_an_error_of_the_source_is_raised_where_it_is_read():
    def source():
        yield 1
        raise OSError("a lost disk")

    items = ReadAhead(source())
    items.advance()
    assert next(items) == 1
    with pytest.raises(OSError, match="a lost disk"):
        items.advance()
