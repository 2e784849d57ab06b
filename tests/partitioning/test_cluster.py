"""Batches sorted by the partitions of their rows."""

from __future__ import annotations

import decimal

import numpy as np
import pyarrow as pa
import pytest

from partitioning.clustering import Clustered, Clustering, cluster_by_key, hash_columns, owned, partition_ids, pieces


def numbered(rows: int) -> pa.RecordBatch:
    rng = np.random.default_rng(rows)
    return pa.record_batch({"key": rng.integers(0, 50, rows), "row": np.arange(rows)})


def whole(batch: pa.RecordBatch, partition: int, partitions: int) -> Clustered:
    return Clustering(batch.schema, [], partitions).whole(batch, partition)


def check(
    clustered: Clustered, batch: pa.RecordBatch, keys: list[int], partitions: int, order: np.ndarray | None = None
) -> None:
    """Check that every row is there once, in its partition, in the order in which it came, and that partitions without rows are
    left out."""
    ids = partition_ids(hash_columns([batch.column(i) for i in keys]), partitions)
    order = np.arange(partitions) if order is None else order
    rank = np.argsort(order)
    rows = batch.to_pylist()
    assert clustered.batch.to_pylist() == [rows[i] for i in np.argsort(rank[ids], kind="stable")]
    assert clustered.batch.schema.equals(batch.schema, check_metadata=True)
    counts = np.bincount(rank[ids], minlength=partitions)
    assert clustered.by_rank.tolist() == order[counts > 0].tolist()
    assert np.diff(clustered.offsets).tolist() == counts[counts > 0].tolist()
    validity = sum(-(-batch.num_rows // 8) for column in clustered.batch.columns if column.null_count)
    assert clustered.batch.nbytes - validity <= clustered.nbytes <= clustered.batch.nbytes


@pytest.mark.parametrize("partitions", [1, 2, 7, 64, 4096])
def test_rows_go_to_the_partition_of_their_key_in_the_order_in_which_they_came(partitions: int) -> None:
    batch = numbered(1000)
    clustered = cluster_by_key(batch, [0], partitions)
    check(clustered, batch, [0], partitions)
    for partition in range(0, partitions, 13):
        rows = clustered.rows_of(partition).column("row").to_pylist()
        assert rows == sorted(rows)


def test_partitions_of_one_worker_can_be_put_next_to_each_other() -> None:
    batch = numbered(1000)
    order = np.array([3, 1, 0, 2], np.int32)
    clustered = cluster_by_key(batch, [0], 4, order)
    check(clustered, batch, [0], 4, order)
    assert clustered.batch.slice(0, int(clustered.offsets[1])).equals(clustered.rows_of(3))


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [0, 1, 3], [-1, 0, 1]])
def test_an_order_that_is_no_permutation_is_refused(order: list[int]) -> None:
    with pytest.raises(ValueError, match="permutation of the 3 partitions"):
        cluster_by_key(numbered(10), [0], 3, np.array(order, np.int32))


@pytest.mark.parametrize(
    "key",
    [
        pa.array([3, None, 1, 2] * 9),
        pa.array([1.5, None, -0.0, 0.0] * 9),
        pa.array([decimal.Decimal("1.5"), None, decimal.Decimal(7)] * 12, pa.decimal128(20, 1)),
        pa.array([True, None, False] * 12),
        pa.array(np.arange(36, dtype=np.int16)),
    ],
    ids=lambda key: str(key.type),
)
def test_a_key_of_one_column_goes_where_its_hash_says(key: pa.Array) -> None:
    """Cluster by a key of one column, which has its own code path, without hashes in between."""
    batch = pa.record_batch({"key": key, "row": np.arange(36)})
    for part in (batch, batch.slice(5, 20)):
        check(cluster_by_key(part, [0], 8), part, [0], 8)


