"""The event log in a directory and in a store of objects: cuts and damage, segments, names, limits, several owners."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flux.eventlog.chain import Segment, read_chain
from flux.eventlog.log_owner import LogBusy, LogFull, LogLimits, LogOwner, NameReused, PushTicket
from flux.eventlog.log_reader import LogReader
from flux.eventlog.records import DamagedLog, PushName, SegmentHead
from flux.vault.directory_store import Directory, TakenOver
from flux.vault.framing import framed
from flux.vault.object_store import Bucket
from tests.flux.objects import AtOnce, Objects

Opening = Callable[[bool], Directory | Bucket]


@pytest.fixture(params=["directory", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Opening:
    objects = Objects()

    def opened(writes: bool) -> Directory | Bucket:
        if request.param == "directory":
            return Directory(tmp_path, writes, keeps=True)
        return Bucket(objects.beside(), "the store", writes, AtOnce(), keeps=True)

    return opened


def owner(store: Directory | Bucket, limits: LogLimits | None = None) -> LogOwner:
    log = LogOwner(store, "the log", limits)
    for _ in log.open():
        pass
    return log


def push(log: LogOwner, content: bytes, rows: int = 1, name: PushName = PushName(), at: int = 1000) -> PushTicket:  # noqa: B008
    ticket = log.offer(memoryview(content), rows, name, at)
    for _ in log.commit(log.take()):
        pass
    return ticket


def tidy(log: LogOwner, at: int, needed_from: int | None = None) -> None:
    for _ in log.tidy(at, needed_from):
        pass


def content(store: Directory | Bucket, start: int = 0) -> list[tuple[int, bytes]]:
    """Read everything from a position on."""
    reader, found = LogReader(store, "the log", start), []
    while records := reader.read():
        found += [(record.stored.first, bytes(record.batch)) for record in records]
    return found


def test_a_reader_and_the_next_owner_find_each_push_at_its_position(place: Opening) -> None:
    log = owner(place(True))
    tickets = [push(log, b"one", 2), push(log, b"two" * 500, 3)]
    assert [(each.stored.first, each.durable) for each in tickets] == [(0, True), (2, True)]
    assert content(place(False)) == [(0, b"one"), (2, b"two" * 500)]
    after = owner(place(True))
    assert after.next == 5
    push(after, b"three")
    assert content(place(False), 4) == [(2, b"two" * 500), (5, b"three")]


def test_pushes_that_come_together_are_flushed_together(place: Opening) -> None:
    log = owner(place(True))
    tickets = [log.offer(memoryview(b"x"), 1, PushName(), 0) for _ in range(5)]
    assert not any(each.durable for each in tickets)
    assert content(place(False)) == []
    assert [len(list(log.commit(log.take()))), all(each.durable for each in tickets)] == [4, True]


def test_an_owner_that_was_taken_over_answers_nobody(place: Opening) -> None:
    earlier = owner(place(True))
    push(earlier, b"one")
    later = owner(place(True))
    ticket = earlier.offer(memoryview(b"late"), 1, PushName(), 0)
    with pytest.raises(TakenOver):
        list(earlier.commit(earlier.take()))
    assert not ticket.durable
    push(later, b"two")
    assert content(place(False)) == [(0, b"one"), (1, b"two")]


def test_rows_are_shown_only_when_they_are_durable_and_owned(place: Opening) -> None:
    log = owner(place(True))
    log.offer(memoryview(b"one"), 1, PushName(), 0)
    commit = log.commit(log.take())
    shown = []
    for _ in commit:
        shown.append(len(content(place(False))))
    assert shown[0] == 0
    assert len(content(place(False))) == 1


def test_rows_of_an_owner_that_does_not_know_its_end_are_not_shown(place: Opening) -> None:
    """Leave out rows that the former owner has flushed behind the claim of the next one, which may have read the log
    already."""
    earlier = owner(place(True))
    push(earlier, b"one")
    claimed = place(True)
    earlier.offer(memoryview(b"late"), 1, PushName(), 0)
    commit = earlier.commit(earlier.take())
    next(commit)
    next(commit)
    assert b"late" not in [data for _, data in content(place(False))]
    assert claimed.generation == 2


def test_a_repeat_has_the_place_of_the_first_at_this_owner_and_the_next(place: Opening) -> None:
    log = owner(place(True))
    push(log, b"one", name=PushName(key="k"))
    push(log, b"two", name=PushName(client="ann", number=4))
    for each in (log, owner(place(True))):
        again = each.offer(memoryview(b"one"), 1, PushName(key="k"), 0)
        assert (again.repeated, again.durable, again.stored.first) == (True, True, 0)
        again = each.offer(memoryview(b"two"), 1, PushName(client="ann", number=4), 0)
        assert (again.repeated, again.durable, again.stored.first) == (True, True, 1)
        assert each.offer(memoryview(b"old"), 1, PushName(client="ann", number=3), 0).repeated
        with pytest.raises(NameReused, match="key 'k' was used for other rows, at position 0"):
            each.offer(memoryview(b"three"), 1, PushName(key="k"), 0)


def test_a_key_is_known_for_ten_minutes_and_a_client_for_ever(place: Opening) -> None:
    log = owner(place(True), LogLimits(segment_bytes=1, retain_us=0))
    push(log, b"one", name=PushName(key="k"), at=0)
    push(log, b"two", name=PushName(client="ann", number=1), at=0)
    tidy(log, 0)
    push(log, b"three", at=601 * 1_000_000)
    tidy(log, 1200 * 1_000_000)
    tidy(log, 1200 * 1_000_000)
    assert log.first > 1, "the segments of both are gone"
    after = owner(place(True))
    assert not after.offer(memoryview(b"one"), 1, PushName(key="k"), 0).repeated
    assert after.offer(memoryview(b"two"), 1, PushName(client="ann", number=1), 0).repeated


def test_the_time_of_arrival_never_falls(place: Opening) -> None:
    assert push(owner(place(True)), b"one", at=5000).stored.arrival == 5000
    assert push(owner(place(True)), b"two", at=70).stored.arrival == 5000


def test_segments_go_when_readers_have_them_and_their_time_is_over(place: Opening) -> None:
    log = owner(place(True), LogLimits(segment_bytes=1, retain_us=100))
    for at in range(4):
        push(log, b"row", at=at * 1000)
        tidy(log, at * 1000, needed_from=0)
    assert log.first == 0
    tidy(log, 10_000, needed_from=2)
    assert log.first == 2
    assert content(place(False)) == [(2, b"row"), (3, b"row")]
    tidy(log, 10_000, needed_from=None)
    assert (log.first, log.next, content(place(False))) == (4, 4, [])
    assert owner(place(True)).next == 4


def test_a_full_log_and_a_slow_disk_refuse(place: Opening) -> None:
    log = owner(place(True), LogLimits(disk_bytes=2000, pending_bytes=100))
    log.offer(memoryview(bytes(100)), 1, PushName(), 0)
    with pytest.raises(LogBusy, match="Push again"):
        log.offer(memoryview(b"x"), 1, PushName(), 0)
    list(log.commit(log.take()))
    for number in range(40):
        if log.bytes + 100 < 2000:
            push(log, number.to_bytes(2) * 25)
    push(log, bytes(range(100)))
    with pytest.raises(LogFull, match="queries that read it"):
        log.offer(memoryview(bytes(range(200))), 1, PushName(), 0)


def test_a_log_that_has_lost_its_segments_is_not_new(tmp_path: Path) -> None:
    push(owner(Directory(tmp_path, keeps=True)), b"one")
    for path in tmp_path.glob("journal-*"):
        path.unlink()
    with pytest.raises(DamagedLog, match="has none any more"):
        owner(Directory(tmp_path, keeps=True))


# ---- cuts and damage, in a directory

PUSHES = st.lists(st.tuples(st.binary(min_size=1, max_size=400), st.integers(1, 5)), min_size=1, max_size=6)


def written(folder: Path, pushes: list[tuple[bytes, int]]) -> tuple[Path, list[tuple[int, bytes]]]:
    """Write a log; return its only segment, and its content."""
    log, kept = owner(Directory(folder, keeps=True)), []
    for data, rows in pushes:
        kept.append((push(log, data, rows).stored.first, data))
    (segment,) = folder.glob("journal-*")
    return segment, kept


@settings(max_examples=25, deadline=None)
@given(PUSHES, st.data())
def test_a_torn_end_is_cut_off_where_it_was_not_answered(pushes: list[tuple[bytes, int]], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        segment, kept = written(folder, pushes)
        whole = segment.read_bytes()
        start = Directory(folder, False, keeps=True).read((1, 1)).index(b"FlxJ", 4)
        segment.write_bytes(whole[: data.draw(st.integers(start, len(whole) - 1))])
        with pytest.raises(DamagedLog, match=r"segment 00000001-00000001 is damaged at byte [\d,]+ of"):
            owner(Directory(folder, keeps=True))  # published rows were answered
        next(iter(folder.glob("published-*"))).unlink()
        after = owner(Directory(folder, keeps=True))
        found = content(Directory(folder, False, keeps=True))
        assert found == kept[: len(found)]
        assert len(found) < len(kept)
        assert after.next == sum(rows for _, rows in pushes[: len(found)])


@settings(max_examples=60, deadline=None)
@given(PUSHES, st.data())
def test_damage_anywhere_is_an_error_or_the_end_and_never_other_rows(
    pushes: list[tuple[bytes, int]], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        segment, kept = written(folder, pushes)
        bad = bytearray(segment.read_bytes())
        at = data.draw(st.integers(0, len(bad) - 1))
        bad[at] ^= data.draw(st.integers(1, 255))
        segment.write_bytes(bad)
        with pytest.raises(DamagedLog):
            owner(Directory(folder, keeps=True))
        with pytest.raises(DamagedLog):
            content(Directory(folder, False, keeps=True))
        next(iter(folder.glob("published-*"))).unlink()
        try:
            owner(Directory(folder, keeps=True))
        except DamagedLog:
            return
        assert content(Directory(folder, False, keeps=True)) == kept[:-1], "only the last push may pass for torn"


def test_content_that_looks_like_a_frame_is_none(tmp_path: Path) -> None:
    """Read such content as content: a client could else make a torn end look like damage, and the log would not open
    again."""
    log = owner(Directory(tmp_path, keeps=True))
    push(log, b"one")
    log.offer(memoryview(framed(b"evil" * 10) + b"the rest"), 1, PushName(), 0)
    commit = log.commit(log.take())
    next(commit)
    (segment,) = tmp_path.glob("journal-*")
    segment.write_bytes(segment.read_bytes()[:-1])
    assert owner(Directory(tmp_path, keeps=True)).next == 1


def test_names_that_a_log_knows_count_for_no_limit_of_its_rows(place: Opening) -> None:
    log = owner(place(True), LogLimits(segment_us=1, retain_us=0, retain_bytes=18_000, disk_bytes=20_000))
    for number in range(60):
        push(log, b"row", name=PushName(client=f"{number:0100}", number=1), at=number * 10)
        tidy(log, number * 10 + 5, needed_from=0)
    assert log.bytes > 20_000, "the heads alone have more"
    push(log, b"row")
    limits = log.limits._replace(retain_us=1 << 60)
    after = owner(place(True), limits)
    push(after, b"row")
    tidy(after, 1000, needed_from=None)
    assert after.first == 0, "rows went though all of them have fewer bytes than are kept"


def test_a_log_knows_so_many_clients(place: Opening) -> None:
    log = owner(place(True), LogLimits(clients=2))
    for client in ("ann", "bob", "ann"):
        push(log, b"one", name=PushName(client=client, number=1))
    with pytest.raises(LogFull, match="knows 2 names of clients"):
        push(log, b"one", name=PushName(client="eve", number=1))
    push(log, b"two", name=PushName(client="bob", number=2))
    push(log, b"two", name=PushName(key="eve"))


def test_a_key_is_new_after_its_time_though_nothing_has_come_meanwhile(place: Opening) -> None:
    log = owner(place(True))
    push(log, b"one", name=PushName(key="k"), at=0)
    assert push(log, b"one", name=PushName(key="k"), at=600 * 1_000_000).repeated
    assert not push(log, b"two", name=PushName(key="k"), at=601 * 1_000_000).repeated


@pytest.mark.parametrize("previous", [(1, 2), (1, 3), (2, 1)])
def test_a_segment_that_names_a_later_one_as_the_one_before_it_is_damage(previous: tuple[int, int]) -> None:
    """Refuse such a chain, which would be read for ever."""

    class TwoSegments:
        def segments(self) -> list[tuple[int, int]]:
            return [(1, 2), *([previous] if previous != (1, 2) else [])]

    heads = {
        each: Segment(SegmentHead(each, previous if each == (1, 2) else (1, 2), 9, 0, 0, 7, {}, {}), 9, None, None)
        for each in TwoSegments().segments()
    }
    with pytest.raises(DamagedLog, match=r"the log: segment 00000001-00000002 names .* as the one before it"):
        read_chain(TwoSegments(), "the log", heads)  # type: ignore[arg-type]


def test_events_are_not_written_over_where_the_claim_of_a_generation_is_lost() -> None:
    objects = Objects()
    push(owner(Bucket(objects, "the store", True, AtOnce(), keeps=True)), b"one")
    for claim in objects.sizes("claims"):
        if claim != "begun":
            objects.remove(f"claims/{claim}")
    push(owner(Bucket(objects.beside(), "the store", True, AtOnce(), keeps=True)), b"two")
    assert content(Bucket(objects.beside(), "the store", False, AtOnce(), keeps=True)) == [(0, b"one"), (1, b"two")]


def test_events_are_not_written_over_where_the_file_of_a_generation_is_lost(tmp_path: Path) -> None:
    first = owner(Directory(tmp_path, keeps=True))
    push(first, b"one")
    first._store.close()
    (tmp_path / "generation-00000001").unlink()
    push(owner(Directory(tmp_path, keeps=True)), b"two")
    assert content(Directory(tmp_path, False, keeps=True)) == [(0, b"one"), (1, b"two")]
