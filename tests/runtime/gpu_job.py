"""The job of the GPU test: each worker says which GPU Spark gave it, as far as torch lets it."""

import json
import sys

import sparkdml as dml


def main(output):
    builder = dml.session_builder("gpus", "local-cluster[2,1,1024]")
    spark = builder.config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    try:
        found = dml.run(lambda ctx: str(ctx.device), gpus_per_worker=1, spark=spark)
    except dml.SetupError as error:
        found = str(error)
    with open(output, "w") as file:
        json.dump(found, file)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
