"""The job of the Ctrl-C test: workers that would never end."""

import os
import sys
import time
from pathlib import Path

import torch

import sparkdml as dml


def main(folder):
    spark = dml.session_builder("interrupted", "local[2]").config("spark.ui.enabled", "false")
    spark = spark.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")

    def forever(ctx):
        Path(folder, f"rank-{ctx.rank}").write_text(str(os.getpid()))
        while True:
            ctx.comm.allreduce_(torch.ones(1))
            time.sleep(0.05)

    try:
        dml.run(forever, num_workers=2, spark=spark)
    except KeyboardInterrupt:
        gone = not any(alive(int(Path(folder, f"rank-{r}").read_text())) for r in range(2))
        after = dml.run(lambda ctx: ctx.rank, num_workers=2, spark=spark)
        Path(folder, "interrupted").write_text(f"gone={gone} after={after}")
        spark.stop()


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] not in "ZX"
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    main(sys.argv[1])
