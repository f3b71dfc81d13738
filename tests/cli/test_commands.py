"""The command line as a user meets it."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sparkdml.cli import bench, demo, doctor
from sparkdml.cli.checks import Check
from sparkdml.cli.demo import as_text, count_confusions
from sparkdml.cli.main import main
from sparkdml.cli.terminal import paint
from sparkdml.errors import SetupError

REPOSITORY = Path(__file__).resolve().parents[2]
CHECKS = [
    Check("Java", "ok", "17"),
    Check("Horovod", "warn", "not installed", "sparkdml install-horovod"),
]


def test_help_imports_neither_torch_nor_pyspark() -> None:
    script = (
        "import sys\n"
        "from sparkdml.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "assert not {'torch', 'pyspark'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_no_command_shows_the_help_and_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "install-horovod" in capsys.readouterr().out


def test_unknown_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["install-horovod", "--fast"])
    assert end.value.code == 2
    assert "--fast" in capsys.readouterr().err


def test_errors_of_ours_are_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_options: object) -> int:
        raise SetupError("torch is not installed here. Fix: pip install torch")

    monkeypatch.setattr(demo, "run", fail)
    assert main(["demo"]) == 1
    error = capsys.readouterr().err
    assert error == "sparkdml demo: torch is not installed here. Fix: pip install torch\n"


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warn", 0), ("FAIL", 1)])
def test_the_doctors_exit_code(
    status: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check = Check("Java", status, "found", "fix")  # type: ignore[arg-type]
    monkeypatch.setattr(doctor, "examine", lambda _master, _timeout: [check])
    assert main(["doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["ok"] is (code == 0)


def test_the_doctors_table_is_aligned_and_plain_off_a_terminal() -> None:
    lines = doctor.as_table(CHECKS, io.StringIO()).splitlines()
    assert lines == [
        "ok    Java     17",
        "warn  Horovod  not installed",
        "               fix: sparkdml install-horovod",
        "",
        "ready, 1 warning",
    ]


def test_colours_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert paint("ok", "green", Terminal()) == "\x1b[32mok\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert paint("ok", "green", Terminal()) == "ok"


def test_a_check_that_breaks_is_reported_as_such() -> None:
    def look() -> list[Check]:
        raise OSError("no such device")

    (check,) = doctor.guarded("GPUs", look)
    assert check.status == "FAIL"
    assert "no such device" in check.found


def test_the_benchmarks_are_looked_for_beside_the_package(tmp_path: Path) -> None:
    package = tmp_path / "sparkdml"
    with pytest.raises(SetupError, match="make bench"):
        bench.benchmark_script(package)
    script = tmp_path / "benchmarks" / "peers.py"
    script.parent.mkdir()
    script.write_text("")
    assert bench.benchmark_script(package) == script


def test_the_demo_names_what_is_missing() -> None:
    demo.require_packages({"json": "json"})
    with pytest.raises(SetupError, match=r"pip install scikit-nothing$"):
        demo.require_packages({"json": "json", "no_such_module": "scikit-nothing"})


def test_confusions_are_counted_and_shown() -> None:
    counts = count_confusions([0, 0, 1, 1, 1], [0, 1, 1, 1, 1], 3)
    assert counts == [[1, 1, 0], [0, 3, 0], [0, 0, 0]]
    text = as_text(counts)
    assert text.splitlines()[1:] == [
        "label    0  1  2    right",
        "    0    1  1  ·    50.0%",
        "    1    ·  3  ·   100.0%",
        "    2    ·  ·  ·     none",
    ]


@pytest.mark.slow
def test_the_doctor_finds_this_machine_ready() -> None:
    trial = subprocess.run(
        [sys.executable, "-m", "sparkdml.cli.main", "doctor", "--master", "local[2]", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    report = json.loads(trial.stdout)
    failed = [check for check in report["checks"] if check["status"] == "FAIL"]
    assert trial.returncode == 0, failed
    names = {check["name"] for check in report["checks"]}
    assert {"Java", "Spark", "torch", "Horovod", "free slots", "ports", "GPUs"} <= names
    slots = next(check for check in report["checks"] if check["name"] == "free slots")
    assert slots["found"].startswith("2 at local[2]")


@pytest.mark.slow
def test_the_wheel_needs_no_build_step(tmp_path: Path) -> None:
    # Built from a copy: setuptools leaves its build folder in the source.
    source = tmp_path / "source"
    shutil.copytree(REPOSITORY / "sparkdml", source / "sparkdml")
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(REPOSITORY / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path)]
    subprocess.run([*pip, str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"sparkdml/py.typed", "sparkdml/cli/main.py", "sparkdml/cli/checks/software.py"} <= set(
        names
    )
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "examples"))]
