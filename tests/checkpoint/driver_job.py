"""What the driver test runs: a driver that is killed with -9, then one that finishes its run.

`driver_job.py <folder> <step>` kills itself after that step; with step 0 it finishes, and compares.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from small_run import equal, make_estimator, make_rows

import sparkdml as dml
from sparkdml.testing.faults import executor_of


class KillsDriver(dml.Callback):
    """Notes down every process of the run; then rank 1 ends its driver."""

    def __init__(self, folder, driver, step):
        self.folder, self.driver, self.step = folder, driver, step

    def on_step_end(self, training):
        if training.step == self.step - 1:
            pids = [os.getpid(), os.getppid(), executor_of(os.getpid())]
            Path(self.folder, f"pids-{training.ctx.rank}.json").write_text(json.dumps(pids))
            time.sleep(0.5)  # so that checkpoints that are on their way arrive
        if training.step == self.step and training.ctx.rank == 1:
            os.kill(self.driver, signal.SIGKILL)

    def __repr__(self):
        return "KillsDriver()"


def main(folder, step):
    spark = (
        dml.session_builder("killed-driver", "local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "4")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    rows = make_rows(spark)
    checkpoints = dml.Checkpoints(f"file:{folder}/run", every=4)
    callbacks = [KillsDriver(folder, os.getpid(), int(step))]
    settings = {"optimizer": "adam", "callbacks": callbacks}
    fitted = make_estimator(checkpoint=checkpoints, **settings).fit(rows)
    expected = make_estimator(**settings).fit(rows)
    submissions = checkpoints.lineage().submissions
    result = {
        "equal": equal(fitted, expected),
        "outcomes": [submission.outcome for submission in submissions],
        "reasons": [submission.reason for submission in submissions],
        "resumed_from": submissions[-1].resumed_from,
        "losses": [row["loss"] for row in fitted.history],
        "expected_losses": [row["loss"] for row in expected.history],
    }
    Path(folder, "result.json").write_text(json.dumps(result))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
