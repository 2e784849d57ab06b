"""A service in real processes: registered queries count each event that was answered once, though it is killed and started
again."""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_process import Pusher
from striking import until

import flux
from benchmarks.ports import free_port
from benchmarks.serve import STARTS_S
from benchmarks.serve_process import BEGINS_S
from flux.client import Client, GatewayRefused
from flux.errors import UsageError
from flux.eventlog.log_reader import LogReader
from flux.eventlog.log_store import open_log
from flux.eventlog.records import rows_of
from flux.eventlog.streams import SERVICE_READER, ReaderPositions, StreamCatalogue, StreamDefinition
from flux.outputs.catalogue import OutputCatalogue
from flux.vault.location import Folder
from spark_integration.service.command import IDLE_JVM

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]


def rows_of_output(location: Path, query: str) -> list[dict[str, Any]]:
    """Return the rows of a query's output, from the disk."""
    outputs = OutputCatalogue(Folder(location))
    of = outputs.all().get(query)
    found: list[dict[str, Any]] = []
    if of is None:
        return found
    for partition in range(of.partitions):
        reader = LogReader(open_log(outputs.log_place(of, partition)), query)
        while records := reader.read():
            for record in records:
                found += rows_of(record, of.columns()).to_pylist()
    return found


def files_below(location: Path) -> set[str]:
    return {path.name for part in ("streams", "outputs") for path in (location / part).glob("*")}


ALLOWED = ("service_operators:Above", "service_operators:unlucky", "service_operators:SECRET")


def test_queries_come_and_go_over_http(spark: Any, tmp_path: Path) -> None:
    location = tmp_path / "location"
    location.mkdir(mode=0o700)
    options: dict[str, Any] = {"spark": spark, "workers": 2}
    with flux.serve(location, f"127.0.0.1:{free_port()}", allow=ALLOWED, **options) as service:
        with pytest.raises(UsageError, match="a service runs on"):
            flux.serve(location, f"127.0.0.1:{free_port()}", **options)
        with Client(service.urls, service.token, timeout=STARTS_S) as client:
            client.register_stream("clicks", "user BIGINT, page STRING")
            client.push_events("clicks", [{"user": 0, "page": "before"}])
            register(client, name="home", sql="SELECT user, page FROM clicks WHERE page = '/'")
            register(client, name="fifth", sql="SELECT user FROM home WHERE user % 5 = 0")
            register(client, name="late", **operator("Above", {"limit": 16}, "home"))
            register(client, name="weak", **operator("unlucky", {}, "home"))
            register(client, name="weaker", sql="SELECT user FROM weak")
            check_refusals(client)
            client.push_events("clicks", [{"user": user, "page": "/" if user % 2 else "x"} for user in range(20)])
            until(lambda: len(rows_of_output(location, "fifth")) == 2, "rows of the query behind a query")
            until(lambda: len(rows_of_output(location, "home")) == 10, "rows in an output of their own")
            assert [row["user"] for row in rows_of_output(location, "home")] == list(range(1, 20, 2))
            assert rows_of_output(location, "fifth") == [{"user": 5}, {"user": 15}]
            until(lambda: len(rows_of_output(location, "late")) == 2, "rows of an operator")
            until(lambda: shown(client, "weaker")["status"] == "FAILED", "the failure is told")
            assert "ValueError: user 13" in shown(client, "weak")["error"]
            assert "weak has failed" in shown(client, "weaker")["error"]
            client.push_events("clicks", [{"user": 25, "page": "/"}])
            until(lambda: len(rows_of_output(location, "fifth")) == 3, "the others go on")
            client._call("DELETE", "/v1/queries/home?cascade=true")
            assert client.streams()[0]["readers"] == []
            client.remove_stream("clicks")
        assert {stage.name for stage in service.plan.query.plan.stages} == {"/idle"}
        assert service.plan.parts().failed == {}
        assert files_below(location) == set()


