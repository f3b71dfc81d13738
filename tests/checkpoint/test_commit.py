"""Writer, committer, archive, lease: without Spark, on a local store."""

import threading
import time
import warnings
from dataclasses import replace

import pytest
import torch

from sparkdml.checkpoint.archive import Archive
from sparkdml.checkpoint.checkpointer import Checkpointer, CheckpointPlan
from sparkdml.checkpoint.committer import Committer
from sparkdml.checkpoint.driver_lock import take_over, this_driver
from sparkdml.checkpoint.keep import Keep
from sparkdml.checkpoint.manifest import Submission
from sparkdml.checkpoint.policy import parse_every
from sparkdml.checkpoint.state import Entry
from sparkdml.checkpoint.stores.local import LocalPlace, LocalStore
from sparkdml.checkpoint.writer import Outgoing, Writer
from sparkdml.errors import CheckpointError, SetupError

PROBE = f"probes/{1:032x}"
WORKER = {"host": "here", "device": "cpu", "backend": "torch"}


@pytest.fixture
def url(tmp_path):
    return f"file://{tmp_path}/run"


class Driver:
    """The driver's side, reached by ranks without a wire."""

    def __init__(self, url, keep=2, parent=None, number=1):
        self.archive = Archive(LocalStore(url))
        self.archive.store.write(PROBE, [b"x"])
        submission = Submission(number, "start", None, 2, time.time(), driver=this_driver())
        self.archive.record(submission)
        self.committed, self.damaged = [], []
        self.committer = Committer(
            self.archive, submission, parent, Keep(last=keep), {"model": "m"}, {"num_rows": 3},
            self.committed.append,
        )  # fmt: skip

    def reporter(self, rank):
        driver = self

        class Reporter:
            def report_parts(self, report):
                driver.committer.receive(rank, report)

            def report_damaged(self, checkpoint_id, why):
                driver.damaged.append(checkpoint_id)

        return Reporter()


def make_ranks(driver, url, size=2, resume=None, number=1, place=None):
    plan = CheckpointPlan(place or LocalPlace(url), PROBE, number, resume, parse_every("10 steps"))
    made = [Checkpointer(plan, rank, size, WORKER, driver.reporter(rank)) for rank in range(size)]
    MADE.extend(made)
    return made


MADE: list[Checkpointer] = []


@pytest.fixture(autouse=True)
def closed_ranks():
    yield
    while MADE:
        MADE.pop().close()


def save_all(ranks, step, kind="step", **fields):
    for rank, checkpointer in enumerate(ranks):
        state = {
            "weights": torch.full((100,), float(step)),
            "own": Entry(torch.tensor([10.0 * rank + step]), "mean", 1.0 + 2 * rank),
        }
        checkpointer.save(step, state, kind=kind, global_batch=8, **fields)
    for checkpointer in ranks:
        checkpointer.wait()


def save_and_close(driver, ranks, step):
    save_all(ranks, step)
    driver.committer.close("failed")


def test_a_checkpoint_exists_once_all_ranks_have_written(url):
    driver = Driver(url)
    ranks = make_ranks(driver, url)
    ranks[0].save(0, {"weights": torch.ones(3)}, kind="root")
    assert driver.archive.newest() is None, "rank 1 has not written"
    ranks[1].save(0, {"weights": torch.ones(3)}, kind="root")
    driver.committer.close("finished")
    newest = driver.archive.newest()
    assert newest.kind == "root"
    assert [part.name for part in newest.parts] == [
        "rank-0.safetensors", "state.safetensors", "rank-1.safetensors",
    ]  # fmt: skip
    assert newest.workers[1]["host"] == "here"
    assert driver.archive.submissions()[0].outcome == "finished"


def test_each_rank_loads_its_own_and_other_counts_a_merged_one(url):
    driver = Driver(url)
    save_all(make_ranks(driver, url), 7)
    driver.committer.close("failed")
    newest = driver.archive.newest()
    same = [rank.load() for rank in make_ranks(driver, url, resume=newest)]
    assert [state["own"].item() for state in same] == [7.0, 17.0]
    assert all(state["weights"].tolist() == [7.0] * 100 for state in same)
    for rank in make_ranks(driver, url, size=3, resume=newest):
        assert rank.step == 7
        assert rank.load()["own"].item() == pytest.approx((7 * 1 + 17 * 3) / 4)


