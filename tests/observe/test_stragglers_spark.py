"""A rank that is slow in a real fit is found, with its cause, and told at the end."""

import os
import re
import time

import pytest
import torch
from torch import nn

import sparkdml as dml

pytestmark = pytest.mark.spark

PAUSE_SECONDS = 0.05


class SlowOnRankOne(nn.Module):
    """Computes longer there, as a GPU that is shared or too hot would."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, features):
        if os.environ["RANK"] == "1" and torch.is_grad_enabled():
            time.sleep(PAUSE_SECONDS)
        return self.layer(features)


def test_the_slow_rank_is_named(spark, capsys):
    rows = [([0.1 * i, 1.0, 2.0, 3.0], i % 3) for i in range(600)]
    frame = spark.createDataFrame(rows, "features array<float>, label long")
    dml.TorchEstimator(
        model=SlowOnRankOne,
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD,
        numWorkers=2,
        epochs=2,
        batchSize=16,
        verbose=2,
    ).fit(frame)
    said = capsys.readouterr().err
    (report,) = re.findall(r"straggler: (.*)", said)
    assert re.match(r"rank 1 on \S+ took [\d.]+ times as long as the others", report)
    assert ", compute)" in report
    assert re.search(r"rank 0 on \S+: \d+ steps, .*communication [5-9]\d%", said)
    assert re.search(r"rank 1 on \S+: \d+ steps, .*compute [5-9]\d%", said)