def operator(name: str, arguments: dict[str, Any], *inputs: str) -> dict[str, Any]:
    return {"operator": f"service_operators:{name}", "arguments": arguments, "inputs": inputs}


def check_refusals(client: Client) -> None:
    """Assert that registrations are refused with the reason, and leave nothing."""
    for definition, said in (
        ({"sql": "SELECT user FROM clicks WHERE pages = 1"}, "position 31, at 'pages'"),
        ({"sql": "SELECT a.user FROM clicks a JOIN clicks b ON a.user = b.user"}, "bounds"),
        ({"sql": "SELECT user, count(*) AS n FROM clicks GROUP BY user"}, "update"),
        ({"sql": "SELECT * FROM parquet.`/etc`"}, "no stream and no running query 'parquet./etc'"),
        ({"sql": "SELECT user FROM clicks WHERE )"}, "PARSE_SYNTAX_ERROR"),
        ({"sql": "SELECT 1 AS user"}, "FROM"),
        ({"sql": "SET spark.master = local"}, "SET"),
        (operator("Above", {}, "home"), "limit"),
        (operator("SECRET", {}, "home"), "SECRET"),
        ({"operator": "os:system", "inputs": ["home"]}, "is not allowed here; allowed are service_operators:Above"),
    ):
        with pytest.raises(GatewayRefused, match=re.escape(said)):
            register(client, name="wrong", **definition)
    assert "wrong" not in [each["name"] for each in client._call("GET", "/v1/queries")["queries"]]


def shown(client: Client, query: str) -> dict[str, Any]:
    return client._call("GET", f"/v1/queries/{query}")


@pytest.mark.long
def test_a_service_goes_on_where_it_was(spark: Any, tmp_path: Path) -> None:
    location = tmp_path / "location"
    location.mkdir(mode=0o700)

    def served(*allow: str, at: Path | None = location) -> Any:
        return flux.serve(at, f"127.0.0.1:{free_port()}", allow=allow, spark=spark, workers=2)

    def counted() -> list[int]:
        return [row["n"] for row in rows_of_output(location, "counts")]

    counts = "SELECT user, count(*) AS n FROM clicks GROUP BY user"
    with served(*ALLOWED) as service, Client(service.urls, service.token, timeout=STARTS_S) as client:
        token = service.token
        client.register_stream("clicks", "user BIGINT, page STRING")
        register(client, name="counts", sql=counts, mode="update")
        register(client, name="late", **operator("Above", {"limit": 5}, "clicks"))
        client.push_events("clicks", [{"user": 1}] * 3)
        until(lambda: counted()[-1:] == [3], "three events are counted")
    before = counted()
    with pytest.raises(
        UsageError, match="query late is registered with operator service_operators:Above, which is not"
    ):
        served()
    streams = StreamCatalogue(Folder(location))
    unread, _ = streams.register(StreamDefinition(name="unread", schema="n BIGINT"))
    left = ReaderPositions(streams.readers_place(unread))
    left.note(SERVICE_READER, 0, 0)  # as of a service that was lost in an addition
    with served(*ALLOWED) as service, Client(service.urls, token, timeout=STARTS_S) as client:
        assert service.token is None
        assert left.names() == []
        client.push_events("clicks", [{"user": 1}, {"user": 9}])
        until(lambda: counted()[-2:] in ([4, 1], [1, 4]), "the state is there")
        assert counted()[: len(before)] == before
        until(lambda: len(rows_of_output(location, "late")) == 1, "the operator goes on")
    with served(at=None) as service:
        kept = Path(service.location)
        assert (kept / "queries.json").exists()
    assert not kept.exists()


