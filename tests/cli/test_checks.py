"""The doctor's judgements, on machines that are broken only on paper."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from sparkdml.cli.checks import Check, horovod, machine, software, workers
from sparkdml.cli.horovod_probe import HorovodProbe

JAVA_17 = 'openjdk version "17.0.15" 2025-04-15\nOpenJDK Runtime Environment (build 17.0.15+6)\n'


@pytest.mark.parametrize(
    ("output", "version"),
    [
        (JAVA_17, 17),
        ('java version "1.8.0_402"\nJava(TM) SE Runtime Environment\n', 8),
        ('openjdk version "11.0.20" 2023-07-18\n', 11),
        ('openjdk version "21" 2023-09-19\n', 21),
        ('openjdk version "25-ea" 2025-09-16\n', 25),
        ("Picked up JAVA_TOOL_OPTIONS: -Xmx1g\n" + JAVA_17, 17),
        ("The operation couldn't be completed. Unable to locate a Java Runtime.\n", None),
    ],
)
def test_java_versions_are_read(output: str, version: int | None) -> None:
    assert software.parse_java_version(output) == version


@pytest.mark.parametrize(
    ("output", "status"),
    [
        (JAVA_17, "ok"),
        ('openjdk version "21.0.2" 2024-01-16\n', "ok"),
        ('openjdk version "19.0.2" 2023-01-17\n', "warn"),
        ('openjdk version "11.0.20" 2023-07-18\n', "FAIL"),
        ("", "FAIL"),
        (None, "FAIL"),
    ],
)
def test_java_is_judged(output: str | None, status: str) -> None:
    check = software.judge_java(output, "/usr/bin/java")
    assert check.status == status
    assert ("openjdk-17-jre-headless" in check.fix) == (status != "ok")


def test_java_home_wins_over_the_path_and_is_named_when_wrong(tmp_path: Path) -> None:
    check = software.check_java({"JAVA_HOME": str(tmp_path), "PATH": os.environ["PATH"]})
    assert check.status == "FAIL"
    assert str(tmp_path) in check.found
    assert "JAVA_HOME" in check.fix


def test_a_fake_old_java_on_the_path_is_found_out(tmp_path: Path) -> None:
    fake = tmp_path / "java"
    fake.write_text("#!/bin/sh\necho 'openjdk version \"11.0.20\"' >&2\n")
    fake.chmod(0o755)
    check = software.check_java({"PATH": str(tmp_path)})
    assert check.status == "FAIL"
    assert "needs 17 or 21" in check.found


@pytest.mark.parametrize(
    ("version", "status"),
    [("4.3.0", "ok"), ("4.1.1", "ok"), ("4.9.0", "warn"), ("3.5.1", "FAIL"), ("5.0.0", "FAIL")],
)
def test_spark_versions(version: str, status: str) -> None:
    assert software.judge_pyspark(version).status == status


def test_missing_packages_fail_or_warn() -> None:
    assert software.judge_pyspark(None).status == "FAIL"
    assert software.judge_torch(None, None).status == "FAIL"
    assert software.judge_pandas(None).status == "warn"


def test_pandas_3_and_an_old_torch_fail() -> None:
    assert software.judge_pandas("3.0.1").status == "FAIL"
    assert software.judge_pandas("2.3.3").status == "ok"
    assert software.judge_torch("2.3.1", None).status == "FAIL"
    assert "CUDA 12.8" in software.judge_torch("2.13.0+cu128", "12.8").found


@pytest.mark.parametrize(
    ("names", "torch_count", "cuda", "amount", "status"),
    [
        ([], 0, None, None, "ok"),
        ([], 0, None, "1", "FAIL"),
        (["A100"], 0, None, None, "warn"),
        (["A100"], 0, "12.8", None, "warn"),
        (["A100"], 1, "12.8", None, "warn"),
        (["A100"], 1, "12.8", "1", "ok"),
    ],
)
def test_gpus(
    names: list[str], torch_count: int, cuda: str | None, amount: str | None, status: str
) -> None:
    assert machine.judge_gpus(names, torch_count, cuda, amount).status == status


@pytest.mark.parametrize(
    ("probe", "status", "word"),
    [
        (HorovodProbe(problem="not installed"), "warn", "torch backend"),
        (HorovodProbe("0.28.1", problem="undefined symbol"), "FAIL", "undefined symbol"),
        (HorovodProbe("0.28.1", "2.5.0+cpu", gloo=True), "FAIL", "2.5.0+cpu"),
        (HorovodProbe("0.28.1", "2.13.0+cpu", gloo=False), "FAIL", "Gloo"),
        (HorovodProbe("0.28.1", "2.13.0+cpu", gloo=True), "ok", "Gloo"),
    ],
)
def test_horovod_is_judged(probe: HorovodProbe, status: str, word: str) -> None:
    check = horovod.judge_probe(probe, "2.13.0+cpu", None)
    assert check.status == status
    assert word in check.found


def test_horovod_without_nccl_is_a_warning_where_torch_has_cuda() -> None:
    probe = HorovodProbe("0.28.1", "2.13.0", gloo=True)
    assert horovod.judge_probe(probe, "2.13.0", "12.8").status == "warn"


HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def test_the_workers_python_fails_only_where_someone_chose_it() -> None:
    assert workers.judge_interpreter("/opt/py", "/opt/py", "3.9", []).status == "FAIL"
    assert workers.judge_interpreter(None, "/usr/bin/python3", "3.9", []).status == "warn"
    bare = workers.judge_interpreter(None, "/usr/bin/python3", HERE, ["torch", "pyarrow"])
    assert bare.status == "warn"
    assert "torch, pyarrow" in bare.found
    assert sys.executable in bare.fix
    assert workers.judge_interpreter("/opt/py", None, "", []).status == "FAIL"


def test_an_interpreter_that_is_not_there_is_found_out() -> None:
    check = workers.check_interpreter({"PYSPARK_PYTHON": "/nowhere/python", "PATH": ""})
    assert check.status == "FAIL"
    assert "/nowhere/python" in check.found


def test_workers_that_lack_packages_fail() -> None:
    worker = {"host": "node7", "python": "/usr/bin/python3", "version": HERE, "missing": "torch"}
    check = workers.judge_worker(worker)
    assert check.status == "FAIL"
    assert "node7" in check.found
    assert "torch" in check.fix
    assert workers.judge_worker({**worker, "missing": ""}).status == "ok"


def test_slots_and_settings() -> None:
    assert workers.judge_slots(1, "local[1]").status == "warn"
    assert workers.judge_slots(8, "spark://host:7077").status == "ok"
    assert workers.judge_settings({}).status == "ok"
    assert workers.judge_settings({"spark.speculation": "false"}).status == "ok"
    dynamic = workers.judge_settings({"spark.dynamicAllocation.enabled": "true"})
    assert dynamic.status == "FAIL"
    assert "spark.dynamicAllocation.enabled=false" in dynamic.fix
    assert workers.judge_settings({"spark.authenticate": "true"}).status == "warn"


GATEWAY = """\
26/01/01 10:00:00 WARN Utils: Your hostname resolves to a loopback address
Exception in thread "main" org.apache.spark.SparkException: Master must be yarn or start with spark
\tat org.apache.spark.deploy.SparkSubmit.error(SparkSubmit.scala:1068)
Traceback (most recent call last):
pyspark.errors.exceptions.base.PySparkRuntimeError: [JAVA_GATEWAY_EXITED] Java gateway exited.
"""
MISMATCH = """\
py4j.protocol.Py4JJavaError: An error occurred while calling collectAndServe.
: org.apache.spark.api.python.PythonException: [PYTHON_EXCEPTION] An exception was thrown
pyspark.errors.exceptions.base.PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] 3.12 than 3.11
 SQLSTATE: 38000
