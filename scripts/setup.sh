#!/usr/bin/env bash
# Makes the virtual environment and installs everything into it. Each step leaves a stamp, so a
# second call takes only a moment. A problem is reported on stderr in one line, with its fix.
#
# Settings: VENV (.venv), PYTHON (the interpreter to start from), HOROVOD=no (don't build it),
# TORCH_INDEX (an index with torch's CPU build), APT=no (never install system packages, not even as root on Debian).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/apt.sh
source scripts/java.sh

TORCH_VERSION=2.13.0
EXIT_CANNOT_COMPILE=3 # of `sparkdml install-horovod`

venv="${VENV:-.venv}"
stamps="$venv/.stamps"
log="$venv/setup.log"

say() { echo "setup: $*"; }

die() {
    echo "setup: $*" >&2
    exit 1
}

done_before() { [[ -f "$stamps/$1" && "$(<"$stamps/$1")" == "$2" ]]; }

stamp() {
    mkdir -p "$stamps"
    echo "$2" >"$stamps/$1"
}

# pip without its chatter; the last lines of it where it fails.
quiet_pip() {
    if ! "$venv/bin/python" -m pip --disable-pip-version-check "$@" >>"$log" 2>&1; then
        grep -E '^ERROR' "$log" | tail -n 3 >&2 || true
        return 1
    fi
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3.10 python3}; do
        # Runs it: a version manager's shim can be there for a Python that isn't.
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

check_java() {
    local home
    if home="$(java_home)"; then
        [[ -z "$home" || "$home" == "${JAVA_HOME:-}" ]] || say "using the Java at $home"
        return
    fi
    local found=missing version
    version="$(java_version "${JAVA_HOME:+$JAVA_HOME/bin/}java")"
    [[ -z "$version" ]] || found="version $version"
    if apt_install openjdk-17-jre-headless && java_home >/dev/null; then
        return
    fi
    [[ -z "${JAVA_HOME:-}" ]] || found+=" (JAVA_HOME=$JAVA_HOME)"
    die "Java is $found, but Spark 4 needs Java 17 or 21. Fix: apt-get install openjdk-17-jre-headless"
}

make_venv() {
    if [[ -x "$venv/bin/python" ]] && "$venv/bin/python" -c 'import pip' 2>/dev/null; then
        return
    fi
    local python version
    if ! python="$(find_python)"; then
        apt_install python3 python3-venv python3-dev || true
        python="$(find_python)" ||
            die "Python 3.10 or later was not found. Fix: apt-get install python3.11 python3.11-venv"
    fi
    version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        apt_install "python$version-venv" && "$python" -c 'import ensurepip, venv' 2>/dev/null ||
            die "$python has no venv or pip. Fix: apt-get install python$version-venv"
    fi
    say "making $venv with Python $version"
    "$python" -m venv --clear "$venv"
}

install_torch() {
    local now
    done_before torch "$TORCH_VERSION" && return
    now="$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))' \
        2>/dev/null || true)"
    if [[ "${now%%+*}" != "$TORCH_VERSION" ]]; then
        say "installing torch $TORCH_VERSION (about 1 minute) …"
        # On a machine without a GPU the plain build may bring gigabytes of CUDA, so the CPU build
        # is tried first. TORCH_INDEX names an index that has it, where pip's own has none.
        local index=()
        [[ -z "${TORCH_INDEX:-}" ]] || index=(--extra-index-url "$TORCH_INDEX")
        if [[ "$(uname -s)" != Linux ]] || command -v nvidia-smi >/dev/null; then
            quiet_pip install "torch==$TORCH_VERSION"
        elif ! quiet_pip install "torch==$TORCH_VERSION+cpu" "${index[@]}" 2>/dev/null; then
            say "pip's index has no CPU build of torch: using the default one (TORCH_INDEX=URL names another)"
            quiet_pip install "torch==$TORCH_VERSION"
        fi || die "torch could not be installed (log: $log). Fix: check the network and pip's index"
    fi
    stamp torch "$TORCH_VERSION"
}

install_project() {
    local key constraints="$venv/constraints.txt"
    key="$(cat pyproject.toml constraints.txt | sha256sum)"
    done_before project "$key" && return
    say "installing sparkdml, Spark and the tools (about 1 minute) …"
    if "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
        cp constraints.txt "$constraints"
    else
        # The pins are those of Python 3.11; with another one only these three must not move.
        grep -E '^(torch|pyspark|pandas)==' constraints.txt >"$constraints"
    fi
    quiet_pip install -c "$constraints" -e '.[dev]' ||
        die "the packages could not be installed (log: $log). Fix: check the network and pip's index"
    stamp project "$key"
}

install_horovod() {
    local key="$TORCH_VERSION" header code=0
    if [[ "${HOROVOD:-yes}" == no ]]; then
        say "HOROVOD=no: the torch backend will be used"
        return
    fi
    done_before horovod "$key" && return
    header="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h"
    if [[ "$header" == /usr/include/* && ! -e "$header" ]] && command -v c++ >/dev/null; then
        apt_install "$(basename "$(dirname "$header")")-dev" || true
    fi
    "$venv/bin/sparkdml" install-horovod || code=$?
    case "$code" in
        0) stamp horovod "$key" ;;
        "$EXIT_CANNOT_COMPILE") say "continuing without Horovod: the torch backend will be used" ;;
        *) die "Horovod was not built. Fix: see above, or add HOROVOD=no to go on with torch" ;;
    esac
}

check_java
make_venv
install_torch
install_project
install_horovod
