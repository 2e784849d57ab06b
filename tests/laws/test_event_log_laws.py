"""The laws of the event log hold in a model of its gateways, and each rule that is left out breaks one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator

import pytest

from flux.eventlog.chain import Segment
from flux.eventlog.log_owner import LogOwner, PushGroup
from flux.eventlog.log_store import SegmentId
from flux.eventlog.records import DamagedLog, PushName, Stored
from tests.laws.event_log_model import LawBroken, Run, VirtualStore

#: Other seeds: ``for seed in range(1000, 16000): Run(seed).go()``, four minutes.
SEEDS = 120


def test_each_answered_event_is_in_the_log_once_at_its_position_for_every_owner_and_reader() -> None:
    happened: Counter[str] = Counter()
    for seed in range(SEEDS):
        run = Run(seed)
        run.go()
        happened += run.happened
    expected = {
        "take-over",
        "kill",
        "kill in a commit",
        "power lost",
        "fenced",
        "repeat",
        "segment removed",
        "answered",
    }
    assert {event for event, times in happened.items() if times >= 20} >= expected, happened


class AnswersBeforeTheFlush(LogOwner):
    def commit(self, group: PushGroup) -> Generator[None, None, None]:
        for ticket in group.tickets:
            ticket.durable = True
        yield from super().commit(group)


class LooksAtNoGeneration(VirtualStore):
    def check(self) -> None: ...


class ChecksNoKeyAfterATakeOver(LogOwner):
    def _replay(self, newest: Segment, data: memoryview) -> int:
        end = super()._replay(newest, data)
        self._clients, self._keys = {}, {}
        return end


class GoesByItsOwnClock(LogOwner):
    def offer(self, rows: memoryview, count: int, name: PushName, now_us: int) -> object:  # type: ignore[override]
        self.arrival = 0
        return super().offer(rows, count, name, now_us)


class FlushesNoTailOfAnEarlierOwner(VirtualStore):
    def secure(self, segment: SegmentId) -> None: ...


class ShowsReadersAllThatIsWritten(VirtualStore):
    def published(self, segment: SegmentId) -> int:
        return len(self.disk.files[segment].data)


class NamesNoEndOfTheSegmentBefore(LogOwner):
    """An owner that takes all bytes of the segment before its own for content."""

    def _begin(self) -> Generator[None, None, None]:
        if self._chain:
            self._size = len(self._store.read(self._chain[-1].id))
        yield from super()._begin()


class BeginsWithoutNames(LogOwner):
    """An owner whose segments do not list the requests before them."""

    def _begin(self) -> Generator[None, None, None]:
        kept = self._clients, self._keys
        self._clients, self._keys = {}, {}
        yield from super()._begin()
        self._clients, self._keys = kept


class RemovesWhatReadersLack(LogOwner):
    def tidy(self, now_us: int, needed_from: int | None) -> Generator[None, None, None]:
        yield from super().tidy(now_us, None)


class AnswersRepeatsAtOnce(LogOwner):
    """An owner that answers the repeat of a push before the push is on disk."""

    def _known(self, name: PushName, crc: int) -> Stored | None:
        found = super()._known(name, crc)
        if found is not None:
            self.durable = max(self.durable, found.first + found.rows)
        return found


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: Run(seed, log=AnswersBeforeTheFlush),
        lambda seed: Run(seed, LooksAtNoGeneration),
        lambda seed: Run(seed, log=ChecksNoKeyAfterATakeOver),
        lambda seed: Run(seed, log=GoesByItsOwnClock),
        lambda seed: Run(seed, FlushesNoTailOfAnEarlierOwner),
        lambda seed: Run(seed, ShowsReadersAllThatIsWritten),
        lambda seed: Run(seed, log=NamesNoEndOfTheSegmentBefore),
        lambda seed: Run(seed, log=BeginsWithoutNames),
        lambda seed: Run(seed, log=RemovesWhatReadersLack),
        lambda seed: Run(seed, log=AnswersRepeatsAtOnce),
    ],
    ids=[
        "answer before the flush", "no look at the generation", "no keys after a take-over", "clock of the next owner",
        "tail not flushed", "unpublished rows shown", "no end of the segment before", "segments without names",
        "removed too early", "repeats answered at once",
    ],
)  # fmt: skip
def test_a_rule_that_is_left_out_breaks_a_law(make: Callable[[int], Run]) -> None:
    for seed in range(8 * SEEDS):
        try:
            make(seed).go()
        except (LawBroken, DamagedLog):
            return
    pytest.fail(f"none of {8 * SEEDS} runs shows it")
