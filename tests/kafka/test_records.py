"""Record batches to columns and back, without a broker."""

from __future__ import annotations

import datetime

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flux.connectors.kafka.errors import CorruptRecords
from flux.connectors.kafka.records import kernels
from flux.connectors.kafka.records.compression import compress, decompress
from flux.connectors.kafka.records.decoder import Decoder
from flux.connectors.kafka.records.encoder import encode
from tests.kafka.batches import ABORT, COMMIT, TIME, ProducerIdentity, changed, control, decoded, made, signed, values

CODECS = (None, "gzip", "snappy", "lz4", "zstd")
BYTES = st.one_of(st.none(), st.binary(max_size=200))
HEADERS = st.lists(st.fixed_dictionaries({"key": st.text(max_size=20), "value": BYTES}), max_size=4)
RECORDS = st.lists(st.tuples(BYTES, BYTES, HEADERS, st.integers(-1, 4_102_444_800_000)), min_size=1, max_size=60)


@given(RECORDS, st.sampled_from(CODECS), st.integers(1, 3000), st.integers(0, 1 << 40))
@settings(max_examples=200, deadline=None)
def test_what_is_encoded_is_decoded(records: list, codec: str | None, batch_bytes: int, offset: int) -> None:
    keys, payloads, headers, times = (list(each) for each in zip(*records, strict=True))
    table = decoded(made(payloads, offset, keys, headers, codec, times, batch_bytes=batch_bytes))
    assert table.column("key").to_pylist() == keys
    assert values(table) == payloads
    assert table.column("headers").to_pylist() == [each or None for each in headers]
    assert table.column("timestamp").cast(pa.int64()).to_pylist() == [1000 * time for time in times]
    assert table.column("offset").to_pylist() == list(range(offset, offset + len(records)))


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=40), st.integers(0, 45), st.integers(1, 400))
@settings(max_examples=100, deadline=None)
def test_records_before_the_wanted_offset_are_left_out(payloads: list[bytes], start: int, chunk: int) -> None:
    table = decoded(made(payloads, 0, batch_bytes=100), start, chunk_bytes=chunk)
    assert values(table) == payloads[start:]


def test_columns_are_those_of_spark() -> None:
    table = decoded(made([b"v"], 7, [b"k"], [[{"key": "h", "value": None}]]))
    assert table.to_pylist() == [
        {
            "key": b"k", "value": b"v", "topic": "a topic", "partition": 3, "offset": 7,
            "timestamp": datetime.datetime.fromtimestamp(TIME / 1000, datetime.UTC), "timestampType": 0,
            "headers": [{"key": "h", "value": None}],
        }
    ]  # fmt: skip


def test_only_columns_that_are_wanted_are_made() -> None:
    table = decoded(
        made([b"v", b"w"], 7, [b"k", None], [[{"key": "h", "value": b"x"}], None]), columns=["offset", "value"]
    )
    assert table.schema.names == ["value", "offset"]
    assert table.to_pylist() == [{"value": b"v", "offset": 7}, {"value": b"w", "offset": 8}]


