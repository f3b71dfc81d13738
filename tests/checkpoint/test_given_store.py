"""A store of the user's own in place of a path: checked, shipped, good for all that a path is."""

import pickle
import sys
import threading
from pathlib import Path

import pytest
from pyspark import cloudpickle

import sparkdml as dml
from sparkdml.checkpoint.archive import Archive
from sparkdml.checkpoint.driver_lock import take_over
from sparkdml.checkpoint.manifest import Submission
from sparkdml.checkpoint.stores.local import LocalStore
from sparkdml.checkpoint.stores.places import GivenPlace, PickledPlace
from sparkdml.checkpoint.stores.retrying import Retrying

sys.path.insert(0, str(Path(__file__).parent))
from small_run import equal, make_estimator, make_rows


class InMemory:
    """Fine for one process only: no other sees what a copy writes."""

    url = "memory:here"

    def __init__(self):
        self.objects = {}

    def write(self, name, chunks):
        self.objects[name] = b"".join(chunks)

    def read(self, name):
        if name not in self.objects:
            raise FileNotFoundError(name)
        return self.objects[name]

    def names(self, prefix=""):
        return sorted(name for name in self.objects if name.startswith(prefix))

    def remove(self, name):
        self.objects.pop(name, None)


class Locked(InMemory):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class OnlyReads:
    url = "readonly:"

    def read(self, name):
        return b""

    def names(self, prefix=""):
        return []


def test_what_is_no_store_is_refused_with_what_it_lacks():
    with pytest.raises(dml.ParameterError, match=r"store.*It lacks write\(\), remove\(\)"):
        dml.Checkpoints(store=OnlyReads())
    with pytest.raises(dml.ParameterError, match="Pass an object, not its class"):
        dml.Checkpoints(store=InMemory)
    with pytest.raises(dml.ParameterError, match=r"store.*lacks .*url"):
        dml.Checkpoints(store="s3://bucket/run")


def test_a_store_that_cannot_be_pickled_is_refused():
    with pytest.raises(dml.ParameterError, match=r"can be pickled.*cannot pickle.*lock.*Open conn"):
        dml.Checkpoints(store=Locked())


def test_a_place_is_named_once():
    store = InMemory()
    with pytest.raises(dml.ParameterError, match=r"path.*left out where store= is given"):
        dml.Checkpoints("/runs/1", store=store)
    with pytest.raises(dml.ParameterError, match=r"storage_options.*left out where store="):
        dml.Checkpoints(store=store, storage_options={"key": "k"})
    with pytest.raises(dml.ParameterError, match=r"path.*or store= is given"):
        dml.Checkpoints()
    place = dml.Checkpoints(store=store)
    assert place.url == "memory:here"
    assert "store=" in repr(place)
    assert "memory" not in repr(dml.Checkpoints("/runs/1"))


def test_the_driver_uses_the_object_and_a_worker_a_copy():
    store = InMemory()
    store.write("a", [b"1"])
    place = GivenPlace(store)
    store.write("probe", [b""])
    shipped = pickle.loads(cloudpickle.dumps(place))
    assert isinstance(shipped, PickledPlace)
    assert shipped.url == "memory:here"
    assert shipped.open().names() == ["a"], "as it was before the driver wrote to it"
    assert place.open() is store


def test_a_worker_that_lacks_the_module_says_so():
    content = cloudpickle.dumps(LocalStore("file:///runs")).replace(b"local", b"l0cal")
    with pytest.raises(dml.SetupError, match=r"store for file:///runs.*No module named.*addPyFile"):
        PickledPlace("file:///runs", content).open()


def test_it_is_read_without_a_session():
    store = InMemory()
    place = dml.Checkpoints(store=store)
    assert place.newest() is None
    assert "no checkpoints yet" in str(place.lineage())
    with pytest.raises(dml.CheckpointError, match="memory:here has no checkpoint"):
        place.nearest(3)


def test_one_driver_at_a_time_in_a_given_store():
    archive = Archive(Retrying(InMemory()))
    running = Submission(
        number=1, reason="start", resumed_from=None, num_workers=2, started=0.0, driver="far/1/0.0"
    )
    archive.record(running)

    def beat(seconds):
        now = archive.submissions()[0]
        archive.record(type(now)(**{**vars(now), "beats": now.beats + 1}))

    with pytest.raises(dml.CheckpointError, match=r"another driver .* into memory:here"):
        take_over(archive, sleep=beat)


def test_an_estimator_with_a_store_is_not_saved_with_its_secrets(spark, tmp_path):
    estimator = make_estimator(checkpoint=dml.Checkpoints(store=InMemory()))
    with pytest.raises(dml.SetupError, match=r"store may hold credentials.*estimator\.clear"):
        estimator.save(str(tmp_path / "saved"))
    estimator.clear(estimator.checkpoint)
    estimator.save(str(tmp_path / "saved"))
    with dml.allow_packages("sparkdml.testing"):
        loaded = dml.TorchEstimator.load(str(tmp_path / "saved"))
    assert loaded.value("checkpoint") is None


def test_a_store_in_one_process_is_not_shared_by_all(spark):
    estimator = make_estimator(checkpoint=dml.Checkpoints(store=InMemory()), maxRestarts=0)
    with pytest.raises(dml.SetupError, match=r"can't see what the driver wrote to memory:here"):
        estimator.fit(make_rows(spark, 100))


def test_resume_keep_and_replay(spark, tmp_path):
    rows = make_rows(spark, 300).cache()
    checkpoints = dml.Checkpoints(
        every="5 steps", keep=2, store=LocalStore(f"file://{tmp_path}/run")
    )
    make_estimator(epochs=1, checkpoint=checkpoints).fit(rows)
    estimator = make_estimator(epochs=2, checkpoint=checkpoints)
    resumed = estimator.fit(rows)
    assert equal(resumed, make_estimator(epochs=2).fit(rows))
    lineage = checkpoints.lineage()
    assert [one.reason for one in lineage.submissions] == ["start", "resume"]
    assert any(manifest.pruned for manifest in lineage.manifests)
    newest = checkpoints.newest()
    assert newest.kind == "final"
    replayed = checkpoints.replay(newest.step, estimator, rows)
    for name, value in resumed.module.state_dict().items():
        assert replayed.module.state_dict()[name].equal(value)
    assert equal(estimator.fit(rows), resumed), "trained already: it is not trained again"
    assert len(checkpoints.lineage().submissions) == 2