def test_a_chain_with_parents_pruned_but_in_the_graph(url):
    driver = Driver(url, keep=2)
    ranks = make_ranks(driver, url)
    for step, kind in ((0, "root"), (10, "step"), (20, "step"), (30, "step"), (40, "final")):
        save_all(ranks, step, kind)
    driver.committer.close("finished")
    chain = driver.archive.manifests()
    assert [m.step for m in chain if not m.pruned] == [0, 30, 40]
    assert [m.parent for m in chain[1:]] == [m.id for m in chain[:-1]]
    files = driver.archive.store.names("checkpoints/")
    assert sum(name.endswith(".safetensors") for name in files) == 9
    assert Archive(driver.archive.store).newest().step == 40


def test_a_write_that_fails_is_reported_and_the_run_continues(url):
    class Unreachable(LocalStore):
        broken = False

        def write(self, name, chunks):
            if Unreachable.broken:
                raise OSError("no route to host")
            super().write(name, chunks)

    class Place:
        url = "file:/x"

        def open(self):
            return Unreachable(url)

    driver = Driver(url)
    ranks = make_ranks(driver, url, place=Place())
    save_all(ranks, 0, "root")
    Unreachable.broken = True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save_all(ranks, 10)
        Unreachable.broken = False
        save_all(ranks, 20)
        driver.committer.close("finished")
    (told,) = [str(w.message) for w in caught]
    assert "step 10 could not be written (rank 0 on here: no route to host)" in told
    assert "The newest one is that of step 0" in told
    assert [m.step for m in driver.archive.manifests()] == [0, 20]
    Unreachable.broken = True
    with pytest.raises(CheckpointError, match="first checkpoint can't be written"):
        ranks[0].save(0, {}, kind="root")


def test_the_caller_pays_for_the_copy_only_and_one_write_is_in_flight(url):
    gate, writes = threading.Event(), []

    class Slow(LocalStore):
        def write(self, name, chunks):
            writes.append(name)
            gate.wait(10)
            super().write(name, chunks)

    done = []
    writer = Writer(Slow(url))
    tensor = torch.ones(1000)
    writer.write("1", [Outgoing("a", 0, {"t": Entry(tensor)})], done.append)
    assert writer.busy
    assert not done
    tensor.zero_()  # training continues meanwhile
    second = threading.Thread(
        target=writer.write, args=("2", [Outgoing("a", 0, {"t": Entry(tensor)})], done.append)
    )
    second.start()
    time.sleep(0.1)
    assert writes == ["checkpoints/1/a"], "the second waits for the first"
    gate.set()
    second.join()
    writer.wait()
    assert [written.error for written in done] == [None, None]
    from sparkdml.checkpoint.encoding import decode

    first = decode(LocalStore(url).read("checkpoints/1/a"), "a")
    assert first["t"].value.tolist() == [1.0] * 1000


def test_a_worker_that_is_short_of_memory_says_so(url, monkeypatch):
    driver = Driver(url)
    rank = make_ranks(driver, url, size=1)[0]
    rank.save(0, {"w": torch.ones(3)}, kind="root")
    (writing,) = [t.ident for t in threading.enumerate() if t.name == "sparkdml-checkpoint"]

    def no_memory(self, name, chunks):
        assert threading.get_ident() == writing, "no thread is started in mid-run"
        raise MemoryError

    monkeypatch.setattr(LocalStore, "write", no_memory)
    rank.save(10, {"w": torch.ones(3)})
    with pytest.raises(MemoryError, match=r"writing checkpoint .* out of memory.*memoryOverhead"):
        rank.wait()
    monkeypatch.undo()
    with pytest.warns(UserWarning, match="step 10 could not be written"):
        driver.committer.close("failed")


