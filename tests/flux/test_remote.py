"""An object store as a checkpoint location, with the real protocol of S3 (design: object-stores)."""

from __future__ import annotations

import logging
import pickle
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from kept import LARGE, all_held, checkpoint, opened, orders, standby, take
from pyarrow import fs
from test_location import plan

import flux
from controller.operate.cli.show import _survey
from flux.errors import QueryFailed, UsageError
from flux.eventlog.records import PushName
from flux.eventlog.streams import ReaderPositions, StreamCatalogue, StreamDefinition
from flux.gateway.gateway import Gateway, PendingPush
from flux.gateway.log_writer import NotStored
from flux.gateway.routes import PushEvents
from flux.vault import object_store as remote
from flux.vault.journal import Journal
from flux.vault.location import place_of
from flux.vault.object_store import Objects, Remote
from tests.object_store import serving, uri_in

Location = pytest.importorskip("spark_integration.query.checkpoint_location").CheckpointLocation


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with serving() as found:
        yield found


@pytest.fixture
def uri(endpoint: str) -> str:
    return uri_in(endpoint)


def test_what_a_writer_has_flushed_is_what_the_next_one_reads_and_the_first_one_ends(uri: str) -> None:
    place = pickle.loads(pickle.dumps(place_of(uri)))
    first = place.store()
    journal = opened(first)
    standby(journal).on_orders(orders(1, 0, 5, committed=3))
    take(journal, checkpoint(2, 1, 1, size=LARGE))
    journal.flush()
    before = all_held(journal)
    second = place.store()
    assert (first.generation, second.generation) == (1, 2)
    assert all_held(Journal(second)) == before
    journal.see(9)
    with pytest.raises(QueryFailed, match="another query has been started on the checkpoint location s3://user@kept/"):
        journal.flush()
    for store in (first, second):
        store.close()


def test_a_location_is_that_of_its_plan_and_is_known_again(uri: str) -> None:
    assert Location.open(uri).about is None
    Location.open(uri).take(plan())
    assert Location.open(uri).query == plan().query
    with pytest.raises(UsageError, match="is that of a query now that was just started"):
        Location(place_of(uri), None).take(plan())
    with pytest.raises(UsageError, match=r"s3://user@kept/.*is that of another plan"):
        Location.open(uri).take(plan(middle={"partitions": 5}))


def test_a_streaming_dataframe_needs_a_checkpoint_of_its_own_there(uri: str) -> None:
    """Ask for a checkpoint: Spark reaches the store by other file systems, with other credentials."""
    checkpoint_of = pytest.importorskip("spark_integration.streaming.stream_source").checkpoint_of
    with pytest.raises(UsageError, match=r"source clicks: say where .*checkpoint=.*'s3://user@kept/"):
        checkpoint_of("clicks", None, place_of(uri))
    assert checkpoint_of("clicks", "s3a://kept/clicks", place_of(uri)) == "s3a://kept/clicks"


def test_the_ends_of_a_streaming_dataframe_are_kept_there(uri: str) -> None:
    made = pytest.importorskip("spark_integration.streaming.stream_ends").StreamEnds
    ends = made(place_of(uri), "clicks")
    assert not ends.begins(0, 2)
    assert made(place_of(uri), "clicks").begins(0, 2)
    with pytest.raises(QueryFailed, match="in 3 partitions, and was begun in 2"):
        made(place_of(uri), "clicks").begins(0, 3)


def test_a_prefix_with_something_else_is_refused(uri: str) -> None:
    place_of(uri).write("notes.txt", b"mine")
    with pytest.raises(UsageError, match="is not empty, and nothing of a Flux query is in it"):
        Location.open(uri)


def test_a_password_in_the_uri_is_told_to_nobody(uri: str) -> None:
    place = place_of(uri)
    for said in (str(place), repr(place), f"{Location(place, None)}"):
        assert "secret" not in said


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("zz://bucket/query", "Unrecognized filesystem"),
        ("s3://a:secret@kept/q?scheme=http&region=us-east-1&endpoint_override=127.0.0.1:9", "curlCode: 7"),
        ("s3:///", "checkpointLocation="),
        ("s3://a:secret@my bucket/q", r"'s3://a@my bucket/q': .* syntax error"),
        ("s3://a:a/secret@bucket/q", "'s3://a@bucket/q'"),
        ("s3://a:secret@bucket/q?region=%zz", "syntax error"),
        ("S3A://a:secret@bucket/q?zz=1", "'zz'"),
        ("zz://a:secret@bucket/q", "Unrecognized filesystem"),
    ],
)
def test_a_store_that_cannot_be_reached_is_refused_by_name(given: str, why: str) -> None:
    with pytest.raises(UsageError, match=why) as refused:
        place_of(given)
    assert "secret" not in "".join(traceback.format_exception(refused.value))