"""


@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        (GATEWAY, "SparkException: Master must be yarn or start with spark"),
        (MISMATCH, "PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] 3.12 than 3.11"),
        ("Killed\n", "Killed"),
        ("", "the process exited without output"),
    ],
)
def test_a_session_that_does_not_start_says_why(stderr: str, said: str) -> None:
    assert workers.reason(stderr) == said
    (check,) = workers.check_session("nope", workers.Session(problem=said))
    assert check.status == "FAIL"
    assert said in check.found


def test_ports_name_a_host_without_an_address() -> None:
    check = machine.check_ports({"SPARK_LOCAL_IP": "no-such-host.invalid"})
    assert check.status == "FAIL"
    assert "no-such-host.invalid" in check.found
    assert machine.check_ports({"SPARK_LOCAL_IP": "127.0.0.1"}).status == "ok"


def test_free_space_is_judged() -> None:
    gib = 2**30
    statuses = [
        machine.judge_free_space(Path("/data"), free, "fix").status
        for free in (gib // 2, 2 * gib, 50 * gib)
    ]
    assert statuses == ["FAIL", "warn", "ok"]


def test_every_local_dir_is_looked_at(tmp_path: Path) -> None:
    first, second = tmp_path / "not" / "yet", tmp_path
    checks = machine.check_spool("/ignored", {"SPARK_LOCAL_DIRS": f"{first},{second}"})
    assert [str(first) in checks[0].found, str(second) in checks[1].found] == [True, True]
    assert all(check.status != "FAIL" or "free" in check.found for check in checks)


def test_a_folder_that_is_a_file_can_not_be_spooled_to(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert machine.check_spool_dir(blocked).status == "FAIL"


def test_missing_shared_memory_is_a_warning(tmp_path: Path) -> None:
    assert machine.check_shared_memory(tmp_path / "none").status == "warn"


def test_a_problem_without_a_fix_is_refused() -> None:
    with pytest.raises(AssertionError, match="needs its fix"):
        Check("Java", "FAIL", "gone")
