"""The laws of tentative rows for readers hold in a model of primaries and readers, and each rule that is left out breaks one."""

from __future__ import annotations

from collections import Counter

import pytest

from flux.gateway.reads import tentative_tail
from flux.gateway.reads.ring import Positions
from flux.gateway.reads.tentative_tail import TentativeChange, TentativeFollower
from flux.outputs import tentative_channel
from flux.outputs.tentative_channel import ChannelOwner, ChannelReader, ChannelRecord, ChannelVoid, ShownState
from tests.laws.event_log_model import LawBroken, VirtualStore
from tests.laws.tentative_channel_model import ChannelRun, ShowingPrimary, ShownReader

#: Other seeds: ``for seed in range(1000, 11000): ChannelRun(seed).go()``.
SEEDS = 40


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have segments end, and changes be forgotten, all the time."""
    monkeypatch.setattr(tentative_channel, "SEGMENT_BYTES", 600)
    monkeypatch.setattr(tentative_tail, "CHANGES_BYTES", 4000)


def test_readers_show_the_tentative_rows_of_the_newest_primary_and_none_beside_a_stable_one() -> None:
    happened: Counter[str] = Counter()
    for seed in range(SEEDS):
        run = ChannelRun(seed)
        run.go()
        happened += run.happened
    expected = {
        "take-over", "rival ends", "power lost", "revision", "healed", "corrected", "beyond the bound", "came back", "shown",
    }  # fmt: skip
    assert {event for event, times in happened.items() if times >= 5} >= expected, happened


class LooksAtNoGeneration(ChannelRun):
    class store(VirtualStore):  # noqa: N801
        def check(self) -> None: ...


class GoesOnWithAnEarlierOwner(ChannelRun):
    """A run in which a new segment does not void the rows of the segments before it."""

    class reader(ChannelReader):  # noqa: N801
        def read(self) -> list[ChannelRecord]:
            return [each for each in super().read() if each != ChannelVoid(0)]


class BeginsWithoutRows(ChannelRun):
    """A run in which a segment begins without the rows that stand."""

    class owner(ChannelOwner):  # noqa: N801
        def _begin(self) -> None:
            kept, self._state = self._state, ShownState()
            super()._begin()
            self._state = kept


class TakesNothingBack(ChannelRun):
    """A run in which stable rows come without a look at the channel."""

    class owner(ChannelOwner):  # noqa: N801
        def keep(self) -> None: ...


class AsksTheChannelFirst(ChannelRun):
    def poll(self) -> None:
        self.tail.poll()
        self.between()
        self.ring = len(self.log)


class VoidsBehindStableRows(ChannelRun):
    def heal(self, primary: ShowingPrimary, through: int) -> None:
        shown, primary.shown = primary.shown, set()
        newest, at = (self.log[-1] if self.log else -1), len(self.log)
        super().heal(primary, through)
        if shown and min(shown) <= through:
            self.between()
            primary.channel.void(newest, through, at)
        primary.shown |= {each for each in shown if each > through}


class GivesChangesAtTheEndOfItsTurn(ChannelRun):
    def events(self, reader: ShownReader) -> None:
        if reader.position >= self.ring:
            super().events(reader)


class WaitsForNoStableRow(ChannelRun):
    """A run in which a change is given though the reader has still to get stable rows in front of it."""

    class follower(TentativeFollower):  # noqa: N801
        def take(self, positions: Positions) -> list[TentativeChange]:
            return super().take((1 << 60,))


class ComesBackWithItsOldRows(ChannelRun):
    class follower(TentativeFollower):  # noqa: N801
        def __init__(self, *given: object) -> None:
            super().__init__(*given)  # type: ignore[arg-type]
            self._voids = False


class MissesForgottenChanges(ChannelRun):
    class follower(TentativeFollower):  # noqa: N801
        def take(self, positions: Positions) -> list[TentativeChange]:
            if self._seen is not None and self._tail.since(self._seen) is None:
                self._seen = self._tail.number - len(self._tail._changes)
            return super().take(positions)


#: By left-out rule: the seed to begin with, shortly before the first one that shows it.
LEFT_OUT: dict[type[ChannelRun], int] = {
    LooksAtNoGeneration: 147,
    GoesOnWithAnEarlierOwner: 0,
    BeginsWithoutRows: 0,
    TakesNothingBack: 167,
    AsksTheChannelFirst: 0,
    VoidsBehindStableRows: 0,
    GivesChangesAtTheEndOfItsTurn: 0,
    WaitsForNoStableRow: 0,
    ComesBackWithItsOldRows: 0,
    MissesForgottenChanges: 0,
}


@pytest.mark.parametrize(("kind", "first"), LEFT_OUT.items())
def test_a_rule_that_is_left_out_breaks_a_law(kind: type[ChannelRun], first: int) -> None:
    for seed in range(first, first + 10 * SEEDS):
        try:
            kind(seed).go()
        except LawBroken:
            return
    pytest.fail(f"none of {10 * SEEDS} runs shows it")