@pytest.mark.long
def test_late_events_have_queries_of_their_own(spark: Any, tmp_path: Path) -> None:
    location = tmp_path / "location"
    location.mkdir(mode=0o700)
    options: dict[str, Any] = {"spark": spark, "workers": 2}

    def users(query: str) -> list[int]:
        return [row["user"] for row in rows_of_output(location, query)]

    def push(client: Client, user: int, second: int) -> None:
        client.push_events("visits", [{"user": user, "at": f"2026-01-01T00:{second // 60:02}:{second % 60:02}Z"}])

    address = f"127.0.0.1:{free_port()}"
    with flux.serve(location, address, **options) as service:
        token = service.token
        with Client(service.urls, token, timeout=STARTS_S) as client:
            client.register_stream("clicks", "user BIGINT")
            client.register_stream("visits", "user BIGINT, at TIMESTAMP", time="at", delay="1 second")
            with pytest.raises(GatewayRefused, match="'clicks' has the time of arrival, by which no event is late"):
                register(client, name="wrong", sql="SELECT user FROM `clicks.late`")
            with pytest.raises(GatewayRefused, match="would mean the late events of a stream"):
                client.register_stream("visits.late", "user BIGINT")
            made = register(client, name="too_late", sql="SELECT user FROM `visits.late`")
            assert made["reads"] == ["visits"]
            register(client, name="all", sql="SELECT user, at FROM visits")
            for user, second in ((1, 100), (2, 200), (3, 100), (4, 201)):
                push(client, user, second)
            until(lambda: users("all") == [1, 2, 4], "the events that are not late")
            until(lambda: users("too_late") == [3], "the late event")
    with flux.serve(location, address, **options) as service:
        with Client(service.urls, token, timeout=STARTS_S) as client:
            push(client, 5, 120)
            until(lambda: users("too_late") == [3, 5], "the late event of the next life")
            client.remove_query("all")
            push(client, 6, 130)
            until(lambda: users("too_late") == [3, 5, 6], "late events without the others")
            with pytest.raises(GatewayRefused, match="read by too_late"):
                client.remove_stream("visits")
            client.remove_query("too_late")
            assert client.streams()[1]["readers"] == []
        assert {stage.name for stage in service.plan.query.plan.stages} == {"/idle"}


@pytest.mark.long
def test_queries_with_a_damaged_result_or_stream_fail_alone(spark: Any, tmp_path: Path) -> None:
    location = tmp_path / "location"
    location.mkdir(mode=0o700)
    options: dict[str, Any] = {"spark": spark, "workers": 2, "allow": ALLOWED}
    address = f"127.0.0.1:{free_port()}"
    with flux.serve(location, address, **options) as service, Client(service.urls, service.token) as client:
        token = service.token
        client.register_stream("clicks", "user BIGINT")
        for name in ("broken", "sound"):
            register(client, name=name, sql="SELECT user FROM clicks")
        register(client, name="weak", **operator("unlucky", {}, "sound"))
        client.register_stream("users", "user BIGINT")
        register(client, name="people", sql="SELECT user FROM users")
        for stream in ("clicks", "users"):
            client.push_events(stream, [{"user": 1}])
        for name in ("broken", "sound", "weak", "people"):
            until(lambda name=name: rows_of_output(location, name), f"rows of {name}")
    output, stream = OutputCatalogue(Folder(location)).get("broken"), StreamCatalogue(Folder(location)).get("users")
    for part in (f"outputs/{output.id}", f"streams/{stream.id}"):
        for segment in (location / part / "log-0").glob("*-*"):
            segment.write_bytes(b"no head" + segment.read_bytes()[7:])
    with flux.serve(location, address, **options) as service, Client(service.urls, token) as client:
        until(lambda: shown(client, "broken")["status"] == "FAILED", "the failure of one query is told")
        assert "Restore the log from a copy" in shown(client, "broken")["error"]
        until(lambda: shown(client, "people")["status"] == "FAILED", "the failure of a stream is that of its query")
        assert "Restore the log from a copy" in shown(client, "people")["error"]
        until(
            lambda: [each["readers"] for each in client.streams()] == [["service"], []], "the service leaves the stream"
        )
        client.push_events("clicks", [{"user": 13}])
        until(lambda: len(rows_of_output(location, "sound")) == 2, "the other queries go on")
        until(lambda: shown(client, "weak")["status"] == "FAILED", "an error of its code ends a query")
        assert client.restart_query("weak")["status"] == "RUNNING"
        client.push_events("clicks", [{"user": 14}])
        until(lambda: rows_of_output(location, "weak") == [{"user": 1}, {"user": 14}], "its result goes on")
        client.remove_query("broken")
        register(client, name="broken", sql="SELECT user FROM clicks")
        client.push_events("clicks", [{"user": 15}])
        until(lambda: rows_of_output(location, "broken") == [{"user": 15}], "another query of this name")


