"""A stream as a source: the same rows at the same positions in each life, and no event removed before a query has it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

import flux
from controller.operate.cli import app
from flux.errors import QueryFailed, UsageError
from flux.eventlog.log_reader import LogReader
from flux.eventlog.records import PushName
from flux.eventlog.source import EventReader
from flux.eventlog.streams import NoSuchStream, ReaderPositions, Retention, StreamDefinition, StreamExists
from flux.testing import check_source
from tests.flux.pushed import clicks, owned, pushed, registered


def test_a_stream_is_read_alike_in_every_life(tmp_path: Path) -> None:
    catalogue, of = registered(tmp_path, partitions=2)
    for log in range(2):
        owner = owned(catalogue, of, log)
        for number in range(300):
            pushed(owner, clicks(*range(number, number + 7)), 1_000_000 * number)
        owner = owned(catalogue, of, log)  # another segment
        for number in range(40):
            pushed(owner, clicks(number), 0)
    check_source(flux.events(str(tmp_path), "clicks"), rows=500, quiet_s=0.1)


def test_events_bring_their_time_of_arrival_unless_they_have_a_time(tmp_path: Path) -> None:
    registered(tmp_path)
    registered(tmp_path, "timed", schema="at TIMESTAMP, user BIGINT", time="at", delay="10 seconds")
    assert flux.events(str(tmp_path), "clicks").declared.names == ["user", "page", "arrived_at"]
    assert flux.events(str(tmp_path), "clicks", arrival=None).declared.names == ["user", "page"]
    assert flux.events(str(tmp_path), "timed").declared.names == ["at", "user"]


def test_a_query_keeps_the_events_that_it_does_not_have_durably(tmp_path: Path) -> None:
    catalogue, of = registered(tmp_path, retain=Retention("1 second", 1 << 20))
    owner, readers = owned(catalogue, of), ReaderPositions(catalogue.readers_place(of))
    pushed(owner, clicks(1, 2), 0)
    reader = flux.events(str(tmp_path), "clicks").reader
    assert isinstance(reader, EventReader)
    kept = reader.prepare(None)
    assert kept["starts"] == [0]
    assert readers.needed_from(0) == 0
    second = 10_000_000
    list(owner.tidy(second, readers.needed_from(0)))
    pushed(owner, clicks(3), second)
    list(owner.tidy(second, readers.needed_from(0)))
    assert owner.first == 0
    reader._note(0, 2)
    list(owner.tidy(2 * second, readers.needed_from(0)))
    assert owner.first == 2
    reader.forget()
    assert readers.needed_from(0) is None


def test_a_query_is_a_reader_before_it_looks_for_its_first_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogue, of = registered(tmp_path)
    readers = ReaderPositions(catalogue.readers_place(of))
    seen: list[int | None] = []
    monkeypatch.setattr(LogReader, "first", lambda self: seen.append(readers.needed_from(0)) or 0)
    flux.events(str(tmp_path), "clicks").reader.prepare(None)  # type: ignore[attr-defined]
    assert seen == [0]


def test_a_stream_that_was_removed_ends_its_query_and_another_of_its_name_is_refused(tmp_path: Path) -> None:
    catalogue, _ = registered(tmp_path)
    reader = flux.events(str(tmp_path), "clicks").reader
    assert isinstance(reader, EventReader)
    kept = reader.prepare(None)
    catalogue.remove("clicks")
    with pytest.raises(QueryFailed, match="was removed while a query read it"):
        reader._check_registered()
    with pytest.raises(QueryFailed, match="was removed"):
        reader._note(0, 1)
    registered(tmp_path)
    with pytest.raises(QueryFailed, match="removed and registered again"):
        reader._check_registered()
    with pytest.raises(UsageError, match="another checkpointLocation"):
        EventReader(catalogue.place, catalogue.get("clicks"), None).prepare(kept)


def test_a_registration_is_the_same_again_or_refused(tmp_path: Path) -> None:
    catalogue, of = registered(tmp_path)
    assert catalogue.register(StreamDefinition(name="clicks", schema="user LONG, page STRING")) == (of, False)
    with pytest.raises(StreamExists, match="has another definition: name clicks, schema `user` BIGINT"):
        registered(tmp_path, partitions=2)
    with pytest.raises(NoSuchStream, match="no stream 'cliks'"):
        catalogue.get("cliks")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"name": "a/b"}, "name: expected letters"),
        ({"partitions": 0}, "partitions: expected 1 to 64, got 0"),
        ({"schema": "a MAP<STRING, INT>"}, "column 'a' has type map"),
        ({"schema": "a INT, A INT"}, "two columns have one name"),
        ({"time": "user"}, "time: expected a TIMESTAMP column of `user` BIGINT, `page` STRING, got 'user'"),
        ({"delay": "1 second"}, "delay: it belongs to a time column"),
        ({"schema": "infer", "time": "at"}, "the columns are not known yet"),
        ({"retain": Retention("soon")}, "retain.time: expected"),
        ({"retain": Retention(bytes=3)}, "retain.bytes: expected"),
    ],
)
def test_a_definition_that_does_not_fit_is_refused_by_its_part(
    tmp_path: Path, wrong: dict[str, object], said: str
) -> None:
    catalogue, of = registered(tmp_path)
    with pytest.raises(UsageError, match=said.replace("(", r"\(")):
        catalogue.register(msgspec.structs.replace(of, **{"name": "other", **wrong}))


def test_a_request_under_a_name_always_goes_to_one_log(tmp_path: Path) -> None:
    _, of = registered(tmp_path, partitions=4)
    assert {of.log_of(f"client {number}") for number in range(50)} == {0, 1, 2, 3}
    assert of.log_of("ann") == of.log_of("ann")


def test_names_of_pushes_outlive_their_owner(tmp_path: Path) -> None:
    catalogue, of = registered(tmp_path)
    name = PushName(client="ann", number=1)
    assert pushed(owned(catalogue, of), clicks(1), 0, name) == 0
    assert pushed(owned(catalogue, of), clicks(1), 0, name) == 0
    assert owned(catalogue, of).next == 1


def test_flux_events_refuses_a_stream_that_is_not_there_or_has_no_columns(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no stream 'clicks' is registered"):
        flux.events(str(tmp_path), "clicks")
    registered(tmp_path, schema="infer")
    with pytest.raises(UsageError, match="no columns before its first events"):
        flux.events(str(tmp_path), "clicks")
    registered(tmp_path, "arrived", schema="arrived_at STRING")
    with pytest.raises(UsageError, match="give arrival another name"):
        flux.events(str(tmp_path), "arrived")


def test_damage_is_found_by_reading_all_logs(tmp_path: Path) -> None:
    catalogue, of = registered(tmp_path, partitions=2)
    for log in range(2):
        owner = owned(catalogue, of, log)
        for number in range(3):
            pushed(owner, clicks(number), 0)
    run = CliRunner().invoke
    whole = run(app, ["verify", "--location", str(tmp_path), "--json"])
    assert whole.exit_code == 0
    assert [(each["log"], each["next"], each["damage"]) for each in json.loads(whole.stdout)] == [
        (0, 3, ""),
        (1, 3, ""),
    ]
    (segment,) = (tmp_path / "streams" / of.id / "log-1").glob("journal-*")
    bad = bytearray(segment.read_bytes())
    bad[-1] ^= 1
    segment.write_bytes(bad)
    damaged = run(app, ["verify", "--location", str(tmp_path)])
    assert damaged.exit_code == 1
    assert "segment 00000001-00000001 is damaged at byte" in " ".join(damaged.stdout.split())
