"""Queries over HTTP: a gateway, the port of its service, and a registry whose plan is a dictionary."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from typer.testing import CliRunner

from controller.operate.cli import app
from flux.errors import QueryTimeout, UsageError
from flux.eventlog.streams import SERVICE_READER, ReaderPositions, StreamCatalogue, query_of, reader_of
from flux.gateway import gateway
from flux.gateway.tokens import Allowance, TokenRegister
from flux.registry.definitions import RegisteredQuery
from flux.registry.query_catalogue import QueryCatalogue
from flux.registry.service_calls import PATH
from flux.registry.service_hold import ServiceHold, address_of
from spark_integration.growing import imported_files
from spark_integration.growing.imported_files import check_unchanged
from spark_integration.service import registry_port
from spark_integration.service.registrar import Registrar
from spark_integration.service.registry_port import RegistryPort
from tests.flux.gateways import HeldClient, problem
from tests.flux.held_plan import HeldPlan
from tests.flux.live_gateways import LiveGateway

#: Bytes of state that all queries may have.
STATE_MAX = 1000


class Served:
    """A service on the location of a gateway."""

    def __init__(self, client: HeldClient, gateways: Sequence[str] = ()) -> None:
        self.client = client
        self.plan = HeldPlan(lambda: None)
        catalogue = QueryCatalogue(client.place)
        catalogue.claim()
        self._alone = ThreadPoolExecutor(1)
        streams = StreamCatalogue(client.place)
        self.registrar = registrar = Registrar(catalogue, streams, self.plan, self.plan.forget_output, STATE_MAX)
        self.port = RegistryPort(registrar.answer, self._alone)
        self._hold = ServiceHold(client.place)
        self.secret = self._hold.publish(self.port.url, gateways).secret
        self.port.open(self.secret)

    def register(self, token: str | None = None, **definition: Any) -> httpx.Response:
        return self.client.call("POST", "/v1/queries", msgspec.json.encode(definition), token=token)

    def close(self, gone: bool = True) -> None:
        self.port.close()
        self._alone.shutdown()
        if gone:
            self._hold.close()


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(gateway, "BELIEVED_S", 0.0)  # tokens are known as soon as they are made
    client = HeldClient(tmp_path)
    client.register()
    made = Served(client)
    yield made
    made.close()
    client.close()


def test_a_query_is_registered_shown_and_removed(served: Served) -> None:
    client = served.client
    answer = served.register(name="home", sql="clicks")
    assert answer.status_code == 201
    found = answer.json()
    assert (found["status"], found["reads"], found["schema"], found["sql"]) == (
        "RUNNING",
        ["clicks"],
        "`n` BIGINT",
        "clicks",
    )
    assert found["replicas"] is None
    assert served.register(name="home", sql="clicks").status_code == 200
    assert problem(served.register(name="home", sql="clicks clicks")) == (409, "query_exists")
    assert served.register(name="behind", sql="home", replicas=2).json()["replicas"] == 2
    shown = client.call("GET", "/v1/queries").json()["queries"]
    assert [(each["name"], each["read_by"]) for each in shown] == [("home", ["behind"]), ("behind", [])]
    assert client.call("GET", "/v1/queries/behind").json()["reads"] == ["home"]
    assert problem(client.call("DELETE", "/v1/queries/home")) == (409, "has_readers")
    assert client.call("DELETE", "/v1/queries/home?cascade=true").status_code == 204
    assert client.call("GET", "/v1/queries").json()["queries"] == []
    assert (served.plan.queries, served.plan.streams, served.plan.outputs) == ({}, set(), set())
    assert problem(client.call("DELETE", "/v1/queries/home")) == (404, "no_such_query")
    assert problem(client.call("GET", "/v1/queries/home")) == (404, "no_such_query")


def test_a_query_that_has_failed_is_restarted(served: Served) -> None:
    client = served.client
    served.register(name="home", sql="clicks")
    served.plan.failed["home"] = "division by zero"
    served.plan.queries.pop("home")
    served.register(name="other", sql="clicks")  # the service looks at its plan
    assert client.call("GET", "/v1/queries/home").json()["status"] == "FAILED"
    pushes = client.token_for("push", "read")
    assert problem(client.call("POST", "/v1/queries/home/restart", token=pushes)) == (403, "no_right")
    answer = client.call("POST", "/v1/queries/home/restart")
    assert (answer.status_code, answer.json()["status"], answer.json()["error"]) == (200, "RUNNING", "")
    assert set(served.plan.queries) == {"home", "other"}
    assert problem(client.call("POST", "/v1/queries/nothing/restart")) == (404, "no_such_query")


def test_a_stream_goes_with_the_queries_that_read_it(served: Served) -> None:
    client = served.client
    served.register(name="home", sql="clicks")
    assert problem(client.register(name="home")) == (409, "stream_exists")
    refused = client.call("DELETE", "/v1/streams/clicks")
    assert problem(refused) == (409, "has_readers")
    assert "read by home" in refused.json()["error"]["message"]
    assert client.call("DELETE", "/v1/streams/clicks?cascade=true").status_code == 204
    assert client.call("GET", "/v1/streams").json()["streams"] == []
    assert client.call("GET", "/v1/queries").json()["queries"] == []


@pytest.mark.parametrize(
    ("definition", "refused"),
    [
        ({"name": "a b", "sql": "clicks"}, (400, "unfit_query")),
        ({"name": "q"}, (400, "unfit_query")),
        ({"name": "q", "sql": "clicks", "more": 1}, (400, "unfit_query")),
        ({"name": "q", "sql": "nothing"}, (404, "no_such_input")),
        ({"name": "clicks", "sql": "clicks"}, (409, "query_exists")),
        ({"name": "q", "sql": "x" * 70_000}, (413, "too_large")),
    ],
)
def test_a_registration_that_does_not_fit_changes_nothing(
    served: Served, definition: dict[str, Any], refused: tuple[int, str]
) -> None:
    assert problem(served.register(**definition)) == refused
    assert served.client.call("GET", "/v1/queries").json()["queries"] == []
    assert served.plan.queries == {}


def test_a_token_registers_what_it_may_read(served: Served) -> None:
    client = served.client
    other = client.token_for("query", "read", streams=("mine", "other"))
    answer = served.register(token=other, name="mine", sql="clicks")
    assert problem(answer) == (403, "no_right")
    assert "'read' on stream 'clicks'" in answer.json()["error"]["message"]
    reader = client.token_for("query", "read", streams=("mine", "clicks"))
    assert problem(served.register(token=reader, name="yours", sql="clicks")) == (403, "no_right")
    assert served.register(token=reader, name="mine", sql="clicks").status_code == 201
    assert problem(client.call("DELETE", "/v1/queries/mine", token=client.token_for("push"))) == (403, "no_right")
    assert client.call("GET", "/v1/queries", token=other).json()["queries"][0]["name"] == "mine"
    served.register(name="others", sql="mine")
    refused = client.call("DELETE", "/v1/queries/mine?cascade=true", token=reader)
    assert problem(refused) == (403, "no_right")
    assert "'query' on stream 'others'" in refused.json()["error"]["message"]


def test_without_a_service_registrations_promise_nothing(tmp_path: Path) -> None:
    client = HeldClient(tmp_path)
    client.register()
    served = Served(client)
    served.register(name="home", sql="clicks")
    served.close(gone=False)  # as one that was killed
    assert problem(served.register(name="more", sql="clicks")) == (503, "no_service")
    assert [each["name"] for each in client.call("GET", "/v1/queries").json()["queries"]] == ["home"]
    assert client.push(b'{"user": 1}').status_code == 200
    client.place.remove("service.json")
    assert problem(client.call("DELETE", "/v1/queries/home")) == (503, "no_service")
    client.close()


def test_a_plan_that_does_not_change_in_time_is_no_error_of_the_client(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(query: RegisteredQuery) -> None:
        raise QueryTimeout("worker 1 has not confirmed")

    monkeypatch.setattr(served.plan, "add", add)
    assert problem(served.register(name="home", sql="clicks")) == (503, "not_changed")
    assert served.client.call("GET", "/v1/queries").json()["queries"] == []


def test_files_of_the_service_that_have_changed_are_no_error_of_the_client(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(query: RegisteredQuery) -> None:
        check_unchanged(["written_over"], f"cannot add {query.name}")

    served.register(name="home", sql="clicks")
    served.plan.failed["home"] = "boom"
    file = tmp_path / "written_over.py"
    monkeypatch.setitem(imported_files._seen, "written_over", (str(file), b"the digest of a file that is gone"))
    monkeypatch.setattr(served.plan, "add", add)
    for answer in (
        served.register(name="more", sql="clicks"), served.client.call("POST", "/v1/queries/home/restart"),
    ):  # fmt: skip
        assert problem(answer) == (503, "not_changed")
        assert "module written_over has changed since the service was started" in answer.json()["error"]["message"]
        assert str(tmp_path) not in answer.text
    shown = served.client.call("GET", "/v1/queries")
    assert [each["name"] for each in shown.json()["queries"]] == ["home"]
    assert str(tmp_path) not in shown.text


def test_a_removal_that_takes_too_long_goes_on_later(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    client = served.client
    served.register(name="home", sql="clicks")
    with monkeypatch.context() as patched:

        def take(name: str) -> None:
            raise QueryTimeout(f"{client.place}: worker 1 has not confirmed")

        patched.setattr(served.plan, "take", take)
        refused = client.call("DELETE", "/v1/queries/home")
    assert problem(refused) == (503, "not_changed")
    assert refused.json()["error"]["message"] == "the location: worker 1 has not confirmed"
    assert client.call("GET", "/v1/queries/home").json()["status"] == "REMOVING"
    assert served.register(name="more", sql="clicks").status_code == 201
    assert problem(client.call("GET", "/v1/queries/home")) == (404, "no_such_query")


def test_calls_without_the_secret_are_refused(served: Served) -> None:
    for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": f"Bearer {served.client.token}"}):
        assert httpx.post(served.port.url + PATH, content=b"{}", headers=headers).status_code == 401
    right = {"Authorization": f"Bearer {served.secret}"}
    assert httpx.post(served.port.url + PATH, content=b"{", headers=right).status_code == 400
    assert httpx.post(served.port.url + PATH, content=b"x" * (1 << 20), headers=right).status_code == 413
    assert httpx.get(served.port.url + PATH, headers=right).status_code == 405


def test_more_calls_than_can_wait_are_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_port, "WAITING_MAX", 1)
    begun, go_on = threading.Event(), threading.Event()

    def schema_of(*given: Any) -> str:
        begun.set()
        assert go_on.wait(30)
        return "`n` BIGINT"

    monkeypatch.setattr(served.plan, "schema_of", schema_of)
    with ThreadPoolExecutor(1) as other:
        first = other.submit(served.register, name="first", sql="clicks")
        assert begun.wait(30)
        assert problem(served.register(name="second", sql="clicks")) == (429, "busy")
        go_on.set()
        assert first.result().status_code == 201


def test_a_reader_that_does_not_come_back_is_forgotten(served: Served) -> None:
    client = served.client
    of = StreamCatalogue(client.place).get("clicks")
    ReaderPositions(StreamCatalogue(client.place).readers_place(of)).note("query-1", 0, 7)
    assert client.call("GET", "/v1/streams/clicks").json()["readers"] == ["query-1"]
    assert problem(client.call("DELETE", "/v1/streams/clicks/readers/query-2")) == (404, "no_such_reader")
    assert problem(client.call("DELETE", "/v1/streams/x/readers/query-1")) == (404, "no_such_stream")
    assert client.call("DELETE", "/v1/streams/clicks/readers/query-1").status_code == 204
    assert client.call("GET", "/v1/streams/clicks").json()["readers"] == []


def test_the_service_is_not_forgotten_while_queries_read_the_stream(served: Served) -> None:
    client = served.client
    assert served.register(name="home", sql="clicks").status_code == 201
    positions = ReaderPositions(
        StreamCatalogue(client.place).readers_place(StreamCatalogue(client.place).get("clicks"))
    )
    positions.note(SERVICE_READER, 0, 7)
    refused = client.call("DELETE", "/v1/streams/clicks/readers/service")
    assert problem(refused) == (409, "has_readers")
    assert "home" in refused.json()["error"]["message"]
    assert positions.needed_from(0) == 7
    command = ["forget", "clicks", SERVICE_READER, "--location", str(client.place)]
    assert CliRunner().invoke(app, command).exit_code != 0
    assert positions.needed_from(0) == 7
    assert client.call("DELETE", "/v1/queries/home").status_code == 204
    assert CliRunner().invoke(app, command).exit_code == 0
    assert positions.names() == []


def test_the_reader_of_one_query_is_kept_as_long_as_that_query(served: Served) -> None:
    """Keep the position of a query with availability, which reads its streams by itself."""
    client = served.client
    for name in ("home", "soon"):
        assert served.register(name=name, sql="clicks").status_code == 201
    streams = StreamCatalogue(client.place)
    positions = ReaderPositions(streams.readers_place(streams.get("clicks")))
    positions.note(reader_of("soon"), 0, 7)
    refused = client.call("DELETE", "/v1/streams/clicks/readers/service.soon")
    assert problem(refused) == (409, "has_readers")
    assert refused.json()["error"]["message"].endswith("for soon")
    assert client.call("DELETE", "/v1/queries/soon").status_code == 204
    assert client.call("DELETE", "/v1/streams/clicks/readers/service.soon").status_code == 204
    assert positions.names() == []
    assert [query_of(each) for each in ("service", "query-1", "service.soon")] == ["", "", "soon"]


def test_a_name_that_is_taken_is_refused_before_the_plan_sees_it(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served.register(name="home", sql="clicks").status_code == 201

    def schema_of(*_: object) -> str:
        raise UsageError("stage home: a stage of that name runs")

    monkeypatch.setattr(served.plan, "schema_of", schema_of)
    refused = served.register(name="home", sql="clicks clicks")
    assert problem(refused) == (409, "query_exists")
    assert "another definition" in refused.json()["error"]["message"]
    assert problem(served.register(name="clicks", sql="clicks")) == (409, "query_exists")


def test_a_token_pushes_as_much_as_its_quota_says(served: Served) -> None:
    client = served.client
    client.gateway.quotas.clock = lambda: 100.0  # requests of a machine under load take seconds
    slow = TokenRegister(client.place).make(["push"], ["*"], events_per_s=5)
    for _ in range(2):
        assert client.push(b'{"user": 1}\n' * 5, token=slow).status_code == 200
    refused = client.push(b'{"user": 1}\n' * 5, token=slow)
    assert problem(refused) == (429, "over_quota")
    assert int(refused.headers["Retry-After"]) >= 1
    assert client.push(b'{"user": 1}').status_code == 200
    thin = TokenRegister(client.place).make(["push"], ["*"], bytes_per_s=20)
    assert problem([client.push(b'{"user": 1}\n' * 4, token=thin) for _ in range(2)][1]) == (429, "over_quota")


def test_queries_whose_state_is_too_large_are_refused_and_then_ended(served: Served) -> None:
    client = served.client
    for name, reads in (("small", "clicks"), ("large", "clicks"), ("behind", "large")):
        assert served.register(name=name, sql=reads).status_code == 201
    served.plan.state = {"small": 400, "large": 600, "gone": 5000}
    assert served.register(name="room", sql="clicks").status_code == 201
    served.plan.state["large"] = 601
    refused = served.register(name="more", sql="clicks")
    assert problem(refused) == (507, "no_room")
    assert "1,001 bytes of state" in refused.json()["error"]["message"]
    served.plan.state["large"] = 1600
    served.registrar.bound_state()
    assert set(served.plan.queries) == {"small", "large", "behind", "room"}
    served.plan.state["large"] = 1601
    served.registrar.bound_state()
    assert set(served.plan.queries) == {"small", "room"}
    shown = {each["name"]: each for each in client.call("GET", "/v1/queries").json()["queries"]}
    assert {name for name, each in shown.items() if each["status"] == "FAILED"} == {"large", "behind"}
    assert "this one has the most, 1,601" in shown["large"]["error"]
    assert served.register(name="more", sql="clicks").status_code == 201


def test_a_gateway_on_another_host_passes_registrations_on(tmp_path: Path) -> None:
    near = LiveGateway(tmp_path)
    far = HeldClient(tmp_path, host="elsewhere")
    far.register()
    loopback_alone = Served(far)
    refused = loopback_alone.register(name="home", sql="clicks")
    assert problem(refused) == (503, "no_service")
    assert "listen on loopback alone" in refused.json()["error"]["message"]
    loopback_alone.close()
    served = Served(far)
    of = address_of(far.place)
    assert of is not None
    # A test has no other address than one of loopback.
    far.place.write("service.json", msgspec.json.encode(msgspec.structs.replace(of, gateways=[near.url])))
    try:
        assert served.register(name="home", sql="clicks").status_code == 201
        assert served.register(name="behind", sql="home").status_code == 201
        direct = {"Flux-Direct": "true"}
        refused = far.call("DELETE", "/v1/queries/home?cascade=true", headers=direct)
        assert problem(refused) == (421, "other_gateway")
        assert refused.json()["error"]["gateway"] == near.url
        assert problem(far.call("DELETE", "/v1/queries/home")) == (409, "has_readers")
        assert far.call("DELETE", "/v1/queries/home?cascade=true").status_code == 204
        assert served.plan.queries == {}
        near.close()
        assert problem(served.register(name="home", sql="clicks")) == (503, "no_service")
    finally:
        served.close()
        far.close()
        near.close()


def test_an_allowance_fills_up_with_time() -> None:
    left = Allowance(10, now=100.0)
    assert left.wait_s(20, 100.0) == 0
    left.take(20)
    assert left.wait_s(5, 100.0) == pytest.approx(0.5)
    assert left.wait_s(5, 100.5) == 0
    left.take(5)
    assert left.wait_s(1000, 100.5) == pytest.approx(2.0)  # more than it can save up: when it is full
    assert left.wait_s(1000, 110.0) == 0
    left.take(1000)
    assert left.wait_s(1, 110.0) == pytest.approx(98.1)
