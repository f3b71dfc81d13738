"""The contract suite of compression: subclass it, and list the schemes to test.

    class TestMine(CompressionContract):
        cases = {"Mine": CompressionCase(lambda: Mine(fraction=0.25))}

It reduces made-up gradients of a small model, cut into several buckets, on threads. The suite of
strategies checks that a model still learns, and that an interrupted run resumes with the same bits,
with `AllReduce(compression=Mine(…), bucket_bytes=600)`: run both.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from sparkdml.checkpoint.encoding import Stream, decode, take_apart
from sparkdml.checkpoint.state import State
from sparkdml.comm.base import Communicator
from sparkdml.comm.threads import run_threads
from sparkdml.comm.topologies.opening import open_topology
from sparkdml.compression.base import Compression
from sparkdml.errors import ParameterError
from sparkdml.testing.digits import make_reader
from sparkdml.training.flat import FlatParams
from sparkdml.training.totals import NUM_FIXED_STATS, ROWS

BUCKET_BYTES, OTHER_BUCKET_BYTES = 600, 1 << 20  # four buckets, and one
NUM_REPEATS = 256  # steps with the same gradients: the long run


@dataclass(frozen=True)
class CompressionCase:
    """A scheme as the suite runs it.

    Args:
        make: a typical setting.
        tolerance: how much the compressed sum may differ from the exact one, relative to its norm:
            in each step, or with error feedback in the mean of 256 steps with the same gradients.
        bad: functions that must raise, each with a word of the message (the parameter's name).
    """

    make: Callable[[], Compression]
    tolerance: float = 0.05
    bad: Sequence[tuple[Callable[[], object], str]] = field(default=())


class Reduction:
    """One rank's parameters, buckets and reducer, without a training."""

    def __init__(
        self,
        comm: Communicator,
        scheme: Compression,
        dtype: torch.dtype = torch.float32,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.params = FlatParams(make_reader().to(dtype), num_stats=NUM_FIXED_STATS)
        self.buckets = self.params.buckets(bucket_bytes)
        self.reducer = scheme.reducer(comm, self.params, self.buckets)

    def step(self, gradients: Tensor, rows: float, weight: float = 0.0) -> tuple[Tensor, Tensor]:
        """The sums of gradients and stats over all ranks."""
        self.fill(gradients, rows, weight)
        for work in [self.reducer.reduce_async_(index) for index in range(len(self.buckets))]:
            work.wait()
        return self.params.grads.clone(), self.params.stats.clone()

    def fill(self, gradients: Tensor, rows: float, weight: float = 0.0) -> None:
        """Set the gradients as after this rank's backward pass."""
        self.params.zero()
        self.params.grads.copy_(gradients)
        self.params.stats[ROWS] = rows
        self.params.stats[0] = weight


class OnlyAllreduce:
    """A communicator that can be set to refuse everything except an asynchronous allreduce."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.is_in_backward = False

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._comm, name)
        if self.is_in_backward and callable(value):
            assert name in ("allreduce_async_", "repeated", "carries"), (
                f"{name}() in reduce_async_: in the middle of a backward pass only an "
                "asynchronous allreduce may begin; the rest belongs into the wait"
            )
        return value


def made_up(*shape: int) -> Tensor:
    """Return gradients of this many steps, ranks, …, for the parameters of the suite's model."""
    count = sum(parameter.numel() for parameter in make_reader().parameters())
    return torch.randn(*shape, count, generator=torch.Generator().manual_seed(1))


class CompressionContract:
    """What every compression promises."""

    cases: ClassVar[dict[str, CompressionCase]] = {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.cases.values(), ids=self.cases.keys())

    # -- what is received -----------------------------------------------------------------------

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_ranks_get_the_same_sums_and_exact_stats(
        self, case: CompressionCase, dtype: torch.dtype
    ) -> None:
        """Ranks without rows take part; a step without rows moves nothing, residuals included."""
        rows = [[8.0, 8.0, 8.0], [8.0, 0.0, 3.0], [0.0, 0.0, 0.0]]
        gradients = made_up(3, 3) * (torch.tensor(rows)[:, :, None] > 0)

        def reduce_steps(comm: Communicator) -> list[tuple[Tensor, Tensor]]:
            own = Reduction(comm, case.make(), dtype)
            return [
                own.step(gradients[step, comm.rank], rows[step][comm.rank], 0.1 + comm.rank)
                for step in range(3)
            ]

        first, *others = run_threads(3, reduce_steps)
        for step, (sums, stats) in enumerate(first):
            for other in others:
                assert torch.equal(other[step][0], sums), "ranks disagree about the gradients"
                assert torch.equal(other[step][1], stats), "ranks disagree about the stats"
            assert stats[ROWS] == sum(rows[step])
            assert stats[0].item() == pytest.approx(0.1 + 1.1 + 2.1)
        assert not first[2][0].any(), "a step without rows must send nothing, not even residuals"

    def test_nothing_is_lost_in_the_long_run(self, case: CompressionCase) -> None:
        gradients, scheme = made_up(2), case.make()
        num_steps = NUM_REPEATS if scheme.has_residuals else 1

        def mean_sum(comm: Communicator) -> Tensor:
            own = Reduction(comm, scheme)
            total = torch.zeros_like(gradients[0])
            for _ in range(num_steps):
                total += own.step(gradients[comm.rank], 4.0)[0]
            return total / num_steps

        exact = gradients.sum(0)
        error = (run_threads(2, mean_sum)[0] - exact).norm() / exact.norm()
        assert error <= case.tolerance, f"{error:.3g} of the sum is missing after {num_steps} steps"

    def test_residuals_of_full_batches_do_not_swamp_a_short_one(
        self, case: CompressionCase
    ) -> None:
        """Residuals are in units of a row's gradient, and have the weight of the other rows."""
        per_row, rows = made_up(), [64.0, 64.0, 64.0, 64.0, 1.0]

        def reduce_steps(comm: Communicator) -> list[float]:
            own = Reduction(comm, case.make())
            return [float(own.step(per_row * each, each)[0].norm()) / each for each in rows]

        *full, short = run_threads(2, reduce_steps)[0]
        assert short < 4 * max(full)

    def test_any_topology_carries_it(self, case: CompressionCase) -> None:
        scheme, gradients = case.make(), made_up(2, 3)
        if not scheme.any_topology:
            pytest.skip("it has an exchange of its own")

        def reduce_steps(comm: Communicator, topology: str) -> list[Tensor]:
            with open_topology(topology, comm) as opened:
                own = Reduction(opened, scheme)
                return [own.step(each[comm.rank], 4.0)[0] for each in gradients]

        native = run_threads(3, lambda comm: reduce_steps(comm, "native"))
        ring = run_threads(3, lambda comm: reduce_steps(comm, "ring"))
        for step, expected in enumerate(native[0]):
            assert all(torch.equal(sums[step], ring[0][step]) for sums in ring[1:])
            error = (ring[0][step] - expected).norm() / expected.norm()
            assert error <= case.tolerance, f"the sums of a ring differ by {error:.3g}"

    # -- when it is sent ------------------------------------------------------------------------

    def test_only_an_allreduce_begins_in_backward(self, case: CompressionCase) -> None:
        """Then other ranks may be waiting for another message of this one (SyncBatchNorm's)."""

        def reduce_once(comm: Communicator) -> None:
            watched = OnlyAllreduce(comm)
            own = Reduction(watched, case.make())  # type: ignore[arg-type]
            own.fill(made_up(), 4.0)
            watched.is_in_backward = True
            works = [own.reducer.reduce_async_(index) for index in range(len(own.buckets))]
            watched.is_in_backward = False
            for work in works:
                work.wait()

        run_threads(2, reduce_once)

    # -- checkpoints ----------------------------------------------------------------------------

    def test_a_restored_reducer_continues_exactly(self, case: CompressionCase) -> None:
        gradients = made_up(6, 2)

        def continues(comm: Communicator) -> None:
            own = Reduction(comm, case.make())
            for each in gradients[:3]:
                own.step(each[comm.rank], 4.0)
            restored = Reduction(comm, case.make())
            assert restored.reducer.load(as_restored(own.reducer.state())) == []
            for each in gradients[3:]:
                expected = own.step(each[comm.rank], 4.0)[0]
                assert torch.equal(restored.step(each[comm.rank], 4.0)[0], expected)

        run_threads(2, continues)

    def test_a_state_that_does_not_fit_is_left_out_and_named(self, case: CompressionCase) -> None:
        """A forced resume may bring other buckets; another number of ranks brings no residuals."""
        gradients = made_up(3, 2)

        def load(comm: Communicator) -> None:
            own = Reduction(comm, case.make())
            own.step(gradients[0, comm.rank], 4.0)
            other = Reduction(comm, case.make(), bucket_bytes=OTHER_BUCKET_BYTES)
            lost = other.reducer.load(as_restored(own.reducer.state()))
            assert all(isinstance(what, str) for what in lost)
            if case.make().has_residuals:
                assert lost, "residuals of other buckets can't be kept"
            empty = Reduction(comm, case.make())
            assert empty.reducer.load({}) == []
            for each in gradients[1:]:
                other.step(each[comm.rank], 4.0)
                empty.step(each[comm.rank], 4.0)

        run_threads(2, load)

    # -- as an object ---------------------------------------------------------------------------

    def test_it_can_be_shipped_and_described(self, case: CompressionCase) -> None:
        """Its repr is part of the run's fingerprint: it must tell settings apart, and be stable."""
        scheme = case.make()
        assert isinstance(scheme, Compression)
        assert repr(scheme).startswith(f"{type(scheme).__name__}(")
        assert repr(case.make()) == repr(scheme)
        assert repr(pickle.loads(pickle.dumps(scheme))) == repr(scheme)

    def test_bad_arguments_are_refused(self, case: CompressionCase) -> None:
        for make, word in case.bad:
            with pytest.raises(ParameterError, match=word):
                make()


def as_restored(state: State) -> dict[str, Any]:
    """Return what a checkpoint would restore: encoded and decoded, so no tensor is shared."""
    decoded = decode(b"".join(Stream(*take_apart(state))), "a state")
    return {name: entry.value for name, entry in decoded.items()}
