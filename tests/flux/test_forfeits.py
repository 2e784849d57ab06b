"""State beyond its limit while an input is missing: windows close without it, or the other inputs stand still (design: forfeit,
state-stop)."""

from __future__ import annotations

import flux
from flux.dataflow.availability import Availability
from flux.replica.event_clock import SPANS_MAX, Forfeits
from flux.replica.replica import Replica
from flux.wire.statistics import ReaderState
from flux.worker.report import stats
from tests.flux.test_watermarks import Windows, rows, state_of


def forfeiting(max_state: int = 1) -> Availability:
    return Availability(1_000_000, overflow="forfeit", max_state=max_state)


def of_primaries(windows: Windows) -> list[Replica]:
    return [replica for replica in windows.core.replicas.values() if replica.stage.id == 0]


def goes_on(windows: Windows, time: int, seconds: float = 1.5) -> None:
    """Let the first partition give a row each 50 ms."""
    for _ in range(int(seconds / 0.05)):
        windows.script.given[0] += [rows(time)]
        windows.run(0.05)


def test_windows_close_without_a_stream_that_does_not_move_when_the_state_is_beyond_its_limit() -> None:
    """Close the oldest windows first, up to the streams that move. Rows of the standing stream for that time are left
    out and counted when they come; later rows are not."""
    windows = Windows(partitions=2, availability=forfeiting())
    windows.script.given[0] += [rows(1, 2, 15)]
    windows.script.given[1] += [rows(3)]
    windows.run(0.5)
    windows.script.given[0] += [rows(25, 31)]
    windows.run(0.4)
    assert windows.counts == {}, "it may yet come"
    goes_on(windows, 32)
    assert windows.counts == {10: 3, 20: 1, 30: 1}
    assert [replica.forfeits.spans for replica in of_primaries(windows)] == [[(3, 30)]] * 2
    windows.script.given[1] += [rows(4, 9, 33, 40)]
    windows.script.given[0] += [rows(41)]
    windows.run(0.3)
    assert windows.counts == {10: 3, 20: 1, 30: 1, 40: 32}
    assert sum(replica.forfeits.rows for replica in of_primaries(windows)) == 2
    assert sum(replica.left_out()[0] for replica in of_primaries(windows)) == 2
    windows.script.given[1] += [rows(38)]
    windows.run(0.2)
    assert sum(replica.forfeits.rows for replica in of_primaries(windows)) == 2, (
        "what comes behind that is late as ever"
    )


def test_nothing_is_forfeited_while_the_state_is_within_its_limit_or_every_stream_stands_still() -> None:
    within = Windows(partitions=2, availability=forfeiting(1 << 30))
    still = Windows(partitions=2, availability=forfeiting())
    for windows in (within, still):
        windows.script.given[0] += [rows(1, 55)]
        windows.script.given[1] += [rows(3)]
        windows.run(0.1)
    goes_on(within, 56)
    still.run(2.0)
    assert within.counts == still.counts == {}
    assert not any(replica.forfeits.spans for each in (within, still) for replica in of_primaries(each))


def test_a_stream_without_any_row_is_gone_past() -> None:
    windows = Windows(partitions=2, availability=forfeiting())
    for time in range(1, 50):
        windows.script.given[0] += [rows(time)]
        windows.run(0.05)
    assert set(windows.counts) == {10, 20, 30, 40}
    assert of_primaries(windows)[0].forfeits.spans == [(flux.NEVER, 40)]


def test_spans_are_joined_and_few() -> None:
    """Join spans also where steps are repeated, as from a replay point."""
    kept = Forfeits()
    for before, through in ((0, 10), (10, 20), (0, 10), (25, 30)):
        kept.close(before, through, 0)
    assert kept.spans == [(0, 20), (25, 30)]
    for number in range(40, 40 + 4 * SPANS_MAX, 2):
        kept.close(number, number + 1, 5)
    assert len(kept.spans) == SPANS_MAX
    assert (kept.spans[0][0], kept.spans[-1]) == (0, (38 + 4 * SPANS_MAX, 39 + 4 * SPANS_MAX))
    assert kept.counts(kept.spans[-1][1])
    assert not kept.counts(kept.spans[-1][1] + 1)
    kept.count(8)
    copied = Forfeits()
    copied.adopt(kept.state()["forfeits"])
    copied.count(9)
    assert (copied.spans, copied.rows) == (kept.spans, 4)
    assert Forfeits().state() == {}


def test_readers_stand_still_where_the_state_is_beyond_its_limit_and_nothing_is_to_be_forfeited() -> None:
    windows = Windows(partitions=2, may_be_silent=True, availability=Availability(1_000_000, max_state=1))
    assert not stats(windows.core)["state_full"]
    windows.script.given[0] += [rows(1, 55)]
    windows.script.given[1] += [rows(20)]
    windows.run(0.1)
    assert stats(windows.core)["state_full"]
    windows.core.reading.stand(40)
    windows.script.given[0] += [rows(60)]
    windows.script.given[1] += [rows(30)]
    windows.run(0.2)
    assert [state_of(windows, at) for at in (0, 1)] == [ReaderState.HELD, ReaderState.READING]
    assert [len(given) for given in windows.script.given] == [1, 0], "the one that is behind comes up"
    windows.core.reading.stand(flux.END_OF_TIME)
    windows.run(0.2)
    assert windows.script.given[0] == []
    assert not any(replica.forfeits.spans for replica in of_primaries(windows))
