"""Copies of state hold values, and no code unless it is the operator's own."""

from __future__ import annotations

import collections
import datetime
import decimal
import os
import pickle
import uuid
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest

import flux
from flux.api import FunctionOperator
from flux.collect import Collect
from flux.errors import SnapshotError
from flux.snapshot import decode_snapshot, encode_snapshot
from flux.unpickle import loads

PLAIN: list[Any] = [
    {"a": [1, 2.5, "x", b"y", None, True], "b": (1, {2, 3}, frozenset([4])), 5: bytearray(b"z"), 6: 1 + 2j, 7: range(3)},
    collections.OrderedDict(a=1), collections.Counter("aab"), collections.deque([1], maxlen=3),
    collections.defaultdict(list, a=[1]),
    datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC), datetime.date(2024, 1, 2), datetime.time(3), datetime.timedelta(4),
    decimal.Decimal("1.50"), uuid.UUID(int=7), np.float64(1.5), np.datetime64("2024-01-01"), np.dtype("i4"),
    pa.scalar(3), pa.schema([("a", pa.list_(pa.timestamp("us", "UTC")))]), pa.chunked_array([[1, 2]]),
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_plain_values_come_back(value: Any) -> None:
    assert decode_snapshot(encode_snapshot(value, "here")) == value


def test_arrays_and_arrow_data_come_back() -> None:
    batch = pa.record_batch(
        {"a": [1], "b": ["x"], "c": [[decimal.Decimal("1.0")]], "d": pa.array(["q"]).dictionary_encode()}
    )
    for value in ({"batch": batch, "table": pa.table(batch)}, [batch.column(0)]):
        assert decode_snapshot(encode_snapshot(value, "here")) == value
    arrays = {
        "a": np.arange(5),
        "b": np.array(["x", None], object),
        "c": np.zeros(2, [("f", "i4")]),
        "d": np.ma.masked_array([1], [1]),
    }
    back = decode_snapshot(encode_snapshot(arrays, "here"))
    assert all(np.array_equal(back[name], arrays[name]) for name in arrays)
    drawn = np.random.default_rng(3)
    assert decode_snapshot(encode_snapshot(drawn, "here")).random() == drawn.random()


class Runs:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


EVIL = {
    "a command": Runs(os.system, "true"),
    "a file": Runs(open, "/dev/null"),
    "eval": Runs(eval, "1"),
    "an attribute": Runs(getattr, "", "join"),
    "a file of numpy": Runs(np.memmap, "/dev/null"),
    "a file of arrow": Runs(pa.OSFile, "/dev/null"),
    "a pickle in a pickle": Runs(pickle.loads, pickle.dumps(1)),
    "an import": Runs(__import__, "os"),
    "a function by value": lambda: 1,
}


@pytest.mark.parametrize("name", EVIL)
def test_what_would_run_code_is_not_read(name: str) -> None:
    data = cloudpickle.dumps(EVIL[name])
    with pytest.raises(SnapshotError, match="neither plain data nor one of the operator's snapshot_classes"):
        loads(data, ())


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


def test_an_operator_says_which_classes_its_snapshot_holds() -> None:
    data = encode_snapshot({"p": Point(3)}, "here")
    assert decode_snapshot(data, classes=(Point,))["p"].x == 3
    assert decode_snapshot(data, classes=None)["p"].x == 3
    with pytest.raises(SnapshotError, match="Point"):
        decode_snapshot(data)


class Own(flux.Operator):
    def snapshot(self) -> Any:
        return Point(1)


class Declared(Own):
    snapshot_classes = (Point,)


class More(flux.Aggregate):
    n = flux.count()

    def snapshot(self) -> Any:
        return super().snapshot(), Point(1)


class Less(flux.Aggregate):
    n = flux.count()


@pytest.mark.parametrize(
    ("operator", "classes"),
    [(Own, None), (Declared, (Point,)), (More, None), (Less, ()), (Collect, ()), (FunctionOperator, ())],
)
def test_only_an_operator_of_the_users_own_may_hold_anything(operator: type[flux.Operator], classes: Any) -> None:
    assert operator.snapshot_classes == classes
