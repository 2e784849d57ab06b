"""A checkpoint location on the driver's side: its notes about a query, and the plans that go on from it (design:
vault)."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from kept import opened, orders, standby
from kept_watched import watch

import flux
from controller.planning.compiler import compile_plan
from flux.dataflow.plan import Plan
from flux.dataflow.source import DataFrameSource, WorkerSource
from flux.errors import UsageError
from flux.settings import Settings
from flux.vault.directory_store import Directory
from flux.vault.location import Folder
from flux.vault.names import NameHold
from partitioning.ids import PartitionKey

vault = pytest.importorskip("spark_integration.query.checkpoint_location")

SCHEMA = pa.schema([("word", pa.string()), ("n", pa.int64())])
OTHER = pa.schema([("word", pa.string()), ("n", pa.int32())])


def same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


class Sink(flux.Operator):
    def process(self, batch: pa.RecordBatch) -> None: ...


class OtherSink(Sink):
    pass


def words(schema: pa.Schema = SCHEMA, partitions: int = 0, name: str = "words") -> Any:
    if partitions:
        return WorkerSource(name, lambda partition: iter(()), partitions, schema)
    return DataFrameSource(name, schema)


def plan(
    source: Any = None, middle: dict[str, Any] | None = None, last: dict[str, Any] | None = None, operator: Any = Sink,
    query: str = "q", **options: Any,
) -> Plan:  # fmt: skip
    """Compile the plan words -> middle -> last."""
    about = {"partitions": 4, "name": "middle", "schema": SCHEMA, "key": ["word"], **(middle or {})}
    flow = flux.stage(**about)(same)(source or words())
    flow = flux.stage(**{"partitions": 2, "name": "last", **(last or {})})(operator)(flow)
    return compiled([flow], query, **options)


def compiled(flows: list[Any], query: str = "q", **options: Any) -> Plan:
    made = compile_plan(flows, replace(Settings.of(), **options), lambda s: s, query, b"s")
    return replace(made, durable=True, began_with=3)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def taken(place: Path, made: Plan | None = None) -> Path:
    vault.CheckpointLocation.open(place).take(made or plan())
    return place


def refusal(place: Path, made: Plan) -> str:
    with pytest.raises(UsageError) as caught:
        vault.CheckpointLocation.open(place).take(made)
    return str(caught.value)


# ---- opening


def test_a_new_directory_belongs_to_nobody(place: Path) -> None:
    found = vault.CheckpointLocation.open(place)
    assert (found.place, found.about, found.query, found.began_with(5)) == (Folder(place), None, None, 5)
    assert list(place.iterdir()) == [], "nothing is written before the plan is checked"


def test_who_comes_again_finds_the_query_and_with_how_many_workers_it_began(place: Path) -> None:
    found = vault.CheckpointLocation.open(taken(place))
    assert (found.query, found.began_with(5)) == ("q", 3)
    assert (place / "flux.json").stat().st_mode & 0o077 == 0


def test_a_stage_that_the_program_still_has_is_not_given_up(place: Path) -> None:
    found = vault.CheckpointLocation.open(taken(place))
    assert list(found.given_up(["last"], ["middle"]).about["plan"]["stages"]) == ["middle"]
    assert found.given_up(["gone long ago"], ["middle", "last"]) is found
    with pytest.raises(UsageError, match=r"removed=\['last'\] gives up last, and the program still has last: leave"):
        found.given_up(["last"], ["middle", "last"])
    with pytest.raises(
        UsageError, match=r"removed='words' is a source, .* the stages that read it: middle. Name these"
    ):
        found.given_up(["words"], ["middle", "last"])


def test_a_second_stage_of_a_name_is_given_up_while_the_program_has_the_first_one(place: Path) -> None:
    twice = [flux.stage(name="last", partitions=2)(sink)(words(name=sink.__name__)) for sink in (Sink, OtherSink)]
    found = vault.CheckpointLocation.open(taken(place, compiled(twice)))
    assert list(found.given_up(["last#2"], ["last"]).about["plan"]["stages"]) == ["last"]
    with pytest.raises(UsageError, match="the program still has last#2"):
        found.given_up(["last#2"], ["last", "last"])


def test_hidden_files_are_no_contents(place: Path) -> None:
    place.mkdir(mode=0o700)
    (place / ".flux.json.4711").write_text("a crash left it")
    assert vault.CheckpointLocation.open(place).about is None


@pytest.mark.parametrize("name", ["data.csv", "journal-00000001-00000001", "generation-00000001", "state"])
def test_a_directory_with_other_contents_is_refused(place: Path, name: str) -> None:
    place.mkdir(mode=0o700)
    (place / name).write_bytes(b"")
    with pytest.raises(UsageError, match="is not empty, and nothing of a Flux query is in it"):
        vault.CheckpointLocation.open(place)


@pytest.mark.parametrize("text", ["", "{", "\xff\xfe", '{"format": 1, "query": '])
def test_what_cannot_be_read_is_refused(place: Path, text: str) -> None:
    (taken(place) / "flux.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=r"flux\.json cannot be read"):
        vault.CheckpointLocation.open(place)


@pytest.mark.parametrize(
    ("about", "said"),
    [({"format": 1}, "format 1;"), ({}, "format None;"), ({"format": "1"}, "format '1';"), ([1], r"format \[1\];")],
)
def test_another_format_is_refused(place: Path, about: Any, said: str) -> None:
    (taken(place) / "flux.json").write_text(json.dumps(about))
    with pytest.raises(UsageError, match=rf"has {said} this release of Flux reads format 2 only"):
        vault.CheckpointLocation.open(place)


@pytest.mark.parametrize("missing", ["query", "workers", "plan"])
def test_a_description_that_lacks_something_is_refused(place: Path, missing: str) -> None:
    about = json.loads((taken(place) / "flux.json").read_text())
    del about[missing]
    (place / "flux.json").write_text(json.dumps(about))
    with pytest.raises(UsageError, match="has format 2; this release"):
        vault.CheckpointLocation.open(place)


def test_a_directory_that_others_may_read_is_refused_whatever_is_in_it(place: Path) -> None:
    taken(place).chmod(0o755)
    with pytest.raises(UsageError, match="may be read or written by others"):
        vault.CheckpointLocation.open(place)


@pytest.mark.parametrize("call", ["fsync", "link"])
def test_a_directory_that_has_no_room_is_refused_by_name(
    place: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = vault.CheckpointLocation.open(place)

    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(UsageError, match=r"checkpointLocation='.*kept' cannot be written: .*No space left"):
            location.take(plan())
    taken(place)


# ---- which plans go on


def test_the_same_plan_goes_on_and_nothing_is_written_again(place: Path) -> None:
    before = (taken(place) / "flux.json").stat()
    vault.CheckpointLocation.open(place).take(plan(query="another id"))
    after = (place / "flux.json").stat()
    assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino)


def test_a_description_comes_back_from_json_as_it_was() -> None:
    made = vault.description(plan(words(partitions=3)))
    assert json.loads(json.dumps(made)) == made


@pytest.mark.parametrize(
    "other",
    [
        plan(middle={"replicas": 2}),
        plan(middle={"replicas": 2, "recovery": "standby"}),
        plan(heartbeat_timeout=9.0),
        replace(plan(), began_with=9),
        plan(query="another"),
    ],
    ids=["replicas", "recovery", "settings", "workers", "query"],
)
def test_what_protects_a_query_and_how_it_is_set_may_differ(place: Path, other: Plan) -> None:
    vault.CheckpointLocation.open(taken(place)).take(other)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (plan(words(name="lines")), "its sources were words and are lines"),
        (plan(words(partitions=3)), "source 'words': its partitions were 'those of the DataFrame' and are 3"),
        (
            plan(words(OTHER)),
            "stage 'middle': it read (word: string, n: int64) from words and reads (word: string, n: int32)",
        ),
        (plan(middle={"partitions": 5}), "stage 'middle': partitions was 4 and is 5"),
        (plan(middle={"key": ["n"]}), "stage 'middle': key was ['word'] and is ['n']"),
        (plan(middle={"key": ["word", "n"]}), "stage 'middle': key was ['word'] and is ['word', 'n']"),
        (
            plan(middle={"schema": OTHER}),
            "stage 'last': it read (word: string, n: int64) from middle and reads (word: string, n: int32)",
        ),
        (
            plan(middle={"name": "first"}),
            "another plan: stage 'middle' is not there any more; stage 'first' is new. Start",
        ),
        (
            plan(operator=OtherSink),
            "test_location.Sink and is test_location.OtherSink, which cannot go on with that state",
        ),
    ],
    ids=lambda value: "" if isinstance(value, Plan) else value[:30],
)
def test_a_plan_that_differs_is_refused_and_the_message_says_in_what(place: Path, other: Plan, said: str) -> None:
    message = refusal(taken(place), other)
    assert f"checkpointLocation={str(place)!r} is that of another plan: " in message
    assert said in message
    vault.CheckpointLocation.open(place).take(plan())


def test_a_stage_that_is_left_out_is_named_once(place: Path) -> None:
    short = compiled([flux.stage(partitions=2, name="last")(Sink)(words())])
    assert "another plan: stage 'middle' is not there any more. Start" in refusal(taken(place), short)


def test_a_source_more_is_a_difference_with_the_stage_that_reads_it(place: Path) -> None:
    two = compiled(
        [
            flux.stage(partitions=2, name="last")(Sink)(words()),
            flux.stage(partitions=2, name="b")(Sink)(words(name="x")),
        ]
    )
    message = refusal(taken(place, compiled([flux.stage(partitions=2, name="last")(Sink)(words())])), two)
    assert "another plan: stage 'b' is new. Start" in message


def test_of_many_differences_one_is_named(place: Path) -> None:
    stages = [flux.stage(partitions=2, name=f"s{number}")(Sink)(words()) for number in range(9)]
    more = [flux.stage(partitions=3, name=f"s{number}")(Sink)(words()) for number in range(9)]
    message = refusal(taken(place, compiled(stages)), compiled(more))
    assert message.count("partitions was 2 and is 3") == 1
    assert "stages 's0', 's1', 's2', 's3' and 5 others are not there any more. Start" in refusal(place, plan()).replace(
        "; stages 'middle', 'last' are new", ""
    )


def test_the_same_stages_in_another_order_are_another_plan(place: Path) -> None:
    """Refuse such a plan: stage 0 would go on with the state of stage 1."""

    def flows(source: Any) -> list[Any]:
        return [flux.stage(partitions=2, name=name, key=["word"])(Sink)(source) for name in ("a", "b")]

    made, turned = compiled(flows(words())), compiled(flows(words())[::-1])
    assert [stage.name for stage in made.stages] != [stage.name for stage in turned.stages]
    assert "the order of its stages was a, b and is b, a. Start" in refusal(taken(place, made), turned)


def test_of_two_that_open_a_new_directory_at_once_one_is_refused(place: Path) -> None:
    one, other = vault.CheckpointLocation.open(place), vault.CheckpointLocation.open(place)
    one.take(plan())
    with pytest.raises(UsageError, match="was empty, and is that of a query now"):
        other.take(plan(middle={"partitions": 9}))
    assert [path.name for path in place.iterdir()] == ["flux.json"]
    vault.CheckpointLocation.open(place).take(plan())


def test_who_is_second_hears_it_also_when_the_vault_of_the_first_has_come(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_the_first = (taken(tmp_path / "elsewhere") / "flux.json").read_bytes()

    def first_comes(call: str, name: str) -> None:
        if call == "fsync" and name.startswith(".flux.json"):
            (place / "flux.json").write_bytes(of_the_first)
            Directory(place)

    second = vault.CheckpointLocation.open(place)
    watch(monkeypatch, first_comes)
    with pytest.raises(UsageError, match="was empty, and is that of a query now"):
        second.take(plan())


def test_a_plan_that_is_refused_changes_nothing(place: Path) -> None:
    before = (taken(place) / "flux.json").read_bytes()
    refusal(place, plan(middle={"partitions": 9}))
    assert (place / "flux.json").read_bytes() == before
    assert [path.name for path in place.iterdir()] == ["flux.json"]


# ---- the meaning of state


AB = pa.schema([("word", pa.string()), ("a", pa.int64()), ("b", pa.int64())])


def counting(operator: Any, schema: pa.Schema = AB) -> Plan:
    return compiled([flux.stage(key=["word"], partitions=2, name="last")(operator)(words(schema))])


class Totals(flux.Aggregate):
    low = flux.min("a")
    one = flux.sum("a")
    other = flux.sum("b")


def totals(**measures: Any) -> Any:
    """Make the class ``Totals`` anew with other measures, in this order."""
    made = {"low": flux.min("a"), "one": flux.sum("a"), "other": flux.sum("b"), **measures}
    kept = {name: each for name, each in made.items() if each is not None}
    return type("Totals", (flux.Aggregate,), {**kept, "__module__": Totals.__module__, "__qualname__": "Totals"})


@pytest.mark.parametrize(
    ("measures", "said"),
    [
        ({"low": flux.max("a")}, "measure low was min(a) of int64 and is max(a) of int64"),
        ({"one": flux.sum("b")}, "measure one was sum(a) of int64 and is sum(b) of int64"),
        ({"one": flux.sum("b"), "other": flux.sum("a")}, "measure one was sum(a) of int64 and is sum(b) of int64"),
        ({"low": None}, "measure low was min(a) of int64 and is not there any more"),
        ({"more": flux.count()}, "measure more was not there and is count()"),
        (
            {"low": None, "lowest": flux.min("a")},
            "measure low was min(a) of int64 and is not there any more",
        ),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:30],
)
def test_another_measure_is_another_plan(place: Path, measures: dict[str, Any], said: str) -> None:
    taken(place, counting(Totals))
    message = refusal(place, counting(totals(**measures)))
    assert f"another plan: stage 'last': {said}. Start" in message
    vault.CheckpointLocation.open(place).take(counting(totals()))


def test_the_same_measures_in_another_order_are_another_plan(place: Path) -> None:
    taken(place, counting(Totals))
    turned = type(
        "Totals", (flux.Aggregate,),
        {"one": flux.sum("a"), "low": flux.min("a"), "other": flux.sum("b"), "__module__": Totals.__module__},
    )  # fmt: skip
    said = "the order of its measures was measure low, measure one, measure other and is measure one, measure low, measure other"
    assert said in refusal(place, counting(turned))


def test_a_measure_of_another_type_is_another_plan(place: Path) -> None:
    taken(place, counting(Totals))
    other = counting(Totals, AB.set(1, pa.field("a", pa.int32())))
    assert "it read (word: string, a: int64, b: int64) from words and reads (word: string, a: int32" in refusal(
        place, other
    )


def test_a_location_of_a_release_that_did_not_know_measures_goes_on_and_knows_them_from_then_on(place: Path) -> None:
    about = json.loads((taken(place, counting(Totals)) / "flux.json").read_text())
    del about["plan"]["stages"]["last"]["state"]
    (place / "flux.json").write_text(json.dumps(about))
    vault.CheckpointLocation.open(place).take(counting(totals(low=flux.max("a"))))
    assert "measure low was max(a)" in refusal(place, counting(Totals))


def versioned(version: Any) -> Plan:
    kind = type("Sink", (Sink,), {"state_version": version, "__module__": Sink.__module__, "__qualname__": "Sink"})
    return plan(operator=kind)


def test_an_operator_that_names_another_version_of_its_state_is_another_plan(place: Path) -> None:
    taken(place, versioned(1))
    assert "stage 'last': state_version was 1 and is 2. Start" in refusal(place, versioned(2))
    assert "stage 'last': state_version was 1 and is None. Start" in refusal(place, plan())
    vault.CheckpointLocation.open(place).take(versioned(1))


def test_a_version_that_is_named_for_the_first_time_is_kept_from_then_on(place: Path) -> None:
    taken(place)
    vault.CheckpointLocation.open(place).take(versioned("b"))
    assert "state_version was 'b' and is 'c'" in refusal(place, versioned("c"))


def test_a_version_is_a_number_or_a_text() -> None:
    with pytest.raises(UsageError, match=r"Odd\.state_version must be a number or a text"):
        type("Odd", (flux.Operator,), {"state_version": [1]})


# ---- changes that are allowed


def other(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


class Wide(Sink):
    schema = AB


@pytest.mark.parametrize(
    "change",
    [
        lambda: compiled([flux.stage(partitions=4, name="middle", schema=SCHEMA, key=["word"])(other)(words())]),
        lambda: compiled([flux.stage(partitions=4, name="middle", schema=AB, key=["word"])(same)(words())]),
        lambda: compiled(
            [
                flux.stage(partitions=4, name="middle", schema=SCHEMA, key=["word"])(same)(words()).foreach_batch(
                    print_it
                )
            ]
        ),
    ],
    ids=["another function", "a column more that is not read", "a sink"],
)
def test_on_what_no_state_depends_may_change(place: Path, change: Any) -> None:
    before = compiled([flux.stage(partitions=4, name="middle", schema=SCHEMA, key=["word"])(same)(words())])
    vault.CheckpointLocation.open(taken(place, before)).take(change())
    vault.CheckpointLocation.open(place).take(before)


def print_it(batch: pa.RecordBatch, position: flux.Position) -> None: ...


def test_a_column_more_of_a_source_that_no_stage_reads_may_come(place: Path) -> None:
    class Few(flux.Aggregate):
        one = flux.sum("a")

    def counted(schema: pa.Schema) -> Plan:
        return compiled([flux.stage(key=["word"], partitions=2, name="last")(Few)(words(schema, partitions=2))])

    taken(place, counted(AB))
    vault.CheckpointLocation.open(place).take(counted(AB.append(pa.field("c", pa.string()))))


def test_rows_that_a_sink_may_still_get_stay_as_they_are(place: Path) -> None:
    def ending(schema: pa.Schema) -> Plan:
        return compiled([flux.stage(partitions=2, name="last", schema=schema)(same)(words()).foreach_batch(print_it)])

    taken(place, ending(SCHEMA))
    said = "its rows go into a sink, and were (word: string, n: int64) and are (word: string, a: int64, b: int64)"
    assert said in refusal(place, ending(AB))


def into(folder: Path, name: str = "last") -> Any:
    """Make a flow of one stage whose output goes into files, which a stage of their own ends."""
    return flux.stage(partitions=2, name=name, schema=SCHEMA)(same)(words(name=f"of {name}")).to_parquet(str(folder))


def prepared_on(place: Path, made: Plan) -> Any:
    """Open the location as a start does, and return the output that it has forgotten."""
    location = vault.CheckpointLocation.open(place).for_sinks_of(made)
    location.check(made)
    location.take(made, {"sources": {}, "sinks": {stage.name: {"new": True} for stage in made.stages}})
    return location.forgotten(made)


def test_a_sink_that_goes_elsewhere_begins_anew_there_and_others_go_on(place: Path, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    flows = [into(one), into(one, "second")]
    before = compiled(flows)
    assert prepared_on(place, before) == {}
    journal = opened(store := Directory(place))
    moved = next(stage for stage in before.stages if stage.name == "last.files")
    standby(journal, PartitionKey(moved.id, 0)).on_orders(orders(1, 0, 6, 5, 4, PartitionKey(moved.id, 0)))
    journal.flush()
    store.close()
    kept = json.loads((place / "flux.json").read_text())
    kept["kept"]["sinks"] = {"last.files": {"ids": [1]}, "second.files": {"ids": [2]}}
    (place / "flux.json").write_text(json.dumps(kept))
    assert prepared_on(place, before) == {}, "it is the same place"
    after = compiled([into(other), into(one, "second")])
    forgotten = prepared_on(place, after)
    assert {stage: each.first for stage, each in forgotten.items()} == {moved.id: (4,)}
    about = json.loads((place / "flux.json").read_text())
    new = {"last": {"new": True}, "last.files": {"new": True}, "second": {"new": True}}
    assert about["kept"]["sinks"] == {**new, "second.files": {"ids": [2]}}, "writers of the new place are others"
    assert prepared_on(place, after) == forgotten, "in each later life"
    back = prepared_on(place, before)
    assert back[moved.id].query != forgotten[moved.id].query


def test_a_sink_does_not_go_elsewhere_while_a_query_runs_that_writes(place: Path, tmp_path: Path) -> None:
    prepared_on(place, compiled([into(tmp_path / "one")]))
    hold = NameHold(place)
    with pytest.raises(UsageError, match=r"a query is using .*: stop it first"):
        prepared_on(place, compiled([into(tmp_path / "other")]))
    hold.close()


def test_a_query_does_not_start_where_one_of_its_stages_is_not_to_be_kept(tmp_path: Path) -> None:
    """Refuse such a query before anything else, so there is no Spark, and no directory."""
    start = pytest.importorskip("spark_integration.query.start").start_query
    flow = flux.stage(name="odd", durable=False)(same)(words())
    with pytest.raises(UsageError, match="stage odd: durable=False"):
        start([flow], checkpoint_location=tmp_path / "kept")
    assert not (tmp_path / "kept").exists()
