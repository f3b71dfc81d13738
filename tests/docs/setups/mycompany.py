"""A package `mycompany` as the page shows it, in the current folder."""

import sys
from pathlib import Path

Path("mycompany").mkdir()
Path("mycompany/__init__.py").touch()
Path("mycompany/models.py").write_text(
    """
from torch import nn

import sparkdml as dml


@dml.factory
def make_net(hidden=64):
    return nn.Sequential(nn.Linear(10, hidden), nn.ReLU(), nn.Linear(hidden, 2))
"""
)
sys.path.insert(0, str(Path.cwd()))