def test_the_broker_s_time_counts_where_the_topic_says_so() -> None:
    mixed = made([b"a", b"b"], 0) + changed(made([b"c", b"d"], 2), attributes=kernels.APPEND_TIME, max_time=TIME + 99)
    table = decoded(mixed)
    assert table.column("timestampType").to_pylist() == [0, 0, 1, 1]
    assert (table.column("timestamp").cast(pa.int64()).to_numpy() // 1000 - TIME).tolist() == [0, 1, 99, 99]


def test_a_batch_that_is_cut_off_waits_for_the_next_answer() -> None:
    whole = made([b"a"], 0) + made([b"b"], 1)
    for size in range(len(whole)):
        assert values(decoded(whole[:size])) == [b"a"] * (size >= len(whole) // 2)


def test_what_compaction_leaves_is_read() -> None:
    """Offsets with gaps, and batches without records that only tell how far the log is."""
    empty = changed(made([b"x"], 10)[:61], length=49, last_delta=9, records=0)
    gaps = changed(made([b"a", b"b"], 20), last_delta=7)
    got = Decoder("t", 0).decode(pa.py_buffer(empty + gaps + made([b"c"], 50)), 0)
    assert got.rows is not None
    assert got.rows.column("offset").to_pylist() == [20, 21, 50]
    assert got.next == 51
    alone = Decoder("t", 0).decode(pa.py_buffer(empty), 12)
    assert (alone.rows, alone.next, alone.used) == (None, 20, 61)


def test_records_of_aborted_transactions_are_left_out() -> None:
    def of(producer: int, payload: bytes, offset: int) -> bytes:
        return made([payload], offset, producer=ProducerIdentity(producer, 0, 0), transactional=True)

    log = b"".join([
        of(1, b"bad", 0), of(2, b"good", 1), made([b"plain"], 2), control(ABORT, 3, 1), of(1, b"later", 4),
        control(COMMIT, 5, 2), of(1, b"bad again", 6), control(COMMIT, 7, 1), of(1, b"open", 8),
    ])  # fmt: skip
    expected = [b"good", b"plain", b"later", b"bad again", b"open"]
    assert values(decoded(log, aborted=[(1, 0)])) == expected
    assert values(decoded(log, aborted=[(1, 0)], chunk_bytes=1)) == expected, "also where an answer is read in parts"
    assert values(decoded(log, aborted=[(1, 0), (2, 1)])) == [b"plain", b"later", b"bad again", b"open"]
    assert values(decoded(log)) == [b"bad", *expected]
    inside = log[len(of(1, b"bad", 0)) :]
    assert values(decoded(inside, 1, aborted=[(1, 0)])) == expected, "also from within the transaction"


def test_a_name_of_a_header_that_is_no_text_stops_nothing() -> None:
    data = made([b"v"], 0, None, [[{"key": "abc", "value": b"x"}]]).replace(b"abc", b"a\xffc")
    assert decoded(signed(data)).column("headers").to_pylist() == [[{"key": "a\ufffdc", "value": b"x"}]]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"magic": 1}, "format 2"),
        ({"length": 48}, "length"),
        ({"length": -1}, "length"),
        ({"records": -1}, "number of records"),
        ({"records": 2}, "number of records"),
        ({"records": 0}, "behind the last record"),
        ({"records": 1 << 30, "last_delta": (1 << 31) - 1}, "number of records"),
        ({"last_delta": -1}, "offsets"),
        ({"base": -1}, "offsets"),
        ({"base": (1 << 63) - 1}, "offsets"),
        ({"base_time": 1 << 62}, "timestamp"),
        ({"attributes": 5}, "no codec 5"),
        ({"attributes": 7}, "no codec 7"),
        ({"attributes": 1}, "gzip cannot read it"),
        ({"attributes": 2}, "snappy"),
        ({"attributes": 3}, "lz4 cannot read it"),
        ({"attributes": 4}, "zstd cannot read it"),
    ],
)
def test_a_head_that_cannot_be_right_is_an_error(fields: dict[str, int], why: str) -> None:
    with pytest.raises(CorruptRecords, match=why) as error:
        decoded(changed(made([b"value"], 41), **fields))
    assert "'a topic', partition 3" in str(error.value)


def test_a_wrong_checksum_is_an_error_and_rows_before_it_are_given() -> None:
    bad = bytearray(made([b"value"], 1))
    bad[-2] ^= 1
    decoder, data = Decoder("t", 0), made([b"good"], 0) + bytes(bad)
    got = decoder.decode(pa.py_buffer(data), 0)
    assert got.rows is not None
    assert got.rows.column("value").to_pylist() == [b"good"]
    with pytest.raises(CorruptRecords, match="offset 1: the checksum"):
        decoder.decode(pa.py_buffer(data).slice(got.used), got.next)


def test_no_offset_comes_twice_whatever_a_broker_sends() -> None:
    log = made([b"a"], 5) + made([b"b"], 5) + made([b"c", b"d"], 4) + made([b"e"], 6)
    assert decoded(log).column("offset").to_pylist() == [5, 6]


@pytest.mark.parametrize("codec", CODECS[1:])
def test_a_bomb_is_an_error_and_takes_no_memory(codec: str) -> None:
    data = made([b"\0" * (64 << 20)], 0, codec=codec, batch_bytes=1 << 30)
    decoder = Decoder("t", 0, bytes_max=1 << 20)
    before = pa.total_allocated_bytes()
    with pytest.raises(CorruptRecords, match="more than 1 MiB"):
        decoder.decode(pa.py_buffer(data), 0)
    assert pa.total_allocated_bytes() - before < 4 << 20