def test_another_order_is_checked_and_followed_by_the_same_clustering() -> None:
    batch = numbered(500)
    clustering = Clustering(batch.schema, [0], 4)
    for order in ([3, 1, 0, 2], [0, 1, 2, 3], [2, 0, 3, 1]):
        given = np.array(order, np.int32)
        for _ in range(2):
            check(clustering.by_key(batch, given), batch, [0], 4, given)
    with pytest.raises(ValueError, match="permutation of the 4 partitions"):
        clustering.by_key(batch, np.array([0, 1, 2, 2], np.int32))
    check(clustering.by_key(batch), batch, [0], 4)


def test_what_a_batch_keeps_does_not_grow_with_the_partitions() -> None:
    clustered = cluster_by_key(numbered(10), [0], 4096)
    for kept in (clustered.by_rank, clustered.offsets):
        assert len(kept) <= 11
        assert kept.base is None or kept.base.nbytes <= 88


def test_no_rows_make_a_batch_with_empty_slices() -> None:
    for partitions in (1, 4):
        clustered = cluster_by_key(numbered(0), [0], partitions)
        assert clustered.offsets.tolist() == [0]
        assert clustered.batch.num_rows == clustered.nbytes == 0


def test_any_column_type_travels_and_slices_keep_to_their_rows() -> None:
    rows = 200
    batch = pa.record_batch(
        {
            "key": pa.array([None if i % 11 == 0 else f"k{i % 30}" for i in range(rows)]),
            "list": pa.array([[i] * (i % 4) for i in range(rows)]),
            "struct": pa.array([{"a": i, "b": None} for i in range(rows)]),
            "dictionary": pa.array([f"d{i % 5}" for i in range(rows)]).dictionary_encode(),
            "decimal": pa.array([decimal.Decimal(i) for i in range(rows)], pa.decimal128(10, 0)),
            "bool": pa.array([None if i % 3 == 0 else i % 2 == 0 for i in range(rows)]),
            "view": pa.array([f"a string beyond twelve bytes {i}" for i in range(rows)], pa.string_view()),
            "null": pa.nulls(rows),
        },
        metadata={"kept": "yes"},
    )
    for part in (batch, batch.slice(37, 101)):
        check(cluster_by_key(part, [0], 8), part, [0], 8)
        assert cluster_by_key(part, [0], 1).batch.equals(part)
        assert owned(part).equals(part)


