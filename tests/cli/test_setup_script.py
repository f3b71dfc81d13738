"""The set-up's complaints: run with a PATH on which something is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TOOLS = ("bash", "cat", "dirname", "env", "grep", "head", "id", "sed", "tail", "uname")


class Machine:
    """A machine with the usual tools and nothing else, until something is put on its PATH."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.venv = folder / "venv"
        self.java_installations = folder / "jvm"
        for tool in TOOLS:
            (self.bin / tool).symlink_to(str(shutil.which(tool)))

    def add(self, name: str, script: str) -> None:
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!{self.bin}/bash\n{script}\n")
        path.chmod(0o755)

    def add_java(self, version: str) -> None:
        self.add("java", java_script(version))

    def run(self, *command: str, apt: str = "no") -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": str(self.bin),
            "VENV": str(self.venv),
            "JAVA_INSTALLATIONS": str(self.java_installations),
            "APT": apt,
            "HOME": str(self.bin.parent),
        }
        return subprocess.run(
            [str(self.bin / "bash"), *command],
            env=environment,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
        )


def java_script(version: str) -> str:
    return f"""echo 'openjdk version "{version}" 2024-01-01' >&2"""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def complaint(result: subprocess.CompletedProcess[str]) -> str:
    """The one line that was said on stderr."""
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    return line


def test_no_java(machine: Machine) -> None:
    line = complaint(machine.run("scripts/setup.sh"))
    assert "Java is missing" in line
    assert line.endswith("Fix: apt-get install openjdk-17-jre-headless")


@pytest.mark.parametrize("version", ["11.0.20", "1.8.0_402"])
def test_an_old_java(machine: Machine, version: str) -> None:
    machine.add_java(version)
    line = complaint(machine.run("scripts/setup.sh"))
    assert f"version {'8' if version.startswith('1.') else '11'}" in line
    assert "needs Java 17 or 21" in line


def test_no_python(machine: Machine) -> None:
    machine.add_java("17.0.15")
    assert "Python 3.10 or later" in complaint(machine.run("scripts/setup.sh"))


def test_a_python_that_is_too_old(machine: Machine) -> None:
    machine.add_java("17.0.15")
    machine.add("python3", "exit 1")
    assert "Python 3.10 or later" in complaint(machine.run("scripts/setup.sh"))


def test_no_pip(machine: Machine) -> None:
    machine.add_java("17.0.15")
    machine.add(
        "python3.11",
        'case "$2" in *ensurepip*) exit 1;; *print*) echo 3.11;; esac',
    )
    line = complaint(machine.run("scripts/setup.sh"))
    assert line.endswith("Fix: apt-get install python3.11-venv")
    assert not machine.venv.exists()


@pytest.mark.skipif(not os.path.exists("/etc/debian_version"), reason="only Debian has apt-get")
def test_root_on_debian_gets_java_installed_and_is_told(machine: Machine) -> None:
    machine.add("id", "echo 0")
    machine.add("packaged-java", java_script("17.0.15"))
    copy = f"{shutil.which('cp')} {machine.bin}/packaged-java {machine.bin}/java"
    machine.add("apt-get", f'case "$*" in *openjdk*) {copy};; esac')
    result = machine.run("scripts/setup.sh", apt="yes")
    assert "apt-get install openjdk-17-jre-headless" in result.stdout
    assert "Python 3.10 or later" in complaint(result)  # it got past Java


def test_another_java_is_found_where_debian_puts_them(machine: Machine) -> None:
    machine.add_java("11.0.20")
    newer = machine.java_installations / "java-17-openjdk" / "bin" / "java"
    newer.parent.mkdir(parents=True)
    newer.write_text(f"#!{machine.bin}/bash\n{java_script('17.0.15')}\n")
    newer.chmod(0o755)
    result = machine.run("scripts/in-venv.sh", "env")
    assert result.returncode == 0, result.stderr
    assert f"JAVA_HOME={newer.parent.parent}" in result.stdout.splitlines()
    assert "SPARK_LOCAL_IP=127.0.0.1" in result.stdout.splitlines()
