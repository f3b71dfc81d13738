"""The store of a shared disk."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from sparkdml.checkpoint.stores.local import LocalPlace, LocalStore, path_of
from sparkdml.testing.store_contract import FailingChunks, OpenStore, StoreContract


class TestLocalStore(StoreContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        place = LocalPlace(f"file://{tmp_path}/runs/1")
        return lambda: pickle.loads(pickle.dumps(place)).open()


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(f"file://{tmp_path}")


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_failed_write_leaves_no_file_at_all(store: LocalStore, tmp_path: Path) -> None:
    with pytest.raises(FailingChunks.Failure):
        store.write("a/state", FailingChunks(2, b"x"))
    assert files(tmp_path) == []


def test_what_a_killed_writer_left_is_hidden_and_goes_with_the_object(
    store: LocalStore, tmp_path: Path
) -> None:
    script = (
        "import sys, time\n"
        "from sparkdml.checkpoint.stores.local import LocalStore\n"
        "def chunks():\n"
        "    yield bytes(3_000_000)\n"
        "    print('halfway', flush=True)\n"
        "    time.sleep(60)\n"
        f"LocalStore('file://{tmp_path}').write('a/state', chunks())\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"halfway\n"
        writer.kill()
    (leftover,) = files(tmp_path)
    assert (tmp_path / leftover).stat().st_size > 0
    assert store.names() == []
    store.write("a/state2", [b"another"])
    store.remove("a/state")
    assert files(tmp_path) == ["a/state2"]


def test_chunks_are_never_joined(store: LocalStore) -> None:
    chunk = bytes(1 << 20)
    tracemalloc.start()
    store.write("large", (memoryview(chunk) for _ in range(48)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def test_file_and_folder_are_synced_before_the_write_returns(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    events: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor: int) -> None:
        events.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def record_replace(source: Path, target: Path) -> None:
        events.append(("rename", str(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    store.write("new/state", [b"x"])
    kinds = [kind for kind, _ in events]
    assert kinds == ["sync", "sync", "rename", "sync"]
    assert events[0][1] == str(tmp_path)  # holds the new folder's entry
    assert Path(events[1][1]).parent == tmp_path / "new"
    assert events[2][1] == str(tmp_path / "new/state")
    assert events[3][1] == str(tmp_path / "new")


def test_a_place_that_is_a_file_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="File exists"):
        LocalStore(f"file://{tmp_path}/file").write("state", [b"x"])


def test_the_ways_to_write_a_file_url(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for url in ("file:/a/b", "file:///a/b", "file://localhost/a/b/", "/a/b"):
        assert path_of(url) == "/a/b"
    monkeypatch.chdir(tmp_path)
    assert path_of("file:runs/1") == f"{tmp_path}/runs/1"
    with pytest.raises(ValueError, match="another host"):
        path_of("file://elsewhere/a")


def test_listing_many_objects_is_quick(store: LocalStore, tmp_path: Path) -> None:
    for folder in range(20):
        (tmp_path / f"{folder}").mkdir()
        for file in range(50):
            (tmp_path / f"{folder}/{file}").touch()
    started = time.perf_counter()
    assert len(store.names()) == 1000
    assert time.perf_counter() - started < 1
