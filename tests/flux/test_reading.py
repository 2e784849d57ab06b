"""The choice of the source that a worker reads next, and the way of its batches: stories without a clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import flux
from controller.planning.compiler import compile_plan
from flux.connectors.files.errors import BadFile
from flux.connectors.kafka.errors import BadRecord
from flux.dataflow.source import WorkerSource
from flux.errors import FluxError, UserCodeError
from flux.exchange.log import Rows
from flux.exchange.slices import SMALL_ROWS
from flux.operators.user_code import raised_by_user
from flux.settings import Settings
from flux.wire.messages import Mark, Resume
from flux.wire.pulse import KIND, PARTITION, READS, TURN, WHAT
from flux.wire.statistics import SourceLag
from flux.worker.core import WorkerCore
from flux.worker.effects import failure_of
from flux.worker.pacing import BATCHES, READ_S, STARVED_S
from flux.worker.report import stats
from flux.worker.source_scheduler import IDLE_SOURCE_S, QUIET_S, TOGETHER
from partitioning.table import ReplicaAt, Table

SCHEMA = pa.schema([("x", pa.int64())])
Batches = Iterable[pa.RecordBatch | None]


def rows(*values: int) -> pa.RecordBatch:
    return pa.record_batch({"x": pa.array(values, pa.int64())})


def table(*readers: int, epoch: int = 0) -> Table:
    """Make a table: one replica of one partition on worker 0, and partitions of the source on these workers."""
    return Table(epoch, (((ReplicaAt(0, 0),),),), (readers,), {0: "", 1: ""})


def reading(read: Callable[..., Batches], partitions: int = 1, seeks: bool = False, **settings: Any) -> WorkerCore:
    """Make a worker that reads all partitions of a source, and has heard that its own replica waits for rows."""
    source = WorkerSource("rows", read, partitions, SCHEMA, seeks)
    flow = flux.stage(partitions=1, name="kept")(lambda batch: batch)(source)
    plan = compile_plan([flow], replace(Settings.of(), **settings), lambda schema: schema, "q", b"")
    core = WorkerCore(plan, 0)
    core.on_table(table(*(0,) * partitions), 0.0)
    list(core.poll(0.0))
    return core


def turn(core: WorkerCore, now: float, idle: bool = True, each_s: float = READ_S) -> int:
    """Read for one turn, and return the number of batches. Each takes ``each_s``."""
    batches = 0
    while core.read(idle, now + batches * each_s):
        batches += 1
    return batches


def read_of(core: WorkerCore) -> dict[int, int]:
    """Return the number of rows read of each partition."""
    return {partition: streams.rows for (_, partition), streams in core.sources.items()}


def test_sources_take_turns_batch_by_batch() -> None:
    core = reading(lambda p: iter([rows(p)] * 9), partitions=3)
    assert turn(core, 1.0) == BATCHES
    assert sorted(read_of(core).values()) == [1, 1, 2]
    turn(core, 2.0)
    assert sorted(read_of(core).values()) == [2, 3, 3]


def test_a_reader_is_opened_when_somebody_waits_for_its_rows_and_not_before() -> None:
    opened: list[int] = []

    def read(partition: int) -> Iterator[pa.RecordBatch]:
        opened.append(partition)
        return iter([rows(1)])

    source = WorkerSource("rows", read, 1, SCHEMA)
    flow = flux.stage(partitions=1, name="kept")(lambda batch: batch)(source)
    core = WorkerCore(compile_plan([flow], Settings.of(), lambda schema: schema, "q", b""), 0)
    core.on_table(table(0), 0.0)
    assert (turn(core, 1.0), opened, core.reading.due(1.0)) == (0, [], float("inf"))
    list(core.poll(1.0))  # the worker answers its own greeting
    assert core.reading.due(1.0) < float("inf")
    assert (turn(core, 2.0), opened) == (2, [0]), "a batch and the end"


def test_a_source_that_has_nothing_keeps_no_other_waiting_and_is_asked_again_soon() -> None:
    def read(partition: int) -> Batches:
        return iter([None] * 4 + [rows(7)]) if partition == 0 else iter([rows(1), rows(2)])

    core = reading(read, partitions=2)
    assert turn(core, 1.0) == 3, "two batches of the other one, and its end"
    assert read_of(core) == {0: 0, 1: 2}
    assert core.sources[0, 0].pauses == 4
    assert core.reading.due(1.0) == pytest.approx(1.0 + 3 * READ_S + IDLE_SOURCE_S)
    assert turn(core, 1.0 + 3 * READ_S) == 0, "not at once"
    assert turn(core, 1.0 + 4 * READ_S + IDLE_SOURCE_S) == 2
    assert read_of(core) == {0: 1, 1: 2}


def test_a_reader_that_knows_says_itself_when_it_has_nothing() -> None:
    """Believe the count of the reader: one that reads ahead gives None also where rows are on their way."""

    class Ahead:
        found_nothing = 0

        def __iter__(self) -> Iterator[None]:
            return self

        def __next__(self) -> None:
            return None

        def pauses(self) -> int:
            return self.found_nothing

    reader = Ahead()
    core = reading(lambda p: reader)
    turn(core, 1.0)
    turn(core, 2.0)
    assert core.sources[0, 0].pauses == 0
    reader.found_nothing = 3
    turn(core, 3.0)
    turn(core, 4.0)
    assert core.sources[0, 0].pauses == 3
    reader.found_nothing = -1
    with pytest.raises(UserCodeError, match=r"pauses\(\) must return a number that never falls, got -1 after 3"):
        turn(core, 5.0)


def test_at_intervals_all_that_the_sources_have_is_read_together() -> None:
    """Read all of them at multiples of the interval. Rows that come a little later wait for the next multiple."""
    given: dict[int, list[pa.RecordBatch | None]] = {0: [rows(1), rows(2), None, rows(3)], 1: [None, rows(4), None]}
    core = reading(lambda p: iter(given[p]), partitions=2)
    core.reading.interval_s = 0.016
    assert turn(core, 1.0, each_s=0.0001) == 3, "also what is there a moment after the other had nothing"
    assert core.reading.due(1.0003) == pytest.approx(1.008), "multiples of 16 ms"
    assert turn(core, 1.0079) == 0
    assert turn(core, 1.0081) == 3, "the last batch, and both ends"


def test_a_source_that_has_ended_changes_nothing_for_the_others() -> None:
    core = reading(lambda p: iter([rows(1), None, rows(2)] if p else []), partitions=2)
    core.reading.interval_s = 0.016
    assert turn(core, 1.0, each_s=0.0001) == 2, "an end, and a batch"
    assert core.reading.due(1.0002) == pytest.approx(1.008)


def test_a_source_that_waits_for_room_is_not_kept_waiting_by_an_interval() -> None:
    core = reading(lambda p: iter([rows(*range(50))] * 3), log_max_bytes=600)
    core.reading.interval_s = 0.016
    assert turn(core, 1.0) == 2
    list(core.poll(1.001))
    while core.work(1.001):
        pass
    list(core.poll(1.001))
    list(core.poll(1.007))
    assert core.reading.due(1.007) == 1.007
    assert turn(core, 1.007) == 2, "the third batch, and the end"


def test_a_source_whose_log_is_full_is_not_read() -> None:
    core = reading(lambda p: iter([rows(*range(50))] * 9), log_max_bytes=600)
    assert turn(core, 1.0) == 2, "up to the bound and one batch"
    assert core.reading.due(1.0) == float("inf"), "what makes room is a message"


def logged(core: WorkerCore) -> list[list[int]]:
    """Return the batches in the log of the only source."""
    (producer,) = core.sources[0, 0].producers
    return [e.element.data.batch.column("x").to_pylist() for e in producer.log.entries() if isinstance(e.element, Rows)]


def test_small_batches_are_appended_together_and_stay_batches() -> None:
    wide = rows(*range(SMALL_ROWS + 1))
    given = [rows(1), rows(2, 3), wide, rows(4), None, rows(5)]
    core = reading(lambda p: iter(given), partitions=1)
    assert turn(core, 1.0, each_s=0.0001) == 4, "at the None the turn ends"
    assert logged(core) == [[1], [2, 3], wide.column("x").to_pylist(), [4]], (
        "nothing is kept back, and the order is that of the source"
    )


def test_a_reader_may_use_its_memory_again_for_the_next_batch() -> None:
    def read(partition: int) -> Batches:
        memory = np.empty(4, np.int64)
        for n in range(4):
            memory[:] = n
            yield pa.RecordBatch.from_arrays(
                [pa.Array.from_buffers(pa.int64(), 4, [None, pa.py_buffer(memory)])], ["x"]
            )

    core = reading(read)
    while core.read(True, 1.0):
        pass
    assert logged(core) == [[n] * 4 for n in range(4)]


def test_each_small_batch_is_as_old_as_when_it_was_read() -> None:
    core = reading(lambda p: iter([rows(n) for n in range(3)]))
    turn(core, 1.0, each_s=0.0005)
    entries = core.sources[0, 0].producers[0].log.entries()
    assert [entry.created for entry in entries[:3]] == pytest.approx([1.0, 1.0005, 1.001])


def test_a_reader_that_rings_is_not_asked_again_before_that_because_batches_of_it_are_kept() -> None:
    class Rings:
        asked = 0

        def __iter__(self) -> Iterator[pa.RecordBatch | None]:
            return self

        def __next__(self) -> pa.RecordBatch | None:
            self.asked += 1
            return rows(1) if self.asked == 1 else None

        def when_ready(self, ring: Callable[[], None]) -> None:
            pass

    reader = Rings()
    core = reading(lambda p: iter([rows(n) for n in range(9)]) if p else reader, partitions=2)
    core.reading.bell = lambda: None
    turn(core, 1.0, each_s=0.0001)
    assert (reader.asked, read_of(core)) == (2, {0: 1, 1: 9})


def test_no_more_small_batches_are_kept_than_are_appended_together() -> None:
    core = reading(lambda p: iter([rows(n) for n in range(2 * TOGETHER + 1)]))
    at = 1.0
    for _ in range(TOGETHER):
        assert core.read(True, at)
    assert logged(core) == [[n] for n in range(TOGETHER)], "before the turn is over"
    core.reading.read(True, at + 1.0, 0.0, core.note)
    assert core.sources[0, 0].rows == TOGETHER


def test_small_batches_for_which_there_is_no_room_wait_for_it_and_the_end_waits_for_them() -> None:
    core = reading(lambda p: iter([rows(n) for n in range(9)]))
    log = core.sources[0, 0].producers[0].log
    for _ in range(9):
        assert core.read(True, 1.0)
    assert logged(core) == []
    log.bound(20)
    assert core.read(True, 1.0), "it has come to the end"
    assert len(logged(core)) == 3, "up to the bound and one batch"
    assert not core.sources[0, 0].ended
    assert not core.read(True, 9.0)
    assert core.reading.due(9.0) == float("inf"), "what makes room is a message"
    log.bound(1 << 20)
    assert core.reading.due(9.0) == 9.0, "at once, though the reader is not asked"
    assert turn(core, 10.0) == 1, "the end"
    assert logged(core) == [[n] for n in range(9)]
    assert core.sources[0, 0].ended


def test_rows_that_wait_are_applied_first_but_keep_sources_out_only_for_a_while() -> None:
    core = reading(lambda p: iter([rows(1)] * 99))
    assert turn(core, 1.0, idle=True) == BATCHES
    assert turn(core, 1.0 + STARVED_S / 2, idle=False) == 0
    assert turn(core, 1.01 + STARVED_S, idle=False) == 2, (
        "for twice as long, because there was more than there was time for"
    )
    core.ticked = True
    assert turn(core, 1.02 + STARVED_S, idle=False) == BATCHES, "timers without end would keep the rows out"


def test_a_batch_that_is_too_large_goes_into_the_streams_in_pieces() -> None:
    core = reading(lambda p: iter([rows(1, 2, 3, 4, 5)]), batch_max_rows=2)
    assert turn(core, 1.0) == 4, "three pieces and the end"
    assert (core.sources[0, 0].batches, core.sources[0, 0].rows) == (3, 5)


def test_a_batch_that_is_too_large_is_refused_where_batches_are_counted() -> None:
    core = reading(lambda p, start: iter([rows(1, 2, 3)]), seeks=True, batch_max_rows=2)
    with pytest.raises(UserCodeError, match=r"source rows, partition 0: ValueError: a batch of 3 rows.*beyond"):
        turn(core, 1.0)


def test_batches_without_rows_are_left_out() -> None:
    core = reading(lambda p: iter([rows(), rows(1), rows()]))
    turn(core, 1.0)
    assert (core.sources[0, 0].batches, core.sources[0, 0].ended) == (1, True)


def test_a_reader_is_told_to_begin_where_everybody_has_what_is_before() -> None:
    begun: list[int] = []

    def read(partition: int, start: int) -> Iterator[pa.RecordBatch]:
        begun.append(start)
        return iter([rows(1)] * (5 - start))

    core = reading(read, seeks=True)
    assert turn(core, 1.0) == BATCHES
    assert begun == [0]


def test_whoever_watches_sees_which_source_is_read() -> None:
    seen: list[tuple[int, int, int]] = []

    def read(partition: int) -> Iterator[pa.RecordBatch]:
        seen.append((core.note[WHAT], core.note[PARTITION], core.note[KIND]))
        yield rows(1)

    core = reading(read, partitions=2)
    turn(core, 1.0)
    assert seen == [(0, 0, READS), (0, 1, READS)]
    assert core.note[KIND] == TURN


def test_a_reader_is_closed_when_another_worker_reads_and_when_this_one_ends() -> None:
    closed: list[int] = []

    def read(partition: int) -> Iterator[pa.RecordBatch]:
        try:
            while True:
                yield rows(1)
        finally:
            closed.append(partition)

    core = reading(read, partitions=2)
    turn(core, 1.0)
    core.on_table(table(1, 0, epoch=1), 2.0)
    assert closed == [0]
    core.close()
    assert closed == [0, 1]


@pytest.mark.parametrize("error", [RuntimeError("no such file"), SystemExit(3)])
def test_what_a_reader_raises_names_source_and_partition(error: BaseException) -> None:
    def read(partition: int) -> Iterator[pa.RecordBatch]:
        raise error
        yield

    with pytest.raises(UserCodeError, match=f"source rows, partition 0: {type(error).__name__}"):
        turn(reading(read), 1.0)


def test_sources_that_have_nothing_for_long_are_asked_less_often_and_soon_again_after_a_batch() -> None:
    """Ask less often: a worker with nothing to do but to ask its sources took a tenth of a core."""
    core = reading(lambda p: iter([*[None] * 5, rows(7), *[None] * 5]))
    now, pauses = 1.0, []
    while read_of(core) == {0: 0}:
        asked = now + turn(core, now) * READ_S
        pauses.append(round((core.reading.due(now) - asked) / IDLE_SOURCE_S))
        now = core.reading.due(now)
    assert pauses == [1, 2, 4, 4, 4, 1]


class Ringing:
    """A reader that rings."""

    def __init__(self) -> None:
        #: Rows of the next batch.
        self.rows: tuple[int, ...] = ()
        self.asked = 0
        self.ring: Callable[[], None] = lambda: None

    def when_ready(self, ring: Callable[[], None]) -> None:
        self.ring = ring

    def __iter__(self) -> Ringing:
        return self

    def __next__(self) -> pa.RecordBatch | None:
        self.asked += 1
        taken, self.rows = self.rows, ()
        return rows(*taken) if taken else None


def test_a_reader_that_rings_is_not_asked_in_vain() -> None:
    reader, bells = Ringing(), []
    core = reading(lambda p: reader)
    core.reading.bell = lambda: bells.append("ding")
    assert (turn(core, 1.0), reader.asked) == (0, 1)
    assert core.reading.due(1.0) == pytest.approx(1.0 + QUIET_S)
    assert (turn(core, 1.05), reader.asked) == (0, 1)
    reader.rows = (7,)
    reader.ring()
    assert bells == ["ding"]
    assert core.reading.due(1.05) == 1.05
    assert turn(core, 1.05) == 1
    assert core.reading.due(1.1) > 1.1, "it has been asked again and had nothing"
    reader.rows = (8,)
    assert (turn(core, 1.06), read_of(core)) == (0, {0: 1}), "it has not rung"
    assert (turn(core, 1.3), read_of(core)) == (1, {0: 2}), "now and then it is asked all the same"


def test_what_comes_while_a_reader_is_asked_rings_again() -> None:
    reader = Ringing()

    class Late(Ringing):
        def __next__(self) -> pa.RecordBatch | None:
            said = super().__next__()
            if self.asked == 1:
                self.rows = (7,)
                self.ring()
            return said

    reader = Late()
    core = reading(lambda p: reader)
    core.reading.bell = lambda: None
    assert turn(core, 1.0) + turn(core, 1.001) == 1


def test_readers_that_ring_and_others_do_not_wait_for_each_other() -> None:
    ringing = Ringing()
    core = reading(lambda p: ringing if p == 0 else iter([*[None] * 3, rows(1)]), partitions=2)
    core.reading.bell = lambda: None
    turn(core, 1.0)
    assert core.reading.due(1.0) <= 1.0 + READ_S + IDLE_SOURCE_S
    ringing.rows = (1, 2)
    ringing.ring()
    assert (turn(core, 1.0001), read_of(core)) == (1, {0: 2, 1: 0})
    for step in range(1, 20):
        turn(core, 1.0 + step / 100)
    assert read_of(core) == {0: 2, 1: 1}


def test_nobody_is_handed_a_bell_where_nobody_can_be_woken() -> None:
    reader = Ringing()
    core = reading(lambda p: reader)
    turn(core, 1.0)
    assert core.reading.due(1.0) == pytest.approx(1.0 + IDLE_SOURCE_S)


class Lagging:
    """A reader that reports ``said`` as its lag."""

    def __init__(self, batches: Iterable[Any], said: Any = None) -> None:
        self._batches, self.said = iter(batches), said

    def __iter__(self) -> Lagging:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def lag(self) -> Any:
        return self.said


def test_a_worker_reports_the_lag_of_readers_that_know_it() -> None:
    readers = {0: Lagging([None] * 9), 1: Lagging([None] * 9, (3, 8)), 2: [None] * 9}
    core = reading(lambda p: readers[p], partitions=3)
    assert stats(core)["lags"] == [], "none is open"
    turn(core, 1.0)
    assert stats(core)["lags"] == [SourceLag(0, 1, 3, 8)]
    core.on_table(table(0, 1, 0, epoch=1), 2.0)
    assert stats(core)["lags"] == [], "another worker reads it"


@pytest.mark.parametrize("error", [BadFile("f: it is cut off"), BadRecord("it is no json", "topic", 1, 7)])
def test_an_error_of_a_source_of_this_project_keeps_its_class(error: FluxError) -> None:
    def read(partition: int) -> Iterator[pa.RecordBatch]:
        raise error
        yield

    with pytest.raises(type(error), match=f"source rows, partition 0: {error}") as raised:
        turn(reading(read), 1.0)
    assert "in read" in raised.value.traceback, "frames of a user are shown"
    assert failure_of(0, raised.value).kind == type(error).__name__
    assert error.summary in ("f: it is cut off", "it is no json"), "as it was"
    assert not raised_by_user(SystemExit())


@pytest.mark.parametrize("said", [5, (1,), (1, 2, 3), (-1, 2), (0, 1 << 63), ("0", "1"), (0.5, 1)])
def test_a_lag_that_makes_no_sense_names_the_source(said: Any) -> None:
    core = reading(lambda p: Lagging([None] * 9, said))
    turn(core, 1.0)
    with pytest.raises(UserCodeError, match="source rows, partition 0"):
        stats(core)


def test_a_stopped_worker_reads_again_the_batches_that_consumers_have_had_and_no_others() -> None:
    """Read such batches again: the lost reader of the partition had given them to one replica, and another one may need
    them for its next step."""

    def source(partition: int) -> Batches:
        for number in range(9):
            yield rows(number)

    earlier = reading(source)
    turn(earlier, 1.0)
    ((key, streams),) = earlier.sources.items()
    given = streams.producers[0].log[2]
    core = reading(source)
    core.on_last_checkpoints(1.0)
    assert turn(core, 1.0) == 0
    (producer,) = core.sources[key].producers
    core.on_answer(1, Resume(*producer.stream, 0, 0, [], -1, [], 0, [Mark(2, given.checksum)]), 1.0)
    assert turn(core, 2.0) == 3
    assert turn(core, 3.0) == 0