def register(client: Client, **definition: Any) -> dict[str, Any]:
    return client._call("POST", "/v1/queries", json.dumps(definition).encode())


class ServiceProcess:
    """``flux serve`` on a folder."""

    def __init__(self, location: Path) -> None:
        location.mkdir(mode=0o700, exist_ok=True)
        self.location, self.port, self.token = location, free_port(), ""
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Start it, and wait until it serves."""
        command = [
            sys.executable, "-m", "flux", "serve", "--location", str(self.location), "--http", f"127.0.0.1:{self.port}",
            "--workers", "2", "--conf", "spark.ui.enabled=false", "--conf", "spark.driver.memory=700m",
            "--conf", f"spark.flux.workers.timeout={BEGINS_S:.0f}s", "--conf", "spark.flux.heartbeat.timeout=5s",
            "--conf", f"spark.driver.extraJavaOptions={IDLE_JVM}",  # no archive of classes: it costs 40 s of a processor
        ]  # fmt: skip
        self.process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        self._said: list[str] = []
        threading.Thread(target=self._listen, args=(self.process.stderr,), daemon=True).start()
        end = time.monotonic() + BEGINS_S
        while not any("serving" in line for line in self._said):
            assert self.process.poll() is None, "".join(self._said)[-3000:]
            assert time.monotonic() < end, "".join(self._said)[-3000:]
            time.sleep(0.05)

    def _listen(self, lines: Any) -> None:
        for line in lines:
            if found := re.search(r"not shown again: (\S+)", line):
                self.token = found[1]
            self._said.append(line)

    def kill(self) -> None:
        """Kill it, with everything that it has started by the system's means alone, and start it again."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(STARTS_S)
        self.start()

    def close(self) -> None:
        """End it by a signal, and assert that it ends well and soon."""
        began = time.monotonic()
        self.process.terminate()
        assert self.process.wait(STARTS_S) == 0, "".join(self._said)[-3000:]
        assert time.monotonic() - began < STARTS_S / 3


class FollowingReader(threading.Thread):
    """A reader that follows results as server-sent events until the connection ends."""

    def __init__(self, service: ServiceProcess, query: str) -> None:
        super().__init__(daemon=True)
        self._url, self._token = f"{service.url}/v1/queries/{query}/events?after=oldest", service.token
        self.received = 0
        self.start()

    def run(self) -> None:
        headers = {"Authorization": f"Bearer {self._token}", "Accept": "text/event-stream"}
        with (
            contextlib.suppress(httpx.TransportError),
            httpx.stream("GET", self._url, headers=headers, timeout=STARTS_S) as answer,
        ):
            for part in answer.iter_bytes():
                self.received += len(part)


