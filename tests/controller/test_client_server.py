"""From the connection file to the answer, over real sockets: a true controller with workers, and fakes to be operated."""

from __future__ import annotations

import os
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
import zmq
from harness import LIMIT_S, Peer, Rows, ThreadQuery, dataframe
from operated import served

import flux
from controller.operate import client as client_module
from controller.operate.client import QueryClient, RequestRefused, choose, survey
from controller.operate.connection_file import QueryConnection, find_all, write
from controller.operate.requests import (
    REQUEST_BYTES_MAX,
    Accepted,
    FailWorker,
    GetHistory,
    GetMetrics,
    GetPartitions,
    GetStatus,
    History,
    MetricsText,
    Partitions,
    Refusal,
    SetWorkers,
    Status,
    decode_answer,
    encode_request,
)
from controller.server import Server
from flux.errors import Unreachable, UsageError
from flux.settings import Settings
from flux.shell.transport import Sockets
from flux.wire.frames import PREFIX

SCHEMA = pa.schema([("k", pa.int64())])


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLUX_RUNTIME_DIR", str(tmp_path / "flux"))
    # A machine under load answers late; tests of a query that does not answer set limits of their own.
    monkeypatch.setattr(client_module, "SURVEY_S", LIMIT_S)
    return tmp_path / "flux"


@flux.stage(key="k", partitions=4)
class Count(flux.Aggregate):
    n = flux.count()


def until(look: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not look():
        assert time.monotonic() < end
        time.sleep(0.01)


# ---- a true query


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_a_running_query_is_found_and_asked_and_goes_when_it_ends(place: Path, encrypted: bool) -> None:
    gate = threading.Event()

    def rows() -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"k": list(range(100))}, schema=SCHEMA)
        assert gate.wait(2 * LIMIT_S)

    flow = Rows().stage(Count(dataframe(SCHEMA)))
    with ThreadQuery(flow, encrypted=encrypted, progress_interval="20ms", metrics_port=0) as query:
        query.started().feed([rows()])
        (sighting,) = survey()
        assert sighting.stale == ""
        assert sighting.status is not None
        assert (sighting.status.id, sighting.status.phase) == ("q", "running")
        connection = choose(None)
        assert bool(connection.public_key) == encrypted
        with QueryClient(connection) as client:
            until(lambda: client.ask(GetStatus(), Status).stages[0].rows_in == 100)
            status = client.ask(GetStatus(), Status)
            assert [stage.name for stage in status.stages] == ["Count", "Sink"]
            assert [worker.worker for worker in status.workers] == [0, 1]
            partitions = client.ask(GetPartitions(stage="Count"), Partitions)
            assert [(r.partition, r.role) for r in partitions.replicas] == [(p, "primary") for p in range(4)]
            assert client.ask(GetHistory(stage="Count"), History).events == []
            text = client.ask(GetMetrics(), MetricsText).text
            assert 'flux_rows_in_total{id="q",query="q",stage="Count"} 100.0' in text
            with urllib.request.urlopen(status.metrics, timeout=LIMIT_S) as response:
                assert 'flux_rows_in_total{id="q",query="q",stage="Count"} 100.0' in response.read().decode()
        gate.set()
        query.wait()
    assert list(place.iterdir()) == []
    with pytest.raises(Unreachable, match="no query is running"):
        choose(None)


def test_what_operators_do_wrong_does_not_reach_the_workers_port_nor_the_rows(place: Path) -> None:
    with ThreadQuery(Rows().stage(Count(dataframe(SCHEMA)))) as query:
        query.started()
        connection = choose(None)
        for secret in (b"guess", query.plan.secret):  # the right to send rows is not the right to operate
            stranger = msgspec.structs.replace(connection, secret=secret)
            with (
                QueryClient(stranger) as client,
                pytest.raises(RequestRefused, match="another's or an old one") as refused,
            ):
                client.ask(FailWorker(worker=0), Status)
            assert refused.value.kind == "secret"
        with QueryClient(connection) as client:
            assert 'flux_requests_refused_total{id="q",query="q"} 2.0' in eventually_text(client)
            assert len(client.ask(GetStatus(), Status).workers) == 2
        assert query.server.core.refused == 0
        query.feed([[pa.RecordBatch.from_pydict({"k": [1]}, schema=SCHEMA)]])
        query.wait()


