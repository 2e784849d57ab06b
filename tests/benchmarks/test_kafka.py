"""Figures of the benchmark of Kafka, computed from made-up records for which the answer is known."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

import flux
from benchmarks.kafka import bench, count, load, peers
from benchmarks.kafka.count import RunningCount
from benchmarks.kafka.written import Written, exactness, expected, parsed, statistics
from controller.operate.cli import app
from controller.planning.checks import check_taken
from controller.planning.compiler import compile_plan
from flux.connectors.kafka.client.producer import Answer
from flux.connectors.kafka.records.decoder import Decoder
from flux.operators.operator import Context
from flux.settings import Settings

START = 1_000_000.0
KEYED = pa.schema([("key", pa.binary())])
#: Names of figures that the issue asked for and that other programs read.
KEYS = {"rate", "p50_ms", "p99_ms", "worst_second_ms", "gap_ms_max", "lost", "duplicated", "rows_per_s", "ratio"}


def rows(keys: list[int]) -> Written:
    """Make input records of these keys, one each millisecond."""
    due = np.arange(len(keys)) * 1000 + round(START * 1e6)
    return Written(np.array(keys, np.int64), due, np.zeros(len(keys), np.int64), due // 1000)


def without(some: Written, *places: int) -> Written:
    return Written(*(np.delete(getattr(some, name), places) for name in Written.__dataclass_fields__))


def with_again(some: Written, *places: int) -> Written:
    columns = (getattr(some, name) for name in Written.__dataclass_fields__)
    return Written(*(np.concatenate([column, column[list(places)]]) for column in columns))


def test_each_row_has_the_number_of_rows_of_its_key_until_then() -> None:
    wanted = expected(rows([3, 1, 3, 3, 1]))
    assert list(zip(wanted.key.tolist(), wanted.count.tolist(), strict=True)) == [
        (1, 1),
        (1, 2),
        (3, 1),
        (3, 2),
        (3, 3),
    ]
    assert ((wanted.due_us - START * 1e6) // 1000).astype(int).tolist() == [1, 4, 0, 2, 3]


def test_what_is_missing_and_what_comes_again_is_counted() -> None:
    given = rows([3, 1, 3, 3, 1])
    right = expected(given)
    shuffled = Written(*(getattr(right, name)[[4, 0, 2, 1, 3]] for name in Written.__dataclass_fields__))
    assert exactness(given, shuffled) == {"lost": 0, "duplicated": 0}
    assert exactness(given, without(right, 1, 3)) == {"lost": 2, "duplicated": 0}
    assert exactness(given, with_again(right, 1, 1, 4)) == {"lost": 0, "duplicated": 3}
    assert exactness(given, with_again(without(right, 0), 3)) == {"lost": 1, "duplicated": 1}


def test_a_count_that_no_row_gives_is_doubled_and_a_wrong_time_is_both() -> None:
    given = rows([3, 1, 3])
    right = expected(given)
    too_high = Written(np.append(right.key, 3), np.append(right.due_us, 0), np.append(right.count, 3), right.append_ms)
    assert exactness(given, too_high) == {"lost": 0, "duplicated": 1}
    other = Written(right.key, right.due_us + np.array([0, 7, 0]), right.count, right.append_ms)
    assert exactness(given, other) == {"lost": 1, "duplicated": 1}
    unknown = Written(np.append(right.key, 9), np.append(right.due_us, 0), np.append(right.count, 1), right.append_ms)
    assert exactness(given, unknown) == {"lost": 0, "duplicated": 1}


def test_nothing_at_all_is_lost_as_a_whole_and_nothing_of_nothing_is_not() -> None:
    given, none = rows([3, 1, 3]), rows([])
    assert exactness(given, none) == {"lost": 3, "duplicated": 0}
    assert exactness(none, expected(given)) == {"lost": 0, "duplicated": 3}
    assert exactness(none, none) == {"lost": 0, "duplicated": 0}
    assert exactness(none, none, each_row=False) == {"lost": 0, "duplicated": 0}


def test_where_rows_share_a_record_the_last_count_of_a_key_says_what_is_there() -> None:
    given = rows([3, 1, 3, 3, 1])
    right = expected(given)
    assert exactness(given, without(right, 0, 2, 3), each_row=False) == {"lost": 0, "duplicated": 0}
    assert exactness(given, without(right, 1, 3, 4), each_row=False) == {"lost": 3, "duplicated": 0}
    assert exactness(given, with_again(right, 2), each_row=False) == {"lost": 0, "duplicated": 1}


def arrived(ages_ms: list[list[float]]) -> Written:
    """Make rows that are due evenly in each second, and have the given age when they are appended."""
    due = np.concatenate([START + second + np.arange(len(ages)) / len(ages) for second, ages in enumerate(ages_ms)])
    ones = np.ones(len(due), np.int64)
    return Written(ones, np.round(due * 1e6).astype(np.int64), ones, due * 1e3 + np.concatenate(ages_ms))


def test_the_worst_second_is_not_hidden_by_the_others() -> None:
    of = statistics(arrived([[5.0] * 100, [5.0] * 90 + [70.0] * 10, [5.0] * 100]), START, START + 3)
    assert (of["p50_ms"], of["p99_ms"]) == (pytest.approx(5), pytest.approx(70))
    assert (of["worst_second_ms"], of["max_ms"]) == (pytest.approx(70), pytest.approx(70))
    assert of["gap_ms_max"] == pytest.approx(75)


def test_only_what_was_due_in_the_time_counts_however_late_it_comes() -> None:
    warm_up, measured, after = [900.0] * 10, [4.0] * 9 + [3000.0], [800.0] * 10
    of = statistics(arrived([warm_up, measured, after]), START + 1, START + 2)
    assert (of["p50_ms"], of["max_ms"]) == (pytest.approx(4), pytest.approx(3000))


def test_a_topic_in_which_nothing_came_has_no_figures() -> None:
    assert set(statistics(rows([]), START, START + 1).values()) == {None}


def test_the_load_gives_each_partition_its_keys_and_each_row_the_time_at_which_it_was_due() -> None:
    keys, due = np.array([7, 2, 12, 7, 999]), np.arange(5) + 1_700_000_000_000_000
    found = {}
    for partition, data in load._batches(keys, due, 5).items():
        made = Decoder("load", 0).decode(pa.py_buffer(data), 0).rows
        assert made is not None
        pairs = zip(made.column("key").to_pylist(), made.column("value").to_pylist(), strict=True)
        found[partition] = [(key.decode(), int(value)) for key, value in pairs]
    assert found == {
        2: [("k000007", due[0]), ("k000002", due[1]), ("k000012", due[2]), ("k000007", due[3])],
        4: [("k000999", due[4])],
    }


class NewTopic:
    """A topic whose partition 1 has a leader from the third question on. It keeps the batches that it took."""

    def __init__(self, error: Any) -> None:
        self.error, self.taken, self.asked = error, [], 0

    def begin(self, topic: str, batches: dict[int, Any]) -> dict[int, Any]:
        return batches

    def finish(self, sent: dict[int, Any]) -> dict[int, Any]:
        self.asked += 1
        errors = {each: self.error if each == 1 and self.asked < 3 else None for each in sent}
        self.taken += [each for each, error in errors.items() if error is None]
        return {each: Answer(error, "") for each, error in errors.items()}

    def forget(self) -> None:
        """Do nothing where a writer would forget the leaders of partitions."""


def test_the_load_waits_for_the_leaders_of_a_new_topic_and_sends_only_what_is_missing_again() -> None:
    new: Any = NewTopic(type("NotLeaderError", (), {"retriable": True}))
    load._send(new, "clicks", {0: np.zeros(1), 1: np.zeros(1), 2: np.zeros(1)})
    assert (new.taken, new.asked) == ([0, 2, 1], 3)
    refusing: Any = NewTopic(type("TopicAuthorizationFailedError", (), {"retriable": False}))
    with pytest.raises(RuntimeError, match="TopicAuthorizationFailedError"):
        load._send(refusing, "clicks", {1: np.zeros(1)})


def test_the_query_counts_as_the_independent_answer_does_however_it_is_cut() -> None:
    given = rows(np.random.default_rng(1).integers(0, 40, 500).tolist())
    column = pa.array([b"k%06d" % key for key in given.key])
    batch = pa.record_batch({"key": column, "due_us": pa.array(given.due_us)})
    operator, out = _opened(), []
    for start, end in ((0, 1), (1, 180), (180, 500)):
        out.append(operator.process(batch.slice(start, end - start)))
        again = _opened()
        again.restore(operator.snapshot())
        operator = again
    table = pa.Table.from_batches(out)
    keys = np.array([int(key[1:]) for key in table.column("key").to_pylist()])
    got = Written(keys, table.column("due_us").to_numpy(), table.column("count").to_numpy(), given.append_ms)
    assert exactness(given, got) == {"lost": 0, "duplicated": 0}


def _opened() -> RunningCount:
    made = RunningCount()
    made.open(Context("count"))
    return made


FIGURES = {"p50_ms": 5.0, "p99_ms": 20.0, "worst_second_ms": 30.0, "gap_ms_max": 12.0, "lost": 0, "duplicated": 0}


def report(flux: dict[str, Any], **others: dict[str, Any]) -> Any:
    runs = {name: bench.Run(dict(figures), None) for name, figures in ({"flux": flux} | others).items()}
    return bench.report({"benchmark": "kafka", "rate": 1000}, runs)


def test_the_figures_have_their_names_and_those_of_peers_say_whose_they_are() -> None:
    made = report(FIGURES | {"rows_per_s": 3_000_000}, micro=FIGURES | {"rows_per_s": 500_000}, kstreams=FIGURES)
    assert made.figures.keys() >= KEYS
    assert made.figures["ratio"] == 6.0
    assert made.figures["peer_kstreams_p99_ms"] == 20.0
    assert made.failed is None
    json.dumps(made.figures)
    assert report(FIGURES).figures.keys() >= KEYS, "without a backlog, too"


def test_the_query_that_works_off_a_backlog_says_that_nothing_takes_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a query was refused before: a flow that gives rows ends in a sink or says that they are kept or thrown away."""
    started: dict[str, Any] = {}
    monkeypatch.setattr(count, "start_query", lambda flows, *given, **options: started.update(options, flows=flows))
    monkeypatch.setattr(count, "_rows", lambda *given: flux.source(lambda partition: iter(()), KEYED, 1))
    count.start_totals(None, "", "topic", 2, 1)  # type: ignore[arg-type]
    plan = compile_plan(started["flows"], Settings.of(), lambda given: given, "q", b"")
    with pytest.raises(flux.UsageError, match="stage totals gives rows"):
        check_taken(plan)
    assert started["keep_output"] is False


