"""`sparkdml bench`: runs the benchmarks in the checkout from which this package was installed.

The benchmarks start other launchers (torchrun, horovodrun, TorchDistributor) as scripts, so they
live beside the package and not in the wheel.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import sparkdml
from sparkdml.errors import SetupError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        help="arguments for benchmarks/peers.py; `-- --help` lists them",
    )


def run(options: argparse.Namespace) -> int:
    script = benchmark_script(Path(sparkdml.__path__[0]))
    given = options.arguments
    return subprocess.call(
        [sys.executable, str(script), *(given[1:] if given[:1] == ["--"] else given)]
    )


def benchmark_script(package: Path) -> Path:
    script = package.parent / "benchmarks" / "peers.py"
    if not script.is_file():
        raise SetupError(
            f"{script} does not exist: the benchmarks are not part of the wheel. "
            "Clone the repository and run `make bench` in it"
        )
    return script
