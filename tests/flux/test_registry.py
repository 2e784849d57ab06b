"""Registered queries: a service may be lost in any step, and the next one comes to the same end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flux.errors import FluxError, UsageError
from flux.eventlog.streams import StreamCatalogue, StreamDefinition
from flux.gateway.problems import Problem
from flux.registry import convergence
from flux.registry.definitions import (
    HasDependants,
    NoSuchInput,
    NoSuchQuery,
    QueriesFull,
    QueryDefinition,
    QueryExists,
    checked_query,
)
from flux.registry.query_catalogue import QueryCatalogue, ServiceReplaced, dependants
from flux.registry.service_calls import ServiceCall
from flux.registry.service_hold import ServiceHold, address_of, this_host
from flux.vault.location import Folder
from spark_integration.service.registrar import Registrar
from tests.flux.held_plan import STREAMS, HeldPlan


def call(action: Any, name: str = "", cascade: bool = False, body: str = "") -> ServiceCall:
    return ServiceCall(action, name, cascade, body, "", ["admin"], ["*"])


@pytest.fixture(autouse=True)
def _no_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out flushes: no power is lost here, and a thousand flushes take seconds."""
    monkeypatch.setattr("os.fsync", lambda file: None)


class Lost(BaseException):
    """The end of a service between two effects."""


