"""The contract of sources: names that are refused, names that are free, functions that are wrapped, and readers in a worker."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from numbered_log import Numbers, NumbersOfPartition
from one_worker import planned

import flux
from controller.planning.compiler import compile_plan
from flux.dataflow.plan import Plan, WorkerSourcePlan
from flux.dataflow.source_reader import FunctionReader, opened
from flux.errors import UsageError, UserCodeError
from flux.settings import Settings
from flux.vault.plan_without_code import without_code
from flux.worker.core import WorkerCore
from flux.worker.report import of_readers
from partitioning.table import ReplicaAt, Table

SCHEMA = pa.schema([("n", pa.int64())])


def started(source: flux.Source) -> WorkerCore:
    """Start a worker that reads partition 0, and has heard that its own replica waits for rows."""
    core = WorkerCore(planned(flux.stage(partitions=1)(lambda batch: batch), source=source), 0)
    core.on_table(Table(0, (((ReplicaAt(0, 0),),),), ((0,),), {0: ""}), 0.0)
    list(core.poll(0.0))
    return core


def plan_of(source: flux.Source) -> Plan:
    flow = flux.stage(partitions=1, name="passed")(lambda batch: batch)(source)
    return compile_plan([flow], Settings.of(), lambda schema: schema, "q", b"")


@pytest.mark.parametrize(
    ("base", "name", "said"),
    [
        (
            flux.PartitionReader,
            "bad_record",
            "Wrong.bad_record is not part of flux.PartitionReader.*did you mean 'bad_records'",
        ),
        (flux.PartitionReader, "done", "Wrong.done is not part of flux.PartitionReader, so nothing would ever use it"),
        (flux.PartitionReader, "on_ready", "names of your own begin with an underscore"),
        (flux.SourceReader, "forgets", "did you mean 'forget'"),
        (flux.SourceReader, "partition_names", "did you mean 'partition_name'"),
        (flux.SourceReader, "connect", "Methods and settings are configure, endless, forget, goes_on_after_loss"),
    ],
)
def test_a_method_that_is_not_in_the_contract_is_refused_with_the_nearest_name(
    base: type, name: str, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        type("Wrong", (base,), {name: lambda self: None})


def test_a_misspelt_setting_is_refused_and_other_values_are_free() -> None:
    with pytest.raises(UsageError, match=r"Wrong.endles is not part of flux.SourceReader.*did you mean 'endless'"):
        type("Wrong", (flux.SourceReader,), {"endles": True})
    type("Right", (flux.SourceReader,), {"host": "broker-1", "_connect": lambda self: None, "endless": True})


def test_names_of_other_base_classes_are_free() -> None:
    class Fetched:
        def came(self) -> None: ...

    class Reader(flux.PartitionReader, Fetched):
        def came(self) -> None: ...

        def lag(self) -> None: ...

    class Later(Reader):
        def came(self) -> None: ...

        def close(self) -> None: ...

    assert (Reader.defines, Later.defines) == ({"lag"}, {"lag", "close"})


def test_a_reader_brings_schema_partitions_and_settings_into_the_plan() -> None:
    plan = plan_of(flux.source(Numbers(30)))
    (source,) = plan.sources
    assert isinstance(source, WorkerSourcePlan)
    assert (source.name, source.partitions, source.seeks, source.positions) == ("Numbers", 2, True, True)
    assert (source.endless, source.own_numbers) == (False, False)
    numbered = plan_of(flux.source(type("Log", (Numbers,), {"row_numbers": True, "endless": True})(30), name="log"))
    assert (numbered.sources[0].name, numbered.brings_numbers(0), numbered.sources[0].endless) == ("log", True, True)
    (absent,) = without_code(numbered).sources
    assert isinstance(absent, WorkerSourcePlan)
    assert (absent.positions, absent.seeks, absent.own_numbers, absent.endless) == (True, True, True, True)
    assert b"numbered_log" not in pickle.dumps(absent), "a vault gets none of the reader's code"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda: flux.source(Numbers), r"got its class: make one, Numbers\(...\)"),
        (
            lambda: flux.source(type("Empty", (flux.SourceReader,), {})(), SCHEMA, 1),
            r"Empty must define read\(self, part",
        ),
        (lambda: flux.source(type("Odd", (Numbers,), {"seeks": False})(1)), "must say positions = False"),
        (
            lambda: flux.source(type("Odd", (Numbers,), {"positions": False, "row_numbers": True})(1)),
            "needs positions = True",
        ),
        (lambda: flux.source(type("Odd", (Numbers,), {"positions": False})(1), positions=True), "is for functions"),
        (lambda: flux.source(type("Odd", (Numbers,), {"schema": None})(1)), "the schema of the rows is missing"),
        (lambda: flux.source(type("Odd", (Numbers,), {"partitions": 0})(1)), "partitions must be 1 to 4096, got 0"),
        (lambda: flux.source(lambda partition: []), "the schema of the rows is missing"),
    ],
)
def test_sources_that_do_not_fit_are_refused(given: Callable[[], Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        given()


def test_a_function_and_an_object_with_optional_methods_are_wrapped() -> None:
    class Log:
        endless = True
        lag_unit = "line"

        def __call__(self, partition: int, start: Any) -> Iterator[Any]:
            return iter([partition, start])

        def partition_name(self, partition: int) -> str:
            return f"log-{partition}"

    made = FunctionReader(Log(), seeks=True, positions=True)
    assert (made.endless, made.lag_unit, made.may_grow, made.partition_name(1)) == (True, "line", False, "log-1")
    assert made.defines == {"read", "partition_name"}
    assert list(opened(made, 3, "here")) == [3, "here"]
    plain = FunctionReader(lambda partition: [partition])
    assert (plain.partition_name(1), list(opened(plain, 3, "here"))) == ("1", [3])
    plain.forget()


def test_methods_of_an_iterator_are_called_as_they_are() -> None:
    class Items:
        told: Any = None

        def __iter__(self) -> Items:
            return self

        def __next__(self) -> None:
            return None

        def lag(self) -> tuple[int, int]:
            return 1, 2

        def done(self, position: Any) -> None:
            self.told = position

    items = Items()
    reader = opened(FunctionReader(lambda partition: items), 0, None)
    assert reader.defines == {"next", "lag", "applied"}
    reader.applied(7)
    reader.close()
    assert (reader.next(), reader.lag(), reader.bad_records(), items.told) == (None, (1, 2), 0, 7)
    assert reader.next.__self__ is items, "nothing is called between"  # type: ignore[attr-defined]


def test_a_worker_reads_a_partition_reader_and_calls_its_methods() -> None:
    told: list[Any] = []

    class Told(NumbersOfPartition):
        def applied(self, position: Any) -> None:
            told.append(position)

        def close(self) -> None:
            told.append("closed")

        def bad_records(self) -> int:
            return 3

    class Log(Numbers):
        partitions = 1

        def read(self, partition: int, start: Any) -> flux.PartitionReader:
            return Told(self, partition, start)

    core = started(flux.source(Log(30)))
    while core.read(True, 1.0):
        core.work(1.0)
    assert core.sources[0, 0].rows == 30
    assert of_readers(core)["bad_records"] == [], "it has ended"
    core = started(flux.source(Log(300)))
    assert core.read(True, 1.0)
    assert [each[2:] for each in of_readers(core)["bad_records"]] == [(3,)]
    core.reading.close()
    assert told[-1] == "closed"


def test_a_partition_reader_without_next_says_so() -> None:
    class Wrong(Numbers):
        def read(self, partition: int, start: Any) -> flux.PartitionReader:
            return flux.PartitionReader()

    core = started(flux.source(Wrong(3), partitions=1))
    with pytest.raises(UserCodeError, match=r"PartitionReader must define next\(self\)"):
        core.read(True, 1.0)
