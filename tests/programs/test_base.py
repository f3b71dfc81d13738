"""Schedule, push, pull: the runner."""

import pytest
import torch

from sparkdml.comm.threads import run_threads
from sparkdml.errors import ParameterError
from sparkdml.programs.base import Program, run_program


class Sums(Program):
    """Worker r of round n gets r numbers n, and says their sum."""

    def __init__(self, rank, rounds):
        self.rank, self.rounds, self.seen, self.results = rank, rounds, [], []
        self.finished = 0

    def schedule(self, round, num_workers):
        assert self.rank == 0
        if round == self.rounds:
            return None
        return [torch.full((worker,), round) for worker in range(num_workers)]

    def push(self, work):
        self.seen.append(work.tolist())
        return torch.tensor([float(work.sum())], dtype=torch.float64)

    def pull(self, works, parts):
        assert self.rank == 0
        assert [len(work) for work in works] == list(range(len(parts)))
        self.results.append(torch.cat(list(parts)).tolist())

    def finish(self):
        self.finished += 1


def test_each_worker_gets_its_own_work_and_rank_0_all_parts():
    def run(comm):
        program = Sums(comm.rank, rounds=3)
        return run_program(program, comm), program

    results = run_threads(3, run)
    assert [rounds for rounds, _ in results] == [3, 3, 3]
    assert results[0][1].results == [[0, 0, 0], [0, 1, 2], [0, 2, 4]]
    assert results[2][1].seen == [[0, 0], [1, 1], [2, 2]]
    assert [program.finished for _, program in results] == [1, 1, 1]


@pytest.mark.parametrize(("limit", "expected"), [(0, 0), (2, 2), (9, 3)])
def test_rounds_may_be_limited(limit, expected):
    def run(comm):
        return run_program(Sums(comm.rank, rounds=3), comm, limit)

    assert run_threads(2, run) == [expected] * 2


def test_a_worker_that_fails_releases_the_others():
    class Fails(Sums):
        def push(self, work):
            if self.rank == 1 and work[0] == 1:
                raise KeyError("in the second round")
            return super().push(work)

    with pytest.raises(KeyError, match="second round"):
        run_threads(3, lambda comm: run_program(Fails(comm.rank, 3), comm))


def test_bad_arguments():
    with pytest.raises(ParameterError, match="max_rounds"):
        run_threads(1, lambda comm: run_program(Sums(0, 1), comm, -1))
