"""For any bytes, the decoder gives consistent rows or a typed error: no crash, no hang, no access to memory that is not its own.
``python -m tests.kafka.test_mutated_batches 1000000`` tries more, in a process of its own."""

from __future__ import annotations

import random
import sys
import time
from collections import Counter

from flux.connectors.kafka.errors import CorruptRecords
from tests.kafka.batches import ABORT, TIME, ProducerIdentity, control, decoded, made, signed

MUTATIONS = 8_000


def seeds(chance: random.Random) -> list[bytes]:
    """Make batches of every kind, small, so that a mutation hits something that matters."""
    headers = [[{"key": "h", "value": b"1"}, {"key": "", "value": None}], None, [{"key": "ü", "value": b""}]]
    rows, keys = [b"value", None, b"x" * 70], [b"k", None, b""]
    plain = [made(rows, 10, keys, headers, codec) for codec in (None, "gzip", "snappy", "lz4", "zstd")]
    long = made(
        [chance.randbytes(chance.randrange(300)) for _ in range(20)], 0, times=[TIME - 50 * i for i in range(20)]
    )
    several = (
        made([b"a", b"b"], 0, batch_bytes=1)
        + control(ABORT, 2, 7)
        + made([b"c"], 3, producer=ProducerIdentity(7, 0, 0))
    )
    aborted = made([b"a"], 0, producer=ProducerIdentity(7, 0, 0), transactional=True) + control(ABORT, 1, 7)
    return [*plain, long, several, aborted]


def mutated(batch: bytes, chance: random.Random) -> bytes:
    data = bytearray(batch)
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.randrange(len(data))
        match chance.randrange(6):
            case 0:
                data[at] = chance.randrange(256)
            case 1:
                data[at] ^= 1 << chance.randrange(8)
            case 2:
                data[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 3:
                del data[at : at + chance.randrange(1, 9)]
            case 4:
                data[at:at] = chance.randbytes(chance.randrange(1, 9))
            case 5:
                data[at : at + 8] = chance.choice((b"\xff" * 8, b"\x80" * 8, b"\x00" * 8, b"\x7f" + b"\xff" * 7))
        if not data:
            return b""
    if len(data) > 61 and chance.random() < 0.8:
        if chance.random() < 0.5:
            data[8:12] = (len(data) - 12).to_bytes(4, "big")
        size = int.from_bytes(data[8:12], "big") + 12
        if 61 <= size <= len(data):  # a checksum that fits lets the rest of the damage through
            data[:size] = signed(bytes(data[:size]))
    return bytes(data)


def attack(seed: int, count: int) -> Counter[str]:
    """Decode mutated batches; count the results: rows, nothing, or the first words of an error."""
    chance, ended = random.Random(seed), Counter[str]()
    batches = seeds(chance)
    for _ in range(count):
        data = mutated(chance.choice(batches), chance)
        try:
            table = decoded(
                data, chance.choice((0, 11)), aborted=chance.choice(((), [(7, 0)]))
            )  # validates each column in full
        except CorruptRecords as error:
            ended[str(error).split(": ")[1][:40]] += 1
        else:
            ended["rows" if table.num_rows else "nothing"] += 1
            offsets = table.column("offset").to_pylist()
            assert all(before < after for before, after in zip(offsets, offsets[1:], strict=False))
    return ended


def test_mutated_batches_give_rows_or_errors() -> None:
    ended = attack(1, MUTATIONS)
    assert sum(ended.values()) == MUTATIONS
    assert ended["rows"] > MUTATIONS / 20
    reasons = " ".join(ended)
    for reason in (
        "checksum",
        "length in a record",
        "number in a record",
        "number of records",
        "cannot read it",
        "no codec",
    ):
        assert reason in reasons, ended


if __name__ == "__main__":
    total, began = Counter[str](), time.monotonic()
    for seed in range(int(sys.argv[1]) // MUTATIONS):
        total += attack(1000 + seed, MUTATIONS)
    print(f"{sum(total.values())} in {time.monotonic() - began:.0f} s")
    for how, times in total.most_common():
        print(f"{times:9} {how}")
