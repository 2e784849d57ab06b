"""Operators that define neither snapshot nor restore: their attributes are their state, and travel."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import flux
from flux.dataflow.flow import Stage
from flux.errors import SnapshotError, UsageError
from flux.operators.attributes import open_operator
from flux.operators.operator import Chain, Context, Operator
from flux.replica.snapshot import check_snapshot, decode_snapshot, encode_snapshot

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int64())])


def batch(*values: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([0] * len(values)), pa.array(values, pa.int64())], schema=SCHEMA)


def opened(make: Callable[[], Operator]) -> Any:
    operator = make()
    open_operator(operator, Context("mine", schemas=(SCHEMA,), key=("k",)))
    return operator


def moved(operator: Any, make: Callable[[], Operator]) -> Any:
    """Make a fresh operator with the state of this one, as another worker would."""
    classes = operator.snapshot_classes
    state = decode_snapshot(bytes(encode_snapshot(operator.snapshot(), "here", classes=classes)), classes=classes)
    other = opened(make)
    if state is not None:
        other.restore(state)
    return other


class Counts(flux.Operator):
    def open(self, context: Context) -> None:
        super().open(context)
        self.counts: dict[int, int] = {}

    def process(self, rows: pa.RecordBatch) -> None:
        for value in rows.column("v").to_pylist():
            self.counts[value] = self.counts.get(value, 0) + 1

    def finish(self) -> Any:
        yield pa.RecordBatch.from_pylist([{"k": k, "v": n} for k, n in self.counts.items()], schema=SCHEMA)


def test_what_attributes_hold_comes_back() -> None:
    first = opened(Counts)
    first.process(batch(1, 2, 1))
    state = encode_snapshot(first.snapshot(), "here")
    first.process(batch(7))
    second = opened(Counts)
    second.restore(decode_snapshot(state))
    assert second.counts == {1: 2, 2: 1}, "a copy does not see what is added later"
    assert second.context is not first.context


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_the_testing_kit_moves_attributes(at: int) -> None:
    stage = flux.stage(schema=SCHEMA, key="k")(Counts)
    out = flux.testing.apply(stage, batch(1), batch(2, 1), batch(1), restart_after=at)
    assert out.to_pydict() == {"k": [1, 2], "v": [3, 1]}


@pytest.mark.parametrize("nested", [True, False])
def test_the_testing_kit_finds_attributes_that_cannot_travel(nested: bool) -> None:
    @flux.stage(schema=SCHEMA)
    class Iterates(Counts):
        def open(self, context: Context) -> None:
            super().open(context)
            self.lock = None if nested else threading.Lock()

        def process(self, rows: pa.RecordBatch) -> None:
            self.counts[0] = (value for value in (1, 2))  # type: ignore[assignment]

    with pytest.raises(SnapshotError, match=f"stage Iterates: attribute '{'counts' if nested else 'lock'}'"):
        flux.testing.apply(Iterates, batch(1))


def test_attributes_that_share_an_object_share_it_afterwards() -> None:
    class Shared(Counts):
        def open(self, context: Context) -> None:
            super().open(context)
            self.newest = self.counts

    there = moved(opened(Shared), Shared)
    assert there.newest is there.counts


def test_methods_of_the_operator_and_its_context_are_those_of_the_new_one() -> None:
    class Bound(Counts):
        def open(self, context: Context) -> None:
            super().open(context)
            self.handlers = {"add": self.process, "count": lambda: len(self.counts)}
            self.where = context
            self.timers, self.event_timers = context.timers, context.event_timers

    there = moved(opened(Bound), Bound)
    there.handlers["add"](batch(5))
    assert there.counts == {5: 1}
    assert there.handlers["count"]() == 1
    assert there.where is there.context
    assert there.timers is there.context.timers
    assert there.event_timers is there.context.event_timers


def test_transient_attributes_of_a_class_and_its_bases_are_made_anew() -> None:
    class Connected(Counts):
        transient = ("lock",)

        def open(self, context: Context) -> None:
            super().open(context)
            self.lock = threading.Lock()

    class More(Connected):
        transient = ("event",)

        def open(self, context: Context) -> None:
            super().open(context)
            self.event = threading.Event()

    here = opened(More)
    here.process(batch(3))
    there = moved(here, More)
    assert there.counts == {3: 1}
    assert there.lock is not here.lock
    assert there.event is not here.event


@pytest.mark.parametrize("given", ["lock", 5, (5,), {"lock": 1}])
def test_transient_is_a_tuple_of_names(given: Any) -> None:
    with pytest.raises(UsageError, match=r"Mine.transient must be a tuple of names of attributes, as in \('"):
        type("Mine", (flux.Operator,), {"transient": given})


def test_what_cannot_be_pickled_is_refused_by_its_name() -> None:
    class Locked(Counts):
        def open(self, context: Context) -> None:
            super().open(context)
            self.lock = threading.Lock()

    with pytest.raises(SnapshotError, match=r"^here: attribute 'lock' of Locked, a lock, .*transient = \('lock',\)"):
        check_snapshot(opened(Locked).snapshot(), "here", None)


class Unreadable:
    def __reduce__(self) -> Any:
        return _explode, ()


def _explode() -> None:
    raise ValueError("no way back")


def test_what_cannot_be_read_again_is_refused_by_its_name() -> None:
    class Odd(Counts):
        def open(self, context: Context) -> None:
            super().open(context)
            self.odd = Unreadable()

    with pytest.raises(SnapshotError, match=r"attribute 'odd' of Odd, a Unreadable.*no way back"):
        check_snapshot(opened(Odd).snapshot(), "here", None)


def test_classes_that_are_listed_are_the_only_ones_that_travel() -> None:
    class Strict(Counts):
        snapshot_classes = ()

        def open(self, context: Context) -> None:
            super().open(context)
            self.thing: Any = None

    strict = opened(Strict)
    assert moved(strict, Strict).counts == {}
    strict.thing = Unreadable()
    with pytest.raises(SnapshotError, match=r"attribute 'thing' of Strict.*snapshot_classes"):
        check_snapshot(strict.snapshot(), "here", ())


def test_what_init_was_given_is_that_of_the_new_program() -> None:
    class Gaps(Counts):
        def __init__(self, gap: int) -> None:
            self.gap, self.fills = gap, [gap]

    here = opened(lambda: Gaps(30))
    there = moved(here, lambda: Gaps(60))
    assert there.gap == 60
    assert there.fills == [30], "a list may have been added to: it is state"
    here.gap = 31
    assert moved(here, lambda: Gaps(60)).gap == 31


class Calls(flux.Operator):
    """An operator that gives each row the number that ``call`` returns for its value."""

    call: Callable[[int], Any]

    def process(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        return batch(*(self.call(value) or 0 for value in rows.column("v").to_pylist()))


class OfSet(Calls):
    def __init__(self) -> None:
        self.seen: set[int] = set()
        self.add = self.seen.add

    def call(self, value: int) -> int:
        self.add(value)
        return len(self.seen)


class OfClosure(Calls):
    def __init__(self) -> None:
        counts: dict[int, int] = {}

        def add(value: int) -> int:
            counts[value] = counts.get(value, 0) + 1
            return counts[value]

        self.counts, self.call = counts, add


class OfVariable(Calls):
    def __init__(self) -> None:
        n = 0

        def add(value: int) -> int:
            nonlocal n
            n += 1
            return n

        self.call = add


class OfVariableOfTwo(Calls):
    def __init__(self) -> None:
        n, seen = 0, set()

        def add(value: int) -> None:
            nonlocal n
            seen.add(value)
            n += value > 1

        self.add, self.read = add, lambda: n

    def call(self, value: int) -> int:
        self.add(value)
        return self.read()


class OfVariableOfHandlers(OfVariableOfTwo):
    def __init__(self) -> None:
        super().__init__()
        self.handlers = {"add": self.add}
        del self.add

    def call(self, value: int) -> int:
        self.handlers["add"](value)
        return self.read()


class OfFunction(Calls):
    def __init__(self) -> None:
        def add(value: int) -> int:
            add.n += 1  # type: ignore[attr-defined]
            return add.n  # type: ignore[attr-defined,no-any-return]

        add.n = 0  # type: ignore[attr-defined]
        self.call = add


class OfDefault(Calls):
    def __init__(self) -> None:
        def add(value: int, seen: list[int] = []) -> int:  # noqa: B006
            seen.append(value)
            return len(seen)

        self.call = add


@pytest.mark.parametrize(
    "kind", [OfSet, OfClosure, OfVariable, OfVariableOfTwo, OfVariableOfHandlers, OfFunction, OfDefault]
)
@pytest.mark.parametrize("at", [0, 1, 3])
def test_containers_that_functions_of_init_hold_travel(kind: type[Calls], at: int) -> None:
    stage = flux.stage(schema=SCHEMA, key="k")(kind)
    given = [batch(1), batch(1, 2), batch(2), batch(3)]
    there = flux.testing.apply(stage, *given, restart_after=at)
    alone = kind()
    assert there.column("v").to_pylist() == [v for rows in given for v in alone.process(rows).column("v").to_pylist()]


def test_functions_that_hold_constants_are_those_of_the_new_program() -> None:
    class Scored(Calls):
        snapshot_classes = ()

        def __init__(self, factor: int) -> None:
            self.call = lambda value: value * factor
            self.mine = lambda value: self.call(value)
            self.join = ", ".join

    there = moved(opened(lambda: Scored(2)), lambda: Scored(3))
    assert there.call(2) == there.mine(2) == 6
    assert opened(lambda: Scored(2)).snapshot() is None


def test_a_function_with_a_dictionary_is_refused_by_name_where_only_data_travels() -> None:
    class Strict(OfClosure):
        snapshot_classes = ()

    with pytest.raises(SnapshotError, match=r"attribute 'call' of Strict, a function, .*transient = \('call',\)"):
        check_snapshot(opened(Strict).snapshot(), "here", ())


def test_a_value_of_init_that_open_replaces_is_state_even_if_it_returns_to_it() -> None:
    class Back(flux.Operator):
        def __init__(self) -> None:
            self.n = 5

        def open(self, context: Context) -> None:
            self.n = 0

    here = opened(Back)
    here.n = 5
    assert moved(here, Back).n == 5


def test_a_deleted_attribute_stays_deleted() -> None:
    here = opened(Counts)
    del here.counts
    assert not hasattr(moved(here, Counts), "counts")


def test_an_attribute_that_a_newer_program_has_is_what_its_open_makes() -> None:
    class Newer(Counts):
        def open(self, context: Context) -> None:
            super().open(context)
            self.more = 1

    there = moved(opened(Counts), Newer)
    assert (there.counts, there.more) == ({}, 1)


def test_slots_and_frozen_classes_and_cached_values_are_state_as_well() -> None:
    class Slotted(flux.Operator):
        __slots__ = ("__private", "n")

        def open(self, context: Context) -> None:
            self.n, self.__private = 1, 2

        def told(self) -> tuple[int, int]:
            return self.n, self.__private

    @dataclass(frozen=True)
    class Frozen(flux.Operator):
        seen: dict[int, int] = field(default_factory=dict)

    slotted, frozen = opened(Slotted), opened(Frozen)
    slotted.n = 7
    frozen.seen[1] = 2
    assert moved(slotted, Slotted).told() == (7, 2)
    assert moved(frozen, Frozen).seen == {1: 2}
    del slotted.n
    assert not hasattr(moved(slotted, Slotted), "n")


def test_a_slot_of_two_classes_is_that_of_the_subclass() -> None:
    class Base(flux.Operator):
        __slots__ = ("n",)

    class Again(Base):
        __slots__ = ("n",)

        def open(self, context: Context) -> None:
            self.n = 0

    here = opened(Again)
    here.n = 7
    Base.n.__set__(here, 1)  # type: ignore[attr-defined]
    assert moved(here, Again).n == 7


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_operator_without_state_is_replaced_in_the_testing_kit(at: int) -> None:
    @flux.stage(schema=SCHEMA, key="k")
    class Passing(flux.Operator):
        def process(self, rows: pa.RecordBatch) -> Any:
            return rows

    out = flux.testing.apply(Passing, batch(1), batch(2), restart_after=at)
    assert out.column("v").to_pylist() == [1, 2]
    opened(Passing.make).restore(None)


def test_large_arrays_travel_beside_the_pickle_and_may_be_written_to() -> None:
    class Arrays(flux.Operator):
        def open(self, context: Context) -> None:
            self.sums = np.arange(100_000)

    here = opened(Arrays)
    there = moved(here, Arrays)
    there.sums[0] = 9
    assert here.sums[0] == 0
    assert there.sums[1:].tolist() == here.sums[1:].tolist()


class Viewing(flux.Operator):
    def open(self, context: Context) -> None:
        self.sums = np.zeros((2, 8))

    def process(self, rows: pa.RecordBatch) -> None:
        self.row = self.sums[0]


def test_a_view_into_the_array_of_another_attribute_is_refused() -> None:
    with pytest.raises(SnapshotError, match="attribute 'row' of Viewing is a view into the memory of attribute 'sums'"):
        flux.testing.apply(flux.stage(schema=SCHEMA)(Viewing), batch(1))


def test_arrays_without_common_memory_are_no_views() -> None:
    here = opened(Viewing)
    pairs = np.zeros((4, 2))
    here.left, here.right, here.same, here.copy = pairs[:, 0], pairs[:, 1], here.sums, here.sums[0].copy()
    fixed = np.arange(4)
    fixed.flags.writeable = False
    here.fixed, here.part = fixed, fixed[:2]
    assert moved(here, Viewing).right.tolist() == [0, 0, 0, 0]
    here.left = pairs
    with pytest.raises(
        SnapshotError, match="attribute 'right' of Viewing is a view into the memory of attribute 'left'"
    ):
        here.snapshot()


def test_an_operator_without_attributes_has_no_state() -> None:
    class Passing(flux.Operator):
        def process(self, rows: pa.RecordBatch) -> Any:
            return rows

    assert opened(Passing).snapshot() is None
    assert opened(flux.stage(lambda rows: rows).make).snapshot() is None
    assert opened(lambda: flux.stage(schema=SCHEMA)(Passing).make()).snapshot() is None


def test_a_snapshot_of_ones_own_may_be_made_of_the_default_one() -> None:
    class Around(Counts):
        def snapshot(self) -> Any:
            return {"attributes": super().snapshot(), "more": 5}

        def restore(self, snapshot: Any) -> None:
            super().restore(snapshot["attributes"])
            self.more = snapshot["more"]

    here = opened(Around)
    here.process(batch(4))
    there = moved(here, Around)
    assert (there.counts, there.more) == ({4: 1}, 5)


def test_a_state_that_a_snapshot_has_made_is_no_state_of_attributes() -> None:
    for state in ({"counts": {}}, b"bytes"):
        with pytest.raises(SnapshotError, match="Give Counts the snapshot"):
            opened(Counts).restore(state)


def test_operators_of_one_stage_each_keep_their_attributes() -> None:
    make = Chain(Counts, Counts, SCHEMA)
    here = opened(make)
    list(here.through([batch(1, 2)]))
    here.first.process(batch(9))
    there = moved(here, make)
    assert there.first.counts == {9: 1}
    assert there.then.counts == {1: 1, 2: 1}


@pytest.mark.parametrize("second", [True, False])
def test_an_attribute_of_an_operator_of_two_in_one_stage_is_named(second: bool) -> None:
    make = Chain(Counts, Counts, SCHEMA)
    here = opened(make)
    (here.then if second else here.first).odd = Unreadable()
    with pytest.raises(SnapshotError, match=r"^here: attribute 'odd' of Counts, a Unreadable.*no way back"):
        check_snapshot(here.snapshot(), "here", here.snapshot_classes)


class Noting(flux.Aggregate):
    n = flux.count()

    def open(self, context: Context) -> None:
        super().open(context)
        self.seen: set[int] = set()

    def process(self, rows: pa.RecordBatch) -> Any:
        self.seen |= set(rows.column("v").to_pylist())
        return super().process(rows)


def test_attributes_of_an_aggregates_subclass_travel_with_its_groups_and_its_changes() -> None:
    here = opened(Noting)
    here.process(batch(1, 2))
    there = moved(here, Noting)
    assert there.seen == {1, 2}
    here.changes()
    base = moved(here, Noting)
    for value in range(3, 6):
        here.process(batch(value))
    changes = decode_snapshot(encode_snapshot(here.changes(), "here", classes=()), classes=())
    if changes is not None:
        base.apply_changes(changes)
        assert base.seen == {1, 2, 3, 4, 5}
    assert [out.to_pydict() for out in moved(here, Noting).finish()] == [{"k": [0], "n": [5]}]


def test_an_aggregate_sets_no_attribute_that_is_not_known() -> None:
    plain = type("Plain", (flux.Aggregate,), {"n": flux.count(), "total": flux.sum("v")})
    here = opened(plain)
    here.process(batch(1))
    list(here.finish())
    assert isinstance(here.snapshot(), pa.Table)


@pytest.mark.parametrize("defined", ["snapshot", "restore"])
def test_one_of_two_methods_is_refused(defined: str) -> None:
    kind = type("Half", (Counts,), {defined: lambda self, *_: None})
    with pytest.raises(UsageError, match=f"class Half defines {defined}.* and not .*define both.*or neither"):
        flux.stage(kind)


def test_methods_of_bases_count() -> None:
    class Gives(Counts):
        def snapshot(self) -> Any:
            return self.counts

    class Both(Gives):
        def restore(self, snapshot: Any) -> None:
            self.counts = snapshot

    assert isinstance(flux.stage(Both), Stage)


def test_a_container_of_the_class_that_is_filled_is_refused() -> None:
    class Classy(flux.Operator):
        counts: dict[int, int] = {}
        names = {1: "one"}

        def process(self, rows: pa.RecordBatch) -> None:
            self.counts[1] = 1

    here = opened(Classy)
    assert here.snapshot() is None
    here.process(batch(1))
    with pytest.raises(SnapshotError, match=r"Classy.counts is one dict of the class.*self.counts = dict\(\)"):
        here.snapshot()


class Stats:
    def __init__(self) -> None:
        self.n = 0


class SharesDict(flux.Operator):
    kept = {"rows": 0}

    def process(self, rows: pa.RecordBatch) -> None:
        self.kept["rows"] += rows.num_rows


class SharesNested(flux.Operator):
    kept: dict[str, set[int]] = {"seen": set()}

    def process(self, rows: pa.RecordBatch) -> None:
        self.kept["seen"].update(rows.column("v").to_pylist())


class SharesObject(flux.Operator):
    kept = Stats()

    def process(self, rows: pa.RecordBatch) -> None:
        self.kept.n += rows.num_rows


class SharesArray(flux.Operator):
    kept = np.zeros(1 << 18)

    def process(self, rows: pa.RecordBatch) -> None:
        self.kept[-1] += 1


class SharesIterator(flux.Operator):
    kept = itertools.count()

    def process(self, rows: pa.RecordBatch) -> None:
        next(self.kept)


class SharesNumber(flux.Operator):
    kept = 0

    def process(self, rows: pa.RecordBatch) -> None:
        type(self).kept += 1


class SharesNewNumber(flux.Operator):
    def process(self, rows: pa.RecordBatch) -> None:
        type(self).kept = 1  # type: ignore[attr-defined]


class SharesDefault(flux.Operator):
    def __init__(self, kept: list[int] = [], *, more: tuple[int, ...] = ()) -> None:  # noqa: B006
        self.kept, self.more = kept, more

    def process(self, rows: pa.RecordBatch) -> None:
        self.kept.append(rows.num_rows)


SHARING = [
    SharesDict,
    SharesNested,
    SharesObject,
    SharesArray,
    SharesIterator,
    SharesNumber,
    SharesNewNumber,
    SharesDefault,
]


@pytest.mark.parametrize("kind", SHARING)
def test_a_value_that_all_operators_share_and_one_changes_is_refused(kind: type[Operator]) -> None:
    with pytest.raises(SnapshotError, match=r"(?s)kept.* changes while the query runs: all partitions.*self\.kept = "):
        flux.testing.apply(flux.stage(schema=SCHEMA)(kind), batch(1))
    cached = type("Cached", (kind,), {"transient": ("kept",)})
    flux.testing.apply(flux.stage(schema=SCHEMA)(cached), batch(1))


def test_shared_values_that_stay_as_they_are_are_no_state() -> None:
    class Reads(flux.Operator):
        names = {1: "one", 2: ["two"]}
        kind = Stats
        lock = threading.Lock()
        table = np.arange(100_000)
        many = list(range(100_000))
        limit = 5

        def __init__(self, extra: dict[str, int] = {"a": 1}) -> None:  # noqa: B006
            self.extra = extra

        def process(self, rows: pa.RecordBatch) -> None:
            self.limit += 1

    out = [
        flux.testing.apply(flux.stage(schema=SCHEMA)(Reads), batch(1), batch(2), restart_after=at) for at in (0, 1, 2)
    ]
    assert [table.num_rows for table in out if table is not None] == [0, 0, 0]


def test_a_forgotten_super_open_does_no_harm() -> None:
    class Forgets(flux.Operator):
        def open(self, context: Context) -> None:
            self.parts: list[int] = []

        def process(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
            yield batch(self.context.partition)

    out = flux.testing.apply(flux.stage(schema=SCHEMA)(Forgets), batch(1))
    assert out.num_rows == 1
