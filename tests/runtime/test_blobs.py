"""Blobs bypass Spark's channels: pickled with separate buffers, sent by a socket, and restored."""

import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import sparkdml as dml
from sparkdml.checkpoint.stores.relay import RelayPlace, RelayStore
from sparkdml.runtime.driver import preflight, submission
from sparkdml.runtime.driver.blob_server import BlobServer
from sparkdml.runtime.protocol.blobs import (
    LEAST_BYTES,
    Pieces,
    Sent,
    map_buffers,
    pack,
    total,
    unpack,
)
from sparkdml.runtime.worker.blob_client import fetch, pickle_result, release

HERE = Path(__file__).parent
MANY = LEAST_BYTES // 4 + 3  # floats: no multiple of the alignment


@pytest.fixture
def blob_server():
    made = BlobServer("127.0.0.1", threshold_bytes=LEAST_BYTES)
    yield made
    made.close()


def through_a_file(pickled, folder):
    path = folder / "buffers"
    pieces = Pieces(pickled.buffers)
    path.write_bytes(b"".join(bytes(piece) for piece in pieces))
    return map_buffers(path, [buffer.nbytes for buffer in pickled.buffers], pieces.sha256)


def test_what_is_small_stays_inside():
    pickled = pack({"a": torch.arange(3), "b": b"short", "c": np.ones(4)})
    assert pickled.buffers == []
    assert unpack(pickled.pickled, [])["a"].tolist() == [0, 1, 2]


def test_everything_large_is_returned_as_it_was(tmp_path):
    value = {
        "tensor": torch.arange(MANY, dtype=torch.float32).reshape(1, -1),
        "half": torch.ones(MANY, 2, dtype=torch.bfloat16),
        "bytes": os.urandom(LEAST_BYTES + 5),
        "array": np.arange(MANY, dtype=">i8").reshape(-1, 1),
        "transposed": torch.rand(1024, 1025).t(),
        "not contiguous": np.random.default_rng(0).random((1024, 1024)).T,
    }
    pickled = pack(value)
    assert pickled.num_bytes > 5 * LEAST_BYTES
    assert len(pickled.pickled) < pickled.num_bytes
    back = unpack(pickled.pickled, through_a_file(pickled, tmp_path))
    assert back["bytes"] == value["bytes"]
    for name in ("tensor", "half", "transposed"):
        assert torch.equal(back[name], value[name])
        assert back[name].stride() == value[name].stride()
    for name in ("array", "not contiguous"):
        assert np.array_equal(back[name], value[name])
        assert back[name].dtype == value[name].dtype


