"""The laws of output logs hold in a model of their primaries and readers, and each rule that is left out breaks one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable

import pytest

from flux.eventlog.chain import Segment
from flux.eventlog.log_owner import LogOwner
from flux.eventlog.log_store import LogStore, SegmentId
from flux.eventlog.records import DamagedLog, PushName
from flux.outputs.log_owner import ExitBatch, OutputLogOwner
from flux.outputs.reader import MissedRows, OutputPiece, PartitionScan
from tests.laws.event_log_model import LawBroken
from tests.laws.output_log_model import LIMITS, OutputRun, SpiedStore

#: Other seeds: ``for seed in range(1000, 11000): OutputRun(seed).go()``.
SEEDS = 25


def test_each_result_is_in_the_log_once_and_each_reader_gets_it_once_or_is_told() -> None:
    happened: Counter[str] = Counter()
    for seed in range(SEEDS):
        run = OutputRun(seed)
        run.go()
        happened += run.happened
    expected = {
        "take-over", "kill", "power lost", "begun anew", "fenced", "repeat", "segment removed", "missed", "rows",
    }  # fmt: skip
    assert {event for event, times in happened.items() if times >= 5} >= expected, happened


class LooksAtNoGeneration(SpiedStore):
    def check(self) -> None: ...


class ShowsReadersAllThatIsWritten(SpiedStore):
    def published(self, segment: SegmentId) -> int:
        return len(self.disk.files[segment].data)


class DropsNoRepeat(OutputLogOwner):
    def write(self, batches: Iterable[ExitBatch], now_us: int) -> Generator[None, None, None]:
        for batch in batches:
            self._log.offer(batch.rows, batch.row_count, PushName(), now_us)
        yield from self._log.commit(self._log.take())


class TellsBeforeTheFlush(OutputLogOwner):
    """An owner whose write returns when its batches are to be flushed with the next ones."""

    def write(self, batches: Iterable[ExitBatch], now_us: int) -> Generator[None, None, None]:
        yield from super().write((), now_us)
        for batch in batches:
            if batch.sequence >= self.next_exit:
                self._log.offer(batch.rows, batch.row_count, PushName(client=self._exit, number=batch.sequence), now_us)


class ForgetsExits(LogOwner):
    """An owner whose records do not tell the next owner which batches they were."""

    def _replay(self, newest: Segment, data: memoryview) -> int:
        end = super()._replay(newest, data)
        self._clients = {}
        return end


class BeginsWithoutExits(LogOwner):
    """An owner whose segments do not list the batches before them."""

    def _begin(self) -> Generator[None, None, None]:
        kept, self._clients = self._clients, {}
        yield from super()._begin()
        self._clients = kept


def _with(kind: type[LogOwner]) -> type[OutputLogOwner]:
    class Changed(OutputLogOwner):
        def __init__(self, store: LogStore, where: str, exit_name: str, limits: object) -> None:
            super().__init__(store, where, exit_name, LIMITS)
            self._log = kind(store, where, LIMITS)

    return Changed


class GoesByTheBatchAlone(OutputLogOwner):
    """An owner that goes on with the numbers of an earlier life of the query."""

    def __init__(self, store: LogStore, where: str, exit_name: str, limits: object) -> None:
        super().__init__(store, where, "the exit", LIMITS)


class TellsOfNoMissedRows(PartitionScan):
    def read(self, missed: list[MissedRows]) -> bool:
        return super().read([])


class BeginsWithTheWholeRecord(PartitionScan):
    """A scan that takes a cursor within a record to the first row of the record."""

    @staticmethod
    def _behind(piece: OutputPiece, rows: int) -> OutputPiece:
        return piece


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: OutputRun(seed, LooksAtNoGeneration),
        lambda seed: OutputRun(seed, ShowsReadersAllThatIsWritten),
        lambda seed: OutputRun(seed, owner=DropsNoRepeat),
        lambda seed: OutputRun(seed, owner=TellsBeforeTheFlush),
        lambda seed: OutputRun(seed, owner=_with(ForgetsExits)),
        lambda seed: OutputRun(seed, owner=_with(BeginsWithoutExits)),
        lambda seed: OutputRun(seed, owner=GoesByTheBatchAlone),
        lambda seed: OutputRun(seed, scan=TellsOfNoMissedRows),
        lambda seed: OutputRun(seed, scan=BeginsWithTheWholeRecord),
    ],
    ids=[
        "no look at the generation", "shown before the flush", "repeats not dropped", "told before the flush",
        "exits not read at a take-over", "segments without exits", "exits of another life", "missed rows not told",
        "cursor within a record",
    ],
)  # fmt: skip
def test_a_rule_that_is_left_out_breaks_a_law(make: Callable[[int], OutputRun]) -> None:
    for seed in range(16 * SEEDS):
        try:
            make(seed).go()
        except (LawBroken, DamagedLog):
            return
    pytest.fail(f"none of {16 * SEEDS} runs shows it")