def test_the_container_of_azure_is_part_of_the_name() -> None:
    assert (
        str(Remote("abfss://things:secret@mine.dfs.core.windows.net/q?x=1"))
        == "abfss://things@mine.dfs.core.windows.net/q"
    )


def test_an_older_pyarrow_does_without_what_it_does_not_know(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opens = fs.FileSystem.from_uri

    def from_uri(given: str) -> tuple[fs.FileSystem, str]:
        if "allow_delayed_open" in given:
            raise pa.ArrowInvalid("Unexpected query parameter in S3 URI: 'allow_delayed_open'")
        found: tuple[fs.FileSystem, str] = opens(given)
        return found

    monkeypatch.setattr(remote.fs, "FileSystem", SimpleNamespace(from_uri=from_uri))
    place_of(uri).write("notes.txt", b"mine")
    assert place_of(uri).read("notes.txt") == b"mine"


def test_a_bucket_that_is_not_there_is_refused_when_the_query_starts(endpoint: str) -> None:
    with pytest.raises(UsageError, match=r"s3://user@nobody/.* cannot be written"):
        Location.open(uri_in(endpoint, "nobody")).take(plan())


def test_two_programs_at_the_same_time_take_turns_and_one_that_has_died_is_not_waited_for(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, held, most = place_of(uri), [0], [0]

    def hold() -> None:
        with place_of(uri).locked():
            held[0] += 1
            most[0] = max(most[0], held[0])
            time.sleep(0.05)
            held[0] -= 1

    threads = [threading.Thread(target=hold) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert most == [1]
    assert isinstance(place, Remote)
    place.objects.write("locks/dead", b"")
    monkeypatch.setattr(remote, "LOCK_MAX_S", 0.5)
    with pytest.raises(UsageError, match="another program is starting a query on it, or has died within the last 60 s"):
        place.locked().__enter__()
    monkeypatch.setattr(remote, "LOCK_S", 1.0)
    time.sleep(2.1)
    with place.locked():
        pass


def test_requests_that_fail_are_made_again_for_a_while_once_the_query_runs(tmp_path: Path) -> None:
    failing = [3]
    objects = Objects(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "query")
    write = objects._path

    def moody(name: str) -> str:
        if failing[0]:
            failing[0] -= 1
            raise OSError("slow down")
        return write(name)

    objects._path = moody  # type: ignore[method-assign]
    with pytest.raises(OSError, match="slow down"):
        objects.make("state")
    objects.patient()
    objects.make("state")
    objects.write("state/a", b"1")
    assert objects.sizes("state") == {"a": 1}
    objects.remove("state/a")
    objects.remove("state/a")
    assert objects.sizes("state") == objects.sizes("nowhere") == {}


def test_the_command_line_lists_what_is_kept(uri: str) -> None:
    Location.open(uri).take(plan())
    store = place_of(uri).store()
    journal = opened(store)
    standby(journal).on_orders(orders(1, 0, 2, committed=2))
    journal.flush()
    store.close()
    found = _survey(uri)
    assert (found["id"], found["starts"], found["partitions"][0]["steps_after"]) == (plan().query, 1, 2)


def test_events_are_pushed_to_an_object_store_and_read_from_it(uri: str) -> None:
    """Push at two gateways: there is no lock in an object store, so the newest one owns the log, and the earlier one
    finds out."""
    place = pickle.loads(pickle.dumps(place_of(uri)))
    catalogue = StreamCatalogue(place)
    of, _ = catalogue.register(StreamDefinition(name="clicks", schema="user BIGINT, page STRING"))
    gateways = [Gateway(place, f"http://gateway:{number}") for number in range(2)]

    def push(gateway: Gateway, user: int) -> int:
        action = PushEvents("clicks", "lines", "identity", PushName(key=f"k{user}"))
        pending = gateway.answer(action, b'{"user": %d}' % user, None)
        assert isinstance(pending, PendingPush)
        stored: int = pending.ticket.result(30).stored.first
        return stored

    try:
        assert [push(gateways[0], user) for user in range(3)] == [0, 1, 2]
        assert push(gateways[1], 2) == 2, "it is known under its key"
        assert push(gateways[1], 3) == 3
        with pytest.raises(NotStored, match="another gateway has taken over the log"):
            push(gateways[0], 4)
        assert push(gateways[0], 4) == 4, "it takes the log back"
    finally:
        for gateway in gateways:
            gateway.close()
    source = flux.events(uri, "clicks", arrival=None).reader
    source.prepare(None)
    reader, users = source.read(0, None), []
    until = time.monotonic() + 30
    while len(users) < 5 and time.monotonic() < until:
        found = reader.next()
        users += found.batch["user"].to_pylist() if isinstance(found, flux.Positioned) else []
    reader.close()
    assert users == [0, 1, 2, 3, 4]
    assert len(ReaderPositions(catalogue.readers_place(of)).names()) == 1
    catalogue.remove("clicks")
    with pytest.raises(UsageError, match="no stream 'clicks'"):
        flux.events(uri, "clicks")
