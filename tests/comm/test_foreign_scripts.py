"""Unmodified Horovod and DDP scripts run from `process_environment` alone; and we beside them."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

import pytest
import torch

from sparkdml.comm.backends import open_communicator, why_no_horovod
from sparkdml.comm.base import World
from sparkdml.comm.environment import process_environment, temporary_environment
from sparkdml.testing.rank_processes import RankFailed, RankProcesses

needs_horovod = pytest.mark.skipif(why_no_horovod() is not None, reason=str(why_no_horovod()))

HOROVOD_SCRIPT = """
import torch, horovod.torch as hvd
hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
model(torch.ones(4, 2) * hvd.rank()).sum().backward()
optimizer.step()
weights = hvd.allgather(model.weight.detach())
assert torch.equal(weights[0], weights[1])
print(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())
"""

DDP_SCRIPT = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
model(torch.ones(4, 2) * dist.get_rank()).sum().backward()
weights = [torch.empty(1, 2) for _ in range(2)]
dist.all_gather(weights, model.module.weight.grad)
assert torch.equal(weights[0], weights[1])
print(dist.get_rank(), dist.get_world_size(), os.environ["LOCAL_RANK"],
      os.environ["LOCAL_WORLD_SIZE"])
dist.destroy_process_group()
"""


def run_script(world: World, script: str) -> list[str]:
    printed = io.StringIO()
    with temporary_environment(process_environment(world)), redirect_stdout(printed):
        exec(compile(script, "script.py", "exec"), {"__name__": "__main__"})
    return printed.getvalue().split()


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(HOROVOD_SCRIPT, marks=needs_horovod, id="horovod"),
        pytest.param(DDP_SCRIPT, id="ddp"),
    ],
)
def test_an_unmodified_script_finds_its_peers(script: str) -> None:
    with RankProcesses(None, 2) as ranks:
        assert ranks.run(run_script, script) == [["0", "2", "0", "2"], ["1", "2", "1", "2"]]


def use_the_users_process_group(world: World) -> bool:
    import torch.distributed as dist

    with temporary_environment(process_environment(world)):
        dist.init_process_group("gloo")
    with open_communicator("torch", world) as comm:
        assert comm.allreduce_(torch.tensor(1.0)).item() == world.size
        with comm.split(color=0) as group:
            assert group.allreduce_(torch.tensor(1.0)).item() == world.size
    # Closing ours must leave the user's working.
    total = torch.tensor(1.0)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item() == world.size


def use_the_users_horovod(world: World) -> bool:
    import horovod.torch as hvd

    with temporary_environment(process_environment(world)):
        hvd.init()
    with open_communicator("horovod", world) as comm:
        assert comm.allreduce_(torch.tensor(1.0)).item() == world.size
    alive = hvd.allreduce(torch.tensor(1.0), op=hvd.Sum).item() == world.size
    hvd.shutdown()
    return bool(alive)


@pytest.mark.parametrize(
    "function",
    [use_the_users_process_group, pytest.param(use_the_users_horovod, marks=needs_horovod)],
)
def test_what_the_user_opened_is_used_and_left_open(function: object) -> None:
    with RankProcesses(None, 2) as ranks:
        assert ranks.run(function) == [True, True]  # type: ignore[arg-type]


def open_as_another_rank(world: World) -> None:
    import torch.distributed as dist

    with temporary_environment(process_environment(world)):
        dist.init_process_group("gloo")
    open_communicator("torch", World(0, 5, ("127.0.0.1",) * 5))


def test_a_group_of_another_world_is_refused() -> None:
    with (
        RankProcesses(None, 1) as ranks,
        pytest.raises(RankFailed, match=r"SetupError: .*as rank 0 of 1.*rank 0 of 5"),
    ):
        ranks.run(open_as_another_rank)


MANY_TENSORS_SCRIPT = """
import torch, horovod.torch as hvd
hvd.init()
handles = [hvd.allreduce_async(torch.ones(100), op=hvd.Sum) for _ in range(50)]
assert all(torch.equal(hvd.synchronize(h), torch.full((100,), 2.0)) for h in handles)
hvd.shutdown()
print("done")
"""


def run_after_one_rank_has_used_ours(world: World) -> list[str]:
    """As in Spark's Python workers, of which some have served our own runs before."""
    if world.rank == 1:  # not the one that decides what is fused
        import horovod.torch as hvd

        ours = {**process_environment(World(0, 1, ("127.0.0.1",))), "HOROVOD_FUSION_THRESHOLD": "0"}
        with temporary_environment(ours):
            hvd.init()
            hvd.shutdown()
    return run_script(world, MANY_TENSORS_SCRIPT)


@needs_horovod
def test_a_script_runs_in_processes_of_which_one_has_served_us_before() -> None:
    with RankProcesses(None, 2) as ranks:
        assert ranks.run(run_after_one_rank_has_used_ours) == [["done"], ["done"]]