def eventually_text(client: QueryClient) -> str:
    """Wait for a progress report and return the metrics."""
    texts: list[str] = []
    until(lambda: texts.append(client.ask(GetMetrics(), MetricsText).text) or "flux_requests_refused" in texts[-1])  # type: ignore[func-returns-value]
    return texts[-1]


def test_a_query_that_must_not_be_operated_has_no_file_and_no_port(place: Path) -> None:
    with ThreadQuery(Rows().stage(Count(dataframe(SCHEMA))), operate="false") as query:
        query.started()
        assert not place.exists()
        with pytest.raises(Unreachable):
            choose(None)
        query.feed([[pa.RecordBatch.from_pydict({"k": [1]}, schema=SCHEMA)]])
        query.wait()


def test_a_folder_that_cannot_be_trusted_is_a_word_in_the_log_and_not_the_end_of_a_query(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place.mkdir()
    place.chmod(0o777)
    with caplog.at_level("WARNING", "flux"), ThreadQuery(Rows().stage(Count(dataframe(SCHEMA)))) as query:
        query.started()
        assert "cannot be operated" in caplog.text
        assert "chmod 700" in caplog.text
        query.feed([[pa.RecordBatch.from_pydict({"k": [1]}, schema=SCHEMA)]])
        query.wait()


def test_metrics_at_a_port_that_is_taken_are_an_error_before_anything_runs(place: Path) -> None:
    with ThreadQuery(Rows().stage(Count(dataframe(SCHEMA))), metrics_port=0) as query:
        port = int(choose(None).metrics.rpartition(":")[2].removesuffix("/metrics"))
        settings = Settings.of(None, metrics_port=port)
        second = Server(replace(query.plan, settings=settings), 1, "127.0.0.1", None, "second", None)
        with pytest.raises(UsageError, match="metrics cannot be served"):
            second.start()
        assert second.close(LIMIT_S)
        assert [found.path.name for found in find_all()] == ["q.json"]
        query.started().feed([[]])
        query.wait()


# ---- which query is meant


def test_a_query_is_meant_by_name_id_or_the_beginning_of_its_id() -> None:
    with served("clicks", "aa11"), served("views", "aa22"), served(None, "bb33"):
        assert choose("clicks").id == "aa11"
        assert choose("aa22").id == "aa22"
        assert choose("b").id == "bb33"
        with pytest.raises(UsageError, match=r"'aa' may be any of .*clicks \(aa11\).*views \(aa22\)"):
            choose("aa")
        with pytest.raises(UsageError, match="several queries are running, say which"):
            choose(None)
        for nobody in ("", "cc", "click"):
            with pytest.raises(Unreachable, match=r"no running query is called .*views \(aa22\)"):
                choose(nobody)
        assert [s.status.id for s in survey() if s.status] == ["aa11", "aa22", "bb33"]


def test_two_queries_of_the_same_name_are_told_apart_by_id() -> None:
    with served("clicks", "aa11"), served("clicks", "bb22"):
        with pytest.raises(UsageError, match=r"clicks \(aa11\), clicks \(bb22\)"):
            choose("clicks")
        assert choose("bb").id == "bb22"


def test_queries_of_one_process_are_asked_apart() -> None:
    with served("one", "aa11") as one, served("two", "bb22", encrypted=True) as two:
        for name in ("one", "two"):
            with QueryClient(choose(name)) as client:
                assert client.ask(GetStatus(), Status).name == name
                client.ask(FailWorker(worker=1 if name == "one" else 2), Accepted)
        assert [told[:2] for told in one.told] == [("fail", 1)]
        assert [told[:2] for told in two.told] == [("fail", 2)]


# ---- files without a live query behind them


def copied(connection: QueryConnection, id: str, **changes: object) -> Path:
    return write(msgspec.structs.replace(connection, id=id, **changes))


def test_stale_files_are_shown_once_and_cleaned_up_and_hide_no_query(place: Path) -> None:
    with served("clicks", "aa11"), socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # without a listener
        good = choose(None)
        copied(good, "gone", pid=1 << 22)
        copied(good, "another", process_started=good.process_started - 100)
        copied(good, "deaf", endpoint=f"tcp://127.0.0.1:{free.getsockname()[1]}")
        far = copied(good, "far", host="elsewhere")
        assert choose(None) == good
        stale = {s.found.connection.id: s.stale for s in survey() if s.found.connection and s.stale}
        assert stale == {
            "gone": f"its process {1 << 22} is gone",
            "another": f"process {os.getpid()} is another one now",
            "deaf": f"no process listens at tcp://127.0.0.1:{free.getsockname()[1]}",
            "far": "runs on elsewhere: use the command line there",
        }
        assert {path.name for path in place.iterdir()} == {"aa11.json", far.name}
        assert [s.stale for s in survey()] == ["", "runs on elsewhere: use the command line there"]
        far.unlink()


def test_a_controller_that_says_nothing_is_unreachable_after_a_while_and_its_file_stays(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drivers that are paused, or busy for long, come back."""
    monkeypatch.setattr(client_module, "SURVEY_S", 0.5)
    with served("clicks", "aa11"), socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        path = copied(choose(None), "mute", endpoint=f"tcp://127.0.0.1:{silent.getsockname()[1]}", name="mute")
        with (
            QueryClient(choose("mute")) as client,
            pytest.raises(Unreachable, match=r"mute .*does not answer within 0\.05 s"),
        ):
            client.ask(GetStatus(), Status, 0.05)
        assert [bool(s.stale) for s in survey()] == [False, True]
        assert path.exists()
        path.unlink()


def test_a_query_that_has_just_ended_is_unreachable_at_once() -> None:
    with served("clicks", "aa11"):
        connection = choose(None)
    with QueryClient(connection) as client, pytest.raises(Unreachable, match="query clicks has ended"):
        client.ask(GetStatus(), Status, timeout_s=3600)


def test_a_query_that_ends_while_it_is_asked_has_ended_and_is_not_overloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([True, False])
    with served("clicks", "aa11"), socket.socket() as silent:
        found = choose(None)
        monkeypatch.setattr(client_module, "listening", lambda endpoint: next(answers))
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        asked = msgspec.structs.replace(found, id="mute", name="mute", endpoint=endpoint)
        with QueryClient(asked) as client, pytest.raises(Unreachable, match="query mute has ended"):
            client.ask(GetStatus(), Status, 0.05)


# ---- bad input at the port

NONSENSE: dict[str, list[bytes]] = {
    "garbage": [b"\x00\xff garbage" * 7],
    "nothing": [b""],
    "a truncated request": [encode_request(SetWorkers(workers=4))[0][:-2]],
    "values nested without end": [PREFIX + b"\x81\xa4type" * 1000],
}


def test_nonsense_at_the_operators_port_is_counted_and_changes_nothing() -> None:
    with served("clicks", "aa11") as core:
        connection = choose(None)
        for frames in NONSENSE.values():
            with Peer(connection.endpoint, connection.secret, sealed=True) as peer:
                peer.send(*frames)
                answer = peer.recv()
                assert answer is not None
                assert isinstance(decode_answer(answer), Refusal)
        with QueryClient(connection) as client:
            refused = f'flux_requests_refused_total{{id="aa11",query="clicks"}} {float(len(NONSENSE))}'
            until(lambda: refused in client.ask(GetMetrics(), MetricsText).text)
        assert core.told == []


@pytest.mark.parametrize("secret", [b"", b"s" * 32, b"rows"], ids=["none", "another", "that of the rows"])
def test_a_wrong_secret_opens_nothing(secret: bytes) -> None:
    with served("clicks", "aa11") as core:
        connection = choose(None)
        with Peer(connection.endpoint, secret, sealed=True, limit_s=0.3) as stranger:
            assert not stranger.met()
        with Peer(connection.endpoint, connection.secret, sealed=False) as stranger:
            stranger.send(*encode_request(FailWorker(worker=1)))  # after the proof, a message without a seal
            stranger.limit_s = 0.2
            assert stranger.recv() is None
        assert core.told == []


def test_a_request_that_was_heard_cannot_be_made_again() -> None:
    """Replayed by an attacker on the way, on another connection or on that of the operator, the request has no effect."""
    with served("clicks", "aa11") as core:
        connection = choose(None)
        with Peer(connection.endpoint, connection.secret, sealed=True) as peer:
            assert peer.met()
            assert peer.link._session is not None
            sealed = peer.link._session.seal(encode_request(FailWorker(worker=1))[0])
            for _ in range(3):
                peer.link._send([sealed])
            assert peer.recv() is not None
            peer.limit_s = 0.2
            assert peer.recv() is None
        with Peer(connection.endpoint, connection.secret, sealed=True) as another:
            assert another.met()
            another.link._send([sealed])
            another.limit_s = 0.2
            assert another.recv() is None
        assert [told[0] for told in core.told] == ["fail"]


def test_an_oversized_request_closes_its_connection_and_no_other() -> None:
    with served("clicks", "aa11") as core:
        connection = choose(None)
        with QueryClient(connection) as client, Peer(connection.endpoint, connection.secret, sealed=True) as peer:
            assert client.ask(GetStatus(), Status).id == "aa11"
            assert peer.met()
            before = peer.link._caller
            peer.send(bytes(REQUEST_BYTES_MAX + 1024))
            peer.until(lambda: peer.link._caller is not before)
            assert peer.met()
            assert peer.link._caller is not before, "it is another connection"
            assert client.ask(GetStatus(), Status).id == "aa11"
        assert core.told == []


class Deaf(Sockets):
    """A client that takes one answer, and leaves the others where they are."""

    def _socket(self, kind: int, undo: ExitStack) -> Any:
        raw = super()._socket(kind, undo)
        raw.rcvhwm = 1
        raw.setsockopt(zmq.HEARTBEAT_IVL, 0)  # as at ports that have a limit
        return raw


def test_answers_that_nobody_reads_do_not_pile_up_without_bound() -> None:
    asked = 2000  # their answers do not fit into the kernel's buffers of a connection
    with served("clicks", "aa11") as core:
        looked: list[None] = []
        loads = core.load_table
        core.load_table = lambda: looked.append(None) or loads()
        connection = choose(None)
        with Peer(connection.endpoint, connection.secret, sealed=True, kind=Deaf) as peer:
            assert peer.met()
            for _ in range(asked):
                peer.send(*encode_request(GetMetrics()))
            until(lambda: len(looked) >= asked)
            with QueryClient(connection) as client:
                assert client.ask(GetStatus(), Status).id == "aa11"
            read = 0
            assert peer.recv() is not None
            peer.limit_s = 0.5
            while peer.recv() is not None:
                read += 1
            assert read < asked - 1


def test_a_plain_peer_cannot_talk_to_an_encrypted_query() -> None:
    with served("clicks", "aa11", encrypted=True) as core:
        connection = choose(None)
        plain = msgspec.structs.replace(connection, public_key="")
        with QueryClient(plain) as client, pytest.raises(Unreachable, match="does not answer"):
            client.ask(FailWorker(worker=1), Accepted, 0.2)
        with QueryClient(connection) as client:
            assert client.ask(GetStatus(), Status).id == "aa11"
        assert core.told == []
