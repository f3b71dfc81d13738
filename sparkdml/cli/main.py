"""The `sparkdml` command: parses the command line and imports only the chosen subcommand.

Importing torch or pyspark takes a second or more, so `sparkdml --help` imports neither. Each
subcommand is a module of this package with `add_arguments(parser)` and `run(options)`, which
returns the exit code.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from sparkdml.errors import SparkDMLError

SUBCOMMANDS = {
    "doctor": (
        "sparkdml.cli.doctor",
        "check that this machine can train, with a fix for each problem",
    ),
    "install-horovod": (
        "sparkdml.cli.install_horovod",
        "build Horovod for the installed version of torch",
    ),
    "demo": ("sparkdml.cli.demo", "train on handwritten digits with 2 workers on local Spark"),
    "timeline": (
        "sparkdml.cli.timeline",
        "show the largest costs of a traced run and how to reduce them",
    ),
    "bench": (
        "sparkdml.cli.bench",
        "benchmark sparkdml against other libraries (needs a checkout)",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    chosen = next((argument for argument in given if not argument.startswith("-")), None)
    options = _parser(chosen).parse_args(given)
    if options.command is None:
        _parser(None).print_help()
        return 2
    try:
        return int(import_module(SUBCOMMANDS[options.command][0]).run(options))
    except SparkDMLError as error:
        print(f"sparkdml {options.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nsparkdml {options.command}: stopped", file=sys.stderr)
        return 130


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sparkdml", description="Distributed machine learning inside Spark."
    )
    parser.add_argument("--version", action="version", version=f"sparkdml {installed_version()}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    for name, (module, summary) in SUBCOMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name == chosen:
            import_module(module).add_arguments(command)
    return parser


def installed_version() -> str:
    try:
        return version("sparkdml")
    except PackageNotFoundError:
        return "(not installed: running from a folder on the Python path)"


if __name__ == "__main__":
    sys.exit(main())
