"""A model of tentative results along a chain, for random schedules (design: shadow).

Sources feed A, which counts rows per key and window; A feeds B, which adds the counts up; results of B go to a sink. Stable lanes
are in order and reliable, and cut for a time; the tentative lane loses, reorders and repeats messages. Sources fall silent, links
are cut, shadows are lost. Results are counts only, so a tentative count above the true one shows that a row was counted twice.

Shadows are those of the product. ``WITHOUT`` names the rules that a model may be made without, each of which a law must catch.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pyarrow as pa

from flux.dataflow.availability import Availability
from flux.shadows.calendar import DatedMark, MarkCalendar
from flux.shadows.overlay import Overlay, TentativeEntry, TentativeRoom
from flux.shadows.shadow import (
    GRACE_S,
    STANDS_S,
    CorrectionDone,
    MarkOutput,
    Shadow,
    ShadowEffect,
    TentativeState,
    Undone,
    WantedMarks,
)
from flux.shadows.tentative_operator import OverlayRows
from flux.windows.statements import StreamBound
from flux.windows.window import NEVER
from partitioning.ids import StreamId

#: Microseconds of a window, and seconds.
QUANTUM = 100_000
BUCKET_S = QUANTUM / 1e6
KEYS = 4
#: Seconds between two turns of a partition.
TURN_S = 0.001
RESULT = pa.schema([("mark", pa.int64()), ("key", pa.int64()), ("count", pa.int64())])
#: Marks, keys and counts.
Counts = dict[tuple[int, int], int]
#: Events of a schedule after which it must have come to its end.
EVENTS_MAX = 200_000


class ShadowLawBroken(AssertionError):
    """A law that a schedule has broken."""


def batch_of(counts: Counts) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {"mark": [mark for mark, _ in counts], "key": [key for _, key in counts], "count": list(counts.values())},
        RESULT,
    )


def counts_of(batches: Sequence[pa.RecordBatch]) -> Counts:
    found: Counts = Counter()
    for batch in batches:
        for mark, key, count in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            found[mark, key] += count
    return found


class CountPeek:
    """The tentative counts of a partition: its own, with those of the overlay."""

    reach = QUANTUM
    aligned = True
    nbytes = 0
    purges = False

    def __init__(self, partition: ModelPartition) -> None:
        self._partition = partition

    def mark(self, after: int, through: int, overlay: Sequence[OverlayRows]) -> list[pa.RecordBatch] | None:
        state = self._partition.counts
        found: Counts = Counter({at: count for at, count in state.items() if after < at[0] <= through})
        for rows in overlay:
            for at, count in counts_of([rows.batch]).items():
                if after < at[0] <= through:
                    found[at] += count
        if self.purges:
            for at in list(state):
                if after < at[0] <= through:
                    del state[at]
        return [batch_of(found)] if found else []

    def output_watermark(self, watermark: int) -> int:
        return watermark

    def stable(self, step: Any) -> None: ...
    def forget(self) -> None: ...
    def close(self) -> None: ...


class ModelPartition:
    """One partition of A or B, and its shadow."""

    def __init__(self, model: ShadowModel, edge: int, producer: int, inputs: Sequence[StreamId], behind: int) -> None:
        self.model, self.stream, self.behind = model, StreamId(edge, producer), behind
        self.counts: Counts = Counter()
        self.watermark = NEVER
        self.bounds = dict.fromkeys(inputs, NEVER)
        self.applied = dict.fromkeys(inputs, -1)
        self.sequence = 0
        self.life = 0
        #: The time of the last loss of the shadow, which takes the dates of marks with it.
        self.lost_at = -1e9
        self.created: dict[int, float] = {}
        self.heard: dict[int, float] = {}
        #: By stream: the times of its last two rises. A stream that has just risen is late by load, which is no failure.
        self.rises = dict.fromkeys(inputs, (-1e9, -1e9))
        self.room = TentativeRoom(1 << 30)
        self.shadow = self._made()

    def _made(self) -> Shadow:
        self.life += 1
        last = not self.behind
        lanes = (1,) if last else ()
        return Shadow(
            CountPeek(self), self.model.availability, QUANTUM, self.room, lanes, self.behind, last, self.life > 1,
            self.watermark,
        )  # fmt: skip

    def lose_shadow(self) -> None:
        self.shadow.close()
        self.shadow, self.lost_at = self._made(), self.model.now
        self.turn()

    def note(self, mark: int, created: float) -> None:
        """Note that the partition has heard of a mark, and of those before it."""
        for at in range(mark, max(self.watermark, 0), -QUANTUM):
            self.heard.setdefault(at, self.model.now)
            self.created[at] = min(self.created.get(at, 1e9), self.model.truth_created[at])

    # ---- the stable lane

    def rows(self, stream: StreamId, sequence: int, counts: Counts, created: float) -> None:
        for at, count in counts.items():
            if at[0] <= self.watermark:
                raise ShadowLawBroken("a stable row is behind the watermark")
            self.counts[at] += count
        if counts:
            self.applied[stream] = sequence
        slice_ = SimpleNamespace(stream=stream, sequence=sequence, created=created)
        self.shadow.note_step(SimpleNamespace(slices=[slice_], rows=counts or None))  # type: ignore[arg-type]
        self.turn()

    def bound(self, stream: StreamId, bound: int, created: float) -> None:
        if bound > self.bounds[stream]:
            self.rises[stream] = self.rises[stream][1], self.model.now
        self.bounds[stream] = max(self.bounds[stream], bound)
        self.note(bound, created)
        watermark = min(self.bounds.values())
        before, self.watermark = self.watermark, max(self.watermark, watermark)
        self.look()  # the shadow takes its rows back before stable rows follow
        if before < self.watermark:
            self._close(before)
        self.turn()

    def _close(self, before: int) -> None:
        first = min(self.model.first_mark, self.watermark) if before == NEVER else before + QUANTUM
        for mark in range(first, self.watermark + 1, QUANTUM):
            counts = {at: self.counts.pop(at) for at in list(self.counts) if at[0] == mark}
            self.model.give(self, mark, counts, self.model.truth_created[mark])

    # ---- the shadow

    def look(self) -> None:
        bounds = {stream: StreamBound(bound) for stream, bound in self.bounds.items()}
        self._do(self.shadow.look(self.model.now, self.watermark, bounds, self.applied))

    def turn(self) -> None:
        """Tell the shadow of its streams, and let it do the work that is due."""
        self.look()
        while self.shadow.due_at <= self.model.now:
            before = self.shadow.fired + self.shadow.revised
            self._do(self.shadow.work(self.model.now, [self.sequence]))
            if self.shadow.fired + self.shadow.revised == before:
                break
        self.model.seen(self)
        if self.shadow.due_at < 1e9:
            self.model.at(max(self.shadow.due_at, self.model.now + TURN_S), self.turn_if_due)

    def turn_if_due(self) -> None:
        if self.shadow.due_at <= self.model.now + 1e-9:
            self.turn()

    def _do(self, effects: Sequence[ShadowEffect]) -> None:
        for effect in effects:
            self.model.take(self, effect)

    def tentative(self, entry: TentativeEntry) -> None:
        if entry.through > self.bounds[entry.stream]:
            self.note(entry.through, entry.created)
        self.shadow.take(entry, self.model.now)
        self.turn()

    def wanted(self, after: int, by: int) -> None:
        for output in self.shadow.kept(after):
            self.model.send_tentative(self, output, by)


class ShadowModel:
    """One schedule."""

    def __init__(self, seed: int, bound_s: float | None = None, policies: tuple[str, str] | None = None) -> None:
        self.rng = rng = random.Random(seed)
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self.bound_s = bound_s or rng.choice([0.6, 1.0, 3.0])
        self.loss = rng.choice([0.05, 0.05, 0.3])
        names = ("process", "delay", "suspend")
        self.policies = policies or (rng.choice(names), rng.choice(names))
        self.availability = Availability(round(self.bound_s * 1e6), *self.policies)
        sources, in_a, in_b, self.last = (
            rng.choice([1, 2, 3]),
            rng.choice([1, 2, 3]),
            rng.choice([1, 2]),
            rng.choice([40, 80]),
        )
        self.first_mark, self.sources = QUANTUM, sources
        self.stats: Counter[str] = Counter()
        self.latest = 0.0
        #: By window and key; by window.
        self.truth: Counts = Counter()
        self.truth_created: dict[int, float] = {}
        self.of_a = [ModelPartition(self, 1, a, [StreamId(0, s) for s in range(sources)], 1) for a in range(in_a)]
        self.of_b = [ModelPartition(self, 2, b, [StreamId(1, a) for a in range(in_a)], 0) for b in range(in_b)]
        #: At the sink, by partition of B: the stable bound, stable and tentative counts, and marks that were seen.
        self.stable: Counts = Counter()
        self._bounds = dict.fromkeys(range(in_b), NEVER)
        self.shown: dict[tuple[int, int], Counts] = {}
        self._seen: set[tuple[int, int]] = set()
        self._corrected = dict.fromkeys(range(in_b), NEVER)
        self._free_at: dict[Any, float] = {}
        self._cut = self._cuts(sources, in_a, in_b)
        for number in range(1, self.last + 1):
            for source in range(sources):
                self.at(number * BUCKET_S, self._source, source, number * QUANTUM)
        for _ in range(rng.choice([0, 0, 1, 3])):
            self.stats["shadows lost"] += 1
            lost = rng.choice([*self.of_a, *self.of_b])
            self.at(rng.uniform(0, self.last * BUCKET_S), lost.lose_shadow)

    def at(self, time: float, call: Callable[..., None], *given: Any) -> None:
        heapq.heappush(self._heap, (time, next(self._order), call, given))

    def _cuts(self, sources: int, in_a: int, in_b: int) -> dict[tuple[int, int, int], list[tuple[float, float]]]:
        """Draw silence of sources and cuts of links: by edge, producer and consumer."""
        rng, cuts = self.rng, defaultdict(list)
        for _ in range(rng.choice([0, 1, 1, 2, 4])):
            begin = rng.uniform(0, self.last * BUCKET_S)
            end, kind = begin + rng.choice([0.2, 1.0, 3.0, 8.0]), rng.random()
            if kind < 0.4:
                source = rng.randrange(sources)
                for a in range(in_a):
                    cuts[0, source, a].append((begin, end))
            elif kind < 0.7:
                cuts[0, rng.randrange(sources), rng.randrange(in_a)].append((begin, end))
            else:
                cuts[1, rng.randrange(in_a), rng.randrange(in_b)].append((begin, end))
        return cuts

    def silence(self, seconds: float) -> None:
        """Have one source silent for these seconds, after two seconds, and nothing else fail."""
        self.loss = 0.0
        self._heap = [each for each in self._heap if each[2] == self._source]
        heapq.heapify(self._heap)
        for number in range(self.last + 1, 160):
            for source in range(self.sources):
                self.at(number * BUCKET_S, self._source, source, number * QUANTUM)
        self._cut = {(0, 0, a): [(2.0, 2.0 + seconds)] for a in range(len(self.of_a))}

    # ---- lanes

    def _open_at(self, link: tuple[int, int, int], time: float) -> float:
        while (cut := next((cut for cut in self._cut.get(link, ()) if cut[0] <= time < cut[1]), None)) is not None:
            time = cut[1]
        return time

    def _send(self, link: tuple[int, int, int], call: Callable[..., None], *given: Any) -> None:
        """Send on a stable lane."""
        time = max(self._open_at(link, self.now + self.rng.expovariate(200)), self._free_at.get(link, 0.0))
        self._free_at[link] = time + 1e-9
        self.at(time, call, *given)

    def _throw(self, link: tuple[int, int, int], call: Callable[..., None], *given: Any) -> None:
        """Send on the tentative lane, which loses, reorders and repeats messages."""
        time = self.now + self.rng.expovariate(100)
        if self._open_at(link, time) == time and self.rng.random() > self.loss:
            self.at(time, call, *given)
        if self.rng.random() < 0.05:
            self.at(time + 0.3, call, *given)

    def _source(self, source: int, mark: int) -> None:
        rows: Counts = Counter()
        for _ in range(self.rng.choice([0, 1, 5])):
            rows[mark, self.rng.randrange(KEYS)] += 1
        self.truth.update(rows)
        self.truth_created.setdefault(mark, self.now)
        for a, partition in enumerate(self.of_a):
            mine = {at: count for at, count in rows.items() if at[1] // 2 % len(self.of_a) == a}
            self._stable(0, source, a, partition, mark, mine)

    def _stable(self, edge: int, producer: int, to: int, partition: ModelPartition, mark: int, counts: Counts) -> None:
        """Send the rows of a window, and behind them the bound, in separate messages."""
        link, stream, created = (edge, producer, to), StreamId(edge, producer), self.truth_created[mark]
        sequence = mark // QUANTUM
        parts = [counts] if self.rng.random() < 0.5 else [{at: count} for at, count in counts.items()] or [counts]
        for part in parts:
            self._send(link, partition.rows, stream, sequence, part, created)
        self._send(link, partition.bound, stream, mark, created)

    # ---- results

    def give(self, partition: ModelPartition, mark: int, counts: Counts, created: float) -> None:
        """Take the stable results of a partition."""
        if partition.behind:
            partition.sequence = mark // QUANTUM + 1
            for b, other in enumerate(self.of_b):
                mine = {at: count for at, count in counts.items() if at[1] % len(self.of_b) == b}
                self._stable(1, partition.stream.producer, b, other, mark, mine)
            return
        b = partition.stream.producer
        if self._bounds[b] >= mark:
            raise ShadowLawBroken("a window is stable twice")
        self._bounds[b] = mark
        if any(at[0] == b and at[1] <= mark for at in self.shown):
            raise ShadowLawBroken("tentative rows are left when stable ones come")
        self.stable.update(counts)
        self._show(partition, mark)

    def seen(self, partition: ModelPartition) -> None:
        """Note the windows that are at the sink: results without rows are not told to it."""
        if not partition.behind:
            for mark in range(partition.shadow.reached, max(partition.watermark, 0), -QUANTUM):
                self._show(partition, mark)

    def _show(self, partition: ModelPartition, mark: int) -> None:
        if (partition.stream.producer, mark) in self._seen:
            return
        self._seen.add((partition.stream.producer, mark))
        created = max(partition.created.get(mark, self.now), partition.lost_at)
        due = max(created + self.bound_s, partition.heard.get(mark, self.now) + GRACE_S)
        if all(b != partition.stream.producer for b, _ in self.shown):
            due = max(due, self._fails_at(partition, mark))
        self.latest = max(self.latest, self.now - due)

    def _fails_at(self, partition: ModelPartition, mark: int) -> float:
        """Return the time from which on a stream that has not come to a mark stands still, or stood until this moment."""
        holding = [stream for stream, bound in partition.bounds.items() if bound < mark]
        rises = [partition.rises[stream][1] for stream in holding]
        if not holding:  # the stream that has just come was the last one
            rises = [before for before, last in partition.rises.values() if last == self.now]
        return min(rises, default=-1e9) + max(STANDS_S, self.bound_s / 4)

    def send_tentative(self, partition: ModelPartition, output: MarkOutput, to: int | None = None) -> None:
        stream, counts = partition.stream, counts_of(output.batches)
        for b, other in enumerate(self.of_b):
            if to not in (None, b):
                continue
            mine = {at: count for at, count in counts.items() if at[1] % len(self.of_b) == b}
            entry = TentativeEntry(
                stream, 0, partition.life, output.revision, output.output_after, output.output_through,
                output.sequences[0], output.created, batch_of(mine) if mine else None,
            )  # fmt: skip
            self._throw((1, stream.producer, b), other.tentative, entry)

    def take(self, partition: ModelPartition, effect: ShadowEffect) -> None:
        """Take an effect of a shadow."""
        b = partition.stream.producer
        match effect:
            case WantedMarks(stream, after):
                if stream.edge == 1:
                    self._throw((2, b, stream.producer), self.of_a[stream.producer].wanted, after, b)
            case MarkOutput() if partition.behind:
                self.send_tentative(partition, effect)
            case MarkOutput():
                self._tentative(partition, effect)
            case Undone(start, end):
                if not partition.behind:
                    self._undo(b, start, end)
            case CorrectionDone(through):
                self.stats["corrections done"] += 1
                self._corrected[b] = max(self._corrected[b], through) if not partition.behind else NEVER

    def _undo(self, b: int, start: int, end: int | None) -> None:
        for at in [at for at in self.shown if at[0] == b and start < at[1] and (end is None or at[1] <= end)]:
            del self.shown[at]

    def _tentative(self, partition: ModelPartition, output: MarkOutput) -> None:
        b = partition.stream.producer
        if output.through <= self._bounds[b]:
            raise ShadowLawBroken("a tentative row comes after its stable one")
        if output.through <= self._corrected[b]:
            raise ShadowLawBroken("a window is tentative after its correction was done")
        counts = counts_of(output.batches)
        for at, count in counts.items():
            if count > self.truth[at]:
                raise ShadowLawBroken("a row is counted twice")
        self.stats["tentative"] += 1
        if (b, output.through) in self.shown:
            raise ShadowLawBroken("a revision comes beside what it revises")
        self.shown[b, output.through] = counts

    # ---- the course

    def run(self) -> Counter[str]:
        """Run to the end. Raise ShadowLawBroken if a law is broken."""
        for events in itertools.count():
            if not self._heap:
                break
            if events > EVENTS_MAX:
                raise ShadowLawBroken("the model does not come to rest")
            self.now, _, call, given = heapq.heappop(self._heap)
            call(*given)
        if +self.stable != +self.truth:
            raise ShadowLawBroken("the stable answer is another one")
        if self.shown:
            raise ShadowLawBroken("tentative rows are left")
        for partition in (*self.of_a, *self.of_b):
            shadow = partition.shadow
            if not shadow.idle or partition.room.bytes or shadow.nbytes or shadow.state is not TentativeState.STABLE:
                raise ShadowLawBroken("a shadow holds something in calm")
            self.stats["revised"] += shadow.revised
        if "suspend" not in self.policies and self.latest > 2 * TURN_S:
            raise ShadowLawBroken("a result is later than the bound")
        return self.stats


# ---- models without a rule


def _keeps(self: Overlay, *given: Any) -> list[int]:
    return []


def _any_is_news(self: Overlay, entry: TentativeEntry, known: Any, bound: int) -> bool:
    entry.sequence = 1 << 60  # the rule of elements covers this one
    stands = known.entries.get(entry.through)
    return stands is None or entry.version > stands.version


_HEAR = MarkCalendar.hear


def _hears_the_newest(
    self: MarkCalendar, time: int, created: float, now: float, watermark: int, since: float | None = None
) -> None:
    newest = self.floor(time)
    if since is None:
        _HEAR(self, time, created, now, watermark)
    elif newest > watermark:  # a tentative mark
        self._dates.setdefault(newest, DatedMark(newest, created, now))
        self.newest = max(self.newest, newest)


Patches = list[tuple[Any, str, Any]]
#: Broken variants, by the name of the left-out rule: the patch of each, and the laws that it may break.
WITHOUT: dict[str, Patches] = {
    "keeps tentative rows after stable ones came": [(Overlay, "void", _keeps), (Overlay, "applied", _keeps)],
    "takes tentative rows behind stable ones": [(Overlay, "_is_news", _any_is_news)],
    "purges state at a tentative mark": [(CountPeek, "purges", True)],
    "leaves gaps of the lane open": [(MarkCalendar, "hear", _hears_the_newest)],
    "dates a gap by the later mark": [(MarkCalendar, "dated", lambda self, created, distance, since: created)],
    "believes rows beside stable elements": [(Overlay, "applied", _keeps)],
}


@contextmanager
def without(rule: str | None) -> Iterator[None]:
    """Leave a rule out."""
    patches = [patch.object(*each) for each in WITHOUT.get(rule or "", ())]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--without", choices=[*WITHOUT, "each"])
    given = parser.parse_args()
    rules = list(WITHOUT) if given.without == "each" else [given.without]
    for rule in rules:
        found: dict[str, tuple[int, int]] = {}
        stats: Counter[str] = Counter()
        with without(rule):
            for seed in range(given.first, given.first + given.seeds):
                try:
                    stats.update(ShadowModel(seed).run())
                except ShadowLawBroken as broken:
                    law = str(broken)
                    first, times = found.get(law, (seed, 0))
                    found[law] = first, times + 1
        print(rule or "all rules", found or "no law broken", dict(stats))


if __name__ == "__main__":
    main()
