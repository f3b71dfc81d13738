"""Names of kept spools: what is read and removed for them, and what never is."""

import os

import pytest

from sparkdml.errors import ProtocolError
from sparkdml.runtime.driver.spools import Spools
from sparkdml.runtime.protocol.kept_spools import find_spool, remove_spools


@pytest.fixture
def local(tmp_path, monkeypatch):
    """This executor's only local directory; another executor's lies beside it."""
    for name in ("blockmgr-own", "blockmgr-other", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path / "blockmgr-own"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    return tmp_path / "blockmgr-own"


@pytest.fixture
def victim(tmp_path):
    folder = tmp_path / "sparkdml-spool-victim"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    return folder


@pytest.mark.parametrize("place", ["blockmgr-own", "blockmgr-other", "temporary"])
def test_spools_of_this_host_are_found_and_removed(local, place):
    folder = local.parent / place / "sparkdml-spool-ab_3"
    folder.mkdir()
    (folder / "rows").write_bytes(b"x")
    assert find_spool(folder.name) == folder
    remove_spools([folder.name])
    assert not folder.exists()
    remove_spools([folder.name])
    with pytest.raises(FileNotFoundError, match="sparkdml-spool-ab_3 is in no local directory"):
        find_spool(folder.name)


def test_on_a_standalone_cluster_another_executors_spool_is_found(tmp_path, monkeypatch):
    """There each executor's directory lies below its Worker's and its own."""
    own, other = (
        tmp_path / f"spark-{worker}" / f"executor-{worker}" / f"blockmgr-{worker}"
        for worker in ("a1", "b2")
    )
    for folder in (own, other / "sparkdml-spool-ab_3"):
        folder.mkdir(parents=True)
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(own))
    assert find_spool("sparkdml-spool-ab_3") == other / "sparkdml-spool-ab_3"
    (tmp_path / "spark-b2").rename(tmp_path / "elsewhere")
    (tmp_path / "spark-b2").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError):  # a step of the path is a link
        find_spool("sparkdml-spool-ab_3")


@pytest.mark.parametrize(
    "name", ["{victim}", "../{base}", "{base}/../../{base}", "{base}\n", "", 3]
)
def test_a_forged_event_has_no_folder_removed(local, victim, name):
    if isinstance(name, str):
        name = name.format(victim=victim, base=victim.name)
    spools = Spools()
    with pytest.raises(ProtocolError, match="a kept spool is named sparkdml-spool-"):
        spools.note(0, {"host": "h", "name": name, "whole": False}, 1)
    spools.left_behind()
    assert spools.stale() == ()
    with pytest.raises(ProtocolError):
        remove_spools([name])
    assert (victim / "thesis.txt").exists()


def test_links_are_not_followed(local, victim):
    (local / victim.name).symlink_to(victim)
    (local.parent / "blockmgr-link").symlink_to(victim.parent)
    remove_spools([victim.name])
    with pytest.raises(FileNotFoundError):
        find_spool(victim.name)
    assert (victim / "thesis.txt").exists()


def test_another_users_folder_is_not_read(local, monkeypatch):
    folder = local / "sparkdml-spool-a"
    folder.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(FileNotFoundError):
        find_spool(folder.name)
    remove_spools([folder.name])
    assert folder.exists()
