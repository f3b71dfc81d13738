#!/usr/bin/env bash
# Installs what only the slow tests need, on top of setup.sh: a Chromium with Playwright, Gradle, Open MPI, an
# MLflow server. If something can't be installed, a line names its fix, and its tests skip with a
# reason.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/apt.sh

venv="${VENV:-.venv}"
server="$venv/mlflow-server"

need() { # command, package
    command -v "$1" >/dev/null || apt_install "$2" ||
        echo "setup: $1 is missing, so its tests skip. Fix: apt-get install $2" >&2
}

need chromium chromium
need gradle gradle
need ompi-server openmpi-bin
"$venv/bin/python" -c 'import mpi4py' 2>/dev/null ||
    "$venv/bin/python" -m pip install -q 'mpi4py>=4' ||
    echo "setup: no mpi4py, so the tests of MPI skip. Fix: pip install mpi4py" >&2
"$venv/bin/python" -c 'import playwright' 2>/dev/null ||
    "$venv/bin/python" -m pip install -q 'playwright>=1.49' ||
    echo "setup: no Playwright, so the browser tests skip. Fix: pip install playwright" >&2
if [[ ! -x "$server/bin/mlflow" ]]; then # in its own environment: it pins much that we don't
    echo "setup: installing an MLflow server (about 1 minute) …"
    "$venv/bin/python" -m venv "$server"
    "$server/bin/python" -m pip install -q 'mlflow>=2.16' ||
        echo "setup: no MLflow server, so its tests skip. Fix: pip install mlflow" >&2
fi
