"""A checkpoint location that was restored from an older copy: sinks that are ahead of it, and output that is forgotten (design:
ahead, forgotten-output)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pyarrow as pa
import pytest
from kept import KEY, LARGE, Memory, checkpoint, opened, orders, standby, take
from one_worker import SCHEMA, planned
from outside_store import Table, until
from test_reviving import SECOND, VAULT, Both, Slow, table
from typer.testing import CliRunner

import flux
from controller.operate.cli import app
from flux.dataflow.plan import ById, Forgotten
from flux.dataflow.sink import SinkAhead
from flux.errors import QueryFailed
from flux.replica.order_log import OrderLog
from flux.replica.output import SinkBuffer
from flux.replica.replica import Replica
from flux.settings import Settings
from flux.shell.sink_threads import SinkThreads
from flux.vault.directory_store import Directory, check_location
from flux.vault.names import ABOUT, NameHold
from flux.vault.vault import Vault
from flux.wire.parts import PartLimits
from flux.worker.core import WorkerCore
from flux.worker.output_delivery import OutputDelivery
from partitioning.ids import PartitionKey

ONE = pa.record_batch([pa.array([1])], schema=pa.schema([("x", pa.int64())]))


class Strict(Table):
    """A table that takes each position once, and can be copied for each partition."""

    #: Queries under which sinks of this class were opened.
    opened: ClassVar[list[str]] = []

    def __deepcopy__(self, memo: Any) -> Strict:
        return Strict(self.name)

    def open(self, context: flux.SinkContext) -> None:
        super().open(context)
        self.opened.append(context.query)

    def write(self, batch: pa.RecordBatch, position: flux.Position) -> None:
        assert position.sequence == len(self.store.batches[position.partition])
        super().write(batch, position)


class Tells(Strict):
    """A table that cannot tell its number of batches, and notices all the same that it is ahead of the location."""

    def __deepcopy__(self, memo: Any) -> Tells:
        return Tells(self.name)

    def committed(self, partition: int) -> None:  # type: ignore[override]
        return None

    def recovered(self, sequence: int) -> None:
        self.store.calls.append(("recovered", sequence))
        if self.name == "tells more":
            raise SinkAhead(f"record 380 is there, and {sequence} are known")


class TakesNotes(Tells):
    """A table behind an operator that numbers its rows, which notes the note of that operator."""

    def __deepcopy__(self, memo: Any) -> TakesNotes:
        return TakesNotes(self.name)

    def recovered(self, sequence: int, note: Any = None) -> None:
        self.store.calls.append(("recovered", note))


def sinks(sink: flux.Sink, position: int, forgotten: Forgotten | None = None) -> SinkThreads:
    """Start the threads of a sink, after a restart: by the location the first ``position`` batches are outside."""
    stage = SimpleNamespace(id=0, name="last", partitions=1, sink=sink)
    plan: Any = SimpleNamespace(
        query="q", stages=[stage], settings=Settings.of(), location="/data/q", durable=True,
        forgotten={} if forgotten is None else {0: forgotten},
    )  # fmt: skip
    made = SinkThreads(plan, lambda: None)
    made.begins(0, 0, position, False)
    return made


def filled(name: str, count: int) -> list[list[int]]:
    there = Table.stores[name].batches[0]
    there.extend([0] for _ in range(count))
    return there


def failure(made: SinkThreads) -> str:
    until(lambda: not made._failed.empty(), "it has failed")
    with pytest.raises(QueryFailed) as caught:
        made.check()
    made.close()
    return str(caught.value)


def test_an_outside_that_has_more_than_the_location_knows_of_is_refused_and_gets_nothing() -> None:
    there = filled("more", 9)
    made = sinks(Strict("more"), 4)
    for position in range(4, 6):
        made.write(0, 0, position, ONE)
    made.recovered(0, 0, 6)
    for position in range(6, 12):
        made.write(0, 0, position, ONE)
    said = failure(made)
    assert "the outside has 9 batches, and the location knows of 6" in said
    assert "the checkpoint location /data/q is an older copy" in said
    assert "flux checkpoints /data/q --forget-output" in said
    assert len(there) == 9


@pytest.mark.parametrize("count", [4, 5, 6])
def test_an_outside_that_has_what_the_location_knows_of_goes_on(count: int) -> None:
    there = filled(f"as much {count}", count)
    made = sinks(Strict(f"as much {count}"), 4)
    for position in range(4, 6):
        made.write(0, 0, position, ONE)
    made.recovered(0, 0, 6)
    for position in range(6, 12):
        made.write(0, 0, position, ONE)
    until(lambda: made.has(0, 0) == 12, "all is outside")
    made.check()
    assert len(there) == 12
    made.close()


def test_a_sink_that_knows_it_otherwise_is_asked_once_before_the_first_new_batch() -> None:
    there = Table.stores["tells more"]
    made = sinks(Tells("tells more"), 0)
    made.write(0, 0, 0, ONE)
    made.recovered(0, 0, 1)
    made.write(0, 0, 1, ONE)
    assert "record 380 is there, and 1 are known. So the checkpoint location /data/q is an older copy" in failure(made)
    assert len(there.batches[0]) == 1
    assert [call for call in there.calls if call[0] == "recovered"] == [("recovered", 1)]


def test_a_sink_is_told_what_the_operator_before_it_has_numbered() -> None:
    there = Table.stores["takes notes"]
    made = sinks(TakesNotes("takes notes"), 0)
    made.write(0, 0, 0, ONE)
    made.recovered(0, 0, 1, [3, 0])
    made.write(0, 0, 1, ONE)
    until(lambda: made.has(0, 0) == 2, "all is outside")
    made.check()
    assert [call for call in there.calls if call[0] == "recovered"] == [("recovered", [3, 0])]
    made.close()


def test_a_sink_whose_output_is_forgotten_counts_from_there_under_another_name() -> None:
    made = sinks(Strict("forgotten"), 4, Forgotten("other", (4,)))
    for position in range(4, 6):
        made.write(0, 0, position, ONE)
    made.recovered(0, 0, 6)
    made.write(0, 0, 6, ONE)
    until(lambda: made.has(0, 0) == 7, "all is outside")
    made.begins(0, 0, 7, False)  # a later primary
    made.write(0, 0, 7, ONE)
    until(lambda: made.has(0, 0) == 8, "this too")
    made.check()
    assert len(Table.stores["forgotten"].batches[0]) == 4
    assert Strict.opened[-2:] == ["other", "other"]
    made.close()


def test_where_a_location_ends_is_told_once_and_in_its_place() -> None:
    out = SinkBuffer(1 << 20)
    out.leads = True
    for step in range(3):
        out.add(step, ONE)
    assert out.recovered() is None, "it is not known yet"
    out.made = out.position
    assert list(out.hand_on(2)) == [(0, ONE), (1, ONE)]
    assert out.recovered() is None, "a batch that an earlier primary may have made waits"
    out.add(3, ONE)
    told = [(position, out.recovered(position)) for position, _ in out.hand_on(4)]
    assert told == [(2, None), (3, 3)]
    assert out.recovered() is None


class Noted:
    """A ``flux.worker.output_delivery.Outside`` that notes its calls."""

    def __init__(self, there: int = 0, agrees: bool = True) -> None:
        self.there = there
        self.agrees = agrees
        self.calls: list[tuple[str, int]] = []

    def has(self, stage: int, partition: int) -> int:
        return self.there

    def compared(self, stage: int, partition: int) -> bool:
        return self.agrees and any(call == "recovered" for call, _ in self.calls)

    def begins(self, stage: int, partition: int, position: int, first: bool) -> None:
        self.calls.append(("begins", position))

    def write(self, stage: int, partition: int, position: int, batch: pa.RecordBatch) -> None:
        self.calls.append(("write", position))

    def recovered(self, stage: int, partition: int, position: int, note: Any) -> None:
        self.calls.append(("recovered", position))
        self.note = note

    def ends(self, stage: int, partition: int) -> None: ...


class Gives(Slow):
    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:  # type: ignore[override]
        super().process(batch)
        return batch

    def note_of_output(self) -> int:
        return len(self.batches)


@pytest.mark.parametrize("checkpoints", [0.001, 3600.0])
def test_a_worker_says_where_the_order_of_the_vault_ends_before_anything_new(checkpoints: float) -> None:
    made = planned(flux.stage(partitions=1, schema=SCHEMA)(Gives), checkpoint_interval=checkpoints)
    stage = replace(made.stages[0], sink=Strict("noted"))
    both = Both(replace(made, stages=ById([stage]), durable=True))
    first = both.worker.leaving.outside = Noted()
    both.show(table(0, 0, 0))
    both.greet(0, 0)
    both.feed(0, 1)
    both.aside()
    both.feed(2)
    assert first.calls == [("begins", 0), ("write", 0), ("write", 1), ("write", 2)], "nobody was before the first"
    both.worker = WorkerCore(both.plan, SECOND, limits=PartLimits(inline_bytes=0))
    second = both.worker.leaving.outside = Noted()
    both.jobs.clear()
    both.show(table(1, SECOND, 1))
    both.turn()
    both.aside()
    (resumed,) = both.greet(1, 1)
    behind = resumed[0][1]
    both.feed(*range(behind, 5))
    assert second.calls == [
        ("begins", 0), ("write", 0), ("write", 1), ("write", 2), ("recovered", 3), ("write", 3), ("write", 4),
    ]  # fmt: skip
    assert second.note == 3, "said of the batches before that one, and not of those that have come since"


@pytest.mark.parametrize("loss", ["an older copy", "the end of the journal"])
def test_a_location_that_was_set_back_knows_of_less_than_was_shown(loss: str) -> None:
    made = planned(flux.stage(partitions=1, schema=SCHEMA)(Gives), checkpoint_interval=3600.0)
    stage = replace(made.stages[0], sink=Strict("set back"))
    both = Both(replace(made, stages=ById([stage]), durable=True))
    first = both.worker.leaving.outside = Noted()
    both.show(table(0, 0, 0))
    both.greet(0, 0)
    both.feed(0, 1)
    older = both.store.segment
    both.feed(2)
    assert first.calls[-1] == ("write", 2)
    whole = both.store.segment
    assert len(whole) > len(older)
    store = Memory(older if loss == "an older copy" else whole[: len(older) + 1], generation=2)
    both.vault = Vault(both.plan, VAULT, opened(store), limits=PartLimits(inline_bytes=0)).core
    both.worker = WorkerCore(both.plan, SECOND, limits=PartLimits(inline_bytes=0))
    second = both.worker.leaving.outside = Noted()
    both.jobs.clear()
    both.show(table(1, SECOND, 1))
    both.turn()
    both.aside()
    both.greet(1, 1)
    both.feed(0, 1, 2)
    known = [position for call, position in second.calls if call == "recovered"]
    assert known == [2], "three are outside"
    assert second.calls.index(("recovered", 2)) < second.calls.index(("write", 2))


def test_a_location_gets_no_new_steps_before_its_sink_is_compared_so_each_later_start_is_refused_too() -> None:
    made = planned(flux.stage(partitions=1, schema=SCHEMA)(Gives), checkpoint_interval=3600.0)
    stage = replace(made.stages[0], sink=Strict("refused again"))
    both = Both(replace(made, stages=ById([stage]), durable=True))
    both.worker.leaving.outside = Noted()
    both.show(table(0, 0, 0))
    both.greet(0, 0)
    both.feed(0, 1)
    older = both.store.segment
    for start in (1, 2):
        both.store = Memory(older, generation=1 + start)
        both.vault = Vault(both.plan, VAULT, opened(both.store), limits=PartLimits(inline_bytes=0)).core
        both.worker = WorkerCore(both.plan, SECOND, limits=PartLimits(inline_bytes=0))
        outside = both.worker.leaving.outside = Noted(there=5, agrees=False)
        both.jobs.clear()
        both.show(table(start, SECOND, start))
        both.turn()
        both.aside()
        both.greet(start, start)
        both.feed(0, 1, 2, 3, 4, 5)
        both.now += 10.0  # orders are sent again, with the number of batches that have left
        both.turn()
        standby_: Any = both.vault.followers[0, 0]
        assert (standby_.order.end, standby_.left) == (2, 2), "the location knows of no more than before"
        assert outside.calls[-1] == ("recovered", 2)
        older = both.store.segment
    outside.there, outside.agrees = 2, True
    both.turn()
    assert outside.calls[-1] == ("write", 2), "the pending rows are one step"
    assert standby_.order.end == 3


def test_the_end_of_a_partition_is_not_reported_before_its_sink_is_compared() -> None:
    replica = restored()
    out = replica.output.exit
    assert out is not None
    assert not OutputDelivery._has_left(replica)
    assert out.recovered() == 0
    out.outside_has(0, compared=True)
    assert OutputDelivery._has_left(replica)


def test_what_the_outside_has_counts_up_to_the_repeated_output_until_it_is_compared() -> None:
    out = SinkBuffer(1 << 20)
    out.restores()
    out.add(0, ONE)
    out.outside_has(9, compared=False)
    assert (out.left, out.bytes) == (1, 0), "there is room for the rest of the repeated output"
    out.add(1, ONE)
    out.restored(None)
    out.outside_has(9, compared=False)
    assert out.left == 2
    out.outside_has(9, compared=True)
    assert out.left == 9


def restored(state: dict[str, Any] | None = None, order: OrderLog | None = None) -> Replica:
    """Make a primary from a checkpoint location, or from a copy of another one's state: as a standby does, if it has an
    order."""
    plan = planned(flux.stage(partitions=1, schema=SCHEMA)(Gives))
    made = Replica(replace(plan.stages[0], sink=Strict("any")), 0, 0, [], plan.settings)
    made.output.keep_in(SinkBuffer(1 << 20))
    if state is None:
        made.succeed(OrderLog(), 0, whole=True)
        made.lead(1, [])
    else:
        made.adopt(state)
        if order is not None:
            made.succeed(order, 0)
        made.lead(2, [])
    return made


def end_of_what_is_known(replica: Replica) -> int | None:
    assert replica.output.exit is not None
    return replica.output.exit.recovered()


def test_a_copy_compares_too_if_its_primary_had_not_yet_compared() -> None:
    first = restored()
    second = restored(first.state())
    third = restored(second.state())
    assert [end_of_what_is_known(each) for each in (first, second, third)] == [0, 0, 0]
    assert first.output.exit is not None
    first.output.exit.outside_has(0, compared=True)
    assert end_of_what_is_known(restored(first.state())) is None, "it had: its own output is outside by now"


def test_a_standby_compares_if_its_checkpoint_is_of_a_primary_that_had_not_yet_compared() -> None:
    """Compare in that case: the state was known to be restored, the take-over forgot that, and the new primary wrote
    behind the output of a newer location."""
    first = restored()
    state = first.state()
    heir = restored(state, OrderLog())
    assert heir.output.uncompared, "it orders nothing new before"
    assert end_of_what_is_known(heir) == 0
    assert first.output.exit is not None
    first.output.exit.outside_has(0, compared=True)
    heir = restored(first.state(), OrderLog())
    assert (heir.output.uncompared, end_of_what_is_known(heir)) == (False, None)


def test_an_outside_that_lacks_what_it_had_is_a_new_place_perhaps() -> None:
    filled("another", 2)
    said = failure(sinks(Strict("another"), 4))
    assert "has the first 2 batches, and had 4 before" in said
    assert "run 'flux checkpoints /data/q --forget-output': the new place then gets all later output" in said


# ---- flux checkpoints --forget-output

STAGES = {
    "first": {"number": 0, "partitions": 5, "sink": False},
    "last": {"number": 1, "partitions": 2, "sink": True},
}


def location(tmp_path: Path) -> Path:
    """Make a location. In partition 0 of its last stage, 3 batches are outside by the checkpoint, and 4 by the orders
    after it."""
    place = check_location(tmp_path / "kept")
    about = {
        "format": 2, "query": "q", "workers": 2, "plan": {"stages": STAGES, "sources": []},
        "kept": {"sources": {"a": 1}, "sinks": {"last": {"ids": [7]}}},
    }  # fmt: skip
    (place / ABOUT).write_text(json.dumps(about))
    store = Directory(place)
    journal = opened(store)
    last = PartitionKey(1, 0)
    standby(journal, KEY).on_orders(orders(1, 0, 6, committed=5, left=2))
    standby(journal, last).on_orders(orders(1, 0, 6, committed=5, left=4, key=last))
    take(journal, checkpoint(3, 1, 1, size=LARGE, left=3), last)
    journal.flush()
    store.close()
    return place


def test_forgotten_output_gets_another_name_and_begins_behind_what_is_known_to_be_outside(tmp_path: Path) -> None:
    place = location(tmp_path)
    shown = CliRunner().invoke(app, ["checkpoints", str(place), "--forget-output", "--json"])
    assert shown.exit_code == 0, shown.output
    about = json.loads((place / ABOUT).read_text())
    assert about["forgotten"]["last"]["first"] == [4, 0]
    assert about["forgotten"]["last"]["query"] != "q"
    assert json.loads(shown.output) == {"id": "q", "forgotten": about["forgotten"]}
    assert about["kept"] == {"sources": {"a": 1}, "sinks": {}}, "ids of producers belong to the output"
    again = CliRunner().invoke(app, ["checkpoints", str(place), "--forget-output"])
    assert "last/0" in again.output
    assert json.loads((place / ABOUT).read_text())["forgotten"] != about["forgotten"]


def test_output_is_not_forgotten_while_a_query_runs(tmp_path: Path) -> None:
    place = location(tmp_path)
    before = (place / ABOUT).read_bytes()
    hold = NameHold(place)
    refused = CliRunner().invoke(app, ["checkpoints", str(place), "--forget-output"])
    assert refused.exit_code != 0
    assert "stop it first" in refused.output
    assert (place / ABOUT).read_bytes() == before
    hold.close()
