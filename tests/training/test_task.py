"""The task on one rank's rows: how a large batch is cut into pieces."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdml.feed.batch import Batch
from sparkdml.strategies.allreduce import AllReduce
from sparkdml.testing.digits import digits, digits_plan, make_normed_reader
from sparkdml.testing.threads import train_on_threads
from sparkdml.training.plan import Schedule
from sparkdml.training.task import Task


@settings(deadline=None, max_examples=60)
@given(num_rows=st.integers(1, 100), batch_size=st.integers(1, 30))
def test_pieces_are_as_even_as_can_be(num_rows, batch_size):
    task = Task(digits_plan(batch_size=batch_size), torch.device("cpu"))
    rows = digits(num_rows)
    pieces = list(task.pieces(Batch(rows, num_rows)))
    sizes = [piece.num_rows for piece in pieces]
    assert len(sizes) == -(-num_rows // batch_size)  # as few as can be
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    assert sizes[0] <= batch_size
    for name, column in rows.items():
        assert torch.equal(torch.cat([piece[name] for piece in pieces]), column)


def test_no_piece_is_too_small_for_batch_norm_if_another_is_larger():
    """The last batch has 13 rows: pieces of 4, 3, 3 and 3, and not of 4, 4, 4 and 1."""
    plan = digits_plan(batch_size=4, model=make_normed_reader)
    [training] = train_on_threads(AllReduce, plan, Schedule(1, 4, accumulate=4), [digits(45)])
    assert training.history[0]["rows"] == 45
