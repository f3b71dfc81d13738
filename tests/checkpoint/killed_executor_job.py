"""The job of the cluster tests: one session in which executor after executor is killed with -9.

Prints nothing; writes what became of each kill to a JSON file.
"""

import json
import random
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from small_run import equal, make_estimator, make_rows

import sparkdml as dml
from sparkdml.comm.backends import horovod_available
from sparkdml.testing.faults import FaultAt

SETTINGS = [("momentum", "torch"), ("adam", "horovod"), ("adam", "torch"), ("momentum", "horovod")]


def kill_one(rows, expected, seed, count, folder):
    """Seed by seed, the steps are spread over the whole run; where in its part is left to chance.

    The last steps are spared: the survivor could come through before it learns of the loss.
    """
    folder.mkdir(parents=True)
    optimizer, backend = SETTINGS[seed % len(SETTINGS)]
    if not horovod_available():
        backend = "torch"
    settings = {"optimizer": optimizer, "backend": backend, "replacementSeconds": 30.0}
    if (optimizer, backend) not in expected:
        never = FaultAt(0, -1, "kill-executor", "")
        expected[optimizer, backend] = make_estimator(callbacks=[never], **settings).fit(rows)
    steps = int(sum(row["steps"] for row in expected[optimizer, backend].history)) - 3
    dice = random.Random(seed)
    rank = dice.randrange(2)
    step = dice.randint(1 + steps * seed // count, steps * (seed + 1) // count)
    checkpoints = dml.Checkpoints(f"file:{folder}/run", every=7)
    fault = FaultAt(rank, step, "kill-executor", str(folder))
    started = time.monotonic()
    fitted = make_estimator(checkpoint=checkpoints, callbacks=[fault], **settings).fit(rows)
    seconds = time.monotonic() - started
    submissions = checkpoints.lineage().submissions
    return {
        "seed": seed,
        "kill": f"rank {rank} after step {step}, {optimizer} through {backend}",
        "struck": len(list(folder.glob("fault-*"))),
        "equal": equal(fitted, expected[optimizer, backend]),
        "outcomes": [submission.outcome for submission in submissions],
        "num_workers": [submission.num_workers for submission in submissions],
        "cause": submissions[0].cause,
        "names_the_rank": f"rank {rank} on" in (submissions[0].cause or ""),
        "seconds": round(seconds, 2),
    }


def check_kill(kill):
    """In the test: the run continued as if nothing had happened, with no needless resubmission."""
    assert kill["struck"] == 1, kill
    assert kill["equal"], kill
    assert kill["names_the_rank"], kill
    assert kill["outcomes"] == ["failed", "finished"], kill
    assert kill["num_workers"] == [2, 2], kill


def main(output, master, count):
    spark = (
        dml.session_builder("killed-executors", master)
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.python.task.killTimeout", "200ms")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    warnings.filterwarnings("ignore", message=".*Resuming from step.*")
    rows, expected = make_rows(spark), {}
    folder = Path(output).parent
    kills = [
        kill_one(rows, expected, seed, int(count), folder / f"seed-{seed}")
        for seed in range(int(count))
    ]
    Path(output).write_text(json.dumps(kills, indent=1))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
