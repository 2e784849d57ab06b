"""Copies of state hold values, and no code unless it is the operator's own."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import ipaddress
import os
import pathlib
import pickle
import types
import uuid
import zoneinfo
from typing import Any

import cloudpickle
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import pytz

import flux
from flux.dataflow.flow import FunctionOperator
from flux.dataflow.plan import StagePlan
from flux.errors import SnapshotError, UsageError
from flux.operators.collect import Collect
from flux.replica.replica import Replica
from flux.replica.snapshot import decode_snapshot, encode_snapshot
from flux.settings import Settings
from flux.wire.safe_pickle import listed, loads

PLAIN: list[Any] = [
    {"a": [1, 2.5, "x", b"y", None, True], "b": (1, {2, 3}, frozenset([4])), 5: bytearray(b"z"), 6: 1 + 2j, 7: range(3)},
    collections.OrderedDict(a=1), collections.Counter("aab"), collections.deque([1], maxlen=3),
    collections.defaultdict(list, a=[1]),
    datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC), datetime.date(2024, 1, 2), datetime.time(3), datetime.timedelta(4),
    decimal.Decimal("1.50"), uuid.UUID(int=7), np.float64(1.5), np.datetime64("2024-01-01"), np.dtype("i4"),
    datetime.datetime(2024, 1, 2, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")), ipaddress.ip_address("1.2.3.4"),
    ipaddress.ip_network("fe80::/10"), pathlib.Path("/a/b"), pathlib.PureWindowsPath("c:/d"), types.SimpleNamespace(a=1),
    pd.Timestamp("2024-01-02"), pd.Timestamp("2024-01-02", tz="Europe/Berlin"), pd.Timestamp("2024-01-02", tz="UTC"),
    pd.Timedelta("3s"),
    pa.scalar(3), pa.schema([("a", pa.list_(pa.timestamp("us", "UTC")))]), pa.chunked_array([[1, 2]]),
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_plain_values_come_back(value: Any) -> None:
    assert decode_snapshot(encode_snapshot(value, "here")) == value


def test_what_pandas_says_for_nothing_comes_back() -> None:
    back = decode_snapshot(encode_snapshot([pd.NaT, pd.NA], "here"))
    assert back[0] is pd.NaT
    assert back[1] is pd.NA


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


def sets(named: Any, state: Any, make: bool = False) -> bytes:
    """Make a pickle that sets attributes of the named object, or, with ``make``, of the result of its call without
    arguments."""
    push = pickle.dumps(named, 2)[:-1]
    return push + (pickle.EMPTY_TUPLE + pickle.REDUCE if make else b"") + pickle.dumps(state, 2)[2:-1] + b"b."


@pytest.mark.parametrize("named", [collections.Counter, fractions.Fraction, ipaddress.IPv4Address])
@pytest.mark.parametrize("attribute", ["poison", "__repr__", "__name__"])
def test_attributes_of_a_class_of_the_library_are_not_set(named: type, attribute: str) -> None:
    before = {**vars(named), "__name__": named.__name__}
    with pytest.raises(SnapshotError, match=rf"a copy of state sets .*{attribute}, which other code"):
        loads(sets(named, (None, {attribute: "list"})), ())
    assert {**vars(named), "__name__": named.__name__} == before


def test_a_pickle_that_breaks_off_leaves_no_attribute_behind() -> None:
    with pytest.raises(EOFError):
        loads(sets(collections.Counter, (None, {"poison": 1}))[:-1], ())
    assert not hasattr(collections.Counter, "poison")


def test_attributes_of_a_function_of_the_library_are_not_set() -> None:
    function = next(value for value in vars(np.ma.core).values() if getattr(value, "__name__", "") == "_mareconstruct")
    loads(sets(function, (None, {"poison": 1, "__defaults__": (1,)})), ())
    assert not hasattr(function, "poison")
    assert function.__defaults__ is None


def test_attributes_of_a_time_zone_that_all_share_are_not_set() -> None:
    with pytest.raises(SnapshotError, match=r"UTC.*zone"):
        loads(sets(pytz._UTC, {"zone": "nowhere"}, make=True), ())
    assert pytz.utc.zone == "UTC"
    assert loads(pickle.dumps([pytz.utc, pytz.timezone("Europe/Berlin")]), ()) == [
        pytz.utc, pytz.timezone("Europe/Berlin"),
    ]  # fmt: skip


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


def test_an_operator_says_which_classes_its_snapshot_holds() -> None:
    data = encode_snapshot({"p": Point(3)}, "here")
    assert decode_snapshot(data, classes=(Point,))["p"].x == 3
    assert decode_snapshot(data, classes=None)["p"].x == 3
    with pytest.raises(SnapshotError, match="Point"):
        decode_snapshot(data)


class Colour(enum.Enum):
    RED = 1


Pair = collections.namedtuple("Pair", "x y")


@dataclasses.dataclass
class Sketch:
    n: int


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    n: int


OWN = {
    "a class": (Point(3), lambda back: back.x == 3),
    "a dataclass": (Sketch(3), lambda back: back.n == 3),
    "one with slots": (Frozen(3), lambda back: back.n == 3),
    "a namedtuple": (Pair(1, 2), lambda back: back == (1, 2)),
    "an enum": (Colour.RED, lambda back: back.value == 1),
}


def as_of_a_notebook(kind: type, monkeypatch: pytest.MonkeyPatch) -> type:
    """Return the class as another process has it: it cannot be imported there, and its code came with that of the
    operator."""
    monkeypatch.setattr(kind, "__module__", "__main__")
    return kind


def sent(state: Any, here: tuple[type, ...], there: tuple[type, ...]) -> Any:
    return decode_snapshot(bytes(encode_snapshot(state, "here", classes=here)), classes=there)


@pytest.mark.parametrize("name", OWN)
def test_a_listed_class_may_be_of_a_notebook(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state, same = OWN[name]
    kind = as_of_a_notebook(type(state), monkeypatch)
    back = sent({"p": [state, state]}, (int, kind), (int, kind))
    assert same(back["p"][0])
    assert type(back["p"][0]) is kind


def test_a_listed_class_is_that_of_the_operator_that_reads() -> None:
    def made() -> type:
        class Inner:
            pass

        return Inner

    here, there = made(), made()
    assert type(sent([here()], (here,), (there,))[0]) is there
    assert sent(collections.defaultdict(here), (here,), (there,)).default_factory is there


@pytest.mark.parametrize("place", [-1, 1])
def test_a_place_outside_the_list_is_refused(place: int) -> None:
    with pytest.raises(SnapshotError, match=f"names class {place} of snapshot_classes, which lists 1"):
        loads(pickle.dumps(Runs(listed, place)), (Point,))


def test_a_class_of_a_notebook_that_is_not_listed_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    as_of_a_notebook(Point, monkeypatch)
    with pytest.raises(
        SnapshotError, match=r"^here: .* holds a __main__\.Point, .*\. List its class in snapshot_classes"
    ):
        encode_snapshot({"p": Point(3)}, "here", classes=(Sketch,))
    with pytest.raises(SnapshotError, match="<lambda>"):
        encode_snapshot(collections.defaultdict(lambda: 0), "here")
    assert decode_snapshot(encode_snapshot(Point(3), "here", classes=None), classes=None).x == 3


def test_a_snapshot_that_cannot_be_read_again_is_refused_before_any_row() -> None:
    class Wrong(flux.Operator):
        snapshot_classes = (Sketch,)

        def snapshot(self) -> Any:
            return Point(1)

    stage = StagePlan(0, "Wrong", 4, 1, (), Wrong, (pa.schema([("k", pa.int64())]),), None, (0,), ())
    with pytest.raises(SnapshotError, match=r"stage Wrong, partition 2: .*Point, .*List its class in snapshot_classes"):
        Replica(stage, 2, 0, [], Settings.of())


@pytest.mark.parametrize("given", [Point, [Point], {Point}, (Point(1),)], ids=["a class", "list", "set", "an object"])
def test_snapshot_classes_are_a_tuple_of_classes(given: Any) -> None:
    with pytest.raises(UsageError, match=r"Odd\.snapshot_classes must be a tuple of classes, as in \(Sketch,\)"):
        type("Odd", (flux.Operator,), {"snapshot_classes": given})


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