def test_kafka_streams_runs_with_both_guarantees_and_each_line_says_its_own() -> None:
    runs = peers.runs_of(["rtm", "kstreams"], fault=False)
    assert runs == ["rtm", "kstreams", "kstreams_exactly_once"]
    assert [peers.title(run) for run in runs[1:]] == [
        "Kafka Streams (at least once, no standby)", "Kafka Streams (exactly once, one standby)",
    ]  # fmt: skip
    assert peers.runs_of(["kstreams"], fault=True) == ["kstreams_exactly_once"], "without a standby its state is lost"


def test_a_peer_that_cannot_be_run_says_why_and_fails_nothing() -> None:
    made = report(FIGURES | {"rows_per_s": 1}, rtm={"not_run": "Maven is missing"})
    assert made.figures["peer_rtm_not_run"] == "Maven is missing"
    assert made.figures["ratio"] is None
    assert made.failed is None


def test_a_peer_that_breaks_down_leaves_the_figures_of_flux(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no memory for a JVM")

    monkeypatch.setattr(peers, "running", broken)
    topics: Any = SimpleNamespace(address="", pair=lambda who: SimpleNamespace(given="in", out="out"))
    run = bench._peer("rtm", topics, 1000, 1.0, 0, False, SimpleNamespace(print=print))  # type: ignore[arg-type]
    assert run.figures == {"failed": "no memory for a JVM"}


def test_the_picture_has_the_records_where_they_were_appended() -> None:
    got = arrived([[5.0] * 100, [5.0] * 100])
    line = bench.line_of("flux", got, START, START + 2, START + 1)
    assert line.rows_per_s.sum() * 0.1 == pytest.approx(200, abs=2)
    assert np.nanmax(line.latency_ms) == pytest.approx(5)
    assert [mark.start for mark in line.marks] == [START + 1]


def test_a_broker_that_was_named_and_does_not_answer_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "REACHED_S", 0.2)
    with pytest.raises(flux.FluxError, match=r"127\.0\.0\.1:9"):
        bench.run(1000, 5, [], False, SimpleNamespace(print=print), bootstrap="127.0.0.1:9")  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["lost", "duplicated"])