def test_a_dead_writer_thread_is_not_waited_for(url, monkeypatch):
    monkeypatch.setattr("sparkdml.checkpoint.writer._LOOK_SECONDS", 0.05)
    writer = Writer(LocalStore(url))
    writer.close()
    writer._thread.join(5)
    writer.write("1", [Outgoing("a", 0, {"t": Entry(torch.ones(3))})], lambda written: None)
    with pytest.raises(MemoryError, match="thread that writes checkpoints"):
        writer.wait()


def test_a_worker_that_sees_another_disk_is_found_out(url, tmp_path):
    driver = Driver(url)
    with pytest.raises(SetupError, match=r"rank 0 on here can't see.*not shared by all hosts"):
        make_ranks(driver, url, place=LocalPlace(f"file://{tmp_path}/elsewhere"))
    driver.committer.close("failed")


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_damage_is_told_to_the_driver(url, tmp_path, damage):
    driver = Driver(url)
    save_all(make_ranks(driver, url), 5)
    driver.committer.close("failed")
    newest = driver.archive.newest()
    path = tmp_path / "run" / "checkpoints" / newest.id / "rank-1.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink() if damage == "gone" else path.write_bytes(
        content if damage == "flip" else content[:-1]
    )
    one, other = make_ranks(driver, url, resume=newest)
    one.load()
    with pytest.raises(CheckpointError, match=r"SHA-256|bytes, not|missing"):
        other.load()
    assert driver.damaged == [newest.id]


@pytest.mark.parametrize("damage", ["no part", "version", "no JSON", "pruned", "rejected"])
def test_the_newest_that_is_whole(url, tmp_path, damage):
    driver = Driver(url)
    ranks = make_ranks(driver, url)
    for step in (5, 6):
        save_all(ranks, step)
    driver.committer.close("failed")
    archive = Archive(LocalStore(url))
    newest = archive.newest()
    assert newest.step == 6
    folder = tmp_path / "run" / "checkpoints" / newest.id
    archive = Archive(LocalStore(url))  # another process, which has read nothing yet
    if damage == "pruned":
        archive.commit(replace(newest, pruned=True))
        assert archive.newest().step == 5
        return
    if damage == "rejected":
        assert archive.newest({newest.id}).step == 5
        return
    if damage == "no part":
        (folder / "rank-1.safetensors").unlink()
    elif damage == "version":
        text = (folder / "manifest.json").read_text()
        (folder / "manifest.json").write_text(text.replace('"version": 1', '"version": 99'))
    else:
        (folder / "manifest.json").write_text("{")
    with pytest.warns(UserWarning, match=f"skipping (damaged )?checkpoint {newest.id}"):
        assert archive.newest().step == 5
    assert folder.exists(), "nothing is deleted that can't be replaced"


def test_what_killed_processes_left_is_swept(url):
    driver = Driver(url)
    save_all(make_ranks(driver, url), 5)
    driver.committer.close("failed")
    store = driver.archive.store
    store.write("checkpoints/0000000007-0001-step/rank-0.safetensors", [b"x"])
    before = [name for name in store.names("checkpoints/") if "0000000005" in name]
    driver.archive.sweep("probes/mine")
    assert store.names("checkpoints/") == before
    assert store.names("probes/") == []


def test_a_sweep_leaves_alone_what_others_wrote(url, tmp_path):
    victim = tmp_path / "victim"
    for name in ("thesis.txt", "state.safetensors", "0000000007-0001-step/rank-0.safetensors"):
        (victim / name).parent.mkdir(parents=True, exist_ok=True)
        (victim / name).write_text("years of work")
    store = LocalStore(url)
    others = (
        "checkpoints/best.pt",
        "checkpoints/other-project/epoch=9.ckpt",
        "checkpoints/other-project/state.safetensors",
        "checkpoints/0000000007-0001-step/notes.txt",
        "checkpoints/0000000007-0001-step/old/state.safetensors",
        "checkpoints/²-1-step/state.safetensors",
        "probes/voyager.png",
    )
    for name in others:
        store.write(name, [b"x"])
    for name in ("checkpoints/zz", "checkpoints/0000000009-0001-step", "probes/zz"):
        (tmp_path / "run" / name).symlink_to(victim)
    Archive(store).sweep("probes/mine")
    assert store.names() == sorted(others)
    assert len([path for path in victim.rglob("*") if path.is_file()]) == 3


