"""Arrow columns as arrays: every kind that Spark sends, and clear words for what can't be fed."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import types as T

from sparkdml.errors import DataError
from sparkdml.feed.columns.kinds import (
    ArrayColumn,
    OpaqueColumn,
    RaggedColumn,
    ScalarColumn,
    VectorColumn,
)
from sparkdml.feed.columns.schema import describe_columns, recorded_column

VECTOR = pa.struct(
    [
        ("type", pa.int8()),
        ("size", pa.int32()),
        ("indices", pa.list_(pa.int32())),
        ("values", pa.list_(pa.float64())),
    ]
)


def convert(column, values, kind=None):
    array = pa.array(values, kind)
    batch = pa.RecordBatch.from_arrays([array], names=[column.name])
    return column.read(array, batch)


def schema(**kinds):
    return T.StructType([T.StructField(name, kind) for name, kind in kinds.items()])


@pytest.mark.parametrize(
    ("spark_type", "arrow_type", "dtype"),
    [
        (T.BooleanType(), pa.bool_(), "bool"),
        (T.ByteType(), pa.int8(), "int8"),
        (T.ShortType(), pa.int16(), "int16"),
        (T.IntegerType(), pa.int32(), "int32"),
        (T.LongType(), pa.int64(), "int64"),
        (T.FloatType(), pa.float32(), "float32"),
        (T.DoubleType(), pa.float64(), "float64"),
    ],
)
def test_scalars_keep_their_types(spark_type, arrow_type, dtype):
    (column,) = describe_columns(schema(x=spark_type), ["x"])
    result = convert(column, [bool(i) if dtype == "bool" else i for i in (1, 0, 1)], arrow_type)
    assert result.dtype == dtype
    assert result.tolist() == [1, 0, 1]


def test_large_ids_are_exact():
    (column,) = describe_columns(schema(id=T.LongType()), ["id"])
    assert convert(column, [2**53 + 1]).tolist() == [2**53 + 1]


def test_only_floating_columns_are_cast():
    assert ArrayColumn("x", "float64").cast("float32").dtype == "float32"
    assert ScalarColumn("id", "int64").cast("float32").dtype == "int64"


@given(st.integers(0, 5), st.integers(0, 4), st.integers(1, 3))
def test_nested_arrays(rows, length, inner):
    values = np.arange(rows * length * inner, dtype=np.float32).reshape(rows, length, inner)
    kind = pa.list_(pa.list_(pa.float32()))
    result = convert(ArrayColumn("x", "float32", 2), values.tolist(), kind)
    if rows and length:
        assert np.array_equal(result, values)


def test_a_sliced_batch_is_read_from_its_own_rows():
    array = pa.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]).slice(1, 2)
    batch = pa.RecordBatch.from_arrays([array], names=["x"])
    result = ArrayColumn("x", "float64").read(array, batch)
    assert result.tolist() == [[3.0, 4.0], [5.0, 6.0]]


@given(st.lists(st.lists(st.floats(-9, 9), min_size=4, max_size=4), min_size=1, max_size=8))
def test_dense_and_sparse_vectors_mix(rows):
    values = []
    for index, row in enumerate(rows):
        if index % 2:
            places = [i for i, v in enumerate(row) if v]
            sparse = {"type": 0, "size": 4, "indices": places, "values": [row[i] for i in places]}
            values.append(sparse)
        else:
            values.append({"type": 1, "size": None, "indices": None, "values": row})
    (column,) = describe_columns(schema(v=VectorUDT()), ["v"])
    assert convert(column, values, VECTOR).tolist() == rows


def test_vectors_of_different_sizes():
    values = [
        {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0]},
        {"type": 0, "size": 3, "indices": [1], "values": [9.0]},
    ]
    with pytest.raises(DataError, match="'v' has 3 elements in the row"):
        convert(VectorColumn("v"), values, VECTOR)


def test_a_null_names_column_and_row():
    batch = pa.RecordBatch.from_pydict({"id": [1, 2, 3], "x": [0.5, None, 1.5]})
    with pytest.raises(DataError, match=r"column 'x' is null in the row \(id=2, x=None\)"):
        ScalarColumn("x", "float64").read(batch.column("x"), batch)


def test_a_null_inside_an_array_names_column_and_row():
    batch = pa.RecordBatch.from_pydict({"id": [1, 2], "x": [[0.5, 1.0], [2.0, None]]})
    with pytest.raises(DataError, match=r"'x' has a null inside the array in the row \(id=2"):
        ArrayColumn("x", "float64").read(batch.column("x"), batch)


def test_a_ragged_array_names_column_and_row():
    batch = pa.RecordBatch.from_pydict({"id": [1, 2, 3], "x": [[1.0, 2.0], [3.0, 4.0], [5.0]]})
    with pytest.raises(DataError, match=r"'x' has 1 elements in the row \(id=3.*but 2 in others"):
        ArrayColumn("x", "float64").read(batch.column("x"), batch)


def test_a_ragged_inner_array_names_the_row():
    batch = pa.RecordBatch.from_pydict({"id": [1, 2], "x": [[[1.0], [2.0]], [[3.0], [4.0, 5.0]]]})
    with pytest.raises(DataError, match=r"in the row \(id=2"):
        ArrayColumn("x", "float64", 2).read(batch.column("x"), batch)


@pytest.mark.parametrize(
    ("kind", "fix"),
    [
        (T.StringType(), "StringIndexer"),
        (T.DecimalType(10, 2), "cast it to double"),
        (T.DateType(), "datediff"),
        (T.TimestampType(), "unix_timestamp"),
        (T.BinaryType(), "decode it"),
        (T.MapType(T.StringType(), T.LongType()), "turn it into columns"),
        (schema(a=T.LongType()), "select its fields"),
        (T.ArrayType(T.StringType()), "StringIndexer"),
    ],
)
def test_types_that_cannot_be_fed_come_with_a_fix(kind, fix):
    with pytest.raises(DataError, match=f"column 'x' has the type .*{fix}"):
        describe_columns(schema(x=kind), ["x"])


def test_a_missing_column_lists_those_there_are():
    with pytest.raises(DataError, match="no column 'feature': the DataFrame has features, label"):
        describe_columns(schema(features=T.LongType(), label=T.LongType()), ["feature"])


@pytest.mark.parametrize(
    ("column", "record"),
    [
        (ScalarColumn("x", "int64"), ("scalar", "int64", 0, False)),
        (ArrayColumn("x", "float32", 2), ("array", "float32", 2, False)),
        (RaggedColumn("x", "int64"), ("array", "int64", 1, True)),
        (VectorColumn("x", "float32"), ("vector", "float32", 1, False)),
        (OpaqueColumn("x"), ("other", "object", 0, False)),
    ],
)
def test_saved_models_record_columns_in_the_form_of_the_first_release(column, record):
    fields = {"name": "x", **dict(zip(("kind", "dtype", "depth", "ragged"), record, strict=True))}
    assert column.record() == fields
    assert recorded_column(fields) == column


def test_only_arrays_may_become_ragged_and_only_vectors_change_outside_spark():
    assert ArrayColumn("x", "int64", 2).for_collate() == RaggedColumn("x", "int64", 2)
    for column in (ScalarColumn("x", "int64"), VectorColumn("x"), RaggedColumn("x", "int64")):
        assert column.for_collate() == column
    assert VectorColumn("x", "float32").outside_spark() == ArrayColumn("x", "float32")
    assert ScalarColumn("x", "int64").outside_spark() == ScalarColumn("x", "int64")
