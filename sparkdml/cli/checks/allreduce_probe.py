"""One rank of the doctor's allreduce, run with `python -m` and two arguments: BACKEND WORLD.

WORLD is the fields of `World` as JSON. It exits with an error if the sum is wrong.
"""

from __future__ import annotations

import json
import sys

import torch

from sparkdml.comm.backends import open_communicator
from sparkdml.comm.base import World


def add_up(backend: str, world: World) -> None:
    with open_communicator(backend, world) as communicator:
        total = communicator.allreduce_(torch.full((1000,), world.rank + 1.0))
    expected = world.size * (world.size + 1) / 2
    if not bool((total == expected).all()):
        raise SystemExit(f"the sum is {total[0].item()} instead of {expected}")


if __name__ == "__main__":
    fields = json.loads(sys.argv[2])
    add_up(sys.argv[1], World(**{**fields, "hosts": tuple(fields["hosts"])}))