def test_tied_weights_and_views_stay_so(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(MANY, 1)
            self.head = nn.Linear(1, MANY, bias=False)
            self.head.weight = self.embedding.weight
            self.view = self.embedding.weight.detach()[:5]

    pickled = pack(Tied())
    assert len(pickled.buffers) == 1
    back = unpack(pickled.pickled, through_a_file(pickled, tmp_path))
    assert back.head.weight is back.embedding.weight
    assert back.head.weight.requires_grad
    with torch.no_grad():
        back.embedding.weight[0] = 7.0
    assert back.view[0] == 7.0


def test_a_file_that_was_cut_off_is_noticed(tmp_path):
    path = tmp_path / "buffers"
    path.write_bytes(b"x" * 100)
    with pytest.raises(OSError, match="100 bytes, not 1,024"):
        map_buffers(path, [1000], "")
    assert total([1000, 24]) == 1024 + 64


def test_a_body_is_fetched_once_an_executor(blob_server, tmp_path, monkeypatch):
    weights = torch.rand(MANY)
    sent = blob_server.upload({"weights": weights, "small": 1})
    assert isinstance(sent, Sent)
    assert len(sent.pickled) < 10_000
    reads = []
    read = RelayStore.read_pieces
    monkeypatch.setattr(
        RelayStore, "read_pieces", lambda self, name: reads.append(name) or read(self, name)
    )
    with ThreadPoolExecutor(
        3
    ) as pool:  # flock is per open file, so that threads exclude each other
        got = list(pool.map(lambda _: fetch(sent, blob_server.place, str(tmp_path)), range(3)))
    assert len(reads) == 1
    assert all(torch.equal(value["weights"], weights) for value in got)
    got[0]["weights"].zero_()
    assert torch.equal(got[1]["weights"], weights), "each has its own, copied when it is written to"
    mode = (tmp_path / f"sparkdml-{sent.name}").stat().st_mode & 0o777
    assert mode == 0o600
    release(sent, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(got[2]["weights"], weights), "what is mapped outlives its file"


@pytest.mark.parametrize("planted", ["poison", "short", "link", "another user's"])
def test_only_what_was_sent_is_mapped(blob_server, tmp_path, monkeypatch, planted):
    weights = torch.rand(MANY)
    sent = blob_server.upload(weights)
    path, victim = tmp_path / f"sparkdml-{sent.name}", tmp_path / "victim"
    victim.write_bytes(b"\1" * total(sent.sizes))
    if planted == "link":
        path.symlink_to(victim)
    else:
        path.write_bytes(victim.read_bytes()[: 100 if planted == "short" else None])
    if planted == "another user's":
        if os.geteuid() != 0:
            pytest.skip("only root can give a file away")
        os.chown(path, 12345, -1)
    assert torch.equal(fetch(sent, blob_server.place, str(tmp_path)), weights)
    assert victim.read_bytes() == b"\1" * total(sent.sizes), "a link is not written through"
    release(sent, str(tmp_path))
    assert list(tmp_path.iterdir()) == [victim]


def test_a_lock_that_is_a_link_is_refused(blob_server, tmp_path):
    sent = blob_server.upload(torch.rand(MANY))
    (tmp_path / "victim").write_bytes(b"years of work")
    (tmp_path / f"sparkdml-{sent.name}.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic link"):
        fetch(sent, blob_server.place, str(tmp_path))
    assert (tmp_path / "victim").read_bytes() == b"years of work"


def test_what_was_changed_on_the_way_is_not_used(blob_server, tmp_path, monkeypatch):
    class Unpickles:
        def __reduce__(self):
            return pickle.loads, (bytes(LEAST_BYTES + 1),)

    sent = blob_server.upload(Unpickles())
    planted = pickle.dumps(os.getpid)
    planted += bytes(total(sent.sizes) - len(planted))
    monkeypatch.setattr(RelayStore, "read_pieces", lambda self, name: iter([planted]))
    with pytest.raises(OSError, match="is not what was sent: its SHA-256 differs"):
        fetch(sent, blob_server.place, str(tmp_path))
    result = pickle_result(torch.rand(MANY), blob_server.place, threshold_bytes=0)
    for path in blob_server._folder.glob("result-*"):
        path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(OSError, match="SHA-256 differs"):
        blob_server.collect(pickle.loads(result))


def test_a_download_that_breaks_off_leaves_nothing(blob_server, tmp_path, monkeypatch):
    sent = blob_server.upload(torch.rand(MANY))

    def broken(self, name):
        yield b"x"
        raise ConnectionError("the driver is gone")

    monkeypatch.setattr(RelayStore, "read_pieces", broken)
    with pytest.raises(ConnectionError, match="the driver is gone"):
        fetch(sent, blob_server.place, str(tmp_path))
    release(sent, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_small_bodies_are_shipped_as_they_are(blob_server):
    body = {"weights": torch.rand(4)}
    assert blob_server.upload(body) is body


def test_results_are_left_at_the_blob_server(blob_server):
    from pyspark import cloudpickle

    result = (None, torch.rand(MANY), b"z" * (2 * LEAST_BYTES))
    payload = pickle_result(result, blob_server.place, LEAST_BYTES)
    assert len(payload) < 10_000
    back = blob_server.collect(cloudpickle.loads(payload))
    assert torch.equal(back[1], result[1])
    assert back[2] == result[2]
    # Where Spark demands encryption there is no blob server, and everything goes by Spark.
    assert len(pickle_result(result, None, 0)) > 3 * LEAST_BYTES


def test_strangers_and_other_names_get_nothing(blob_server):
    sent = blob_server.upload(torch.rand(MANY))
    stranger = RelayPlace("the driver", blob_server.place.host, blob_server.place.port, "a guess")
    with pytest.raises(OSError, match="ended"):
        RelayStore(stranger).read(sent.name)
    store = RelayStore(blob_server.place)
    for act in (lambda: store.read("result-00"), lambda: store.write(sent.name, [b"other"])):
        with pytest.raises(ValueError, match="the blob server has no"):
            act()
    assert b"".join(store.read_pieces(sent.name)) == store.read(sent.name)


def test_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    blob_server = BlobServer("127.0.0.1", threshold_bytes=0)
    blob_server.upload(torch.rand(MANY))
    assert len(list(tmp_path.rglob("blob-*"))) == 1
    blob_server.close()
    assert list(tmp_path.iterdir()) == []
    assert not [t for t in threading.enumerate() if t.name.startswith("sparkdml-relay")]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 64 << 20),
        ({"spark.driver.maxResultSize": "0"}, 64 << 20),
        ({"spark.driver.maxResultSize": "16m"}, 1 << 20),
        ({"spark.driver.maxResultSize": "1024KB"}, 64 << 10),
        ({"spark.driver.maxResultSize": "1048576"}, 64 << 10),
        ({"spark.authenticate": "true"}, None),
        ({"spark.network.crypto.enabled": "true"}, None),
        ({"spark.io.encryption.enabled": "true"}, None),
    ],
)
def test_from_which_size_on(settings, expected):
    assert preflight.blob_threshold(settings.get) == expected


def test_encryption_on_disk_is_not_asked_of_wires():
    on_disk = {"spark.io.encryption.enabled": "true"}
    assert preflight.must_encrypt_disks(on_disk.get)
    assert not preflight.must_encrypt_wires(on_disk.get)
    assert not preflight.must_encrypt_disks({"spark.authenticate": "true"}.get)


def test_both_ways_in_a_run(spark, monkeypatch):
    monkeypatch.setattr(preflight, "BLOB_BYTES", LEAST_BYTES)
    carried = []
    join = submission.join_pieces
    monkeypatch.setattr(
        submission,
        "join_pieces",
        lambda pieces: carried.extend(len(piece[2]) for piece in pieces) or join(pieces),
    )
    weights = torch.rand(MANY)
    results = dml.run(lambda ctx: weights * (ctx.rank + 1), num_workers=2, spark=spark)
    assert [torch.equal(result, weights * (r + 1)) for r, result in enumerate(results)] == [
        True
    ] * 2
    assert sum(carried) < 100_000


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_of_a_gigabyte(tmp_path):
    """Where Spark lets a job return a megabyte."""
    done = subprocess.run(
        [sys.executable, str(HERE / "large_model_job.py"), str(tmp_path)],
        env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "1,024,000,000 bytes trained, returned and used" in done.stdout
