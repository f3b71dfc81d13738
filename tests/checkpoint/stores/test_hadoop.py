"""Hadoop's file systems through the driver's JVM: a real HDFS, a real FTP server, local files."""

from __future__ import annotations

import tempfile
import threading
import traceback
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sparkdml.checkpoint.stores.hadoop import HadoopStore
from sparkdml.checkpoint.stores.retrying import is_transient
from sparkdml.testing.store_contract import FailingChunks, OpenStore, StoreContract

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


class TestHdfs(StoreContract):
    @pytest.fixture
    def open_store(self, hdfs: str, spark: SparkSession) -> OpenStore:
        url = f"{hdfs}/{uuid.uuid4().hex}/runs/1"
        return lambda: HadoopStore(spark, url)


class TestHadoopFtp(StoreContract):
    # Against this server Hadoop's FTP client stalls when several threads write at once, until the
    # server hangs up (421). HDFS and local files pass.
    test_writers_at_once_leave_one_whole_object = None  # type: ignore[assignment]

    @pytest.fixture
    def open_store(self, spark: SparkSession, ftp: Any) -> OpenStore:
        url = ftp.url(f"{uuid.uuid4().hex}/runs/1")
        return lambda: HadoopStore(spark, url)


class TestHadoopLocal(StoreContract):
    @pytest.fixture
    def open_store(self, spark: SparkSession, tmp_path: Path) -> OpenStore:
        return lambda: HadoopStore(spark, f"file://{tmp_path}/runs/1")


def statuses(store: HadoopStore) -> list[str]:
    """All files past the store's own filter."""
    files = store._fs.listFiles(store._root, True)
    found = []
    while files.hasNext():
        found.append(files.next().getPath().getName())
    return found


def test_hdfs_replaces_without_a_moment_of_absence(hdfs: str, spark: SparkSession) -> None:
    store = HadoopStore(spark, f"{hdfs}/{uuid.uuid4().hex}")
    store.write("state", [b"older"])
    deleted: list[str] = []
    delete = store._fs.delete

    class Watched:
        def __getattr__(self, name: str) -> Any:
            if name == "delete":
                return lambda path, recursive: deleted.append(str(path)) or delete(path, recursive)
            return getattr(fs, name)

    fs, store._fs = store._fs, Watched()
    store.write("state", [b"newer"])
    assert store.read("state") == b"newer"
    assert deleted == []


def test_a_failed_rename_leaves_nothing_behind(hdfs: str, spark: SparkSession) -> None:
    store = HadoopStore(spark, f"{hdfs}/{uuid.uuid4().hex}")
    store.write("taken/by/a/folder", [b"x"])
    with pytest.raises(OSError, match="taken"):
        store.write("taken/by", [b"y"])
    assert statuses(store) == ["folder"]


def test_what_a_killed_writer_left_goes_with_the_object(hdfs: str, spark: SparkSession) -> None:
    from sparkdml.checkpoint.stores.base import temporary_name

    store = HadoopStore(spark, f"{hdfs}/{uuid.uuid4().hex}")
    store._fs.create(store._path(temporary_name("a/state"))).close()
    store._fs.create(store._path(temporary_name("a/state2"))).close()
    assert store.names() == []
    store.remove("a/state")
    (left,) = statuses(store)
    assert left.startswith(".state2.")


def test_a_file_that_goes_while_it_is_listed_is_worth_another_try(
    spark: SparkSession, tmp_path: Path
) -> None:
    store = HadoopStore(spark, f"file://{tmp_path}/store")
    store.write("a/state", [b"x"])
    over = threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            for number in range(20):
                (tmp_path / "store" / "a" / f".state.{number:032}.partial").touch()
            for number in range(20):
                (tmp_path / "store" / "a" / f".state.{number:032}.partial").unlink()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(5):
            try:
                assert store.names() == ["a/state"]
            except OSError as error:
                if not is_transient(error):
                    raise
    finally:
        over.set()
        thread.join()
    assert store.names() == ["a/state"]


def test_the_spool_is_private_and_gone_afterwards(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spools = tmp_path / "spools"
    spools.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(spools))
    store = HadoopStore(spark, f"file://{tmp_path}/store")
    modes: list[int] = []

    class Chunks:
        def __iter__(self) -> Any:
            yield b"secret weights"
            for folder in spools.iterdir():
                modes.append(folder.stat().st_mode & 0o777)
                modes.extend(file.stat().st_mode & 0o777 for file in folder.iterdir())

    store.write("state", Chunks())
    assert modes == [0o700, 0o600]
    assert store.read("state") == b"secret weights"
    with pytest.raises(FailingChunks.Failure):
        store.write("state", FailingChunks(1, b"x"))
    assert list(spools.iterdir()) == []


def test_an_unknown_scheme_is_an_error(spark: SparkSession) -> None:
    with pytest.raises(OSError, match="No FileSystem for scheme"):
        HadoopStore(spark, "nosuch://host/run")


def test_a_refusal_is_a_permission_error(hdfs: str, spark: SparkSession) -> None:
    owner = HadoopStore(spark, f"{hdfs}/{uuid.uuid4().hex}")
    owner.write("state", [b"x"])
    fs = owner._jvm.hadoop.fs
    owner._fs.setPermission(owner._root, fs.permission.FsPermission("700"))
    stranger = HadoopStore(spark, owner.url)
    stranger._fs = fs.FileSystem.get(owner._root.toUri(), owner._jvm.conf, "stranger")
    with pytest.raises(PermissionError, match="stranger"):
        stranger.read("state")
    with pytest.raises(PermissionError, match="stranger"):
        stranger.write("state", [b"y"])
    assert owner.read("state") == b"x"


def test_a_password_in_the_url_is_not_shown(spark: SparkSession, ftp: Any) -> None:
    store = HadoopStore(spark, ftp.url("run"))
    assert store.url == f"ftp://anna@127.0.0.1:{ftp.port}/run"
    store.write("file", [b"x"])
    with pytest.raises(OSError, match="anna@127") as caught:
        store.write("file/below", [b"x"])
    assert "geheim" not in "".join(traceback.format_exception(caught.value))
