"""Which device a worker takes, where it spools, and the settings that are refused."""

from types import SimpleNamespace

import pytest

from sparkdml.errors import SetupError
from sparkdml.runtime.driver.preflight import check_settings
from sparkdml.runtime.worker.main import choose_device, find_hosts, spool_directory


def assigned(*addresses):
    return {"gpu": SimpleNamespace(name="gpu", addresses=list(addresses))}


def test_the_gpu_that_spark_assigned():
    assert choose_device(1, assigned("3"), lambda: True) == "cuda:3"
    assert choose_device(0, assigned("1"), lambda: True) == "cuda:1"


def test_the_cpu_where_nothing_was_assigned():
    assert choose_device(0, {}, lambda: True) == "cpu"


def test_a_gpu_that_was_wanted_but_not_assigned():
    with pytest.raises(SetupError, match=r"gpusPerWorker=1, but Spark assigned no GPU"):
        choose_device(1, {}, lambda: True)


def test_a_gpu_that_torch_cannot_see():
    with pytest.raises(SetupError, match=r"assigned GPU 7 .* sees no CUDA"):
        choose_device(1, assigned("7"), lambda: False)


def test_hosts_come_from_what_spark_knows():
    infos = [SimpleNamespace(address=a) for a in ("host-a:4040", "host-b:4041", "localhost")]
    assert find_hosts(SimpleNamespace(getTaskInfos=lambda: infos)) == (
        "host-a",
        "host-b",
        "localhost",
    )


def test_the_spool_goes_to_sparks_local_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"/nowhere,{tmp_path}")
    assert spool_directory() == str(tmp_path)
    monkeypatch.setenv("SPARK_LOCAL_DIRS", "")
    assert spool_directory()


@pytest.mark.parametrize(
    "key",
    [
        "spark.dynamicAllocation.enabled",
        "spark.speculation",
        "spark.authenticate",
        "spark.network.crypto.enabled",
        "spark.io.encryption.enabled",
    ],
)
def test_settings_that_cannot_be_kept_to_are_refused(key):
    with pytest.raises(SetupError, match=key):
        check_settings({key: "TRUE"}, many=True, spools=True)
    check_settings({key: "false"}, many=True, spools=True)


def test_one_worker_talks_to_no_peer_and_an_empty_feed_spools_nothing():
    check_settings({"spark.authenticate": "true"}, many=False, spools=True)
    check_settings({"spark.io.encryption.enabled": "true"}, many=True, spools=False)
