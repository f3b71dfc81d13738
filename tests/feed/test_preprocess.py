"""The user's preprocess and augment, without Spark: what comes out, and words for what is wrong."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from PIL import Image

import sparkdml as dml
from sparkdml.errors import DataError
from sparkdml.feed.arrow import HASH_COLUMN, prepare, read_arrow
from sparkdml.feed.columns.kinds import OpaqueColumn, ScalarColumn, VectorColumn
from sparkdml.feed.epoch_order import BatchRequest
from sparkdml.feed.feed import Chunk, Feed, FeedPlan
from sparkdml.feed.ragged import Ragged

INPUTS = (ScalarColumn("id", "int64"), OpaqueColumn("text"))
TEXTS = ["a", "bcd", "", "ef"]


def batch_of(texts=TEXTS, start=0, **columns):
    return pa.RecordBatch.from_pydict(
        {
            "id": pa.array(range(start, start + len(texts)), pa.int64()),
            "text": pa.array(texts, pa.string()),
            HASH_COLUMN: pa.array(range(start, start + len(texts)), pa.int64()),
            **columns,
        }
    )


def plan_of(preprocess, columns=INPUTS[:1], **fields):
    return FeedPlan(columns, inputs=INPUTS, preprocess=preprocess, floating="float32", **fields)


def run(preprocess, *batches, **fields):
    return list(read_arrow(iter(batches or (batch_of(),)), plan_of(preprocess, **fields)))


def test_what_it_returns_is_laid_over_what_passes_through():
    def preprocess(batch):
        assert batch.schema.names == ["id", "text"]  # and nothing of the feed's own
        return {"length": pc.utf8_length(batch["text"]), "id": np.asarray(batch["id"]) * 2}

    (chunk,) = run(preprocess)
    assert chunk.columns["id"].tolist() == [0, 2, 4, 6]
    assert chunk.columns["length"].tolist() == [1, 3, 0, 2]


@pytest.mark.parametrize(
    ("make", "dtype", "shape"),
    [
        (lambda n: np.zeros((n, 2)), "float32", (4, 2)),  # the module's own floating type
        (lambda n: np.zeros((n, 2), np.uint8), "uint8", (4, 2)),
        (lambda n: torch.zeros(n, 3, dtype=torch.int64), "int64", (4, 3)),
        (lambda n: torch.zeros(n, requires_grad=True), "float32", (4,)),
        (lambda n: pa.array([True] * n), "bool", (4,)),
        (lambda n: pa.chunked_array([pa.array([[1.0, 2.0]] * n)]), "float32", (4, 2)),
        (lambda n: pa.FixedSizeListArray.from_arrays(np.arange(3 * n), 3), "int64", (4, 3)),
    ],
)
def test_arrays_tensors_and_arrow(make, dtype, shape):
    (chunk,) = run(lambda batch: {"x": make(batch.num_rows)})
    assert chunk.columns["x"].dtype == dtype
    assert chunk.columns["x"].shape == shape


def test_nulls_in_a_column_that_it_replaces_are_allowed():
    batch = batch_of(["a", None])
    plan = plan_of(lambda rows: {"text": pc.fill_null(pc.utf8_length(rows["text"]), -1)})
    assert prepare(plan, batch)["text"].tolist() == [1, -1]


def test_vectors_come_as_lists_of_numbers():
    kind = pa.struct(
        [
            ("type", pa.int8()),
            ("size", pa.int32()),
            ("indices", pa.list_(pa.int32())),
            ("values", pa.list_(pa.float64())),
        ]
    )
    sparse = {"type": 0, "size": 3, "indices": [1], "values": [5.0]}
    batch = pa.RecordBatch.from_arrays([pa.array([sparse], kind)], names=["v"])
    plan = FeedPlan(
        (),
        inputs=(VectorColumn("v"),),
        preprocess=lambda rows: {"sum": np.array([sum(v) for v in rows["v"].to_pylist()])},
    )
    assert prepare(plan, batch)["sum"].tolist() == [5.0]


def test_a_label_that_is_not_there_is_left_out_of_inference():
    plan = plan_of(lambda rows: {"x": np.ones(rows.num_rows)}, (ScalarColumn("label", "int64"),))
    assert sorted(prepare(plan, batch_of())) == ["x"]
    assert prepare(plan, batch_of([])).num_rows == 0


def png(value):
    out = io.BytesIO()
    Image.new("L", (4, 3), value).save(out, "PNG")
    return out.getvalue()


def decode(batch):
    images = [Image.open(io.BytesIO(data)) for data in batch["image"].to_pylist()]
    return {"pixels": np.stack([np.asarray(image) for image in images])}


def test_images_are_decoded_and_the_one_that_is_broken_is_named():
    inputs = (OpaqueColumn("name"), OpaqueColumn("image"))
    plan = FeedPlan((), inputs=inputs, preprocess=decode)
    names = [f"{i}.png" for i in range(9)]
    images = [png(i * 20) for i in range(9)]
    good = pa.RecordBatch.from_pydict({"name": names, "image": images})
    assert prepare(plan, good)["pixels"][:, 0, 0].tolist() == [i * 20 for i in range(9)]
    images[6] = b"not an image"
    bad = pa.RecordBatch.from_pydict({"name": names, "image": images})
    with pytest.raises(
        DataError,
        match=r"on the row \(name='6.png', image=<12 bytes>\): UnidentifiedImageError: cannot",
    ) as caught:
        prepare(plan, bad)
    assert "decode" in str(caught.value.__cause__.__traceback__.tb_next.tb_frame.f_code.co_name)


def fails_together(batch):
    assert batch.num_rows < 3, "too many"
    return {"x": np.zeros(batch.num_rows)}


class Changing:
    """Returns something else for its second chunk."""

    def __init__(self, first, second):
        self._returns = [first, second]

    def __call__(self, batch):
        return self._returns.pop(0)


@pytest.mark.parametrize(
    ("preprocess", "words"),
    [
        (lambda b: None, "returned a NoneType; it must return a dict"),
        (lambda b: {}, "returned an empty dict"),
        (lambda b: {"x": [1, 2, 3, 4]}, "returned a list for column 'x'"),
        (lambda b: {"x": np.float32(1)}, "returned a float32 for column 'x'"),
        (lambda b: {"x": np.zeros(3)}, "returned 3 rows in column 'x' for 4 rows .*df.filter"),
        (lambda b: {"x": b["text"]}, "string for column 'x'; it must be one of bool, uint8"),
        (lambda b: {"x": np.array(["a"] * 4)}, "returned str.* for column 'x'"),
        (lambda b: {"x": torch.zeros(4, dtype=torch.bfloat16)}, "torch.bfloat16 for column 'x'"),
        (lambda b: {"x": pa.array([1, None, 3, 4])}, "column 'x' is null in the row"),
        (lambda b: {"x": pa.array([[1], [1, 2], [], [3]])}, "'x' has 2 elements.*dml.pad"),
        (
            lambda b: {"x": Ragged(torch.ones(4), torch.arange(5))},
            "Ragged for column 'x'.*set collate",
        ),
        (fails_together, "on a chunk of 4 rows with the columns id, text: AssertionError: too"),
        (
            Changing({"x": np.zeros((4, 2))}, {"x": np.zeros((4, 3))}),
            r"of float32 of shape \[3\] in column 'x' .* of float32 of shape \[2\] for those",
        ),
        (
            Changing({"x": np.zeros(4)}, {"x": np.zeros(4, np.int64)}),
            "rows of int64 .* and of float32",
        ),
        (
            Changing({"x": np.zeros(4)}, {"x": np.zeros(4), "y": np.zeros(4)}),
            "the columns x, y for a chunk of 4 rows, and x for those before",
        ),
    ],
)
def test_words_for_what_is_wrong(preprocess, words):
    with pytest.raises(DataError, match=words):
        run(preprocess, batch_of(), batch_of(start=4))


def test_lists_are_ragged_where_collate_makes_tensors_of_them():
    plan = plan_of(
        lambda b: {"x": pa.array([list(map(ord, t)) for t in b["text"].to_pylist()])},
        collate=dml.pad(),
    )
    batch = prepare(plan, batch_of())
    assert batch["x"].shape == (4, 3)
    assert batch["x_length"].tolist() == [1, 3, 0, 2]


def test_it_runs_once_a_row_however_many_epochs(tmp_path):
    seen = []

    def preprocess(batch):
        seen.extend(batch["id"].to_pylist())
        return {"x": np.asarray(batch["id"], dtype=np.float32)}

    batches = [batch_of(start=start) for start in range(0, 40, 4)]
    plan = plan_of(preprocess)
    feed = Feed(read_arrow(iter(batches), plan), plan, str(tmp_path))
    for epoch in range(3):
        for batch in feed.batches(BatchRequest(7, epoch)):
            assert batch["x"].tolist() == batch["id"].tolist()
    assert seen == list(range(40))
    feed.close()


# -- augment ------------------------------------------------------------------------------------


def noisy(batch):
    noise = torch.rand(batch["x"].shape) + np.random.rand()
    return {"x": batch["x"] + noise}


def open_feed(tmp_path, augment=noisy, rank=0, **fields):
    hashes = np.sort(np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 100))
    chunks = iter([Chunk({"x": np.zeros(100, np.float32), "id": np.arange(100)}, hashes)])
    return Feed(chunks, FeedPlan((), 3, augment=augment, **fields), str(tmp_path), rank=rank)


def test_augment_is_another_each_epoch_and_the_same_each_run(tmp_path):
    runs = []
    for rank in (0, 0, 1):
        feed = open_feed(tmp_path, rank=rank)
        torch.rand(rank + 3)  # the state of the training doesn't matter
        runs.append([[b["x"].clone() for b in feed.batches(BatchRequest(16, e))] for e in range(3)])
        feed.close()
    same = [
        torch.equal(a, b) for x, y in zip(*runs[:2], strict=True) for a, b in zip(x, y, strict=True)
    ]
    assert all(same)
    assert not torch.equal(runs[0][0][0], runs[0][0][1])
    assert not torch.equal(runs[0][0][0], runs[0][1][0])
    assert not torch.equal(runs[0][0][0], runs[2][0][0])


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_resumed_epoch_is_augmented_as_it_would_have_been(tmp_path, epoch):
    feed, resumed = open_feed(tmp_path), open_feed(tmp_path)
    batches = list(feed.batches(BatchRequest(16, epoch)))
    rest = list(
        resumed.batches(
            BatchRequest(16, epoch, position=feed.position_after(48, BatchRequest(1, epoch)))
        )
    )
    assert [b["x"].tolist() for b in rest] == [b["x"].tolist() for b in batches[3:]]
    feed.close()
    resumed.close()


def test_augment_leaves_the_random_state_alone(tmp_path):
    feed = open_feed(tmp_path)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    next(feed.batches(BatchRequest(16)))
    assert torch.equal(torch.rand(3), expected)
    feed.close()


def test_validation_is_not_augmented(tmp_path):
    feed = open_feed(tmp_path, validation=0.3)
    assert all(not batch["x"].any() for batch in feed.validation_batches(8))
    assert all(batch["x"].all() for batch in feed.batches(BatchRequest(8, 1)))
    feed.close()


@pytest.mark.parametrize(
    ("augment", "words"),
    [
        (lambda b: b["x"], "augment returned a Tensor, not a dict"),
        (lambda b: {"x": b["x"][:2]}, "augment returned a tensor of shape \\[2\\] for column 'x'"),
        (lambda b: {"x": b["y"]}, "augment failed on Batch\\(16 rows: x\\[16\\]"),
    ],
)
def test_words_for_an_augment_that_is_wrong(tmp_path, augment, words):
    feed = open_feed(tmp_path, augment)
    with pytest.raises(DataError, match=words):
        next(feed.batches(BatchRequest(16)))
    feed.close()


# -- the last batch, and numbers that are none --------------------------------------------------


@pytest.mark.parametrize("epoch", [0, 1])
def test_the_last_batch_is_dropped_only_where_it_is_short(tmp_path, epoch):
    for batch_size, expected in ((16, 96), (20, 100), (101, 0)):
        feed = open_feed(tmp_path, None, drop_last=True, validation=None)
        batches = list(feed.batches(BatchRequest(batch_size, epoch)))
        assert sum(batch.num_rows for batch in batches) == expected
        assert all(batch.num_rows == batch_size for batch in batches)
        feed.close()


def test_rows_that_are_not_finite_are_counted_by_column(tmp_path):
    x = np.ones((10, 2), np.float32)
    x[3, 1], x[3, 0], x[7, 0] = np.nan, np.inf, -np.inf
    columns = {"x": x, "y": np.ones(10), "id": np.arange(10)}
    plan = FeedPlan((), check_finite=True, validation=0.5)
    feed = Feed(iter([Chunk(columns, np.arange(10))]), plan, str(tmp_path))
    feed.ingest()
    assert feed.not_finite == {"x": 2}
    feed.close()
