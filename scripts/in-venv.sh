#!/usr/bin/env bash
# Runs a command with the virtual environment's Python at the driver and in Spark's workers, on
# loopback only.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/java.sh

venv="$PWD/${VENV:-.venv}"
export PATH="$venv/bin:$PATH" VIRTUAL_ENV="$venv"
export PYSPARK_PYTHON="$venv/bin/python" PYSPARK_DRIVER_PYTHON="$venv/bin/python"
export SPARK_LOCAL_IP="${SPARK_LOCAL_IP:-127.0.0.1}"
# Another Spark on this machine would be mixed up with the one in the virtual environment.
unset SPARK_HOME PYTHONHOME
home="$(java_home)"
[[ -z "$home" ]] || export JAVA_HOME="$home"
exec "$@"
