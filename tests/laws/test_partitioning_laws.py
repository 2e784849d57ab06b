"""Laws of routing and of keyed state, against plain Python models."""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from flux.operators import aggregate as agg
from flux.operators.operator import Context
from flux.replica.snapshot import decode_snapshot, encode_snapshot
from partitioning.clustering import cluster_by_key, hash_columns
from partitioning.key_index import KeyIndex

FLOATS = st.sampled_from([0.0, -0.0, float("nan"), float("inf"), 1.0, -1.5, 5e-324])
CENTS = st.integers(-(10**12) + 1, 10**12 - 1)
DAYS = st.dates(datetime.date(1900, 1, 1), datetime.date(2100, 1, 1))
EARLY = datetime.datetime(1, 1, 1, tzinfo=datetime.UTC)
# Values from small sets, so that keys repeat; strings that share beginnings and ends.
VALUES: list[tuple[pa.DataType, st.SearchStrategy]] = [
    (pa.bool_(), st.booleans()),
    (pa.int8(), st.integers(-2, 2)),
    (pa.int32(), st.sampled_from([0, 1, -1, 1 << 30])),
    (pa.int64(), st.sampled_from([0, 1, -1, 1 << 62, -(1 << 63)])),
    (pa.uint64(), st.sampled_from([0, 1, (1 << 64) - 1])),
    (pa.float32(), FLOATS.filter(lambda v: v != 5e-324)),
    (pa.float64(), FLOATS),
    (pa.date32(), st.sampled_from([datetime.date(1900, 1, 1), datetime.date(2013, 1, 1)])),
    (pa.timestamp("us", "UTC"), st.sampled_from([EARLY, EARLY.replace(year=2013)])),
    (pa.decimal128(38, 1), st.sampled_from(["0", "-0.1", 1 << 64, (1 << 64) + 1]).map(Decimal)),
    (pa.string(), st.text("ab", max_size=18).map(lambda s: "common prefix"[: len(s)] + s)),
    (pa.large_binary(), st.sampled_from([b"", b"\0", b"\0" * 8, b"\0" * 9, b"a" * 7, b"a" * 8])),
]  # fmt: skip


@st.composite
def columns_of_keys(draw: Callable[..., Any]) -> list[pa.Array]:
    """Draw one to three columns of equal length, with nulls, sometimes slices of longer ones."""
    kinds = draw(st.lists(st.sampled_from(VALUES), min_size=1, max_size=3))
    rows = draw(st.integers(0, 60))
    start = draw(st.sampled_from([0, 0, 3, 9]))
    columns = []
    for type_, values in kinds:
        cells = draw(st.lists(st.none() | values, min_size=rows + start, max_size=rows + start))
        columns.append(pa.array(cells, type_).slice(start))
    return columns


def plain(value: Any) -> Any:
    """Return a value that Python's == compares as Spark groups."""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value + 0.0
    return value


def rows_of(columns: list[pa.Array]) -> list[tuple]:
    return list(zip(*([plain(v) for v in column.to_pylist()] for column in columns), strict=True))


