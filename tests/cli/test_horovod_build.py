"""Building Horovod: everything but the compiling."""

from __future__ import annotations

import argparse
import io
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from sparkdml.cli import horovod_build, install_horovod
from sparkdml.cli.horovod_probe import HorovodProbe, without_launcher
from sparkdml.cli.install_horovod import BuildKey, WheelCache, default_cache_dir
from sparkdml.cli.terminal import PercentLine
from sparkdml.errors import SetupError

KEY = BuildKey(
    horovod="0.28.1",
    torch="2.13.0+cpu",
    python="cp311",
    platform="linux-x86_64",
    libc="glibc2.36",
    cxx11_abi=True,
    flags=(("HOROVOD_WITH_GLOO", "1"),),
)


@pytest.mark.parametrize(
    ("line", "percent"),
    [
        ("[ 42%] Building CXX object horovod/torch/mpi_ops_v2.cc.o", 42),
        ("  [  2%] Building CXX object third_party/gloo/allgather.cc.o", 2),
        ("[100%] Built target pytorch", 100),
        ("  creating build/lib [ 12%]", None),
        ("warning: 42% of the things", None),
    ],
)
def test_progress_is_read_from_make(line: str, percent: int | None) -> None:
    assert horovod_build.parse_percent(line) == percent


def test_progress_is_a_line_every_ten_percent_and_never_runs_backwards() -> None:
    stream = io.StringIO()
    progress = PercentLine("building", stream)
    for percent in (0, 3, 7, 5, 12, 11, 38, 100, 99):
        progress.update(percent)
    progress.close()
    assert stream.getvalue() == "building … 0%\nbuilding … 10%\nbuilding … 30%\nbuilding … 100%\n"


def test_the_cxx_standard_is_raised_and_nothing_else() -> None:
    before = "set(CMAKE_CXX_STANDARD 14)\nset(CMAKE_CXX_STANDARD_REQUIRED ON)\nset(X 14)\n"
    after, changes = horovod_build.raise_cxx_standard(before)
    assert changes == 1
    assert after == before.replace("STANDARD 14", "STANDARD 17")
    assert horovod_build.raise_cxx_standard("set(CMAKE_CXX_STANDARD 140)")[1] == 0


def archive_with(tmp_path: Path, names: list[str]) -> Path:
    path = tmp_path / "horovod.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            content = b"set(CMAKE_CXX_STANDARD 14)\n"
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


ROOT = f"horovod-{horovod_build.HOROVOD_VERSION}"


def test_source_is_unpacked_and_patched_once(tmp_path: Path) -> None:
    files = ["setup.py", "CMakeLists.txt", "horovod/torch/CMakeLists.txt"]
    archive = archive_with(tmp_path, [f"{ROOT}/{name}" for name in files])
    root = horovod_build.unpack(archive, tmp_path / "source")
    horovod_build.patch(root)
    for name in files[1:]:
        assert (root / name).read_text() == "set(CMAKE_CXX_STANDARD 17)\n"
    with pytest.raises(SetupError, match="CMAKE_CXX_STANDARD 14"):
        horovod_build.patch(root)


def test_an_archive_that_climbs_out_is_refused(tmp_path: Path) -> None:
    archive = archive_with(tmp_path, [f"{ROOT}/setup.py", "../evil"])
    with pytest.raises(SetupError, match="evil"):
        horovod_build.unpack(archive, tmp_path / "source")
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"horovod": "0.29.0"},
        {"torch": "2.13.0"},
        {"python": "cp312"},
        {"platform": "linux-aarch64"},
        {"libc": "glibc2.31"},
        {"cxx11_abi": False},
        {"flags": (("HOROVOD_WITH_GLOO", "1"), ("HOROVOD_GPU_OPERATIONS", "NCCL"))},
    ],
)
def test_everything_that_a_wheel_depends_on_is_in_its_key(change: dict[str, object]) -> None:
    assert replace(KEY, **change).folder() != KEY.folder()  # type: ignore[arg-type]


def test_the_key_is_a_plain_folder_name_and_does_not_depend_on_the_order_of_flags() -> None:
    flags = (("A", "1"), ("B", "2"))
    assert replace(KEY, flags=flags).folder() == replace(KEY, flags=flags[::-1]).folder()
    assert "/" not in replace(KEY, platform="macosx-11/x y").folder()
    assert KEY.folder().startswith("horovod0.28.1-torch2.13.0+cpu-cp311-linux_x86_64-glibc2.36-")


def test_wheels_are_found_again_and_no_part_of_one_is_left(tmp_path: Path) -> None:
    cache = WheelCache(tmp_path / "cache")
    assert cache.find(KEY) is None
    wheel = tmp_path / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    wheel.write_bytes(b"wheel")
    with cache.lock(KEY):
        stored = cache.store(KEY, wheel)
    assert cache.find(KEY) == stored
    assert stored.read_bytes() == b"wheel"
    assert [path.name for path in stored.parent.iterdir()] == [wheel.name]
    assert cache.find(replace(KEY, python="cp312")) is None
    cache.discard(stored)
    assert cache.find(KEY) is None


def test_a_half_written_wheel_is_never_found(tmp_path: Path) -> None:
    cache = WheelCache(tmp_path)
    with pytest.raises(FileNotFoundError):
        cache.store(KEY, tmp_path / "gone.whl")
    assert cache.find(KEY) is None
    assert list((tmp_path / KEY.folder()).iterdir()) == []


