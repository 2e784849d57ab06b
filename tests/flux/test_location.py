"""A checkpoint location on the driver's side: what is written about a query, and which plans go on from it (design: vault)."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from kept_watched import watch

import flux
from controller.dag import compile_plan
from flux.dataflow.plan import Plan
from flux.dataflow.sources import DataFrameSource, WorkerSource
from flux.durable.directory import Directory
from flux.durable.place import Folder
from flux.errors import UsageError
from flux.settings import Settings

vault = pytest.importorskip("spark_integration.vault")

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
    """words -> middle -> last."""
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
    vault.Location.open(place).take(made or plan())
    return place


def refusal(place: Path, made: Plan) -> str:
    with pytest.raises(UsageError) as caught:
        vault.Location.open(place).take(made)
    return str(caught.value)


# ---- opening


def test_a_new_directory_belongs_to_nobody(place: Path) -> None:
    found = vault.Location.open(place)
    assert (found.place, found.about, found.query, found.began_with(5)) == (Folder(place), None, None, 5)
    assert list(place.iterdir()) == [], "nothing is written before the plan is checked"


def test_who_comes_again_finds_the_query_and_with_how_many_workers_it_began(place: Path) -> None:
    found = vault.Location.open(taken(place))
    assert (found.query, found.began_with(5)) == ("q", 3)
    assert (place / "flux.json").stat().st_mode & 0o077 == 0


def test_hidden_files_are_no_contents(place: Path) -> None:
    place.mkdir(mode=0o700)
    (place / ".flux.json.4711").write_text("a crash left it")
    assert vault.Location.open(place).about is None


@pytest.mark.parametrize("name", ["data.csv", "journal-00000001-00000001", "generation-00000001", "state"])
def test_a_directory_with_other_contents_is_refused(place: Path, name: str) -> None:
    place.mkdir(mode=0o700)
    (place / name).write_bytes(b"")
    with pytest.raises(UsageError, match="is not empty, and nothing of a Flux query is in it"):
        vault.Location.open(place)


@pytest.mark.parametrize("text", ["", "{", "\xff\xfe", '{"format": 1, "query": '])
def test_what_cannot_be_read_is_refused(place: Path, text: str) -> None:
    (taken(place) / "flux.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=r"flux\.json cannot be read"):
        vault.Location.open(place)


@pytest.mark.parametrize(
    ("about", "said"),
    [({"format": 1}, "format 1;"), ({}, "format None;"), ({"format": "1"}, "format '1';"), ([1], r"format \[1\];")],
)
def test_another_format_is_refused(place: Path, about: Any, said: str) -> None:
    (taken(place) / "flux.json").write_text(json.dumps(about))
    with pytest.raises(UsageError, match=rf"has {said} this release of Flux reads format 2 only"):
        vault.Location.open(place)


@pytest.mark.parametrize("missing", ["query", "workers", "plan"])
def test_a_description_that_lacks_something_is_refused(place: Path, missing: str) -> None:
    about = json.loads((taken(place) / "flux.json").read_text())
    del about[missing]
    (place / "flux.json").write_text(json.dumps(about))
    with pytest.raises(UsageError, match="has format 2; this release"):
        vault.Location.open(place)


def test_a_directory_that_others_may_read_is_refused_whatever_is_in_it(place: Path) -> None:
    taken(place).chmod(0o755)
    with pytest.raises(UsageError, match="may be read or written by others"):
        vault.Location.open(place)


@pytest.mark.parametrize("call", ["fsync", "link"])
def test_a_directory_that_has_no_room_is_refused_by_name(
    place: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = vault.Location.open(place)

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
    vault.Location.open(place).take(plan(query="another id"))
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
    vault.Location.open(taken(place)).take(other)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (plan(words(name="lines")), "sources name was 'words' and is 'lines'"),
        (plan(words(partitions=3)), "sources partitions was 'those of the DataFrame' and is 3"),
        (plan(words(OTHER)), "sources schema was ['word: string', 'n: int64'] and is ['word: string', 'n: int32']"),
        (plan(middle={"partitions": 5}), "stages middle partitions was 4 and is 5"),
        (plan(middle={"key": ["n"]}), "stages middle key was ['word'] and is ['n']"),
        (plan(middle={"key": ["word", "n"]}), "stages middle key was ['word'] and is ['word', 'n']"),
        (plan(middle={"schema": OTHER}), "stages middle output was"),
        (plan(middle={"name": "first"}), "stages last reads from was 'middle' and is 'first'; stages first is new"),
        (plan(operator=OtherSink), "Sink' and is 'test_location.OtherSink'"),
    ],
    ids=lambda value: "" if isinstance(value, Plan) else value[:30],
)
def test_a_plan_that_differs_is_refused_and_the_message_says_in_what(place: Path, other: Plan, said: str) -> None:
    message = refusal(taken(place), other)
    assert f"checkpointLocation={str(place)!r} is that of another plan: " in message
    assert said in message
    vault.Location.open(place).take(plan())


def test_a_stage_that_is_left_out_is_named_with_those_that_read_from_it(place: Path) -> None:
    short = compiled([flux.stage(partitions=2, name="last")(Sink)(words())])
    message = refusal(taken(place), short)
    assert "stages middle was there and is not any more" in message
    assert "stages last reads from was 'middle' and is 'words'" in message


def test_a_source_more_is_a_difference(place: Path) -> None:
    two = compiled(
        [
            flux.stage(partitions=2, name="last")(Sink)(words()),
            flux.stage(partitions=2, name="b")(Sink)(words(name="x")),
        ]
    )
    message = refusal(taken(place, compiled([flux.stage(partitions=2, name="last")(Sink)(words())])), two)
    assert "sources was [{" in message
    assert "stages b is new" in message


def test_of_many_differences_the_first_five_are_named(place: Path) -> None:
    stages = [flux.stage(partitions=2, name=f"s{number}")(Sink)(words()) for number in range(9)]
    more = [flux.stage(partitions=3, name=f"s{number}")(Sink)(words()) for number in range(9)]
    message = refusal(taken(place, compiled(stages)), compiled(more))
    assert message.count("partitions was 2 and is 3") == 5


def test_the_same_stages_in_another_order_are_another_plan(place: Path) -> None:
    """Stage 0 would go on with the state of stage 1."""

    def flows(source: Any) -> list[Any]:
        return [flux.stage(partitions=2, name=name, key=["word"])(Sink)(source) for name in ("a", "b")]

    made, turned = compiled(flows(words())), compiled(flows(words())[::-1])
    assert [stage.name for stage in made.stages] != [stage.name for stage in turned.stages]
    assert "stages a number was 0 and is 1; stages b number was 1 and is 0" in refusal(taken(place, made), turned)


def test_of_two_that_open_a_new_directory_at_once_one_is_refused(place: Path) -> None:
    one, other = vault.Location.open(place), vault.Location.open(place)
    one.take(plan())
    with pytest.raises(UsageError, match="was empty, and is that of a query now"):
        other.take(plan(middle={"partitions": 9}))
    assert [path.name for path in place.iterdir()] == ["flux.json"]
    vault.Location.open(place).take(plan())


def test_who_is_second_hears_it_also_when_the_vault_of_the_first_has_come(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_the_first = (taken(tmp_path / "elsewhere") / "flux.json").read_bytes()

    def first_comes(call: str, name: str) -> None:
        if call == "fsync" and name.startswith(".flux.json"):
            (place / "flux.json").write_bytes(of_the_first)
            Directory(place)

    second = vault.Location.open(place)
    watch(monkeypatch, first_comes)
    with pytest.raises(UsageError, match="was empty, and is that of a query now"):
        second.take(plan())


def test_a_plan_that_is_refused_changes_nothing(place: Path) -> None:
    before = (taken(place) / "flux.json").read_bytes()
    refusal(place, plan(middle={"partitions": 9}))
    assert (place / "flux.json").read_bytes() == before
    assert [path.name for path in place.iterdir()] == ["flux.json"]


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        ({}, {}, []),
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {"a": 2}, ["a was 1 and is 2"]),
        ({"a": None}, {}, ["a was there and is not any more"]),
        ({}, {"a": None}, ["a is new"]),
        ({"a": {"b": [1]}}, {"a": {"b": [2]}}, ["a b was [1] and is [2]"]),
        ({"a": [{"b": 1}, {"b": 2}]}, {"a": [{"b": 1}, {"b": 3}]}, ["a b was 2 and is 3"]),
        ({"a": [{"b": 1}]}, {"a": []}, ["a was [{'b': 1}] and is []"]),
        ({"a": []}, {"a": [{"b": 1}]}, ["a was [] and is [{'b': 1}]"]),
        ({"a": [{"b": 1}]}, {"a": [7]}, ["a was {'b': 1} and is 7"]),
        ({"a": {"b": 1}}, {"a": 1}, ["a was {'b': 1} and is 1"]),
        ({"a": 1}, {"a": "1"}, ["a was 1 and is '1'"]),
    ],
)
def test_differences_are_named_by_where_they_are(was: Any, now: Any, said: list[str]) -> None:
    assert list(vault._differences(was, now, "")) == said


def test_a_query_does_not_start_where_one_of_its_stages_is_not_to_be_kept(tmp_path: Path) -> None:
    """Before anything else, so there is no Spark, and no directory."""
    start = pytest.importorskip("spark_integration.start").start_query
    flow = flux.stage(name="odd", durable=False)(same)(words())
    with pytest.raises(UsageError, match="stage odd: durable=False"):
        start([flow], checkpoint_location=tmp_path / "kept")
    assert not (tmp_path / "kept").exists()