def test_a_driver_beats_while_it_commits(url, monkeypatch):
    monkeypatch.setattr("sparkdml.checkpoint.committer.BEAT_SECONDS", 0.05)
    driver = Driver(url)
    ranks = make_ranks(driver, url)
    for step in range(20):
        save_all(ranks, step)
        time.sleep(0.02)
    driver.committer.close("finished")
    assert driver.archive.submissions()[0].beats >= 3


def test_workers_of_another_kind_are_warned_of(url):
    driver = Driver(url)
    save_all(make_ranks(driver, url), 5)
    driver.committer.close("failed")
    newest = driver.archive.newest()
    before = {**newest.workers[0], "cpu": "m68k FPU"}
    older = replace(newest, workers=(before, before), plan_hash="other")
    driver = Driver(url, parent=older, number=2)
    with pytest.warns(
        UserWarning, match=r"started with .*m68k.*: the result is valid but not bit-identical"
    ):
        save_and_close(driver, make_ranks(driver, url, number=2), 6)


def test_a_driver_that_died_is_taken_over_and_a_living_one_is_not(url):
    driver = Driver(url)
    with pytest.raises(CheckpointError, match=r"another driver .* is training into file://"):
        take_over(driver.archive)
    driver.committer.close("failed")
    (ended,) = take_over(driver.archive)
    assert ended.outcome == "failed"
    host, pid, _ = this_driver().split("/")
    dead = Submission(2, "resume", None, 2, 0.0, driver=f"{host}/{pid}/1.00")
    driver.archive.record(dead)
    assert take_over(driver.archive)[1].outcome == "lost"


def test_a_store_that_was_read_only_as_the_run_ended_serves_the_same_driver_again(url, monkeypatch):
    driver = Driver(url)

    def read_only(self, name, chunks):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(LocalStore, "write", read_only)
    with pytest.warns(UserWarning, match="record can't be written"):
        driver.committer.close("failed", "rank 1 was killed", 7)
    with pytest.raises(OSError, match="Read-only"):
        take_over(driver.archive)
    monkeypatch.undo()
    assert Archive(LocalStore(url)).submissions()[0].outcome == "running"
    (ended,) = take_over(driver.archive)
    assert (ended.outcome, ended.cause, ended.failed_at_step) == ("failed", "rank 1 was killed", 7)
    assert Archive(LocalStore(url)).submissions() == [ended]


def test_a_driver_on_another_host_is_judged_by_its_beats(url, monkeypatch):
    archive = Archive(LocalStore(url))
    monkeypatch.setattr("sparkdml.checkpoint.driver_lock.SILENT_SECONDS", 0.3)
    record = Submission(1, "start", None, 2, 0.0, driver="elsewhere/1/1.00")
    archive.record(record)

    def beat(seconds):
        archive.record(replace(record, beats=1))
        time.sleep(0.05)

    with pytest.raises(CheckpointError, match="another driver"):
        take_over(archive, sleep=beat)
    archive.record(record)
    assert take_over(archive, sleep=lambda seconds: time.sleep(0.05))[0].outcome == "lost"


@pytest.mark.parametrize("error", [CheckpointError("the store is gone"), RuntimeError("odd")])
def test_a_checkpoint_is_safe_even_if_older_ones_cant_be_removed(url, monkeypatch, error):
    driver = Driver(url, keep=1)
    ranks = make_ranks(driver, url)

    def unreachable(keep, protected):
        raise error

    monkeypatch.setattr(driver.archive, "prune", unreachable)
    with pytest.warns(UserWarning, match=r"step 10 is safe, but older ones could not be removed"):
        save_and_close(driver, ranks, 10)
    assert [manifest.step for manifest in driver.committed] == [10]
    assert driver.archive.newest().step == 10
