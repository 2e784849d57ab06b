"""Small batches that travel together: numbered one by one, cut where another replica has ordered them otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from clustered import clustered
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import made, scripted, work

from flux.errors import NonDeterministicInputError, ProtocolError
from flux.exchange.consumer_map import Ranks
from flux.exchange.consumer_progress import MESSAGE_BYTES
from flux.exchange.feed import Counters
from flux.exchange.inbound import Inbound, Packet, RowSlice, WordSlice
from flux.exchange.log import End
from flux.exchange.producer import Producer
from flux.exchange.slices import RUN_BYTES, RUN_CELLS, RUN_ROWS, SMALL_ROWS, SliceRun, pack, span, unpack
from flux.wire.codec import decode_answer, decode_batches, decode_data, encode_batches
from flux.wire.frames import encode
from flux.wire.messages import Ack, Acks, AppliedThrough, Data, OrderEntry, Resume, in_messages
from partitioning.ids import StreamId
from partitioning.table import ReplicaAt, Table

PARTITIONS = 4
#: Worker 10 hosts partitions 0, 2 and 3 (as secondary of 3), worker 11 hosts 1 and 3.
ROWS = ((ReplicaAt(10, 0),), (ReplicaAt(11, 0),), (ReplicaAt(10, 0),), (ReplicaAt(11, 0), ReplicaAt(10, 0)))
TABLE = Table(0, (ROWS,), (), {10: "", 11: ""})
SCHEMA = pa.schema([("x", pa.int64())])


class Stream:
    """A producer with small batches whose rows say which batch and partition they are of."""

    def __init__(self, run_max_rows: int = 4096, granted: int = 1 << 30) -> None:
        self.producer = Producer(StreamId(0, 0), 0, PARTITIONS, 1 << 30, 1.0, run_max_rows=run_max_rows)
        self.producer.on_table(TABLE, 0, 0.0)
        list(self.producer.poll(0.0))
        self.granted = granted
        self.rows: list[list[int]] = []

    def append(self, *counts: int) -> None:
        """Append a batch with these counts of rows for the partitions."""
        number, by_rank = len(self.rows), self.producer.by_rank
        assert by_rank is not None
        self.rows.append(list(counts))
        values = [value(number, p, row) for p in by_rank for row in range(counts[p])]
        rows = pa.record_batch([pa.array(values, pa.int64())], schema=SCHEMA)
        self.producer.append(clustered(rows, by_rank, [counts[p] for p in by_rank]), float(number))

    def resume(self, worker: int, needed: dict[int, int], nonce: int = 1) -> list[tuple[Data, list[pa.RecordBatch]]]:
        self.producer.on_answer(worker, Resume(0, 0, nonce, 0, [*needed.items()], -1, [], self.granted), 0.0)  # type: ignore[list-item]
        return self.sent(worker)

    def sent(self, worker: int) -> list[tuple[Data, list[pa.RecordBatch]]]:
        """Return the messages to a worker as they come out at the other end."""
        sent = []
        for effect in self.producer.poll(0.0):
            if effect.worker == worker and isinstance(effect.message, Data):
                message = decode_data(encode(effect.message))
                assert isinstance(message, Data)
                sent.append((message, decode_batches(message, encode_batches(effect.batches), SCHEMA)))
        return sent

    def expected(self, partition: int, first: int = 0, end: int | None = None) -> list[int]:
        numbers = range(first, len(self.rows) if end is None else end)
        return [value(n, partition, row) for n in numbers for row in range(self.rows[n][partition])]


def value(number: int, partition: int, row: int) -> int:
    return (number * PARTITIONS + partition) * 1000 + row


def inbound(*has: int) -> Inbound:
    """Make the receiving end of a stream. ``has`` are the next batches that partitions 0, 2 and 3 need."""
    made = Inbound(StreamId(0, 0), 0, 1 << 30)
    made.greet(0, "here", 1)
    for place, (partition, at) in enumerate(zip(HOSTED, has, strict=False)):
        made.received.join(partition, at, HOSTED[:place])
    return made


HOSTED = [0, 2, 3]


def taken(at: Inbound, sent: list[Any], counters: Counters | None = None) -> dict[int, list[RowSlice]]:
    found: dict[int, list[RowSlice]] = {partition: [] for partition in HOSTED}
    for message, batches in sent:
        deliveries = at.take(message, batches, HOSTED, (), counters or Counters())
        assert isinstance(deliveries, list), deliveries
        for partition, slice_ in deliveries:
            assert isinstance(slice_, RowSlice)
            found[partition].append(slice_)
    at.validate()
    return found


def values(slices: list[RowSlice]) -> list[int]:
    return [x for slice_ in slices for x in slice_.batch.column("x").to_pylist()]


SOME_ROWS = st.lists(st.lists(st.integers(0, 3), min_size=PARTITIONS, max_size=PARTITIONS), min_size=1, max_size=12)


@settings(deadline=None)
@given(SOME_ROWS, st.integers(0, 12), st.integers(0, 12), st.sampled_from([0, 5, 4096]))
def test_each_partition_gets_its_rows_in_order_however_they_travel(
    batches: list[list[int]], needed: int, ahead: int, run_max_rows: int
) -> None:
    stream, needed, ahead = Stream(run_max_rows), min(needed, len(batches)), min(ahead, len(batches))
    for counts in batches:
        stream.append(*counts)
    wants = {0: needed, 2: ahead, 3: 0}
    at = inbound(needed, ahead, 0)
    found = taken(at, stream.resume(10, wants))
    for partition, first in wants.items():
        assert values(found[partition]) == stream.expected(partition, first)
        for slice_ in found[partition]:
            run = slice_.run or SliceRun([slice_.sequence], [slice_.batch.num_rows])
            assert (slice_.first, slice_.sequence) == (run.sequences[0], run.sequences[-1])
            assert run.rows == [stream.rows[n][partition] for n in run.sequences], "each has rows here"
            at.applied(partition, slice_)
    assert at.held_bytes == 0


def test_what_waits_for_a_worker_travels_as_one_message() -> None:
    stream = Stream()
    for _ in range(5):
        stream.append(1, 1, 1, 1)
    ((message, (batch,)),) = stream.resume(10, {0: 0, 2: 0, 3: 0})
    assert (message.number, message.first, message.sequence, message.batches) == (0, 0, 4, [0, 1, 2, 3, 4])
    assert (sum(message.rows), batch.num_rows, message.created) == (15, 15, 0.0)
    stream.append(0, 5, 0, 0)  # nothing for worker 10
    stream.append(1, 1, 1, 1)
    ((alone, _),) = stream.sent(10)
    assert (alone.number, alone.first, alone.sequence, alone.batches) == (1, 5, 6, [])


def test_large_batches_and_words_travel_alone() -> None:
    stream = Stream()
    for rows in (1, 1, 1, 1, SMALL_ROWS + 1, 1, 1, 1, 1, 1):
        stream.append(rows, 0, 0, 0)
    stream.producer.finish(9.0)
    sent = stream.resume(10, {0: 0, 2: 0, 3: 0})
    assert [(m.sequence, m.batches) for m, _ in sent] == [(3, [0, 1, 2, 3]), (4, []), (9, [5, 6, 7, 8, 9]), (10, [])]


def test_a_run_is_no_longer_than_a_step_and_the_credit_allow() -> None:
    stream = Stream(run_max_rows=10)
    for _ in range(9):
        stream.append(2, 0, 0, 0)
    assert [m.batches for m, _ in stream.resume(10, {0: 0, 2: 0, 3: 0})] == [[0, 1, 2, 3, 4], [5, 6, 7, 8]]
    short = Stream(granted=4 * (MESSAGE_BYTES + 16) + 1)
    for _ in range(99):
        short.append(2, 0, 0, 0)
    sent = [message.nbytes for message, _ in short.resume(10, {0: 0, 2: 0, 3: 0})]
    assert sum(sent[:-1]) < short.granted <= sum(sent), "the last one goes beyond it"


def test_a_run_has_no_more_rows_than_a_slow_operator_may_get_however_many_a_step_may_have() -> None:
    stream = Stream(run_max_rows=4 * RUN_ROWS)
    for _ in range(4):
        stream.append(RUN_ROWS // 8, 0, 0, 0)
        for _ in range(7):
            stream.append(RUN_ROWS // 8 - 1, 1, 0, 0)
    for _, batches in stream.resume(10, {0: 0, 2: 0, 3: 0}):
        assert sum(batch.num_rows for batch in batches) <= RUN_ROWS


def test_a_batch_that_waits_alone_is_no_run() -> None:
    stream = Stream()
    for rows in (0, 2, 0):
        stream.append(rows, 1, 0, 0)
    assert [(m.sequence, m.batches) for m, _ in stream.resume(10, {0: 0, 2: 0, 3: 0})] == [(1, [])]


def test_the_header_of_a_run_is_bounded() -> None:
    """Give each partition a batch of its own: a run has its batches times its partitions of numbers."""
    partitions, batches = 1000, 200
    table = Table(0, (((ReplicaAt(10, 0),),) * partitions,), (), {10: ""})
    producer = Producer(StreamId(0, 0), 0, partitions, 1 << 30, 1.0, run_max_rows=4096)
    producer.on_table(table, 0, 0.0)
    list(producer.poll(0.0))
    assert producer.by_rank is not None
    for number in range(batches):
        rows = pa.record_batch([pa.array([number], pa.int64())], schema=SCHEMA)
        producer.append(clustered(rows, producer.by_rank[number : number + 1], [1]), 0.0)
    needed = [(partition, 0) for partition in range(partitions)]
    producer.on_answer(10, Resume(0, 0, 1, 0, needed, -1, [], 1 << 30), 0.0)  # type: ignore[arg-type]
    sent = [effect.message for effect in producer.poll(0.0)]
    assert [number for m in sent if isinstance(m, Data) for number in m.batches] == list(range(batches))
    assert 1 < max(len(m.counts) for m in sent if isinstance(m, Data)) <= RUN_CELLS


def test_a_run_has_batches_that_were_clustered_by_another_table() -> None:
    stream = Stream()
    stream.append(1, 1, 1, 1)
    other = np.array([3, 2, 1, 0], np.int32)
    rows = pa.record_batch([pa.array([value(1, p, 0) for p in other], pa.int64())], schema=SCHEMA)
    stream.rows.append([1, 1, 1, 1])
    stream.producer.append(clustered(rows, other, [1, 1, 1, 1]), 1.0)
    stream.append(1, 1, 1, 1)
    sent = stream.resume(10, {0: 0, 2: 0, 3: 0})
    assert [m.batches for m, _ in sent] == [[0, 1, 2]]
    found = taken(inbound(0, 0, 0), sent)
    assert all(values(found[p]) == stream.expected(p) for p in HOSTED)


def test_a_worker_that_catches_up_gets_runs_and_nothing_twice() -> None:
    stream = Stream()
    for _ in range(6):
        stream.append(1, 1, 2, 1)
    sent = stream.resume(10, {0: 5, 2: 2, 3: 4})
    assert [m.batches for m, _ in sent] == [[2, 3, 4, 5]]
    counters = Counters()
    found = taken(inbound(5, 2, 4), sent, counters)
    assert {p: values(found[p]) for p in HOSTED} == {p: stream.expected(p, at) for p, at in ((0, 5), (2, 2), (3, 4))}
    assert counters.duplicate == 0, "it travels only where it is wanted"


def test_a_replica_cuts_its_slices_as_the_order_says() -> None:
    """Give a replica batches 0 to 4 as one run; the primary had them in other runs, and has merged the last two."""
    stream = Stream()
    for _ in range(5):
        stream.append(2, 0, 0, 0)
    at, operator = inbound(0, 0, 0), scripted()
    replica = made(operator, 2)
    replica.follow()
    for slice_ in taken(at, stream.resume(10, {0: 0, 2: 0, 3: 0}))[0]:
        replica.add(slice_)
    orders = [OrderEntry(1.0, 0.0, [(0, 0, through)]) for through in (0, 2, 4)]
    replica.order.on_orders(0, 0, orders, 3, 0)
    applied: list[list[int]] = []
    while replica.ready(1.0):
        step = replica.next_step(1.0)
        assert replica.apply(step)
        for slice_ in step.slices:
            at.applied(0, slice_)
            at.validate()
        applied.append(values(step.slices))  # type: ignore[arg-type]
    assert applied == [stream.expected(0, 0, 1), stream.expected(0, 1, 3), stream.expected(0, 3, 5)]
    assert (at.held_bytes, at.next_to_apply(0)) == (0, 5)
    assert work(replica, 1.0) == 0


def test_an_order_that_names_a_batch_without_rows_in_the_run_shows_another_input() -> None:
    stream = Stream()
    for rows in (1, 0, 1):
        stream.append(rows, 1, 1, 1)
    replica = made(scripted(), 2)
    replica.waits.from_sources = {0}
    replica.follow()
    for slice_ in taken(inbound(0, 0, 0), stream.resume(10, {0: 0, 2: 0, 3: 0}))[0]:
        replica.add(slice_)
    replica.order.on_orders(0, 0, [OrderEntry(1.0, 0.0, [(0, 0, 1)])], 1, 0)
    with pytest.raises(NonDeterministicInputError):
        replica.apply(replica.next_step(1.0))


def test_what_is_packed_for_a_worker_is_unpacked_there() -> None:
    """Pack rows for partitions 1 and 2 of three, the second before the first."""
    by_rank = np.array([2, 1, 0], np.int32)
    ranks = Ranks(by_rank, by_rank.argsort().astype(np.int32))
    batches = [[0, 2, 2], [0, 0], [1, 1, 2]]  # partition of each row
    given = []
    for number, of_rows in enumerate(batches):
        order = [2, 1, 0]
        rows = [10 * number + partition for partition in order for p in of_rows if p == partition]
        batch = pa.record_batch([pa.array(rows, pa.int64())], schema=SCHEMA)
        given.append(clustered(batch, order, [of_rows.count(partition) for partition in order]))
    hosts = np.array([False, True, True])
    packed = pack(span(given, [3, 5, 6]), hosts, np.zeros(0, np.int64), ranks)
    assert packed is not None
    assert (packed.which, packed.partitions) == ([0, 2], [2, 1])
    found = [
        (run.sequences, run.rows, rows.column("x").to_pylist())
        for run, rows in unpack(packed.batch, [3, 6], packed.rows, packed.counts)
    ]
    assert found == [([3, 6], [2, 1], [2, 2, 22]), ([6], [2], [21, 21])]
    assert packed.nbytes == given[0].nbytes * 2 // 3 + given[2].nbytes
    assert pack(span(given[:1], [3]), hosts, np.array([4, 4, 4]), ranks) is None, "all have it"


def test_batches_with_many_bytes_travel_alone_and_a_run_has_few() -> None:
    wide = pa.schema([("s", pa.string())])
    producer = Producer(StreamId(0, 0), 0, PARTITIONS, 1 << 30, 1.0, run_max_rows=4096)
    producer.on_table(TABLE, 0, 0.0)
    list(producer.poll(0.0))
    assert producer.by_rank is not None
    for size in [20_000] * 40 + [RUN_BYTES] * 2:
        rows = pa.record_batch([pa.array(["x" * size])], schema=wide)
        producer.append(clustered(rows, producer.by_rank, [1, 0, 0, 0]), 0.0)
    producer.on_answer(10, Resume(0, 0, 1, 0, [(0, 0), (2, 0), (3, 0)], -1, [], 1 << 30), 0.0)  # type: ignore[list-item]
    sent = [e for e in producer.poll(0.0) if isinstance(e.message, Data) and e.worker == 10]
    sizes = [sum(batch.nbytes for batch in effect.batches) for effect in sent]
    assert max(sizes[:-2]) <= RUN_BYTES
    assert [effect.message.batches for effect in sent[-2:]] == [[], []]  # type: ignore[union-attr]


def test_credit_that_is_left_is_used_without_another_ack() -> None:
    """Batches that are kept for a run count as if each went alone, for every worker."""
    stream = Stream(granted=12_000)
    for _ in range(60):
        stream.append(5, 90, 5, 5)
    sent = stream.resume(10, {0: 0, 2: 0, 3: 0})
    while stream.producer.dirty:
        sent += stream.sent(10)
    assert sum(message.nbytes for message, _ in sent) >= 12_000 or sent[-1][0].sequence == 59


def test_batches_for_others_use_up_no_credit() -> None:
    stream = Stream(granted=5_000)
    for _ in range(300):
        stream.append(0, 9, 0, 0)
    stream.append(1, 0, 0, 0)
    assert [message.sequence for message, _ in stream.resume(10, {0: 0, 2: 0, 3: 0})] == [300]
    assert not stream.producer.dirty


def order(*slices: tuple[int, int, int], rows: int = -1) -> OrderEntry:
    return OrderEntry(1.0, 0.0, list(slices), rows=rows)


def fed(*elements: int) -> Any:
    """Make a secondary of a source's stream that has been read again. ``elements`` are the rows of batches 0, 1, ...;
    0: none for this partition; -1: the end."""
    replica = made(scripted(), 2)
    replica.waits.from_sources = {0}
    replica.follow()
    packet = Packet(inbound(0, 0, 0), 1, 1)
    for number, rows in enumerate(elements):
        about = STREAM, number, packet, 0, 0.0, True
        if rows < 0:
            replica.add(WordSlice(*about, End()))
        elif rows:
            replica.add(RowSlice(*about, pa.record_batch({"x": pa.array(range(rows), pa.int64())})))
    return replica


STREAM = StreamId(0, 0)


@pytest.mark.parametrize(
    ("elements", "ordered"),
    [
        ((0, 0, 0, 1, -1), order((0, 0, 5))),  # it ends before the batch that was ordered
        ((0, 0, 1, -1), order((0, 0, 3))),  # the end was ordered, by itself
        ((0, 0, 1, 1), order((0, 0, 3), rows=1)),  # batch 3 was ordered, and had all the rows
        ((0, 0, 0, 2), order((0, 0, 3), rows=1)),
        ((0, 0, 0, 0, 1), order((0, 0, 3))),
        ((-1,), order((0, 0, 1), (0, 0, 3))),
    ],
)
def test_another_reading_with_other_rows_is_noticed_and_not_waited_for(
    elements: tuple[int, ...], ordered: OrderEntry
) -> None:
    replica = fed(*elements)
    replica.order.on_orders(0, 0, [ordered], 1, 0)
    assert replica.ready(1.0)
    assert replica.missing() == []
    with pytest.raises(NonDeterministicInputError):
        replica.apply(replica.next_step(1.0))


def test_acks_of_very_many_partitions_are_several_messages() -> None:
    acks = [Ack(0, n, 1, 0, 5, [AppliedThrough(p, 4) for p in range(800)], 1) for n in range(800)]
    parts = list(in_messages(acks))
    assert [ack for part in parts for ack in part] == acks
    assert len(parts) > 1
    for part in parts:
        assert decode_answer(encode(Acks(part))) == Acks(part)


GOOD: dict[str, Any] = {
    "edge": 0, "producer": 0, "nonce": 1, "number": 0, "first": 3, "sequence": 5, "partitions": [0, 2], "rows": [3, 1],
    "runs": [2], "nbytes": 300, "batches": [3, 5], "counts": [1, 1, 2, 0],
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"batches": [5, 3]},
        {"batches": [3, 3]},
        {"batches": [3, 4]},
        {"batches": [2, 5]},
        {"batches": [5]},
        {"batches": []},
        {"counts": [1, 1, 2]},
        {"counts": []},
        {"counts": [1, 1, 1, 1]},
        {"counts": [3, 1, 1, 0]},
        {"runs": [1, 1]},
        {"partitions": [2, 2]},
        {"batches": [*range(1000)], "counts": [0] * 2000},
    ],
)
def test_a_run_whose_header_does_not_agree_with_itself_is_malformed(changes: dict[str, Any]) -> None:
    frames = encode_batches([pa.record_batch([pa.array(range(4), pa.int64())], schema=SCHEMA)])
    assert decode_batches(Data(**GOOD), frames, SCHEMA)
    with pytest.raises(ProtocolError):
        decode_batches(Data(**(GOOD | changes)), frames * len(changes.get("runs", [2])), SCHEMA)


@pytest.mark.parametrize("offset", range(8))
def test_columns_are_at_multiples_of_a_word_wherever_their_frame_is(offset: int) -> None:
    sent = pa.record_batch([pa.array(range(4), pa.int64())], schema=SCHEMA)
    (payload,) = encode_batches([sent])
    memory = pa.py_buffer(bytes(offset) + payload.to_pybytes())
    (batch,) = decode_batches(Data(**GOOD), [memory.slice(offset)], SCHEMA)
    assert batch == sent
    assert [buffer.address % 8 for column in batch.columns for buffer in column.buffers() if buffer is not None] == [0]