@pytest.mark.parametrize("partitions", [1, 8])
@pytest.mark.parametrize("text", [pa.string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_the_result_owns_its_memory(partitions: int, text: pa.DataType) -> None:
    """Write over the memory of a batch, as Spark does with the next one."""
    rows = 64
    source = pa.record_batch(
        {
            "key": np.arange(rows),
            "text": pa.array([f"a string beyond twelve bytes {i % 9}" for i in range(rows)]).cast(text),
        }
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, source.schema) as writer:
        writer.write_batch(source)
    memory = np.frombuffer(sink.getvalue(), np.uint8).copy()
    borrowed = pa.ipc.open_stream(pa.py_buffer(memory)).read_next_batch()
    clustered = cluster_by_key(borrowed, [0], partitions)
    before = clustered.batch.to_pylist()
    memory[:] = 0xFF
    assert clustered.batch.to_pylist() == before


@pytest.mark.parametrize(
    "values",
    [
        pa.array([True, None, False] * 40),
        pa.array([decimal.Decimal("1.25"), None] * 60, pa.decimal128(5, 2)),
        pa.array([1.5, -0.0, None] * 40),
        pa.array(["a string beyond twelve bytes", None, ""] * 40),
        pa.array([[1, 2], None, []] * 40),
        pa.array([{"a": 1}, None] * 60),
        pa.array(["x", None, "y"] * 40).dictionary_encode(),
        pa.array(["a string beyond twelve bytes", None] * 60, pa.string_view()),
        pa.nulls(120),
    ],
    ids=lambda values: str(values.type),
)
@pytest.mark.parametrize("part", [slice(0, 120), slice(7, 90), slice(5, 5)])
def test_a_copy_is_equal_and_shares_no_memory_with_the_batch(values: pa.Array, part: slice) -> None:
    whole = pa.record_batch([values], ["c"])
    batch = whole.slice(part.start, part.stop - part.start)
    copy = owned(batch)
    assert copy.equals(batch)
    theirs = [buffer for buffer in whole.column(0).buffers() if buffer is not None and buffer.size]
    for mine in filter(None, copy.column(0).buffers()):
        assert not any(their.address <= mine.address < their.address + their.size for their in theirs)


def test_nbytes_is_that_of_the_rows_and_not_of_the_larger_batch_that_they_were_cut_from() -> None:
    part = numbered(100_000).slice(500, 10)
    assert cluster_by_key(part, [0], 4).nbytes == 160
    assert whole(part, 0, 4).nbytes == 160
    assert whole(part, 0, 4).batch.get_total_buffer_size() < 1000


def test_nbytes_counts_what_lies_in_dictionaries() -> None:
    """Count the values of dictionaries. The width of a dictionary's type is that of its numbers: logs and credit would be bounded
    by these alone."""
    texts = pa.array(["x" * 100_000, "y" * 100_000]).dictionary_encode()
    batch = pa.record_batch({"key": [1, 2], "text": texts})
    for clustered in (cluster_by_key(batch, [0], 4), whole(batch, 0, 4)):
        assert clustered.nbytes >= 200_000


def test_offsets_that_do_not_fit_the_rows_are_noticed() -> None:
    with pytest.raises(AssertionError, match="cover the batch"):
        Clustered(numbered(3), np.array([0], np.int32), np.array([0, 2]), 0)
    with pytest.raises(AssertionError, match="one offset per rank"):
        Clustered(numbered(3), np.array([0], np.int32), np.array([0, 2, 3]), 0)


def test_rows_without_a_key_all_go_to_one_partition() -> None:
    batch = numbered(5)
    clustered = whole(batch, 2, 4)
    assert clustered.by_rank.tolist() == [2]
    assert clustered.offsets.tolist() == [0, 5]
    assert clustered.rows_of(2).equals(batch)
    assert clustered.rows_of(3).num_rows == 0
    assert clustered.batch.column(1).buffers()[1].address != batch.column(1).buffers()[1].address


@pytest.mark.parametrize("partitions", [1, 2, 7, 300])
@pytest.mark.parametrize("key", [["k"], ["s"], ["k", "s"]])
def test_small_batches_are_clustered_together_as_each_would_be_alone(partitions: int, key: list[str]) -> None:
    rng = np.random.default_rng(partitions)
    keys = rng.integers(0, 40, 200)
    rows = pa.record_batch({"k": keys, "s": pa.array([None if k == 3 else str(k) * 9 for k in keys])}).slice(10)
    sizes = [1, 64, 3, 100, 22]
    clustering = Clustering(rows.schema, [rows.schema.get_field_index(name) for name in key], partitions)
    by_rank = rng.permutation(partitions).astype(np.int32)
    found = clustering.each_by_key(rows, sizes, by_rank)
    alone = [clustering.by_key(each, by_rank) for each in pieces(rows, sizes)]
    for one, other in zip(found, alone, strict=True):
        assert one.batch == other.batch
        assert (one.by_rank.tolist(), one.offsets.tolist()) == (other.by_rank.tolist(), other.offsets.tolist())
        assert one.nbytes == pytest.approx(other.nbytes, abs=8), "about the bytes"


def test_batches_with_dictionaries_are_clustered_one_by_one() -> None:
    rows = pa.record_batch({"k": pa.array([1, 2, 3]), "d": pa.array(["a", "b", "a"]).dictionary_encode()})
    found = Clustering(rows.schema, [0], 4).each_by_key(rows, [1, 2])
    assert sorted(row["k"] for each in found for row in each.batch.to_pylist()) == [1, 2, 3]
    assert [each.batch.num_rows for each in found] == [1, 2]
