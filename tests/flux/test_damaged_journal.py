"""A damaged journal of the vault: only records that were never answered are left out silently (design: journal)."""

from __future__ import annotations

import msgspec
import pytest
from kept import KEY, LARGE, Memory, all_held, checkpoint, held, opened, orders, standby, take, two_flushes

from flux.errors import SnapshotError
from flux.vault import journal as records
from flux.vault.journal import FencedRecord, Journal, Ordered, Seen, frame, frames

#: Fields of a frame's header: the byte at which each begins, and the one before which it ends.
MAGIC, CHECKSUM, LENGTH, UNPACKED = (0, 4), (4, 8), (8, 12), (12, 16)


def three_frames() -> list[bytes]:
    return [frame([Seen(3)]), frame([Ordered(orders(1, 0, 20))]), frame([Ordered(orders(1, 20, 2))])]


def read(data: bytes) -> int:
    """Return the number of frames in the data."""
    return len(list(frames(memoryview(data), "the journal")))


def flipped(data: bytes, at: int, bit: int = 0) -> bytes:
    return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]


@pytest.mark.parametrize("which", [0, 1], ids=["first", "second"])
@pytest.mark.parametrize(
    "part",
    [MAGIC, CHECKSUM, LENGTH, UNPACKED, (16, 1 << 30)],
    ids=["magic", "checksum", "length", "size when unpacked", "body"],
)
def test_a_bit_that_is_wrong_before_the_last_frame_is_an_error_that_says_where(
    which: int, part: tuple[int, int]
) -> None:
    data, whole = three_frames(), b"".join(three_frames())
    start = sum(map(len, data[:which]))
    said = f"the journal is damaged at byte {start:,} of {len(whole):,}, and that was whole once"
    assert part[0] < len(data[which])
    for at in range(part[0], min(part[1], len(data[which]))):
        for bit in (0, 7):
            with pytest.raises(SnapshotError, match=said):
                read(flipped(whole, start + at, bit))


def test_a_bit_that_is_wrong_in_the_last_frame_is_a_torn_frame() -> None:
    *before, last = three_frames()
    start = sum(map(len, before))
    for at in range(len(last)):
        for bit in (0, 7):
            assert read(flipped(b"".join([*before, last]), start + at, bit)) == 2


def test_a_record_of_another_release_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_decoder", msgspec.msgpack.Decoder(list[Seen | FencedRecord]))
    with pytest.raises(SnapshotError, match=r"the journal was written by another release of Flux: .*'o'"):
        read(b"".join(three_frames()))


def test_a_wrong_length_that_leads_beyond_the_end_is_damage_where_a_frame_follows() -> None:
    """Only the last frame may be torn, and this one is not the last."""
    first, second, last = three_frames()
    long = second[: LENGTH[0]] + b"\xff" * 4 + second[LENGTH[1] :]
    with pytest.raises(SnapshotError, match=f"damaged at byte {len(first)} of"):
        read(first + long + last)
    assert read(first + long) == 1


def test_a_lost_block_with_several_frames_in_it_is_an_error() -> None:
    small = [frame([Seen(epoch)]) for epoch in range(1000)]
    whole = b"".join(small)
    with pytest.raises(SnapshotError, match="damaged"):
        read(whole[:4096] + b"\0" * 4096 + whole[8192:])


def test_a_segment_without_a_byte_is_damaged() -> None:
    with pytest.raises(SnapshotError, match="damaged at byte 0 of 0"):
        read(b"")


@pytest.mark.parametrize("kind", ["a bit is wrong", "cut off"])
def test_damage_to_the_first_frame_of_a_segment_is_an_error_though_nothing_follows(kind: str) -> None:
    """Raise, because the query would else begin again at its first epoch, and the directory be emptied."""
    store = two_flushes()[0]
    Journal(store).begin()
    only = store.segment
    store.segment = {"a bit is wrong": flipped(only, 40), "cut off": only[:-1]}[kind]
    with pytest.raises(SnapshotError, match="damaged"):
        Journal(store)


def damaged(store: Memory, name: str, damage: str) -> None:
    data = store.files.pop(name)
    changed = {"changed": flipped(data, len(data) - 1), "shorter": data[:-1], "longer": data + b"\0", "empty": b""}
    if damage in changed:
        store.files[name] = changed[damage]


@pytest.mark.parametrize("damage", ["gone", "changed", "shorter", "longer", "empty"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_checkpoint_file_that_is_not_as_it_was_is_an_error_that_names_it(number: int, damage: str) -> None:
    """Raise, because rows have been acked by the damaged checkpoint, so that the one before it would not do. Number 0
    is whole, the others are changes."""
    store = Memory()
    journal = opened(store)
    standby(journal).on_orders(orders(1, 0, 4, committed=4))
    for each in range(3):
        take(journal, checkpoint(each + 1, 1, each, size=LARGE, base=each - 1))
    journal.flush()
    name = f"0-3-1-{number}-1"
    damaged(store, name, damage)
    said = "is not there" if damage == "gone" else "is damaged"
    with pytest.raises(SnapshotError, match=rf"checkpoint of partition 3 of stage 0 \({name}, [\d,]+ bytes\) {said}"):
        Journal(store)


@pytest.mark.parametrize("damage", ["gone", "changed", "shorter", "longer", "empty"])
@pytest.mark.parametrize("base", [-1, 0])
def test_one_that_waits_and_is_damaged_leaves_the_checkpoint_before_it(base: int, damage: str) -> None:
    """Primaries were not told that the waiting checkpoint is kept."""
    store = Memory()
    journal = opened(store)
    standby(journal).on_orders(orders(1, 0, 4, committed=2))
    take(journal, checkpoint(2, 1, 0, size=0))
    take(journal, checkpoint(4, 1, 1, size=LARGE, base=base))
    assert standby(journal).beside is not None
    journal.flush()
    before = all_held(journal)
    damaged(store, "0-3-1-1-1", damage)
    read = Journal(store)
    assert standby(read).beside is None
    assert held(standby(read))[0] == before[KEY][0]
    assert standby(read).order.since(2) == standby(journal).order.since(2)
    (said,) = read.left_out
    assert "checkpoint of partition 3 of stage 0 (0-3-1-1-1" in said
