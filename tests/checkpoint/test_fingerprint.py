"""The fingerprint: what distinguishes one run from another, and what doesn't."""

import subprocess
import sys
from functools import partial

import torch
from torch import nn

import sparkdml as dml
from sparkdml.checkpoint.fingerprint import data_differences, describe, differences
from sparkdml.testing.models import TinyClassifier, accuracy

DESCRIBE = """
from functools import partial
import torch
from sparkdml.checkpoint.fingerprint import describe
from sparkdml.testing.models import TinyClassifier, accuracy
print(describe([TinyClassifier(), accuracy, partial(torch.optim.SGD, lr=0.1), lambda x: x + 1]))
"""


def test_the_same_in_every_process():
    command = [sys.executable, "-c", DESCRIBE]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    one, other = (process.communicate()[0] for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert one == other != ""


def make_loss(weight):
    def loss(outputs, targets):
        return (outputs * weight).sum()

    return loss


def weighted(weight):
    return nn.CrossEntropyLoss(weight=torch.tensor([1.0, weight]))


class Setting:
    def __init__(self, value):
        self.value = value


def test_what_makes_a_difference():
    assert describe(TinyClassifier(8)) != describe(TinyClassifier(9))
    assert describe(nn.Dropout(0.1)) != describe(nn.Dropout(0.2))
    assert describe(make_loss(1)) != describe(make_loss(2))
    assert describe(lambda x: x + 1) != describe(lambda x: x + 2)
    assert describe(partial(accuracy, targets=1)) != describe(partial(accuracy, targets=2))
    assert describe(torch.ones(2)) != describe(torch.zeros(2))
    assert describe(dml.AllReduce(backend="torch")) != describe(dml.AllReduce(backend="horovod"))
    assert describe(nn.CrossEntropyLoss()) != describe(nn.CrossEntropyLoss(label_smoothing=0.1))
    assert describe(weighted(1.0), weights=True) != describe(weighted(2.0), weights=True)
    assert describe(dml.EarlyStopping(min_delta=0.1)) != describe(dml.EarlyStopping())
    assert describe(lambda x, y=1: x) != describe(lambda x, y=2: x)
    assert describe(Setting(1)) != describe(Setting(2))
    frozen = TinyClassifier()
    frozen.out.weight.requires_grad = False
    assert describe(frozen) != describe(TinyClassifier())


def test_what_makes_none():
    assert describe(TinyClassifier()) == describe(TinyClassifier()), "initial weights"
    assert describe(make_loss(1)) == describe(make_loss(1))

    class Plain:
        pass

    assert describe(Plain()) == describe(Plain()), "an address in memory"


def test_differences_are_named():
    found = differences({"seed": "1", "loss": "a"}, {"seed": "2", "loss": "a", "new": "3"})
    assert found == ["seed was 1, is now 2", "new was not set, is now 3"]


def test_the_same_rows_from_other_files_are_the_same_data():
    before = {"num_rows": 5, "hash_sum": 9, "files": {"a": [1, 2]}}
    assert data_differences(before, {**before, "files": {"b": [3, 4]}}) == []
    assert data_differences(before, {**before, "hash_sum": 8, "files": {"b": [3, 4]}}) == [
        "sum of the rows' hashes: 9 before, 8 now",
        "file a is gone",
        "file b is new",
    ]
    assert data_differences({}, before) == [], "a root that was written before the rows were known"
