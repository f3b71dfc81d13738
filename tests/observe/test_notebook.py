"""A notebook, executed for real: the widget, the workers' prints, the curves, the plots."""

import os
import re

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SETUP = """
import os, sys
os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
os.environ["PYSPARK_PYTHON"] = sys.executable
import torch
from torch import nn
import sparkdml as dml
from sparkdml.testing.models import TinyClassifier, accuracy

spark = (
    dml.session_builder("notebook", "local[2]").config("spark.ui.enabled", "false").getOrCreate()
)
spark.sparkContext.setLogLevel("OFF")
rows = [([float(i % 3 == k) + 0.01 * (i % 7) for k in range(4)], i % 3) for i in range(600)]
df = spark.createDataFrame(rows, "features array<float>, label long")
"""
FIT = """
class Talk(dml.Callback):
    def on_epoch_end(self, training, row):
        print("epoch over")

fitted = dml.TorchEstimator(
    model=TinyClassifier,
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    metrics={"accuracy": accuracy},
    validation=0.2,
    numWorkers=2,
    epochs=4,
    batchSize=16,
    callbacks=[Talk()],
    logs="driver",
).fit(df)
"""
CELLS = [SETUP, FIT, "fitted.history", "%matplotlib inline\nfitted.history.plot();", "spark.stop()"]


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    for package in ("nbclient", "nbformat", "ipykernel", "ipywidgets"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install it")
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in CELLS]
    )
    folder = tmp_path_factory.mktemp("notebook")
    paths = [os.getcwd(), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    client = NotebookClient(
        book, timeout=180, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=environment)
    keep = os.environ.get("SPARKDML_NOTEBOOK")  # to look at it
    if keep:
        nbformat.write(book, keep)
    return book


def text_of(cell):
    return "".join(output["text"] for output in cell.outputs if output.output_type == "stream")


def test_the_fit_shows_a_widget_that_came_to_its_end(executed):
    widgets = executed.metadata["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]
    (bar,) = [w["state"] for w in widgets.values() if w["model_name"] == "FloatProgressModel"]
    assert bar["value"] == bar["max"] == 4
    assert bar["bar_style"] == "success"
    labels = [w["state"]["value"] for w in widgets.values() if w["model_name"] == "HTMLModel"]
    said = " ".join(labels).replace("\u2007", " ")
    assert re.search(r"epoch 4/4: +100%", said)
    assert re.search(r"loss \d.*val_loss \d.*samples/s", said)


def test_the_workers_prints_are_in_the_cell(executed):
    said = text_of(executed.cells[1])
    for rank in (0, 1):
        assert len(re.findall(rf"\[rank {rank} on [\w.-]+\] epoch over", said)) == 4


def test_the_history_is_curves_and_a_table(executed):
    (output,) = executed.cells[2].outputs
    page = output["data"]["text/html"]
    assert page.count("<svg") == 2
    assert page.count("<tr>") == 5
    assert "val_accuracy" in output["data"]["text/plain"]


def test_the_plot_is_a_picture(executed):
    pictures = [o for o in executed.cells[3].outputs if "image/png" in o.get("data", {})]
    assert len(pictures) == 1


def test_nothing_else_was_said(executed):
    expected = ("WARN", "no Training tab")  # Spark's own words; a checkout without its jar
    errors = [
        output["text"]
        for cell in executed.cells
        for output in cell.outputs
        if output.output_type == "stream" and output["name"] == "stderr"
    ]
    assert [text for text in errors if not any(words in text for words in expected)] == []