class Tried:
    """A service on a folder, which may be lost at one of its effects."""

    def __init__(self, folder: Path) -> None:
        self.place = Folder(folder)
        streams = StreamCatalogue(self.place)
        for name in STREAMS:
            streams.register(StreamDefinition(name=name, schema="n BIGINT"))
        self.left: int | None = None
        self.plan = HeldPlan(self._effect)
        self.answered: dict[str, bool] = {}
        self.begin()

    def _effect(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Lost

    def begin(self) -> None:
        """Begin another service, as after the loss of one."""
        self.left = None
        self.catalogue = QueryCatalogue(self.place)
        self.catalogue.claim()
        self.registrar = Registrar(self.catalogue, StreamCatalogue(self.place), self.plan, self.plan.forget_output)
        self.registrar.converge()

    def register(self, name: str, *reads: str) -> None:
        body = QueryDefinition(name=name, sql=" ".join(reads))
        self.registrar.answer(call("register_query", body=msgspec.json.encode(body).decode()))
        self.answered[name] = True

    def restart(self, name: str) -> None:
        assert self.registrar.answer(call("restart_query", name)).content.status == "RUNNING"

    def remove(self, name: str, cascade: bool = False) -> None:
        for gone in (name, *dependants(self.catalogue.all(), name)):
            self.answered.pop(gone, None)  # from now on it may be there or not
        self.registrar.answer(call("remove_query", name, cascade))

    def check(self) -> None:
        """Check that plan, outputs and registry say the same, and that answered registrations are among them."""
        entries = self.catalogue.all()
        assert {each.phase for each in entries.values()} <= {"RUNNING", "FAILED"}
        running = {name: each.reads for name, each in entries.items() if each.phase == "RUNNING"}
        assert self.plan.queries == running
        assert self.plan.streams == {name for reads in running.values() for name in reads} & set(STREAMS)
        assert self.plan.outputs == set(entries)
        # A restart takes the notes of a failure away first, and may be lost then.
        assert set(self.plan.failed) <= {name for name, each in entries.items() if each.phase == "FAILED"}
        assert set(self.answered) <= set(entries)


def story(tried: Tried) -> Iterator[str]:
    """Go through a day of a service, and yield the name of each part when it was answered."""
    tried.register("slow", "clicks")
    yield "slow"
    tried.register("both", "slow", "users")
    yield "both"
    tried.register("third", "both")
    yield "third"
    tried.remove("both", cascade=True)
    yield "both and third are gone"
    tried.register("both", "users")
    yield "both again"
    tried.plan.failed["slow"] = "division by zero"
    tried.plan.queries.pop("slow")
    tried.registrar.converge()
    yield "slow has failed"
    tried.restart("slow")
    yield "slow runs again"
    tried.plan.failed["slow"] = "division by zero"
    tried.plan.queries.pop("slow")
    tried.registrar.converge()
    yield "slow has failed again"
    tried.remove("slow")
    yield "slow is gone"
    tried.remove("both")
    yield "nothing is left"


def whole_day(tried: Tried) -> None:
    for _ in story(tried):
        tried.check()


def test_a_day_without_losses_leaves_nothing(tmp_path: Path) -> None:
    tried = Tried(tmp_path)
    whole_day(tried)
    assert (tried.catalogue.all(), tried.plan.queries, tried.plan.streams, tried.plan.outputs) == ({}, {}, set(), set())


def test_a_service_that_is_lost_at_any_effect_is_followed_by_one_that_makes_all_whole(tmp_path: Path) -> None:
    for effects in itertools.count():
        folder = tmp_path / str(effects)
        folder.mkdir(mode=0o700)
        tried = Tried(folder)
        tried.left = effects
        try:
            for _ in story(tried):
                pass
        except Lost:
            tried.begin()
            tried.check()
            continue
        assert effects > 20
        return


@pytest.mark.parametrize("broken", ["NoteRunning", "NoteFailed", "Forget", "TakeFromPlan"])
def test_each_step_is_needed(tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out one kind of step: such a registry does not pass the check of the day."""
    kind = getattr(convergence, broken)
    found = convergence.next_step

    def without(registered: Any, plan: Any) -> Any:
        step = found(registered, plan)
        return None if isinstance(step, kind) else step

    monkeypatch.setattr("spark_integration.service.registrar.next_step", without)
    tried = Tried(tmp_path)
    with pytest.raises((AssertionError, FluxError)):
        whole_day(tried)


def test_a_query_that_failed_just_now_is_restarted_without_its_failure(tmp_path: Path) -> None:
    tried = Tried(tmp_path)
    tried.register("slow", "clicks")
    tried.register("behind", "slow")
    for name in ("behind", "slow"):  # in the plan alone: the service has not looked since
        tried.plan.failed[name] = "division by zero"
        tried.plan.queries.pop(name)
    with pytest.raises(Problem, match="'behind' reads query 'slow', which is FAILED") as refused:
        tried.restart("behind")
    assert refused.value.code == "input_failed"
    tried.restart("slow")
    tried.restart("slow")  # runs already
    tried.plan.refused.add("behind")
    with pytest.raises(Problem, match="a worker cannot have it"):
        tried.restart("behind")
    assert (tried.catalogue.get("behind").phase, tried.catalogue.get("behind").error) == (
        "FAILED",
        "a worker cannot have it",
    )
    tried.plan.refused.clear()
    tried.restart("behind")
    tried.check()
    assert {each.phase for each in tried.catalogue.all().values()} == {"RUNNING"}
    with pytest.raises(Problem, match="no query 'other'"):
        tried.restart("other")


def test_a_stream_that_cannot_be_read_fails_its_queries_and_is_left(tmp_path: Path) -> None:
    tried = Tried(tmp_path)
    for name, reads in (("near", "clicks"), ("far", "near"), ("other", "users")):
        tried.register(name, reads)
    for name in ("near", "far"):  # with their source
        tried.plan.failed[name] = "clicks has failed: log 0 is damaged"
        tried.plan.queries.pop(name)
    tried.plan.streams.discard("clicks")
    tried.registrar.converge()
    tried.check()
    assert {name for name, each in tried.catalogue.all().items() if each.phase == "FAILED"} == {"near", "far"}
    assert set(tried.plan.forgotten) == {"clicks"}
    tried.restart("near")
    tried.restart("far")
    tried.check()


def test_a_query_that_the_plan_refuses_leaves_nothing(tmp_path: Path) -> None:
    tried = Tried(tmp_path)
    tried.plan.refused.add("bad")
    with pytest.raises(Exception, match="a worker cannot have it"):
        tried.register("bad", "clicks")
    tried.check()
    assert tried.catalogue.all() == {}
    tried.plan.refused.clear()
    tried.register("bad", "clicks")
    tried.check()


def definition(name: str, sql: str = "SELECT 1", **more: Any) -> QueryDefinition:
    return checked_query(QueryDefinition(name=name, sql=sql, **more))


@pytest.fixture
def catalogue(tmp_path: Path) -> QueryCatalogue:
    tmp_path.chmod(0o700)
    StreamCatalogue(Folder(tmp_path)).register(StreamDefinition(name="clicks", schema="n BIGINT"))
    made = QueryCatalogue(Folder(tmp_path), queries_max=3)
    made.claim()
    return made


def test_names_belong_to_one_stream_or_query(catalogue: QueryCatalogue) -> None:
    made, new = catalogue.begin(definition("a"), ["clicks"], "n BIGINT")
    assert new
    assert made.phase == "REGISTERING"
    assert catalogue.begin(definition("a"), ["clicks"], "n BIGINT") == (made, False)
    with pytest.raises(QueryExists, match="another definition"):
        catalogue.begin(definition("a", "SELECT 2"), ["clicks"], "n BIGINT")
    with pytest.raises(QueryExists, match="the name of a stream"):
        catalogue.begin(definition("clicks"), ["clicks"], "n BIGINT")
    with pytest.raises(NoSuchInput, match="'nothing'"):
        catalogue.begin(definition("b"), ["nothing"], "n BIGINT")
    catalogue.begin(definition("b"), ["a"], "n BIGINT")
    catalogue.begin(definition("c"), ["b"], "n BIGINT")
    with pytest.raises(QueriesFull, match="3 queries"):
        catalogue.begin(definition("d"), ["clicks"], "n BIGINT")


def test_a_removal_names_the_dependants(catalogue: QueryCatalogue) -> None:
    for name, read in (("a", "clicks"), ("b", "a"), ("c", "b")):
        catalogue.begin(definition(name), [read], "n BIGINT")
    with pytest.raises(HasDependants, match="query 'a' is read by b, c"):
        catalogue.begin_removal("a")
    with pytest.raises(HasDependants, match="stream 'clicks' is read by a, b, c"):
        catalogue.begin_removal_of_readers("clicks", cascade=False)
    assert {each.phase for each in catalogue.all().values()} == {"REGISTERING"}
    with pytest.raises(NoSuchQuery):
        catalogue.begin_removal("x")
    assert catalogue.begin_removal("b", cascade=True) == ["b", "c"]
    assert [each.phase for each in catalogue.all().values()] == ["REGISTERING", "REMOVING", "REMOVING"]
    catalogue.note(catalogue.get("b"), "RUNNING")  # late: it is on its way out
    assert catalogue.get("b").phase == "REMOVING"


def test_the_queries_of_a_stream_that_is_given_up_fail_and_others_stay(catalogue: QueryCatalogue) -> None:
    StreamCatalogue(catalogue._place).register(StreamDefinition(name="users", schema="n BIGINT"))
    for name, reads in (("near", ["clicks", "users"]), ("far", ["near"]), ("other", ["users"])):
        catalogue.note(catalogue.begin(definition(name), reads, "n BIGINT")[0], "RUNNING")
    assert catalogue.fail_readers("clicks", "given up") == ["near", "far"]
    found = {each.name: (each.phase, each.error) for each in catalogue.all().values()}
    assert found == {"near": ("FAILED", "given up"), "far": ("FAILED", "given up"), "other": ("RUNNING", "")}
    catalogue.begin_removal("far")
    assert catalogue.fail_readers("clicks", "again") == []
    assert catalogue.get("far").phase == "REMOVING"


def test_an_earlier_service_finds_out_that_it_was_replaced(catalogue: QueryCatalogue, tmp_path: Path) -> None:
    later = QueryCatalogue(Folder(tmp_path))
    later.claim()
    with pytest.raises(ServiceReplaced, match="number 2, and this one is number 1"):
        catalogue.begin(definition("a"), ["clicks"], "n BIGINT")
    later.begin(definition("a"), ["clicks"], "n BIGINT")


def test_a_second_service_of_a_location_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    place = Folder(tmp_path)
    assert address_of(place) is None
    hold = ServiceHold(place)
    given = ["http://127.0.0.1:2", "http://[::1]:2", "http://0.0.0.0:2", "http://localhost:2", "https://flux.example:2"]
    told = hold.publish("http://127.0.0.1:1", given)
    assert address_of(place) == told
    assert (told.host, told.gateways) == (this_host(), ["https://flux.example:2"])
    with pytest.raises(UsageError, match=f"a service runs on {tmp_path} already, process"):
        ServiceHold(place)
    hold.close()
    assert address_of(place) is None
    ServiceHold(place).close()
    killed = ServiceHold(place)
    killed.publish("http://127.0.0.1:1")
    killed._hold.close()  # as the system does when its process ends
    later = ServiceHold(place)
    assert (killed.after_a_kill, later.after_a_kill) == (False, True)
    assert address_of(place) is None
    later.close()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"name": "a b"}, "name: expected letters"),
        ({"name": "a.late"}, "would mean the late events of a stream"),
        ({"sql": ""}, "'sql' or 'operator', and got none"),
        ({"operator": "m:n"}, "got both"),
        ({"sql": "x" * 20_001}, "at most 20,000 characters, got 20,001"),
        ({"inputs": ["a"]}, "belong to an operator"),
        ({"sql": "", "operator": "os.system"}, "expected MODULE:NAME"),
        ({"sql": "", "operator": "m:n"}, "1 to 16 names of streams"),
        ({"partitions": 0}, "partitions: expected 1 to 64"),
        ({"availability": "soon"}, "cannot read 'soon'"),
        ({"availability": "2 days"}, "up to 1 day"),
        ({"availability": "0s"}, "above zero"),
        ({"availability": "-1s"}, "availability"),
        ({"replicas": 4}, "replicas: expected 1 to 3"),
    ],
)
def test_a_definition_that_does_not_fit_is_refused(wrong: dict[str, Any], said: str) -> None:
    given = {"name": "q", "sql": "SELECT 1", **wrong}
    with pytest.raises(UsageError, match=said):
        checked_query(QueryDefinition(**given))
