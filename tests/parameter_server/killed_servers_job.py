"""The job of the parameter server's kill tests: fits whose tasks are killed with -9.

The model counts: each row adds 1 to every parameter, so what the servers hold in the end is how
often they took a row. The workers write down each part of a push as it is acknowledged.
"""

import json
import os
import signal
import sys
import threading
import warnings
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

import sparkdml as dml
from sparkdml.parameter_server import worker
from sparkdml.parameter_server.client.client import WorkerClient
from sparkdml.parameter_server.consistency import BSP, TAP, Consistency
from sparkdml.parameter_server.optimizers import Add
from sparkdml.parameter_server.server.node import serve
from sparkdml.parameter_server.wire.frames import Status
from sparkdml.testing.faults import executor_of

VALUES = "values"  # the strategy's name for the table of parameters
ROWS, BATCH, EPOCHS, WORKERS = 240, 10, 3, 2
ELEMENTS, PART_ELEMENTS = 4000, 250
PUSHES_OF_A_WORKER = 17  # of some 36: in the middle of the second epoch
PARTS_OF_A_SERVER = 300  # of some 600: the tables' parts lie on both servers


@dataclass(frozen=True)
class Case:
    """The task to kill, alone or with its executor."""

    victims: tuple[str, ...]
    consistency: Consistency = field(default_factory=BSP)
    executors: bool = False
    checkpoint: bool = False


CASES = {
    "none": Case(()),
    "a server": Case(("server",)),
    "a server with its executor": Case(("server",), executors=True),
    "a worker": Case(("worker",)),
    "both": Case(("server", "worker")),
    "both, and no worker waits": Case(("server", "worker"), TAP()),
    # Rows that were shuffled are lost with it, so that Spark starts the workers' stage again.
    "a worker with its executor": Case(("worker",), executors=True, checkpoint=True),
}


class Counting(nn.Module):
    """Its loss has a slope of 1 in every parameter, wherever it is."""

    def __init__(self):
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(ELEMENTS))

    def forward(self, x):
        return self.counts.sum().expand(len(x))


def outputs_alone(outputs, targets):
    return outputs


def kill(folder, who, executor):
    """Once: a task that Spark starts again finds the mark."""
    try:
        Path(folder, f"killed-{who}").touch(exist_ok=False)
    except FileExistsError:
        return
    if executor:
        os.kill(executor_of(os.getpid()), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


class WritesDown(WorkerClient):
    """Each part that was acknowledged is a line on disk before any other process hears of it."""

    doomed, executor, folder, file = False, False, "", -1  # set in the task
    num_pushes = 0

    def push(self, name, *arguments, **options):
        cls = type(self)
        self.pushing = name
        if name == VALUES:
            if cls.doomed and cls.num_pushes == PUSHES_OF_A_WORKER:
                self._pushes.wait()  # else the fate of the last push would be undefined
                kill(cls.folder, "worker", cls.executor)
            cls.num_pushes += 1
        return super().push(name, *arguments, **options)

    def _push_request(self, *arguments):
        request = super()._push_request(*arguments)
        name, entry, done = self.pushing, request.entry, request.done

        def write_down(message, answer):
            if name == VALUES:
                line = f"{entry.part} {entry.weight:.0f} {int(answer.status)}\n"
                os.write(type(self).file, line.encode())
            done(message, answer)

        request.done = write_down
        return request


class Mortal(dml.ParameterServer):
    """Its second server and its second worker end in the middle, each once."""

    def __init__(self, folder, case):
        super().__init__(consistency=case.consistency, updater=Add())
        self.folder, self.victims, self.executors = folder, case.victims, case.executors

    def _config(self, key):
        return replace(super()._config(key), part_bytes=4 * PART_ELEMENTS)

    def run(self, role, training):
        ctx = training.ctx
        if role == "worker":
            book = f"{self.folder}/acknowledged-{ctx.rank}-{ctx.attempt}"
            WritesDown.file = os.open(book, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            WritesDown.folder, WritesDown.num_pushes = self.folder, 0
            WritesDown.executor = self.executors
            WritesDown.doomed = "worker" in self.victims and (ctx.rank, ctx.attempt) == (1, 0)
            worker.WorkerClient = WritesDown
            try:
                super().run(role, training)
            finally:
                worker.WorkerClient = WorkerClient
                os.close(WritesDown.file)
        elif "server" in self.victims and (ctx.rank, ctx.attempt) == (1, 0):
            serve(ctx.rank, self.config(ctx), ctx.ask, ctx.host, self.watch)
        else:
            super().run(role, training)

    def watch(self, node):
        def wait_and_kill():
            while node.stats.pushes < PARTS_OF_A_SERVER:
                never.wait(0.001)
            kill(self.folder, "server", self.executors)

        never = threading.Event()
        threading.Thread(target=wait_and_kill, daemon=True).start()


def fit(rows, folder, case):
    folder.mkdir()
    checkpoint = {}
    if case.checkpoint:
        checkpoint["checkpoint"] = dml.Checkpoints(f"file:{folder}/run", every="epoch")
    fitted = dml.TorchEstimator(
        model=Counting,
        loss=outputs_alone,
        optimizer=partial(torch.optim.SGD, lr=1.0),  # the servers add instead
        strategy=Mortal(str(folder), case),
        batchSize=BATCH,
        epochs=EPOCHS,
        numWorkers=WORKERS,
        seed=3,
        verbose=0,
        **checkpoint,
    ).fit(rows)
    acknowledged = [0] * (ELEMENTS // PART_ELEMENTS)
    statuses = set()
    for book in folder.glob("acknowledged-*"):
        for line in book.read_text().splitlines():
            part, weight, status = map(int, line.split())
            if status != Status.REPEATED:  # which was acknowledged as something known already
                acknowledged[part] += weight
            statuses.add(status)
    held = fitted.module.counts.detach().view(-1, PART_ELEMENTS)
    return {
        "killed": sorted(path.name for path in folder.glob("killed-*")),
        "attempts": sorted(path.name for path in folder.glob("acknowledged-*")),
        "acknowledged": acknowledged,  # by the workers' books, in rows, part by part
        "statuses": sorted(statuses),
        "held": held.min(dim=1).values.tolist(),  # by the servers
        "held_alike": bool((held == held[:, :1]).all()),
        "rows": [row["rows"] for row in fitted.history],
    }


def main(output, master):
    spark = (
        dml.session_builder("killed-servers", master)
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "4")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    warnings.filterwarnings("ignore", message=".*Resuming from step.*")
    rows = spark.range(0, ROWS, 1, 4).selectExpr(
        "array(cast(id as float)) as features", "0L as label"
    )
    found = {
        name: fit(rows, Path(output).parent / f"run-{number}", case)
        for number, (name, case) in enumerate(CASES.items())
    }
    Path(output).write_text(json.dumps(found, indent=1))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
