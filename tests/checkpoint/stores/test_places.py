"""How a URL is reached: decided at the driver, used in a worker."""

from __future__ import annotations

import os
import pickle
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sparkdml.checkpoint.stores import places
from sparkdml.checkpoint.stores.fsspec_store import FsspecPlace
from sparkdml.checkpoint.stores.places import StoreAccess, resolve_place
from sparkdml.checkpoint.stores.relay import RelayPlace
from sparkdml.checkpoint.stores.retrying import RetryingPlace
from sparkdml.errors import ParameterError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
HOST, TOKEN = "127.0.0.1", "a-long-random-token"


def shipped(access: StoreAccess) -> Any:
    place = access.worker_place(HOST, TOKEN)
    assert isinstance(place, RetryingPlace)
    return place.place


@pytest.fixture
def setting(spark: SparkSession) -> Iterator[Any]:
    """Sets something in the session's Hadoop configuration for one test."""
    keys: list[str] = []

    def set(key: str, value: str) -> None:
        spark.conf.set(key, value)
        keys.append(key)

    yield set
    for key in keys:
        spark.conf.unset(key)


def in_tasks(spark: SparkSession, access: StoreAccess) -> list[str]:
    """Two tasks write a state each, from processes that have no JVM of their own."""
    place = access.worker_place(HOST, TOKEN)

    def write(rank: int) -> str:
        place.open().write(f"ranks/{rank}", [b"state of ", str(rank).encode()])
        return place.open().read(f"ranks/{rank}").decode()

    return spark.sparkContext.parallelize(range(2), 2).map(write).collect()


def check_from_tasks(spark: SparkSession, access: StoreAccess) -> None:
    with access:
        assert in_tasks(spark, access) == ["state of 0", "state of 1"]
        store = access.driver_store()
        assert store.names() == ["ranks/0", "ranks/1"]
        assert store.read("ranks/1") == b"state of 1"


def test_a_file_url_is_the_hosts_disk(spark: SparkSession, tmp_path: Path) -> None:
    for session in (spark, None):
        access = resolve_place(f"file:{tmp_path}/run", None, session)
        assert access.is_local
        assert access.url == f"file://{tmp_path}/run"
    check_from_tasks(spark, access)


def test_a_bare_path_is_sparks(spark: SparkSession, tmp_path: Path) -> None:
    access = resolve_place(f"{tmp_path}/run", None, spark)
    assert access.url == f"file://{tmp_path}/run"
    assert resolve_place("runs/1", None, spark).url == f"file://{os.getcwd()}/runs/1"
    assert resolve_place("runs/1", None, None).url == f"file://{os.getcwd()}/runs/1"


def test_a_bare_path_on_a_cluster_is_hdfs(hdfs: str, spark: SparkSession, setting: Any) -> None:
    setting("fs.defaultFS", hdfs)
    run = uuid.uuid4().hex
    access = resolve_place(f"/{run}", None, spark)
    assert access.url == f"{hdfs}/{run}"
    assert not access.is_local
    relative = resolve_place("runs/1", None, spark)
    assert relative.url.startswith(f"{hdfs}/user/")
    assert relative.url.endswith("/runs/1")


def test_hdfs_goes_through_the_driver(hdfs: str, spark: SparkSession) -> None:
    access = resolve_place(f"{hdfs}/{uuid.uuid4().hex}", None, spark)
    place = shipped(access)
    assert isinstance(place, RelayPlace)
    assert shipped(access).port == place.port, "one relay serves all"
    check_from_tasks(spark, access)
    with pytest.raises(ConnectionRefusedError):
        place.open().names()


def test_s3_goes_straight_from_the_workers(spark: SparkSession, s3: Any) -> None:
    access = resolve_place(f"s3://{s3.make_bucket()}/run", s3.options, spark)
    assert isinstance(shipped(access), FsspecPlace)
    check_from_tasks(spark, access)


@pytest.mark.parametrize("scheme", ["s3", "s3a", "s3n"])
def test_the_credentials_of_hadoop_serve_s3(
    spark: SparkSession, s3: Any, setting: Any, scheme: str
) -> None:
    bucket = s3.make_bucket()
    setting("fs.s3a.access.key", s3.options["key"])
    setting("fs.s3a.secret.key", "of another bucket")
    setting(f"fs.s3a.bucket.{bucket}.secret.key", s3.options["secret"])
    setting("fs.s3a.endpoint", f"127.0.0.1:{s3.port}")
    setting("fs.s3a.connection.ssl.enabled", "false")
    setting("fs.s3a.path.style.access", "true")
    access = resolve_place(f"{scheme}://{bucket}/run", None, spark)
    place = shipped(access)
    assert dict(place.storage_options) == {
        "key": s3.options["key"],
        "secret": s3.options["secret"],
        "endpoint_url": s3.endpoint,
        "use_ssl": False,
        "config_kwargs": {
            "s3": {"addressing_style": "path"},
            "retries": {"total_max_attempts": 2},
        },
    }
    assert s3.options["secret"] not in repr(access.worker_place(HOST, TOKEN))
    access.driver_store().write("state", [b"x"])
    assert s3.client().cat_file(f"{bucket}/run/state") == b"x"


def test_memory_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"checkpoint must be .* share.* 'memory://run'"):
        resolve_place("memory://run", None, None)


@pytest.mark.parametrize("url", ["https://host/run", "simplecache::s3://b/run", "zip://a.zip"])
def test_what_can_not_be_written_is_refused(url: str) -> None:
    with pytest.raises(ParameterError, match="can be written"):
        resolve_place(url, None, None)


@pytest.mark.parametrize("url", ["", "  ", "s3://", "s3:///run", "file://elsewhere/run"])
def test_what_names_no_place_is_refused(url: str) -> None:
    with pytest.raises(ParameterError, match="checkpoint must be"):
        resolve_place(url, None, None)


def test_an_unknown_scheme_names_both_ways(spark: SparkSession) -> None:
    with pytest.raises(ParameterError, match=r"fsspec package for oddfs:.* or .*Hadoop's file sys"):
        resolve_place("oddfs://host/run", None, spark)
    with pytest.raises(ParameterError, match="classic Spark session"):
        resolve_place("hdfs://host/run", None, None)


def test_without_s3fs_the_message_says_what_to_install(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "_fsspec_opens", lambda scheme: False)
    with pytest.raises(ParameterError, match=r"pip install s3fs on .* or give Spark the jar"):
        resolve_place("s3a://bucket/run", None, spark)


def test_options_that_would_be_ignored_are_refused(
    spark: SparkSession, hdfs: str, tmp_path: Path
) -> None:
    with pytest.raises(ParameterError, match=r"storage_options must be empty for a file: path"):
        resolve_place(f"file:{tmp_path}", {"key": "k"}, None)
    with pytest.raises(ParameterError, match=r"storage_options must be empty for hdfs:") as caught:
        resolve_place(f"{hdfs}/run", {"secret": "hush"}, spark)
    assert "hush" not in str(caught.value)


def test_a_password_in_a_url_becomes_an_option(spark: SparkSession, ftp: Any) -> None:
    access = resolve_place(ftp.url(uuid.uuid4().hex), None, spark)
    assert "geheim" not in access.url + repr(access.worker_place(HOST, TOKEN))
    assert pickle.loads(pickle.dumps(shipped(access))).storage_options == {"password": "geheim"}
    access.driver_store().write("state", [b"x"])
    assert access.driver_store().names() == ["state"]