@pytest.mark.long
@pytest.mark.starts_spark
@pytest.mark.parametrize("kills", [5, 20])
def test_each_answered_event_is_counted_once_though_the_service_is_killed(tmp_path: Path, kills: int) -> None:
    service = ServiceProcess(tmp_path / "location")
    try:
        with Client(service.url, service.token, timeout=STARTS_S) as client:
            client.register_stream("clicks", "who BIGINT, n BIGINT")
            register(client, name="all", sql="SELECT who, n FROM clicks")
            register(client, name="some", sql="SELECT who, n FROM all WHERE n % 3 = 0")
            pushers = [Pusher(service.url, service.token, "clicks", who) for who in range(3)]
            for kill in range(kills):
                wanted = [each.pushed + 100 for each in pushers]
                until(
                    lambda wanted=wanted: all(a.pushed >= b for a, b in zip(pushers, wanted, strict=True)),
                    "pushes go on",
                )
                service.kill()
                assert [each["status"] for each in client._call("GET", "/v1/queries")["queries"]] == ["RUNNING"] * 2, (
                    kill
                )
            for each in pushers:
                each.stop()
            expected = Counter((each.who, n) for each in pushers for n in range(each.pushed))
            found: Counter[tuple[int, int]] = Counter()

            def counted() -> bool:
                found.clear()
                found.update((row["who"], row["n"]) for row in rows_of_output(service.location, "all"))
                return sum(found.values()) >= sum(expected.values())

            until(counted, "all rows in the output")
            assert found == expected
            third = Counter({key: n for key, n in expected.items() if key[1] % 3 == 0})
            until(lambda: len(rows_of_output(service.location, "some")) >= len(third), "all rows behind it")
            assert Counter((row["who"], row["n"]) for row in rows_of_output(service.location, "some")) == third
            reader = FollowingReader(service, "some")
            until(lambda: reader.received, "a reader gets results")
    finally:
        service.close()  # soon, though a reader is connected
    reader.join(STARTS_S)
    assert not reader.is_alive()


@pytest.mark.long
@pytest.mark.starts_spark
def test_registrations_are_whole_or_gone_though_the_service_is_killed(tmp_path: Path) -> None:
    """Queries come and go all the time. After each kill the ones that were answered are there, and the others as a whole or
    not at all."""
    chosen = random.Random(7)
    service = ServiceProcess(tmp_path / "location")
    there: set[str] = set()
    unsure: set[str] = set()
    try:
        with Client(service.url, service.token, timeout=STARTS_S) as client:
            client.register_stream("clicks", "n BIGINT")
            for kill in range(4):
                killer = threading.Timer(chosen.uniform(0.3, 4.0), service.process.kill)
                killer.start()
                number = 0
                while service.process.poll() is None:
                    name = f"q{kill}_{number}"
                    number += 1
                    unsure.add(name)
                    with contextlib.suppress(Exception):
                        raw(
                            service,
                            "POST",
                            "/v1/queries",
                            {"name": name, "sql": f"SELECT n + {number} AS n FROM clicks"},
                        )
                        unsure.discard(name)
                        there.add(name)
                    if there and chosen.random() < 0.5:
                        gone = chosen.choice(sorted(there))
                        there.discard(gone)
                        unsure.add(gone)
                        with contextlib.suppress(Exception):
                            raw(service, "DELETE", f"/v1/queries/{gone}", None)
                            unsure.discard(gone)
                killer.join()
                service.process.wait(STARTS_S)
                service.start()
                found = {each["name"]: each["status"] for each in client._call("GET", "/v1/queries")["queries"]}
                assert set(found.values()) <= {"RUNNING"}
                assert there <= set(found) <= there | unsure
                assert set(OutputCatalogue(Folder(service.location)).all()) == set(found)
                there, unsure = set(found), set()
            client.push_events("clicks", [{"n": 1}])
            for name in there:
                until(lambda name=name: len(rows_of_output(service.location, name)) == 1, f"the row of {name}")
    finally:
        service.close()


def raw(service: ServiceProcess, method: str, path: str, content: Any) -> None:
    """Make a request once. Any error: it is not known whether it was carried out."""
    headers = {"Authorization": f"Bearer {service.token}"}
    answer = httpx.request(method, service.url + path, json=content, headers=headers, timeout=STARTS_S)
    answer.raise_for_status()