def test_the_cache_follows_xdg() -> None:
    assert default_cache_dir({"XDG_CACHE_HOME": "/x"}) == Path("/x/sparkdml/wheels")
    home = Path("/home/ann/.cache/sparkdml/wheels")
    assert default_cache_dir({"HOME": "/home/ann"}) == home
    assert default_cache_dir({"HOME": "/home/ann", "XDG_CACHE_HOME": "relative"}) == home


@pytest.mark.parametrize(
    ("output", "fits"),
    [
        ("cmake version 3.25.1\n", True),
        ("cmake version 3.13.4\n", True),
        ("cmake version 3.10.2\n", False),
        ("cmake version 4.1.0\n", False),
        ("no such thing\n", False),
    ],
)
def test_cmake_versions(output: str, fits: bool) -> None:
    assert horovod_build.cmake_fits(horovod_build.parse_cmake_version(output)) is fits


def test_nccl_is_asked_for_only_where_cuda_and_nccl_are_there() -> None:
    assert "HOROVOD_GPU_OPERATIONS" not in horovod_build.build_flags(None, nccl=True)
    assert "HOROVOD_GPU_OPERATIONS" not in horovod_build.build_flags("12.8", nccl=False)
    flags = horovod_build.build_flags("12.8", nccl=True)
    assert flags["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert "NCCL" in install_horovod.describe_gpu_support("12.8", flags)
    assert "--force" in install_horovod.describe_gpu_support("12.8", {})


def test_the_build_sees_our_flags_and_not_the_callers(tmp_path: Path) -> None:
    base = {
        "PATH": "/bin",
        "MAKEFLAGS": "--jobserver-auth=3,4",
        "MAKELEVEL": "1",
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_NCCL_HOME": "/nccl",
        "PYTHONPATH": "/mine",
    }
    seen = horovod_build.build_environment(base, {"HOROVOD_WITH_GLOO": "1"}, tmp_path)
    assert seen["PATH"] == "/bin"
    assert seen["MAKEFLAGS"].startswith("-j")
    assert seen["PYTHONPATH"] == f"{tmp_path}:/mine"
    assert seen["HOROVOD_NCCL_HOME"] == "/nccl"
    assert "HOROVOD_WITH_MPI" not in seen
    assert "MAKELEVEL" not in seen


def test_a_failed_step_keeps_its_log_and_shows_its_end(tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    with log.open("w") as file, pytest.raises(horovod_build.BuildFailed) as failure:
        horovod_build._step("compiling", ["sh", "-c", "echo first; echo broken >&2; exit 7"], file)
    assert "exit code 7" in str(failure.value)
    assert "broken" in str(failure.value)
    assert str(log) in str(failure.value)
    assert "first\nbroken\n" in log.read_text()


@pytest.mark.parametrize(
    ("probe", "word"),
    [
        (HorovodProbe("0.28.1", "2.13.0+cpu", gloo=True), ""),
        (HorovodProbe("0.28.1", "2.12.0", gloo=True), "2.12.0"),
        (HorovodProbe("0.28.1", "2.13.0+cpu", gloo=False), "Gloo"),
        (HorovodProbe(problem="not installed"), "not installed"),
    ],
)
def test_what_is_installed_is_judged(probe: HorovodProbe, word: str) -> None:
    problem = install_horovod.unfit(probe, "2.13.0+cpu")
    assert bool(problem) is bool(word)
    assert word in problem


def test_a_launchers_variables_are_left_out() -> None:
    kept = without_launcher({"HOROVOD_RANK": "1", "OMPI_COMM_WORLD_RANK": "1", "PATH": "/bin"})
    assert kept == {"PATH": "/bin"}


def options(tmp_path: Path, force: bool = False) -> argparse.Namespace:
    return argparse.Namespace(force=force, cache_dir=tmp_path)


def test_no_compiler_has_an_exit_code_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(horovod_build, "find_compiler", lambda _environment: None)
    assert install_horovod.run(options(tmp_path, force=True)) == 3
    assert "apt-get install g++" in capsys.readouterr().err


def test_a_failed_build_ends_with_1_and_nothing_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_arguments: object) -> Path:
        raise horovod_build.BuildFailed("building Horovod failed. The whole log: x.log")

    monkeypatch.setattr(horovod_build, "missing_tools", lambda: [])
    monkeypatch.setattr(install_horovod, "build_wheel", fail)
    monkeypatch.setattr(install_horovod, "_pip_install", lambda *_arguments: "")
    assert install_horovod.run(options(tmp_path, force=True)) == 1
    assert "x.log" in capsys.readouterr().err
    assert list(tmp_path.glob("**/*.whl")) == []


def test_a_cached_wheel_that_does_not_work_is_thrown_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = WheelCache(tmp_path)
    wheel = tmp_path / "horovod-0.28.1-py3-none-any.whl"
    wheel.write_bytes(b"")
    cache.store(KEY, wheel)
    monkeypatch.setattr(install_horovod, "_install", lambda _wheel: "not a zip file")
    assert install_horovod._install_from_cache(cache, KEY, "2.13.0+cpu") is False
    assert cache.find(KEY) is None


def test_a_compiler_must_know_cxx17(tmp_path: Path) -> None:
    fake = tmp_path / "g++"
    fake.write_text("#!/bin/sh\nexit 1\n")
    fake.chmod(0o755)
    assert horovod_build.find_compiler({"PATH": str(tmp_path)}) is None
    fake.write_text("#!/bin/sh\nexit 0\n")
    assert horovod_build.find_compiler({"PATH": str(tmp_path)}) == str(fake)
