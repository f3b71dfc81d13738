"""The job of the driver test: `driver_job.py <folder> <step>` is killed with -9 after that step."""

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from small_run import make_estimator, make_rows

import sparkdml as dml
from sparkdml.testing.faults import executor_of


class KillsDriver(dml.Callback):
    """Notes down every process of the run; then rank 1 ends its driver."""

    def __init__(self, folder, driver, step):
        self.folder, self.driver, self.step = folder, driver, step

    def on_step_end(self, training):
        training.checkpoint.wait()  # else a busy disk could put all of them off
        if training.step == self.step - 1:
            pids = [os.getpid(), os.getppid(), executor_of(os.getpid())]
            Path(self.folder, f"pids-{training.ctx.rank}.json").write_text(json.dumps(pids))
            time.sleep(0.5)  # so that the driver commits the last of them
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
    make_estimator(optimizer="adam", checkpoint=checkpoints, callbacks=callbacks).fit(rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