@given(columns_of_keys(), st.integers(1, 70), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_clustering_is_a_stable_permutation_that_keeps_equal_keys_together(
    columns: list[pa.Array], partitions: int, random: Any
) -> None:
    rows = len(columns[0])
    batch = pa.RecordBatch.from_arrays(
        [*columns, pa.array(np.arange(rows))], names=[*(f"k{i}" for i in range(len(columns))), "row"]
    )
    order = list(range(partitions))
    random.shuffle(order)
    clustered = cluster_by_key(batch, range(len(columns)), partitions, np.array(order, np.int32))
    came = clustered.batch.column("row").to_pylist()
    assert sorted(came) == list(range(rows))
    assert repr(clustered.batch.to_pylist()) == repr(batch.take(pa.array(came, pa.int64())).to_pylist())
    home: dict[tuple, int] = {}
    given = clustered.by_rank.tolist()
    assert given == [partition for partition in order if partition in given]
    for rank, partition in enumerate(given):
        part = came[clustered.offsets[rank] : clustered.offsets[rank + 1]]
        assert part
        assert part == sorted(part)
        for key in rows_of([c.take(pa.array(part, pa.int64())) for c in columns]):
            assert home.setdefault(key, partition) == partition


@given(columns_of_keys())
@settings(max_examples=150, deadline=None)
def test_equal_keys_have_equal_hashes_and_the_index_agrees_with_a_dict(columns: list[pa.Array]) -> None:
    keys = rows_of(columns)
    model: dict[tuple, int] = {}
    expected = [model.setdefault(key, len(model)) for key in keys]
    index = KeyIndex([pa.field(f"k{i}", column.type) for i, column in enumerate(columns)])
    half = len(keys) // 2
    slots = [
        *index.slots([c.slice(0, half) for c in columns]),
        *index.slots([c.slice(half) for c in columns]),
    ]
    assert slots == expected
    assert len(index) == len(model)
    assert rows_of(index.keys()) == list(model)
    assert rows_of(index.keys(np.array(slots, np.int32))) == keys
    copy = KeyIndex.from_arrow(index.to_arrow())
    assert copy.slots(columns).tolist() == expected
    hashed: dict[tuple, int] = {}
    for key, value in zip(keys, hash_columns(columns).tolist(), strict=True):
        assert hashed.setdefault(key, value) == value


class Everything(agg.Aggregate):
    rows = agg.count()
    values = agg.count("f")
    total_i, total_f, total_d = agg.sum("i"), agg.sum("f"), agg.sum("d")
    mean_i, mean_f, mean_d = agg.mean("i"), agg.mean("f"), agg.mean("d")
    least_i, least_f, least_d, least_t = agg.min("i"), agg.min("f"), agg.min("d"), agg.min("t")
    most_i, most_f, most_d, most_b = agg.max("i"), agg.max("f"), agg.max("d"), agg.max("b")
    least_s, most_s = agg.min("s"), agg.max("s")


TABLE = {
    "k": (pa.string(), st.sampled_from([None, "", "a", "aa", "b"])),
    "j": (pa.float64(), st.sampled_from([None, 0.0, -0.0, float("nan")])),
    "i": (pa.int32(), st.none() | st.integers(-(1 << 31), (1 << 31) - 1)),
    "f": (pa.float64(), st.none() | st.sampled_from([float("nan"), -0.0, 0.5, 3.0, -1e6])),
    "d": (pa.decimal128(12, 2), st.none() | CENTS.map(lambda v: Decimal(v) / 100)),
    "t": (pa.date32(), st.none() | DAYS),
    "b": (pa.bool_(), st.none() | st.booleans()),
    "s": (pa.string(), st.none() | st.text(st.sampled_from("a\0é\ue000\U00010000"), max_size=12)),
}  # fmt: skip
SCHEMA = pa.schema([(name, type_) for name, (type_, _) in TABLE.items()])


def rising(value: Any) -> Any:
    return (1, 0.0) if isinstance(value, float) and math.isnan(value) else (0, value)


def expected_rows(rows: list[dict], key: tuple[str, ...]) -> list[dict]:
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault(tuple(plain(row[k]) for k in key), []).append(row)
    if not key and not rows:
        groups[()] = []
    answers = []
    for names, members in groups.items():
        have = {c: [m[c] for m in members if m[c] is not None] for c in TABLE}
        answer: dict[str, Any] = dict(zip(key, names, strict=True))
        answer |= {"rows": len(members), "values": len(have["f"])}
        for measure, c in (("i", "i"), ("f", "f"), ("d", "d")):
            answer[f"total_{measure}"] = sum(have[c]) if have[c] else None
            answer[f"least_{measure}"] = min(have[c], key=rising, default=None)
            answer[f"most_{measure}"] = max(have[c], key=rising, default=None)
        answer["least_t"], answer["most_b"] = min(have["t"], default=None), max(have["b"], default=None)
        answer["least_s"] = min(have["s"], key=str.encode, default=None)
        answer["most_s"] = max(have["s"], key=str.encode, default=None)
        for c in "if":
            answer[f"mean_{c}"] = sum(float(v) for v in have[c]) / len(have[c]) if have[c] else None
        answer["mean_d"] = _half_up(sum(have["d"]), len(have["d"])) if have["d"] else None
        answers.append(answer)
    return [{name: plain(a[name]) for name in (*key, *Everything._measures)} for a in answers]


def _half_up(total: Decimal, count: int) -> Decimal:
    units = int(total * 10**6)
    quotient, rest = divmod(abs(units), count)
    rounded = quotient + (2 * rest >= count)
    return Decimal(rounded if units >= 0 else -rounded) / 10**6


def started(key: tuple[str, ...]) -> agg.Aggregate:
    operator = Everything()
    operator.open(Context("everything", key=key, schemas=(SCHEMA,)))
    return operator


@given(
    st.lists(st.fixed_dictionaries({name: values for name, (_, values) in TABLE.items()}), max_size=40),
    st.lists(st.integers(0, 40), max_size=4),
    st.integers(0, 5),
    st.sampled_from([("k",), ("j",), ("k", "j"), ("b", "i"), ("d",), ()]),
)
@settings(max_examples=150, deadline=None)
def test_an_aggregate_equals_its_plain_model_however_cut_and_wherever_restored(
    rows: list[dict], cuts: list[int], restore_after: int, key: tuple[str, ...]
) -> None:
    batch = pa.RecordBatch.from_pylist(rows, SCHEMA)
    edges = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    operator = started(key)
    for number, (start, end) in enumerate(itertools.pairwise(edges)):
        if number == restore_after:
            snapshot = operator.snapshot()
            operator = started(key)
            operator.restore(snapshot)
        operator.process(batch.slice(start, end - start))
    got = [row for part in operator.finish() for row in part.to_pylist()]
    assert [{name: plain(value) for name, value in row.items()} for row in got] == expected_rows(rows, key)


@given(
    st.lists(st.fixed_dictionaries({name: values for name, (_, values) in TABLE.items()}), max_size=40),
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.integers(0, 3),
    st.integers(0, 5),
    st.sampled_from([("k",), ("j",), ("k", "j"), ("b", "i"), ("d",), ()]),
)
@settings(max_examples=150, deadline=None)
def test_an_aggregate_is_the_same_from_a_snapshot_and_the_changes_since(
    rows: list[dict], cuts: list[int], whole_after: int, restore_after: int, key: tuple[str, ...]
) -> None:
    """Ask for whole snapshots at any place in between, and let changes become too many at any place."""
    batch = pa.RecordBatch.from_pylist(rows, SCHEMA)
    edges = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    operator, kept, since = started(key), None, []
    for number, (start, end) in enumerate(itertools.pairwise(edges)):
        found = operator.changes()
        if found is None or number == whole_after:
            kept, since = encode_snapshot(operator.snapshot(), ""), []
        else:
            since.append(encode_snapshot(found, ""))
        if number == restore_after:
            operator = started(key)
            operator.restore(decode_snapshot(kept))
            for changes in since:
                operator.apply_changes(decode_snapshot(changes))
        operator.process(batch.slice(start, end - start))
    got = [row for part in operator.finish() for row in part.to_pylist()]
    assert [{name: plain(value) for name, value in row.items()} for row in got] == expected_rows(rows, key)