def test_a_record_beyond_the_limit_is_an_error_without_compression_too() -> None:
    with pytest.raises(CorruptRecords, match="more than 1 MiB"):
        Decoder("t", 0, bytes_max=1 << 20).decode(pa.py_buffer(made([b"x" * (2 << 20)], 0)), 0)


@pytest.mark.parametrize("codec", CODECS)
def test_a_record_of_30_mb_is_read(codec: str | None) -> None:
    payload = np.random.default_rng(1).integers(0, 256, 30_000_000, np.uint8).tobytes()
    assert values(decoded(made([b"before", payload, b"behind"], 0, codec=codec))) == [b"before", payload, b"behind"]


def test_snappy_is_read_with_and_without_the_framing_of_java() -> None:
    raw = bytes(range(256)) * 400
    framed = compress("snappy", pa.py_buffer(raw))
    assert bytes(framed[:8]) == b"\x82SNAPPY\0"
    assert bytes(decompress("snappy", framed, len(raw))) == raw
    assert bytes(decompress("snappy", pa.Codec("snappy").compress(pa.py_buffer(raw)), len(raw))) == raw
    with pytest.raises(ValueError, match="cut off"):
        decompress("snappy", framed.slice(0, framed.size - 1), len(raw))
    with pytest.raises(ValueError, match="more bytes than it can have"):
        decompress("snappy", pa.py_buffer(b"\xff\xff\xff\x07" + b"\0" * 10), 1 << 30)


def test_batches_keep_to_the_size_that_is_asked_for() -> None:
    encoded = encode(None, pa.array([b"x" * 100] * 50, pa.binary()), np.full(50, TIME), batch_bytes=1000)
    assert encoded.rows == [9] * 5 + [5]
    alone = encode(None, pa.array([b"x" * 5000] * 3, pa.binary()), np.full(3, TIME), batch_bytes=1000)
    assert alone.rows == [1, 1, 1]
    assert encode(None, pa.array([], pa.binary()), np.empty(0)).rows == []


def test_sequences_go_on_from_batch_to_batch_and_begin_again() -> None:
    payloads = pa.array([b"x" * 100] * 20, pa.binary())
    encoded = encode(
        None, payloads, np.full(20, TIME), producer=ProducerIdentity(9, 2, (1 << 31) - 9), batch_bytes=1000, offset=0
    )
    batches = np.zeros((10, kernels.FIELDS), np.int64)
    _, found, used = kernels.scan(encoded.data.address, encoded.data.size, 1 << 30, batches)
    assert (encoded.rows, used) == ([9, 9, 2], encoded.data.size)
    assert batches[:found, kernels.SEQUENCE].tolist() == [(1 << 31) - 9, 0, 9]
    assert set(batches[:found, kernels.PRODUCER]) == {9}
    assert set(batches[:found, kernels.EPOCH]) == {2}


def test_slices_of_columns_are_encoded_as_they_look() -> None:
    keys, payloads = pa.array([b"a", None, b"", b"d"], pa.binary()), pa.array(["v", "w", None, "y"])
    headers = pa.array(
        [[], [{"key": "h", "value": b"1"}], None, [{"key": "i", "value": None}]],
        decoded(b"").schema.field("headers").type,
    )
    data = encode(keys[1:], payloads[1:], np.full(3, TIME), headers[1:], offset=0).data
    table = decoded(bytes(data))
    assert table.column("key").to_pylist() == [None, b"", b"d"]
    assert values(table) == [b"w", None, b"y"]
    assert table.column("headers").to_pylist() == [[{"key": "h", "value": b"1"}], None, [{"key": "i", "value": None}]]


def test_both_ways_to_the_checksum_give_the_known_ones() -> None:
    known = {b"": 0, b"123456789": 0xE3069283, b"\0" * 32: 0x8A9136AA, bytes(range(32)): 0x46DD794E}
    for data, expected in known.items():
        at = np.frombuffer(data + b"\0", np.uint8).ctypes.data
        assert int(kernels.crc32c_by_table(at, len(data))) == expected
        assert int(kernels.crc32c(at, len(data))) == expected


@given(st.binary(max_size=300))
@settings(max_examples=100, deadline=None)
def test_both_ways_to_the_checksum_agree(data: bytes) -> None:
    at = np.frombuffer(data + b"\0", np.uint8)
    assert kernels.crc32c_by_table(at.ctypes.data, len(data)) == kernels.crc32c(at.ctypes.data, len(data))
