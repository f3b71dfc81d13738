"""The entry point of a Spark task: set up, call the body, report, return the result in pieces.

The Python process is Spark's and may serve other jobs afterwards, so everything that is changed
here (environment, thread count, random state) is restored, and what an unmodified Horovod or DDP
script has opened is closed. Owns the control client and the context of the task.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pyarrow as pa
import torch
from pyspark import BarrierTaskContext, TaskContext

from sparkdml.comm.base import World
from sparkdml.comm.environment import process_environment, temporary_environment
from sparkdml.errors import SetupError
from sparkdml.feed.arrow import read_arrow
from sparkdml.feed.randomness import seed_everything
from sparkdml.feed.rdd import read_rows
from sparkdml.feed.validation_split import only_held_out
from sparkdml.network.connection import address_towards, interface_towards
from sparkdml.observe.worker_output import WorkerOutput
from sparkdml.runtime.protocol.kept_spools import assign_ranks, remove_spools
from sparkdml.runtime.protocol.messages import Hello
from sparkdml.runtime.protocol.plan import Plan
from sparkdml.runtime.protocol.results import cut_pieces, to_arrow
from sparkdml.runtime.protocol.roles import role_and_rank
from sparkdml.runtime.worker.blob_client import fetch, pickle_result, release
from sparkdml.runtime.worker.context import Context
from sparkdml.runtime.worker.control_client import ControlClient

Body = Callable[[Context], Any]


def run_arrow_worker(
    plan: Plan, body: Body, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """For `mapInArrow`."""
    yield from map(to_arrow, run_worker(plan, body, batches))


def run_worker(plan: Plan, body: Body, source: Iterator[Any]) -> Iterator[tuple[int, int, bytes]]:
    """Run `body` as one task of its role; yields its pickled result in pieces."""
    task = (BarrierTaskContext if plan.role.gang else TaskContext).get()
    assert task is not None, "this runs in a Spark task"
    index, hosts = find_rank(plan, task)
    role, role_rank = role_and_rank(plan.job_roles, index)
    plan, number = replace(plan, role=role), plan.first_number + index
    rank = index if role.gang else 0  # of the communicator: a task outside of a gang has its own
    hello = Hello(
        role.name,
        role_rank,
        number=number,
        host=hosts[rank],
        pid=os.getpid(),
        attempt=task.attemptNumber(),
        task_id=task.taskAttemptId(),
    )
    client = ControlClient(plan, hello)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(plan.resources.cpus)
        world = find_world(plan, rank, hosts, task.resources())
        with temporary_environment(process_environment(world)), kept_groups():
            payload = _run_body(plan, body, source=source, world=world, client=client, task=hello)
        client.done()
    except BaseException as error:
        client.failed(error)
        raise
    finally:
        torch.set_num_threads(threads)
        client.close()
    yield from cut_pieces(number, payload)


def _run_body(
    plan: Plan, body: Body, source: Iterator[Any], world: World, client: ControlClient, task: Hello
) -> bytes:
    seed_everything(plan.seed)  # the same on every rank: models that are built here begin alike
    chunks, rows = None, None
    if plan.role.reads == "none":
        pass  # its partition is empty, or holds a number
    elif plan.source == "arrow":
        assert plan.feed is not None
        chunks = read_arrow(source, plan.feed)
        if plan.role.reads == "validation":
            chunks = only_held_out(chunks, plan.feed)
    elif plan.source == "rows":
        assert plan.feed is not None
        chunks = read_rows(source, plan.feed)
        rows = (row for _, row in source)
    remove_spools(plan.stale_spools)
    ctx = Context(
        plan,
        world,
        client=client,
        chunks=chunks,
        rows=rows,
        spool_directory=spool_directory(),
        task=task,
    )
    failed = True
    try:
        # Closed first: its last lines must be sent before this task reports its end.
        output = WorkerOutput(client, ctx.host) if plan.forwards_output else nullcontext()
        with output:
            result = fetch(body, plan.blob_server, spool_directory())(ctx)
        payload = pickle_result(result, plan.blob_server, plan.blob_bytes)
        ctx.close_feed()
        for _ in source:
            pass  # Spark reuses a Python worker only if its input was read to the end
        failed = False
    except BaseException as error:
        client.failed(error)  # before the clean-up, which may take its time
        raise
    finally:
        ctx.close(failed)
        release(body, spool_directory())
        leave_foreign_groups(failed)
    return payload


def find_rank(plan: Plan, task: Any) -> tuple[int, tuple[str, ...]]:
    """Which of its job's tasks this is, and the hosts of those that it shares a gang with."""
    if not plan.role.gang:
        return task.partitionId(), (address_towards(plan.driver_host) or socket.gethostname(),)
    hosts = find_hosts(task)
    ranks = assign_ranks(hosts, {rank: spool.host for rank, spool in plan.spools.items()})
    return ranks[task.partitionId()], tuple(hosts[ranks.index(r)] for r in range(len(ranks)))


