"""KeyedOperator against a model in plain Python: state, timers, time to live, copies and changes."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flux
from flux.errors import SchemaError, SnapshotError, UsageError
from flux.operators import keyed_operator

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
