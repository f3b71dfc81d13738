"""`sparkdml demo`: trains on handwritten digits with two workers on local Spark.

It takes less than a minute, and ends with the accuracy on held-out rows, a confusion matrix, and a
plot of the loss.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sparkdml as dml
from sparkdml.cli.terminal import paint
from sparkdml.comm.backends import why_no_horovod
from sparkdml.errors import SetupError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from torch import Tensor, nn


def count_confusions(
    labels: Sequence[int], predictions: Sequence[int], num_classes: int
) -> list[list[int]]:
    """Return the confusion matrix: `result[label][prediction]` is a number of rows."""
    counts = [[0] * num_classes for _ in range(num_classes)]
    for label, prediction in zip(labels, predictions, strict=True):
        counts[label][prediction] += 1
    return counts


def as_text(counts: Sequence[Sequence[int]]) -> str:
    """Format a confusion matrix: one row per label, one column per prediction, and the recall."""
    width = max(3, *(len(str(count)) + 1 for row in counts for count in row))
    header = "".join(f"{prediction:>{width}}" for prediction in range(len(counts)))
    lines = [f"       {'predicted':^{len(header)}}", f"label  {header}    right"]
    for label, row in enumerate(counts):
        cells = "".join(f"{count or '·':>{width}}" for count in row)
        total = sum(row)
        right = f"{row[label] / total:7.1%}" if total else f"{'none':>7}"
        lines.append(f"{label:>5}  {cells}  {right}")
    return "\n".join(line.rstrip() for line in lines)


PACKAGES = {
    "pyspark": "pyspark",
    "sklearn": "scikit-learn",
    "matplotlib": "matplotlib",
    "pandas": "'pandas<3'",
}
NUM_CLASSES = 10
BATCH_SIZE = 32
LEARNING_RATE = 0.05

_LOG4J = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--epochs", type=int, default=12, help="default: %(default)s")
    parser.add_argument(
        "--backend", choices=("horovod", "torch"), help="default: horovod if it is installed"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("demo-output"), help="folder for the plot"
    )


def run(options: argparse.Namespace) -> int:
    require_packages(PACKAGES)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    backend = options.backend or choose_backend()
    print(f"Starting local Spark with {options.workers} slots …", flush=True)
    spark = start_quiet_spark(options.workers)
    try:
        _train_and_report(spark, options, backend)
    finally:
        spark.stop()
    print_next_steps()
    return 0


def require_packages(packages: Mapping[str, str]) -> None:
    """Check that packages are installed; `packages` maps a module's name to its name on PyPI."""
    missing = [name for module, name in packages.items() if not importlib.util.find_spec(module)]
    if missing:
        needed = " ".join(missing)
        raise SetupError(f"the demo needs packages that are not installed: pip install {needed}")


def choose_backend() -> str:
    reason = why_no_horovod()
    if reason is None:
        return "horovod"
    print(f"Using the torch backend: {reason} (run `sparkdml install-horovod` to build it).")
    return "torch"


def start_quiet_spark(num_slots: int) -> SparkSession:
    """Start local Spark that logs only errors, so that the progress bar is not interrupted."""
    with tempfile.TemporaryDirectory(prefix="sparkdml-demo-") as folder:
        logging = Path(folder) / "log4j2.properties"  # read once, when the JVM starts
        logging.write_text(_LOG4J)
        return (
            dml.session_builder("sparkdml demo", f"local[{num_slots}]")
            .config("spark.driver.extraJavaOptions", f"-Dlog4j2.configurationFile={logging}")
            .config("spark.ui.showConsoleProgress", "false")
            .getOrCreate()
        )


def digits(spark: SparkSession) -> tuple[DataFrame, DataFrame]:
    """Load scikit-learn's 1,797 digits of 8x8 pixels as 80% training rows and 20% test rows."""
    import pandas as pd
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    rows = pd.DataFrame(
        {"features": list((data.data / 16.0).astype("float32")), "label": data.target}
    )
    train, test = train_test_split(rows, test_size=0.2, random_state=7, stratify=rows["label"])
    return spark.createDataFrame(train), spark.createDataFrame(test)


def network() -> nn.Module:
    from torch import nn

    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, NUM_CLASSES),
    )


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return 1 for each row whose largest output is at its label, else 0."""
    return (outputs.argmax(dim=1) == targets).float()


def _train_and_report(spark: SparkSession, options: argparse.Namespace, backend: str) -> None:
    import torch
    from torch import nn

    train, test = digits(spark)
    print(f"Training on handwritten digits with {options.workers} barrier workers:", flush=True)
    estimator = dml.TorchEstimator(
        model=network,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=LEARNING_RATE, momentum=0.9),
        batchSize=BATCH_SIZE,
        epochs=options.epochs,
        numWorkers=options.workers,
        seed=7,
        validation=0.1,
        metrics={"accuracy": accuracy},
        # "auto" would sum through shared memory here; this is to show the backend itself.
        strategy=dml.AllReduce(backend=backend, topology="native"),
    )
    started = time.monotonic()
    fitted = estimator.fit(train)
    seconds = time.monotonic() - started
    history = fitted.history
    print(f"Gradients were summed by {history.backend} (topology {history.topology}).")

    score = fitted.evaluate(test)["accuracy"]
    rows = fitted.transform(test).select("label", "prediction").collect()
    counts = count_confusions(
        [int(row["label"]) for row in rows], [int(row["prediction"]) for row in rows], NUM_CLASSES
    )
    picture = save_plot(history, options.output)
    print()
    print(as_text(counts))
    print()
    verdict = paint(f"{score:.1%}", "green" if score >= 0.96 else "red")
    print(f"Test accuracy: {verdict} on {len(rows)} held-out digits")
    print(f"Training took {seconds:.1f} s; loss plot: {picture}")


def save_plot(history: Any, folder: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")  # no window: the plot is written to a file
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "digits-loss.png"
    history.plot()
    pyplot.gcf().savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close("all")
    return path


def print_next_steps() -> None:
    print(
        "\nWhat to try next:\n"
        "  sparkdml demo --backend torch   the same with torch.distributed\n"
        "  python examples/digits.py       the same as a short script (in a checkout)\n"
        "  sparkdml doctor --master URL    check that your cluster can train\n"
        "  docs/tutorial.md                train your own model on your own DataFrame"
    )
