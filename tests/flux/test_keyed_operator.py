"""KeyedOperator against a model in plain Python: state, timers, time to live, copies and changes."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flux
from flux.errors import SchemaError, SnapshotError, UsageError
from flux.operators import keyed_operator
from flux.operators.attributes import open_operator
from flux.operators.operator import EventTimers, facts_of
from flux.replica.snapshot import decode_snapshot, encode_snapshot

SCHEMA = pa.schema([("user", pa.string()), ("amount", pa.int64())])


def batch(*rows: tuple[str | None, int]) -> pa.RecordBatch:
    users, amounts = zip(*rows, strict=True)
    return pa.RecordBatch.from_arrays([pa.array(users, pa.string()), pa.array(amounts)], schema=SCHEMA)


@flux.stage(key="user", schema="user STRING, what STRING, total BIGINT")
class Totals(flux.KeyedOperator):
    """A total per user, given with each step, forgotten at a negative total, and given once more three seconds after the last
    rows."""

    state_schema = "total BIGINT, last BIGINT"

    def on_rows(self, key: tuple, rows: list[Any], state: Any) -> Any:
        state.total = (state.total or 0) + sum(row.amount for row in rows)
        state.last = rows[-1].amount
        if state.total < 0:
            state.clear()
            return {"user": key[0], "what": "gone", "total": state.total}
        state.timer = self.context.now + 3
        return *key, "more" if state.exists else "first", state.total

    def on_key_timer(self, key: tuple, state: Any) -> Any:
        yield {"user": key[0], "what": "quiet", "total": state.total}


def model(batches: list[list[tuple]], times: list[float]) -> list[tuple]:
    totals: dict[Any, int] = {}
    due: dict[Any, float] = {}
    order: dict[Any, int] = {}
    out = []
    for rows, now in [*zip(batches, times, strict=False), ([], times[-1])]:
        for at in sorted({at for at in due.values() if at <= now}):
            for user in sorted((user for user, when in due.items() if when == at), key=order.__getitem__):
                del due[user]
                out.append((user, "quiet", totals[user]))
        for user in dict.fromkeys(user for user, _ in rows):
            order.setdefault(user, len(order))
            what = "more" if user in totals else "first"
            total = totals.get(user, 0) + sum(amount for owner, amount in rows if owner == user)
            if total < 0:
                totals.pop(user, None)
                due.pop(user, None)
                out.append((user, "gone", total))
            else:
                totals[user], due[user] = total, now + 3
                out.append((user, what, total))
    return out


@settings(max_examples=60, deadline=None)
@given(
    batches=st.lists(
        st.lists(st.tuples(st.sampled_from(["a", "b", "c", "d", None]), st.integers(-4, 6)), min_size=1, max_size=6), min_size=1,
        max_size=10,
    ),
    data=st.data(),
)  # fmt: skip
def test_results_are_those_of_a_model_whatever_is_copied(batches: list[list[tuple]], data: Any) -> None:
    gaps = data.draw(st.lists(st.integers(0, 4), min_size=len(batches) + 1, max_size=len(batches) + 1))
    times = [float(sum(gaps[: place + 1])) for place in range(len(gaps))]
    restart = data.draw(st.none() | st.integers(0, len(batches)))
    kept = None if restart is None else data.draw(st.none() | st.integers(0, restart))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keyed_operator, "KEYS_MIN", 2)  # so that few keys move together
        table = flux.testing.apply(
            Totals, [batch(*rows) for rows in batches], times=times, restart_after=restart, checkpoint_after=kept
        )
    found = list(zip(*table.to_pydict().values(), strict=True))
    assert sorted(found, key=repr) == sorted(model(batches, times), key=repr)
    assert [row for row in found if row[1] != "quiet"] == [row for row in model(batches, times) if row[1] != "quiet"]


def test_a_key_is_forgotten_when_its_time_to_live_is_over() -> None:
    @flux.stage(key="user", schema="user STRING, n BIGINT")
    class Counts(flux.KeyedOperator):
        state_schema = "n BIGINT"
        time_to_live = "10 seconds"

        def on_row(self, key: tuple, row: Any, state: Any) -> Any:
            state.n = (state.n or 0) + 1
            return *key, state.n

    rows = [batch(("a", 1), ("b", 1)), batch(("b", 1)), batch(("a", 1), ("b", 1)), batch(("b", 1))]
    for restart in (None, 2):
        table = flux.testing.apply(Counts, rows, times=[0, 9, 11, 30, 30], restart_after=restart)
        assert list(zip(*table.to_pydict().values(), strict=True)) == [
            ("a", 1), ("b", 1), ("b", 2), ("a", 1), ("b", 3), ("b", 1),
        ]  # fmt: skip


def test_event_timers_of_keys_fire_by_the_watermark_and_at_the_end() -> None:
    @flux.stage(key="user", schema="user STRING, at BIGINT")
    class Deadlines(flux.KeyedOperator):
        def on_row(self, key: tuple, row: Any, state: Any) -> None:
            state.event_timer = row.amount

        def on_key_event_timer(self, key: tuple, state: Any) -> Any:
            return [(*key, min(self.context.watermark, 1000))]

    rows = [batch(("a", 5), ("b", 3), ("c", 50)), batch(("b", 30)), batch(("d", 1))]
    for restart in (None, 1, 2):
        table = flux.testing.apply(Deadlines, rows, watermarks=[2, 10, 20], restart_after=restart)
        assert list(zip(*table.to_pydict().values(), strict=True)) == [
            ("a", 10), ("d", 20), ("b", 1000), ("c", 1000),
        ]  # fmt: skip


def test_keys_without_state_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed_operator, "KEYS_MIN", 16)

    class Once(flux.KeyedOperator):
        def on_rows(self, key: tuple, rows: list[Any], state: Any) -> None:
            state.timer = self.context.now + 1
            if len(rows) == 1:
                state.clear()

    operator = flux.stage(key="user")(Once).make()
    operator.open(flux.Context("once", key=("user",), schemas=(SCHEMA,)))
    for step in range(50):
        operator.process(batch(*((f"{step}-{i}", i) for i in range(20))))
    assert len(operator._keys) <= 40
    assert not operator._due


@pytest.mark.parametrize(
    ("attributes", "key", "error", "said"),
    [
        ({}, None, SchemaError, "name the key"),
        ({"state_schema": "timer BIGINT"}, "user", SchemaError, "'timer' cannot be a field"),
        ({"state_schema": 7}, "user", SchemaError, "must be a DDL string"),
        ({"time_to_live": "0 seconds"}, "user", SchemaError, "above zero"),
        ({"schema": 7}, "user", SchemaError, "its schema must be"),
        ({"on_rows": lambda self, key, rows, state: "x"}, "user", SchemaError, "results must be dicts or tuples"),
        ({"on_rows": lambda self, key, rows, state: {"n": 1, "m": 2}}, "user", SchemaError, "other columns"),
        ({"on_rows": lambda self, key, rows, state: (1, 2)}, "user", SchemaError, "a result has 2 values"),
        ({}, "user", NotImplementedError, "on_rows"),
        ({"state_schema": "n BIGINT", "on_rows": lambda self, key, rows, state: setattr(state, "n", "x")}, "user",
         SnapshotError, "field 'n' of the state is declared as int64"),
        ({"on_rows": lambda self, key, rows, state: setattr(state, "m", 1)}, "user", AttributeError, "m"),
        ({"on_rows": lambda self, key, rows, state: setattr(state, "event_timer", 1.5)}, "user", UsageError, "microseconds"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_in_a_sentence(attributes: dict, key: str | None, error: type, said: str) -> None:
    kind = type("Wrong", (flux.KeyedOperator,), {"schema": "n BIGINT", **attributes})
    with pytest.raises(error, match=said):
        flux.testing.apply(flux.stage(key=key)(kind), batch(("a", 1)))


def trial(operator: type[flux.KeyedOperator], **given: Any) -> Any:
    """Make an open operator that has seen no row."""
    made = flux.stage(key="user", **given)(operator).make()
    open_operator(made, flux.Context("trial", key=("user",), schemas=(SCHEMA,)))
    return made


def copy_of(operator: Any, operator_class: type[flux.KeyedOperator], **given: Any) -> Any:
    """Make a replica of an operator, from its snapshot, with the same timers."""
    made = trial(operator_class, **given)
    made.restore(decode_snapshot(encode_snapshot(operator.snapshot(), "here", classes=()), classes=()))
    made.context.now, made.context.watermarks = operator.context.now, list(operator.context.watermarks)
    made.context.timers.replace(operator.context.timers.pending)
    made.context.event_timers.replace(operator.context.event_timers.pending)
    return made


def test_attributes_of_a_subclass_travel_with_its_state() -> None:
    """Keep attributes that were lost without a word with each move, because the operator has a snapshot of its own."""

    @flux.stage(key="user", schema="user STRING, seen BIGINT")
    class Seen(flux.KeyedOperator):
        state_schema = "n BIGINT"

        def __init__(self) -> None:
            self.seen = 0

        def on_row(self, key: tuple, row: Any, state: Any) -> Any:
            self.seen += 1
            state.n = (state.n or 0) + 1
            return *key, self.seen

    rows = [batch(("a", 1)), batch(("b", 1)), batch(("a", 1))]
    for kept, restart in [(None, None), (None, 1), (1, 2), (0, 2)]:
        table = flux.testing.apply(Seen, rows, restart_after=restart, checkpoint_after=kept)
        assert table.column("seen").to_pylist() == [1, 2, 3]


class WithTimers(flux.KeyedOperator):
    """An operator with timers of both clocks, which do nothing."""

    def on_key_timer(self, key: tuple, state: Any) -> None: ...

    def on_key_event_timer(self, key: tuple, state: Any) -> None: ...


def test_timers_are_the_same_on_a_copy_whose_outdated_ones_are_gone() -> None:
    """Put a timer off: the heap of the first replica still had the earlier time, and set that."""

    class PutOff(WithTimers):
        def on_row(self, key: tuple, row: Any, state: Any) -> None:
            state.timer = float(row.amount)
            state.event_timer = row.amount

    one = trial(PutOff)
    one.process(batch(("a", 10), ("b", 30)))
    one.process(batch(("a", 20)))
    other = copy_of(one, PutOff)
    for each in (one, other):
        each.process(batch(("b", 40)))
    assert one.context.timers.pending == other.context.timers.pending == {keyed_operator.TIMER: 20.0}
    assert one.context.event_timers.pending == other.context.event_timers.pending == {keyed_operator.TIMER: 20}


def test_a_timer_that_is_taken_back_calls_nobody() -> None:
    class Once(WithTimers):
        def on_row(self, key: tuple, row: Any, state: Any) -> None:
            state.timer = state.event_timer = row.amount or None

    one = trial(Once)
    one.process(batch(("a", 10)))
    one.process(batch(("a", 0)))
    assert not one.context.timers.pending
    assert not one.context.event_timers.pending


def test_values_are_those_of_a_copy_after_each_step() -> None:
    """Convert values at once: a replica that was copied saw 1.0 where the first one saw 1, and gave other output."""

    @flux.stage(key="user", schema="user STRING, what STRING")
    class Said(flux.KeyedOperator):
        state_schema = "rate DOUBLE, at TIMESTAMP, cost DECIMAL(6,2), name STRING, small FLOAT"

        def on_row(self, key: tuple, row: Any, state: Any) -> Any:
            before = state.rate, state.at, state.cost, state.name, state.small
            state.rate, state.at, state.cost = 1, datetime(2026, 11, 27), Decimal(row.amount)
            state.name, state.small = f"{key[0]}-{row.amount}", 0.1
            return *key, repr(before)

    rows = [batch(("a", 1)), batch(("a", 2)), batch(("a", 3))]
    alone = flux.testing.apply(Said, rows)
    assert alone == flux.testing.apply(Said, rows, restart_after=1) == flux.testing.apply(Said, rows, restart_after=2)
    assert "1.0" in alone.column("what")[1].as_py()


@pytest.mark.parametrize(("ddl", "value"), [("n BIGINT", "x"), ("n BIGINT", 1 << 63), ("n STRING", 7), ("n INT", 0.5)])
def test_a_value_that_does_not_fit_is_refused_in_its_step_and_not_when_a_replica_is_lost(ddl: str, value: Any) -> None:
    class Wrong(flux.KeyedOperator):
        state_schema = ddl

        def on_row(self, key: tuple, row: Any, state: Any) -> None:
            state.n = None if row.amount == 1 else value

    operator = trial(Wrong)
    operator.process(batch(("a", 1)))
    with pytest.raises(SnapshotError, match="field 'n' of the state is declared as"):
        operator.process(batch(("a", 2)))


def test_event_timers_that_keys_set_in_their_timers_fire_in_the_order_of_time() -> None:
    """Let a key set a time that has passed: it holds up no other key, and waits for the next watermark itself."""

    @flux.stage(key="user", schema="user STRING, at BIGINT")
    class Again(flux.KeyedOperator):
        state_schema = "at BIGINT"

        def on_row(self, key: tuple, row: Any, state: Any) -> None:
            state.at = state.event_timer = row.amount

        def on_key_event_timer(self, key: tuple, state: Any) -> Any:
            yield *key, state.at
            step = {"past": -7, "now": 0, "next": 4}.get(key[0])
            if step is not None:
                state.at = state.event_timer = state.at + step

    rows = [batch(("past", 10), ("now", 10), ("next", 10), ("late", 13)), batch(("x", 90))]
    for restart in (None, 1):
        table = flux.testing.apply(Again, rows, watermarks=[15, 16], restart_after=restart)
        assert list(zip(*table.to_pydict().values(), strict=True)) == [
            ("past", 10), ("now", 10), ("next", 10), ("late", 13), ("next", 14),  # the watermark is at 15
            ("past", 3), ("now", 10),  # at 16; they wait again
            ("past", -4), ("now", 10), ("next", 18), ("x", 90),  # the end: each once
        ]  # fmt: skip


@pytest.mark.parametrize("name", ["timer", "event_timer"])
def test_a_timer_without_its_method_is_refused_when_it_is_set(name: str) -> None:
    """Refuse the timer at once: it was refused when it fired, perhaps hours later."""

    class Timed(flux.KeyedOperator):
        def on_row(self, key: tuple, row: Any, state: Any) -> None:
            setattr(state, name, 1)

    with pytest.raises(NotImplementedError, match=f"must define on_key_{name}"):
        trial(Timed).process(batch(("a", 1)))


@pytest.mark.parametrize("at", [float("nan"), float("inf"), "soon"])
def test_the_time_of_a_timer_is_a_number_of_seconds(at: Any) -> None:
    class Timed(flux.KeyedOperator):
        def on_row(self, key: tuple, row: Any, state: Any) -> None:
            state.timer = at

    with pytest.raises(UsageError, match="timer: expected a time in seconds"):
        trial(Timed).process(batch(("a", 1)))


def test_a_time_behind_the_end_of_time_is_the_end() -> None:
    """Bound such times: at the end of the input, the watermark and a little more fits into no number, and the query
    ended with an error."""

    @flux.stage(key="user", schema="user STRING")
    class Always(flux.KeyedOperator):
        def on_row(self, key: tuple, row: Any, state: Any) -> None:
            state.event_timer = flux.END_OF_TIME + 7 if row.amount else 5

        def on_key_event_timer(self, key: tuple, state: Any) -> Any:
            state.event_timer = self.context.watermark + 10
            return [key]

    table = flux.testing.apply(Always, [batch(("a", 0), ("b", 1))], watermarks=[3], restart_after=1)
    assert table.column("user").to_pylist() == ["a", "b"]
    timers = EventTimers()
    timers.set(flux.END_OF_TIME + 7, "last")
    assert timers.due(flux.END_OF_TIME) == ["last"]


@pytest.mark.parametrize("at", [1.5, True])
def test_the_time_of_an_event_timer_of_a_key_is_a_whole_number(at: Any) -> None:
    class Timed(flux.KeyedOperator):
        def on_row(self, key: tuple, row: Any, state: Any) -> None:
            state.event_timer = at

    with pytest.raises(UsageError, match="event_timer must be a time in whole microseconds"):
        trial(Timed).process(batch(("a", 1)))


def test_names_that_the_operator_uses_itself_are_refused() -> None:
    """Refuse such names: an attribute with one of them was replaced by that of the operator."""
    with pytest.raises(UsageError, match="Clash: _load cannot be a name of its own"):

        class Clash(flux.KeyedOperator):
            def _load(self) -> None: ...

    class Sets(flux.KeyedOperator):
        def __init__(self) -> None:
            self._keys: dict[str, int] = {}

    with pytest.raises(UsageError, match="Sets: _keys cannot be a name of its own"):
        trial(Sets)


def test_timers_of_a_key_whose_time_is_over_are_taken_off_on_copies_too() -> None:
    class Late(WithTimers):
        time_to_live = "10 seconds"

        def on_row(self, key: tuple, row: Any, state: Any) -> None:
            state.timer = state.event_timer = 12

    one = trial(Late)
    one.process(batch(("a", 1)))
    one.changes()
    kept = one.snapshot()
    one.context.now = 12.0  # two seconds late
    one.context.watermarks = [12]
    one.on_timer(keyed_operator.TIMER)
    one.on_event_timer(keyed_operator.TIMER)
    other = trial(Late)
    other.restore(kept)
    other.apply_changes(one.changes())
    for each in (one, other, copy_of(one, Late)):
        each.context.now = 12.0
        each.on_timer(keyed_operator.TIMER)
        assert not each._due
        assert not each._event_due
        assert keyed_operator.TIMER not in each.context.timers.pending


def test_operators_without_timers_of_the_clock_let_slices_be_ordered_ahead() -> None:
    class ByRows(flux.KeyedOperator):
        def on_row(self, key: tuple, row: Any, state: Any) -> None: ...

        def on_key_event_timer(self, key: tuple, state: Any) -> None: ...

    class Timed(ByRows):
        def on_key_timer(self, key: tuple, state: Any) -> None: ...

    class Forgets(ByRows):
        time_to_live = "1 hour"

    assert [facts_of(trial(kind)).timed for kind in (ByRows, Timed, Forgets)] == [False, True, True]


@pytest.mark.parametrize("zone", [None, "UTC", "America/St_Johns"])
def test_times_of_rows_are_those_that_arrow_makes_of_them(zone: str | None) -> None:
    at = [0, -1, 1_700_000_000_000_001, keyed_operator.DATES[0], keyed_operator.DATES[1] - 86_400_000_000]
    for values in (at[:3], at if zone in (None, "UTC") else at[:3], [*at[:3], None], []):
        column = pa.array(values, pa.int64()).cast(pa.timestamp("us", zone))
        found = keyed_operator._listed_column(column)
        assert [(each, getattr(each, "tzinfo", None)) for each in found] == [
            (each, getattr(each, "tzinfo", None)) for each in column.to_pylist()
        ]