def find_hosts(task: Any) -> tuple[str, ...]:
    """The host of every task, as Spark knows them already: costs no round trip."""
    return tuple(info.address.rpartition(":")[0] or info.address for info in task.getTaskInfos())


def find_world(plan: Plan, rank: int, hosts: tuple[str, ...], resources: dict[str, Any]) -> World:
    """This rank's place among the others, and its device."""
    return World(
        rank=rank,
        size=len(hosts),
        hosts=hosts,
        device=choose_device(plan.resources.gpus, resources, torch.cuda.is_available),
        rendezvous_host=plan.driver_host,
        store_port=plan.store_port,
        kv_port=plan.kv_port,
        interface=interface_towards(plan.driver_host),
    )


def choose_device(
    gpus: int, resources: dict[str, Any], cuda_is_available: Callable[[], bool]
) -> str:
    """The GPU that Spark assigned to this task, or the CPU.

    CUDA_VISIBLE_DEVICES has no effect in a Python worker that is used again, so the address names
    the device.
    """
    assigned = resources.get("gpu")
    addresses = list(assigned.addresses) if assigned is not None else []
    if not addresses:
        if gpus:
            raise SetupError(
                f"gpusPerWorker={gpus}, but Spark assigned no GPU to this task. Set "
                "spark.executor.resource.gpu.amount, spark.task.resource.gpu.amount and "
                "spark.executor.resource.gpu.discoveryScript, or gpusPerWorker=0"
            )
        return "cpu"
    if not cuda_is_available():
        raise SetupError(
            f"Spark assigned GPU {addresses[0]} to this task, but torch {torch.__version__} on "
            f"{socket.gethostname()} sees no CUDA. Install a CUDA build of torch for the workers' "
            f"Python ({sys.executable})"
        )
    return f"cuda:{addresses[0]}"


def spool_directory() -> str:
    """The executor's local directory with the most room."""
    candidates = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")
    usable = [path for path in candidates if path and os.access(path, os.W_OK)]
    if not usable:
        import tempfile

        return tempfile.gettempdir()
    return max(usable, key=lambda path: os.statvfs(path).f_bavail)


MAKES_GROUPS = "_new_process_group_helper"  # torch's own: `init_process_group` and `new_group` do

_of_failed: list[Any] = []  # an error has the script's variables, until its process ends


@contextmanager
def kept_groups() -> Iterator[None]:
    """Hold the process groups that a script opens, until it has dropped its models.

    A DDP model that is dropped after `destroy_process_group` would be the last to have its group.
    It ends the group's thread with Python's lock in hand, for which that thread may be waiting (to
    drop the last gradients): both would wait forever. Python itself drops a group without it.
    """
    torchs: Any = sys.modules.get("torch.distributed.distributed_c10d")
    make: Any = getattr(torchs, MAKES_GROUPS, None)
    if make is None:  # torch was built without groups, or is another torch
        yield
        return
    kept: list[Any] = []

    def make_and_keep(*arguments: Any, **options: Any) -> Any:
        made = make(*arguments, **options)
        kept.append(made[0])
        return made

    setattr(torchs, MAKES_GROUPS, make_and_keep)
    try:
        yield
    except BaseException:
        _of_failed.extend(kept)
        raise
    finally:
        setattr(torchs, MAKES_GROUPS, make)


def leave_foreign_groups(failed: bool) -> None:
    """Close what a script opened and left open."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    horovod = sys.modules.get("horovod.torch")
    if horovod is not None and not failed and horovod.is_initialized():
        horovod.shutdown()
