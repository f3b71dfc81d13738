"""Records of checkpoints and submissions: damage of any kind is a CheckpointError."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdml.checkpoint.archive import Archive
from sparkdml.checkpoint.encoding import decode
from sparkdml.checkpoint.manifest import KINDS, Manifest, Part, Submission, checkpoint_id, parse_id
from sparkdml.checkpoint.stores.local import LocalStore
from sparkdml.errors import CheckpointError

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoints"
NAME = "checkpoints/{}/manifest.json"

steps = st.integers(0, 10**12)
texts = st.text(max_size=8)


@st.composite
def manifests(draw):
    size, step, submission, kind = draw(
        st.tuples(st.integers(1, 3), steps, st.integers(1, 20_000), st.sampled_from(KINDS))
    )
    return Manifest(
        id=checkpoint_id(step, submission, kind),
        parent=draw(st.none() | st.just(checkpoint_id(0, 1, "root"))),
        submission=submission,
        step=step,
        epoch=draw(steps),
        kind=kind,
        num_workers=size,
        global_batch=draw(steps),
        plan=draw(st.dictionaries(texts, texts, max_size=3)),
        plan_hash=draw(texts),
        data={"num_rows": draw(steps), "schema": draw(texts)},
        parts=tuple(Part(f"rank-{r}.safetensors", r, draw(steps), "ab" * 32) for r in range(size)),
        workers=tuple({"host": draw(texts)} for _ in range(size)),
        metrics=draw(st.dictionaries(texts, st.floats(allow_nan=False), max_size=2)),
        created=draw(st.floats(0, 1e-5)),
    )


submissions = st.builds(
    Submission,
    st.integers(1, 20_000),
    st.just("restart"),
    st.none() | texts,
    st.integers(1, 9),
    st.floats(0, 1e10),
    cause=st.none() | texts,
)


def flipped(content, bit):
    damaged = bytearray(content)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


@given(manifest=manifests(), data=st.data())
def test_any_flipped_bit_of_a_manifest_is_noticed(manifest, data):
    content, name = manifest.to_json(), NAME.format(manifest.id)
    assert Manifest.from_json(content, name) == manifest
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    with pytest.raises(CheckpointError):
        Manifest.from_json(flipped(content, bit), name)


@given(submission=submissions, data=st.data())
def test_any_flipped_bit_of_a_submission_is_noticed(submission, data):
    content = submission.to_json()
    assert Submission.from_json(content, "submissions/0001.json") == submission
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    with pytest.raises(CheckpointError):
        Submission.from_json(flipped(content, bit), "submissions/0001.json")


def golden():
    return Archive(LocalStore(f"file:{GOLDEN}")).newest()


def test_each_bit_of_one_manifest():
    """All of them, with the field that holds the hash."""
    manifest = golden()
    content, name = manifest.to_json(), NAME.format(manifest.id)
    for bit in range(8 * len(content)):
        with pytest.raises(CheckpointError):
            Manifest.from_json(flipped(content, bit), name)


def test_a_manifest_is_an_object_of_json_with_its_hash():
    fields = json.loads(golden().to_json())
    assert list(fields)[-2:] == ["version", "sha256"]
    assert len(fields["sha256"]) == 64


def test_manifests_without_a_hash_load():
    archive = Archive(LocalStore(f"file:{GOLDEN}"))
    assert b'\n "sha256"' not in archive.store.read(NAME.format(archive.newest().id))
    assert [manifest.step for manifest in archive.manifests()] == [0, 30]
    assert [submission.number for submission in archive.submissions()] == [1]


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"num_workers": 3}, "it has 3 workers and lists 2"),
        ({"num_workers": "2"}, "it has 2 workers and lists 2"),
        ({"kind": "stop"}, "not in tuple"),
        ({"kind": "step"}, "its submission, step or kind is not that of"),
        ({"step": 31}, "its submission, step or kind is not that of"),
        ({"id": "0000000031-0001-final"}, "it is that of '0000000031-0001-final'"),
        ({"id": None}, "it is that of None"),
        ({"plan": []}, "its plan is no object"),
        ({"parts": None}, "not iterable"),
        ({"parts": [[]]}, "mapping"),
        ({"workers": 3}, "not iterable"),
        ({"parts": [{"name": "a", "rank": 2, "num_bytes": 1, "sha256": ""}]}, "parts of ranks .2."),
        ({"parts": [{"name": "a", "rank": [], "num_bytes": 1, "sha256": ""}]}, "unhashable"),
        ({"hash": ""}, "unexpected keyword"),
    ],
)
def test_what_contradicts_itself_is_noticed_without_a_hash(changed, cause):
    manifest = golden()
    content = (GOLDEN / NAME.format(manifest.id)).read_bytes()
    damaged = json.dumps({**json.loads(content), **changed}).encode()
    with pytest.raises(CheckpointError, match=cause):
        Manifest.from_json(damaged, NAME.format(manifest.id))


def test_a_damaged_manifest_is_skipped_for_its_parent(tmp_path):
    place = tmp_path / "run"
    shutil.copytree(GOLDEN, place)
    archive = Archive(LocalStore(f"file:{place}"))
    newest = archive.newest()
    archive.commit(replace(newest, created=1.0))
    path = place / NAME.format(newest.id)
    whole = path.read_bytes()
    for damaged in (
        whole.replace(b'"num_workers": 2', b'"num_workers": 3'),
        b"[" * 100_000,
        whole.replace(b'"kind": "final"', b'"kind": "stop"'),
        (place / NAME.format("0000000000-0001-root")).read_bytes(),
        b"",
        b"null",
    ):
        path.write_bytes(damaged)
        archive = Archive(archive.store)
        with pytest.warns(UserWarning, match=f"skipping checkpoint {newest.id} .*manifest.json"):
            assert archive.newest().step == 0


def test_parts_of_nested_json_are_damaged():
    head = b'{"__metadata__":{"skeleton":"' + b"[" * 100_000 + b'"}}'
    head += b" " * (-len(head) % 8)
    for content in (head, b'{"__metadata__":{"skeleton":"[]"}}      ', b"[]      "):
        with pytest.raises(CheckpointError, match="state is damaged"):
            decode(len(content).to_bytes(8, "little") + content, "state")


@pytest.mark.parametrize(
    "id", ["²-1-step", "1-1-", "1-1-stop", "1-1-step\n", "-1-1-step", "zz", ""]
)
def test_names_that_are_no_checkpoints(id):
    assert parse_id(id) is None