def test_a_record_that_is_lost_or_doubled_fails_the_benchmark(wrong: str) -> None:
    assert "3 " in report(FIGURES | {wrong: 3}).failed
    assert report(FIGURES, rtm=FIGURES | {wrong: 3}).failed is None, "of a peer it is a finding"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rate", "0"], "--rate"),
        (["--partitions", "none"], "--partitions"),
        (["--peer", "flink"], "flink"),
        (["--fault", "pause"], "pause"),
        (["--fault", "kill-executor", "--replicas", "1"], "--replicas 2"),
        (["--rows", "-1"], "--rows"),
        (["--p99-ms", "0"], "--p99-ms"),
        (["--fault", "kill-executor", "--p99-ms", "50"], "--fault"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_starts(
    options: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "run", lambda *_: pytest.fail("it has begun"))
    done = CliRunner().invoke(app, ["bench", "kafka", *options], env={"COLUMNS": "200", "TERM": "dumb"})
    assert done.exit_code == 2
    assert said in done.output


def test_the_command_hands_on_its_options_and_ends_with_an_error_if_rows_were_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Any] = []

    def run(*arguments: Any) -> Any:
        given.extend(arguments)
        return report(FIGURES | {"lost": 2})

    monkeypatch.setattr(bench, "run", run)
    command = ["bench", "kafka", "--rate", "7", "--peer", "micro", "--peer", "rtm", "--peer", "micro", "--json"]
    done = CliRunner().invoke(app, [*command, "--fault", "kill-executor"])
    assert done.exit_code == 1
    assert given[:4] == [7, 5, ["micro", "rtm"], True]
    (line,) = [line for line in done.output.splitlines() if line.startswith("{")]
    assert json.loads(line)["lost"] == 2


def test_where_no_broker_can_be_started_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Any:
        raise peers.Unavailable("Maven is missing (mvn)")

    monkeypatch.setattr(peers, "broker", none)
    with pytest.raises(bench.UsageError, match=r"Maven is missing.*--bootstrap HOST:PORT"):
        bench.run(1000, 5, [], False, SimpleNamespace(print=print))  # type: ignore[arg-type]


def test_a_record_that_is_read_alone_is_read_all_the_same() -> None:
    def record(key: int, value: bytes) -> Any:
        return SimpleNamespace(
            key=lambda: b"k%06d" % key, value=lambda: value, timestamp=lambda: (0, 7), partition=lambda: 0
        )

    alone, several = parsed([record(3, b"5,1")]), parsed([record(3, b"5"), record(4, b"6")])
    assert (alone.key.tolist(), alone.due_us.tolist(), alone.count.tolist()) == ([3], [5], [1])
    assert (several.key.tolist(), several.due_us.tolist()) == ([3, 4], [5, 6])
