"""The evaluator of a parameter server: it measures the validation loss while the workers train.

It is one ordinary Spark task, which reads the held-out rows and nothing else. It takes snapshots of
the model from the servers, measures each, and sends what it found as an event, with the step that
it belongs to. It has no clock, and no worker waits for it; if it fails, Spark restarts it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from sparkdml.errors import ParameterError
from sparkdml.feed.batch import Batch
from sparkdml.parameter_server.client.snapshot_reader import Snapshot, SnapshotReader
from sparkdml.parameter_server.config import ServerConfig
from sparkdml.parameter_server.model_tables import BUFFERS, ServedTables, flat_buffers, load_buffers
from sparkdml.parameter_server.optimizers import Updater
from sparkdml.parameter_server.partition import Table
from sparkdml.parameter_server.progress import PROGRESS, furthest, nowhere
from sparkdml.training.epoch_row import validate
from sparkdml.training.training import Training, TrainingPlan

EVALUATOR = "evaluator"  # the role, and its question to the driver service
SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.02, 10.0


def check_evaluator(plan: TrainingPlan) -> None:
    """At the driver, before any job."""
    if not plan.schedule.validates:
        raise ParameterError(
            "validation",
            None,
            "given with evaluator=True",
            "The evaluator measures the rows that are held out: set it to 0.1, for instance.",
        )


class Evaluator:
    """One task's run."""

    def __init__(self, training: Training, config: ServerConfig, updater: Updater) -> None:
        self.training, self.config, self.ctx = training, config, training.ctx
        task = training.task
        self.served = ServedTables.of(task.module, task.params, updater)

    def run(self) -> None:
        last_clock = -1
        with SnapshotReader(self.config, self.ctx.ask) as snapshot_reader:
            tables = self._tables(self.config.part_bytes)
            while tables and self._goes_on():
                began = time.monotonic()
                snapshot = snapshot_reader.snapshot(tables, self._goes_on)
                pause = time.monotonic() - began
                if snapshot is None:
                    return
                if snapshot.clock != last_clock:
                    last_clock = snapshot.clock
                    self._measure(snapshot)
                # Pause as long as the snapshot took: workers have priority at the servers.
                pause = min(max(pause, SHORTEST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS)
                if self.ctx.wait_for_the_end(pause):
                    return

    def _goes_on(self) -> bool:
        return not self.ctx.wait_for_the_end(0)

    def _tables(self, part_bytes: int) -> list[Table]:
        """The model with its buffers, and how far the workers were with it."""
        num_workers = None
        while num_workers is None and self._goes_on():
            num_workers = self.ctx.ask(EVALUATOR)
        if num_workers is None:
            return []
        values = self.training.task.params.values.detach().cpu()
        tables = self.served.layouts(values, part_bytes)
        tables.append(Table.of(PROGRESS, nowhere(num_workers), True, part_bytes))
        buffers = flat_buffers(self.training.task.module)
        if buffers is not None:
            tables.append(Table.of(BUFFERS, buffers, False, part_bytes))
        return tables

    def _measure(self, snapshot: Snapshot) -> None:
        place = furthest(snapshot.tables[PROGRESS])
        if not place.step:
            return  # no worker has made a step yet: perhaps the model is still being put there
        began = time.monotonic()
        self.served.join(snapshot.tables, self.training.task.params.values)
        if BUFFERS in snapshot.tables:
            load_buffers(self.training.task.module, snapshot.tables[BUFFERS])
        try:
            found = validate(self.training, self._batches())
        except _RunIsOver:
            return
        self.ctx.event(
            "evaluation",
            clock=snapshot.clock,
            epoch=place.epoch + 1,
            step=place.step,
            seconds=time.monotonic() - began,
            values=found,
        )
        self.ctx.flush_events()

    def _batches(self) -> Iterator[Batch]:
        for batch in self.ctx.data.validation_batches(self.training.schedule.batch_size):
            if not self._goes_on():
                raise _RunIsOver
            yield batch


class _RunIsOver(Exception):
    """Aborts an evaluation whose result would not be used."""
