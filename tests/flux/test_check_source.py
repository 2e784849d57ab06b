"""``flux.testing.check_source``: sources that keep the contract pass, and each mistake in a copy is found and told in words."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from folders_read import write
from numbered_log import Numbers, NumbersOfPartition

import flux
from flux.testing import ContractBroken, check_source

SCHEMA = pa.schema([("n", pa.int64())])


class Log(Numbers):
    """A source like a log: rows bring numbers, with gaps."""

    row_numbers = True

    def read(self, partition: int, start: Any) -> flux.PartitionReader:
        return LogOfPartition(self, partition, start)


class LogOfPartition(NumbersOfPartition):
    def __init__(self, source: Numbers, partition: int, start: Any) -> None:
        super().__init__(source, partition, None if start is None else -(-start.number // 3))

    def next(self) -> flux.Positioned | None:
        given = super().next()
        assert given is not None
        assert given.numbers is not None
        return given._replace(numbers=3 * given.numbers)


def batches(count: int, rows: int = 3) -> list[pa.RecordBatch]:
    return [
        pa.record_batch([pa.array(range(n, n + rows), pa.int64())], schema=SCHEMA) for n in range(0, count * rows, rows)
    ]


# ---- sources that keep the contract


@pytest.mark.parametrize("reader", [Numbers(100), Numbers(2, rows_at_once=1), Log(100), Log(100, rows_at_once=1)])
def test_a_reader_with_positions_and_one_with_numbers_pass(reader: flux.SourceReader) -> None:
    check_source(reader)


def test_functions_pass() -> None:
    check_source(lambda partition: iter(batches(5)), SCHEMA, 2)
    check_source(lambda partition, start: iter(batches(5)[start:]), "n BIGINT", 2)

    def read(partition: int, start: Any) -> Iterator[flux.Positioned]:
        for each in batches(50)[start or 0 :]:
            yield flux.Positioned(each, each["n"][0].as_py() // 3 + 1)

    check_source(flux.source(read, SCHEMA, 1, positions=True))


def test_a_source_without_end_passes() -> None:
    def read(partition: int) -> Iterator[Any]:
        yield from batches(5)
        while True:
            yield None

    check_source(read, SCHEMA, 1, quiet_s=0.1)


@pytest.mark.parametrize("options", [{}, {"partitions": 2}, {"format": "csv", "settle": 0}])
def test_files_pass(tmp_path: Path, options: Any) -> None:
    for number in range(3):
        write(tmp_path, f"{number}.parquet", 10 * number, 10, group=4)
        (tmp_path / f"{number}.csv").write_text("".join(f"{n}\n" for n in range(10)))
    glob = f"*.{options.get('format', 'parquet')}"
    check_source(flux.files(tmp_path, schema=SCHEMA, poll="10ms", pathGlobFilter=glob, **options), quiet_s=0.2)
    assert not (tmp_path / "_flux").exists(), "its ledger is forgotten"


def test_python_data_sources_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from test_datasource_rows import Numbers as DataNumbers

    monkeypatch.setattr("flux.dataflow.threaded_reader.JOINED_ROWS", 10)
    check_source(flux.datasource(DataNumbers, {"rows": 40}, partitions=2), rows=200, quiet_s=0.2)
    stream = flux.datasource(DataNumbers, {"rows": 40}, stream=True, ledger=tmp_path / "ledger", poll="10ms")
    check_source(stream, rows=200, quiet_s=0.2)


def test_a_source_that_spark_reads_and_one_without_rows_cannot_be_checked() -> None:
    with pytest.raises(flux.UsageError, match="is read by Spark"):
        check_source(flux.stream("n BIGINT"))
    with pytest.raises(flux.UsageError, match="has given no row: there is nothing to compare"):
        check_source(lambda partition: iter(()), SCHEMA, 1)
    with pytest.raises(
        flux.UsageError, match=r"has given no row behind a position or a batch.*more rows, or .* smaller batches"
    ):
        check_source(Numbers(7))


# ---- mistakes


def of(reader: type[flux.PartitionReader], base: type[Numbers] = Numbers, rows: int = 100, **more: Any) -> Numbers:
    """Make a source whose partitions have this reader."""

    class Copied(base):  # type: ignore[misc, valid-type]
        def read(self, partition: int, start: Any) -> flux.PartitionReader:
            made: Any = reader
            return made(self, partition, start)  # type: ignore[no-any-return]

    made = Copied(rows)
    vars(made).update(more)
    return made


def broken(source: Any, said: str, **options: Any) -> None:
    with pytest.raises(ContractBroken, match=said):
        check_source(source, **{"quiet_s": 0.1, **options})


def test_a_row_that_is_forgotten_behind_a_position() -> None:
    class Forgets(NumbersOfPartition):
        def __init__(self, source: Numbers, partition: int, start: Any) -> None:
            super().__init__(source, partition, start and start + 1)

    said = r"partition 0, read\(partition, 7\), behind 7 rows: row 7 is {'n': 16} and was {'n': 14}.*: a row before it is missing"
    broken(of(Forgets), said)


def test_a_row_that_comes_twice_behind_a_position() -> None:
    class Twice(NumbersOfPartition):
        def __init__(self, source: Numbers, partition: int, start: Any) -> None:
            super().__init__(source, partition, start and start - 1)

    broken(of(Twice), r"behind 7 rows: row 7 is {'n': 12} and was {'n': 14}")


def test_a_position_that_counts_from_the_beginning_of_the_life() -> None:
    class Counts(NumbersOfPartition):
        def __init__(self, source: Numbers, partition: int, start: Any) -> None:
            super().__init__(source, partition, start)
            self.first = self.at

        def next(self) -> flux.Positioned | None:
            given = super().next()
            assert given is not None
            return given._replace(position=self.at - self.first)

    broken(of(Counts), r"behind 7 rows; then read\(partition, 7\): row 14 is {'n': 14} and was {'n': 28}")


def test_a_start_that_is_not_looked_at() -> None:
    class Ignores(NumbersOfPartition):
        def __init__(self, source: Numbers, partition: int, start: Any) -> None:
            super().__init__(source, partition, None)

    broken(of(Ignores), r"row 7 is {'n': 0} and was {'n': 14}")


def test_numbers_that_differ_from_life_to_life() -> None:
    class Renumbers(LogOfPartition):
        def __init__(self, source: Numbers, partition: int, start: Any) -> None:
            super().__init__(source, partition, start)
            self.first = 3 * self.at

        def next(self) -> flux.Positioned | None:
            given = super().next()
            assert given is not None
            assert given.numbers is not None
            return given._replace(numbers=given.numbers - self.first)

    broken(of(Renumbers, Log), "row 7 has number 0 and had 21 in the first reading: a number stands for the same row")


def test_a_start_in_the_middle_of_a_batch_that_is_rounded() -> None:
    class Rounds(LogOfPartition):
        def __init__(self, source: Numbers, partition: int, start: Any) -> None:
            super().__init__(source, partition, start)
            self.at -= self.at % source.rows_at_once

    broken(
        of(Rounds, Log, 98), r"read\(partition, RowStart\(number=3, .*behind 1 rows: row 1 is {'n': 0} and was {'n': 2}"
    )


@pytest.mark.parametrize("numbers", [None, [1.0] * 7, [1] * 7, list(range(6))])
def test_numbers_that_are_no_numbers_of_these_rows(numbers: Any) -> None:
    class Odd(LogOfPartition):
        def next(self) -> flux.Positioned | None:
            given = super().next()
            assert given is not None
            return given._replace(numbers=numbers and np.array(numbers))

    broken(of(Odd, Log), "gives an int64 number for each row|numbers of rows must ascend")


def test_rows_that_are_others_each_time() -> None:
    class Reads(NumbersOfPartition):
        def next(self) -> flux.Positioned | None:
            given = super().next()
            assert given is not None
            now = pa.array([time.monotonic_ns()] * given.batch.num_rows)
            return given._replace(batch=pa.record_batch([now], schema=SCHEMA))

    broken(of(Reads), r"row 0 is .* in the first reading\. The same rows must come in the same order in each life")


def test_a_life_that_ends_too_early_or_too_late() -> None:
    class Ends(NumbersOfPartition):
        def next(self) -> flux.Positioned | None:
            if self.start and self.at == self.ends:
                raise StopIteration
            return super().next()

        def __init__(self, source: Numbers, partition: int, start: Any) -> None:
            super().__init__(source, partition, start)
            self.start, self.ends = start, 98

    class Longer(NumbersOfPartition):
        def __init__(self, source: Numbers, partition: int, start: Any) -> None:
            super().__init__(source, partition, start)
            if start:
                source.rows += 1

    broken(of(Ends), "it ended behind row 98; the first reading gave 100 rows")
    broken(of(Longer), "it gave more rows than the 100 of the first reading, which had come to its end")


def test_batches_that_are_counted_and_cut_elsewhere() -> None:
    def read(partition: int, start: Any) -> Iterator[pa.RecordBatch]:
        whole = batches(12)
        if not start:
            yield from whole
            return
        yield whole[start]
        yield whole[start + 1].slice(0, 1)
        yield whole[start + 1].slice(1)
        yield from whole[start + 2 :]

    broken(
        flux.source(read, SCHEMA, 1),
        "batch 2 has 1 rows and had 3 in the first reading: batches of a source without positions",
    )


def test_a_close_that_can_be_called_once() -> None:
    class Closes(NumbersOfPartition):
        def close(self) -> None:
            del self.at

    broken(of(Closes), r"opened and not read: close\(\), called a second time, raised AttributeError")


def test_a_close_that_needs_rows_before_it() -> None:
    class Closes(NumbersOfPartition):
        def close(self) -> None:
            assert self.at, "nothing is open"

    broken(of(Closes), r"opened and not read: close\(\) raised AssertionError: nothing is open")


class WithoutEnd(NumbersOfPartition):
    def next(self) -> flux.Positioned | None:
        try:
            return super().next()
        except StopIteration:
            return None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((-1, 5), r"lag\(\) must return two numbers from 0, a position and an end, or None; got \(-1, 5\)"),
        ((1.5, 2), "must return two numbers"),
        (3, "must return two numbers"),
        ((30, 12), r"lag\(\) says that record 30 is next, and that the last one is before 12"),
    ],
)
def test_a_lag_that_makes_no_sense(given: Any, said: str) -> None:
    broken(of(type("Lags", (WithoutEnd,), {"lag": lambda self: given})), said)


def test_counts_that_fall_or_do_not_count() -> None:
    for name in ("pauses", "bad_records"):
        method = {name: lambda self: 1000 - self.at}
        broken(
            of(type("Falls", (WithoutEnd,), method)),
            rf"{name}\(\) must return a number that never falls, got \d+ after \d+",
        )
    zero = type("Zero", (WithoutEnd,), {"pauses": lambda self: 0})
    broken(
        of(zero), r"pauses\(\) is 0, though next\(\) has had nothing for 1 s: processAllAvailable would wait for ever"
    )


def test_memory_that_is_used_again_too_early() -> None:
    class Reuses(NumbersOfPartition):
        """A reader that writes over the memory of a batch as soon as this batch was given."""

        def __init__(self, source: Numbers, partition: int, start: Any) -> None:
            super().__init__(source, partition, start)
            self.memory = np.zeros(source.rows_at_once, np.int64)

        def next(self) -> flux.Positioned | None:
            given = super().next()
            assert given is not None
            rows = given.batch.num_rows
            self.memory[:rows] = given.batch["n"].to_numpy()
            threading.Timer(0.0005, self.memory.fill, (-1,)).start()
            return given._replace(batch=pa.record_batch([pa.Array.from_buffers(
                pa.int64(), rows, [None, pa.py_buffer(self.memory)])], schema=SCHEMA))  # fmt: skip

    broken(of(Reuses), r"a batch has changed after it was given: its memory may be used again when next\(\) is called")


def test_memory_that_is_used_again_when_the_next_rows_are_asked_for_is_allowed() -> None:
    class Reuses(NumbersOfPartition):
        def __init__(self, source: Numbers, partition: int, start: Any) -> None:
            super().__init__(source, partition, start)
            self.memory = np.zeros(source.rows_at_once, np.int64)

        def next(self) -> flux.Positioned | None:
            given = super().next()
            assert given is not None
            rows = given.batch.num_rows
            self.memory[:rows] = given.batch["n"].to_numpy()
            array = pa.Array.from_buffers(pa.int64(), rows, [None, pa.py_buffer(self.memory)])
            return given._replace(batch=pa.record_batch([array], schema=SCHEMA))

    check_source(of(Reuses))


def test_a_call_that_waits() -> None:
    class Waits(NumbersOfPartition):
        def next(self) -> flux.Positioned | None:
            time.sleep(self.source.sleeps)  # type: ignore[attr-defined]
            return super().next()

    broken(
        of(Waits, sleeps=0.1), r"next\(\) took 0.1 s. It must not wait, because the worker's thread", patience_s=0.05
    )
    broken(of(Waits, sleeps=5), r"next\(\) has not returned for 0.15 s. It must not wait", patience_s=0.05)


def test_a_bell_that_does_not_ring() -> None:
    class Silent(NumbersOfPartition):
        idle = 3

        def when_ready(self, ring: Callable[[], None]) -> None:
            pass

        def next(self) -> flux.Positioned | None:
            self.idle -= 1
            return None if self.idle > 0 else super().next()

    broken(of(Silent), r"ring\(\) was not called", patience_s=0.1)


def test_an_end_of_a_source_without_end() -> None:
    broken(of(NumbersOfPartition, endless=True), "it has ended, and the source says endless = True")


def test_columns_that_do_not_fit() -> None:
    broken(flux.source(Numbers(10), "m BIGINT"), "a batch that does not fit: the batch: .*'m'")


def test_positions_that_cannot_travel_or_are_missing() -> None:
    class Odd(NumbersOfPartition):
        def next(self) -> flux.Positioned | None:
            given = super().next()
            assert given is not None
            return given._replace(position=self.source.odd)  # type: ignore[attr-defined]

    broken(of(Odd, odd=object()), "the position of a source must be a number, text, bytes")
    broken(of(Odd, odd=None), "has given 100 rows and no position, so each life would begin at the start")
    broken(
        of(NumbersOfPartition, positions=False),
        "next.. has returned flux.Positioned, and the source says positions = False",
    )


def test_a_reader_that_cannot_travel() -> None:
    broken(
        of(NumbersOfPartition, lock=threading.Lock()),
        r"cannot be pickled for the workers.*Open files .* in read\(\)",
    )

    class Settles(Numbers):
        def prepare(self, kept: Any) -> Any:
            return None

    locked = Settles(100)
    locked.lock = threading.Lock()  # type: ignore[attr-defined]
    broken(locked, r"cannot be pickled for the workers.*Open files .* in read\(\)")


def test_facts_that_are_settled_anew_at_each_start() -> None:
    class Settles(Numbers):
        newest = iter(range(10, 90, 10))

        def prepare(self, kept: Any) -> Any:
            self.rows = next(Settles.newest)
            return self.rows

    broken(Settles(0), "behind row 20|more rows than the 10 of the first reading")


def test_facts_that_json_cannot_hold_or_that_are_refused_at_the_next_start() -> None:
    class Odd(Numbers):
        def prepare(self, kept: Any) -> Any:
            return {1, 2}

    class Refuses(Numbers):
        def prepare(self, kept: Any) -> Any:
            assert kept is None
            return 1

    broken(Odd(10), r"prepare\(\) must return data for JSON")
    broken(Refuses(10), r"prepare\(\), given what it had returned at the first start, raised AssertionError")


def test_partitions_with_one_name() -> None:
    broken(type("Named", (Numbers,), {"partition_name": lambda self, p: "log"})(10), "another text for each partition")


def test_an_applied_that_does_not_know_a_position_of_its_own() -> None:
    class Hears(NumbersOfPartition):
        def applied(self, position: Any) -> None:
            raise KeyError(position)

    broken(of(Hears), r"applied\(\) raised KeyError")
