"""A model of watermarks that the order of steps carries, for random schedules (design: watermark-statements).

Sources feed A, which counts rows per key and hopping window; A feeds B, which keeps the most frequent key of each window. A
partition has a primary, a secondary, and a checkpoint with the order in a vault. Rows of sources are numbered, and cut elsewhere
each time they are sent or read; batches of A are numbered and come from either replica. Workers die, everything dies, readers
begin again at marks, statements are lost and late, sources fall idle, and some sources never end.

Decisions are those of the product: ``Lateness`` judges rows, ``Statement``, ``bound_of`` and ``least`` give the watermark that a
primary orders. ``BREAKS`` names rules that a model may be made without, each of which the laws must catch.
"""

from __future__ import annotations

import argparse
import copy
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from flux.windows.lateness import Judgement, Lateness
from flux.windows.statements import Statement, StreamBound, bound_of, least
from flux.windows.window import END_OF_TIME, NEVER

SIZE, SLIDE, DELAY, WORKERS = 10, 5, 4, 3
#: Events of a schedule after which it must have come to its end.
EVENTS_MAX = 200_000
BREAKS = {
    "own": "a replica takes the watermark that it would order, instead of the ordered one",
    "ahead": "a partition believes a statement though it lacks elements in front of it",
    "rows": "a statement counts before the rows in front of it are ordered",
    "uncommitted": "a replica states what steps gave that are not committed",
    "reread": "a reader begins again without the greatest time of the rows before",
    "early": "the watermark of a step goes out in front of its last rows",
    "falls": "a new primary begins below the watermark that was ordered",
    "silence": "a reader that is gone counts as idle",
    "ended": "an ended stream holds the watermark for ever",
}

Row = tuple[int, ...]
#: A cut of a stream, the statement behind it, whether the stream ends there, and the rows for each partition.
Offer = tuple[int, Statement, bool, Callable[[int], list[tuple[int, Row]]]]


class LawBroken(AssertionError):
    """A law that a schedule has broken."""


def check(holds: bool, law: str) -> None:
    if not holds:
        raise LawBroken(law)


class Reader:
    """A source partition and the life of its reader."""

    def __init__(self, rows: list[Row], partitions: int, endless: bool, broken: str) -> None:
        self.rows, self.partitions, self.endless, self.broken = rows, partitions, endless, broken
        self.begin_again(0, NEVER)
        self.idle = self.gone = False

    def begin_again(self, mark: int, newest: int) -> None:
        """Begin a new life at a mark, which has the greatest time of the rows before it."""
        self.base = self.at = mark
        self.judge = Lateness(DELAY, Judgement(NEVER if self.broken == "reread" else newest))
        self.kept: dict[int, Row] = {}  # by number, the rows that are not late
        self.newest_behind = {mark: newest}  # by number, the greatest time of the rows before
        self.ended = self.idle = False

    def read(self, count: int) -> None:
        """Read rows, with one judgement for all of them."""
        rows = self.rows[self.at : self.at + count]
        if len(rows) < count and not self.endless:
            self.ended = True
        if not rows:
            return
        newest, times = self.judge.newest, np.array([row[0] for row in rows])
        late = self.judge.judge(times)
        for place, row in enumerate(rows):
            newest = max(newest, row[0])
            if late is None or not late[place]:
                self.kept[self.at] = row
            self.at += 1
            self.newest_behind[self.at] = newest

    def elements(self, first: int, end: int, partition: int) -> list[tuple[int, Row]]:
        found = ((number, self.kept.get(number)) for number in range(first, end))
        return [(number, row) for number, row in found if row is not None and row[1] % self.partitions == partition]

    def state(self, through: int) -> Statement:
        """Return the statement behind an element."""
        newest = self.newest_behind[through]
        idle = through == self.at and self.idle and not self.ended
        return Statement(through, NEVER if newest == NEVER else newest - DELAY, idle)


@dataclass
class Entry:
    """One ordered step: elements of a stream, or nothing but a watermark."""

    stream: int | None
    through: int
    over: bool
    watermark: int | None


class Replica:
    """A replica, whose state is a function of the ordered steps and of their rows."""

    def __init__(self, stage: str, streams: int, consumers: int) -> None:
        self.stage, self.consumers = stage, consumers
        self.next = [0] * streams
        self.ended = [False] * streams
        self.watermark, self.applied, self.dropped = NEVER, 0, 0
        self.windows: dict[int, Counter] = defaultdict(Counter)
        self.batches: list[dict[int, list[Row]]] = []
        #: By step: batches, watermark and size of the state behind it.
        self.behind: list[tuple[int, int, int]] = []
        #: Elements received and not applied: first, end, rows, the watermark before them.
        self.pending: list[list[tuple[int, int, list[tuple[int, Row]], int]]] = [[] for _ in range(streams)]

    def has(self, entry: Entry) -> bool:
        if entry.stream is None:
            return True
        pending = self.pending[entry.stream]
        return self.next[entry.stream] >= entry.through or bool(pending and pending[-1][1] >= entry.through)

    def apply(self, entry: Entry) -> None:
        if entry.stream is not None:
            for row in self._take(entry.stream, entry.through):
                self._add(row)
            self.next[entry.stream] = entry.through
            self.ended[entry.stream] |= entry.over
        if entry.watermark is not None:
            check(entry.watermark >= self.watermark, "a watermark never falls")
            self.watermark = entry.watermark
            self._close()
        self.applied += 1
        self.behind.append(
            (len(self.batches), self.watermark, sum(sum(each.values()) for each in self.windows.values()))
        )

    def _take(self, stream: int, end: int) -> list[Row]:
        rows: list[Row] = []
        pending = self.pending[stream]
        while pending and pending[0][0] < end:
            _, last, some, before = pending.pop(0)
            rows += [row for number, row in some if self.next[stream] <= number < end]
            if last > end:  # cut: the rest keeps the watermark before it
                pending.insert(0, (end, last, [each for each in some if each[0] >= end], before))
        return rows

    def _add(self, row: Row) -> None:
        if row[0] < self.watermark:
            self.dropped += 1
        elif self.stage == "A":
            for start in range((row[0] - SIZE + SLIDE) // SLIDE * SLIDE, row[0] + 1, SLIDE):
                if start <= row[0] < start + SIZE:
                    self.windows[start + SIZE][row[1]] += 1
        else:
            self.windows[row[0] + 1][row[1]] += row[2]

    def _close(self) -> None:
        for end in sorted(end for end in self.windows if end <= self.watermark):
            counts = self.windows.pop(end)
            rows = [(end - 1, key, count) for key, count in sorted(counts.items())]
            if self.stage == "B":
                rows = [row for row in rows if row[2] == max(counts.values())]
            self.batches.append({end % self.consumers: rows})


@dataclass
class Inbound:
    """A stream at a worker, for all partitions there."""

    said: Statement = field(default_factory=Statement)
    #: The stream ends at this number; -1: not known.
    end: int = -1
    #: Exclusive, by partition.
    received: dict[int, int] = field(default_factory=dict)


class Partition:
    """A partition with its replicas by worker, its order, its checkpoint in the vault, and its rows outside."""

    def __init__(self, stage: str, number: int, streams: int, consumers: int, workers: list[int]) -> None:
        self.stage, self.number = stage, number
        fresh = Replica(stage, streams, consumers)
        self.primary, self.secondary = workers
        self.replicas = {worker: copy.deepcopy(fresh) for worker in workers}
        self.checkpoint = copy.deepcopy(fresh)
        self.order: list[Entry] = []
        self.seen = self.kept = 0  # entries that the secondary, and the vault, have
        self.shown: list[dict[int, list[Row]]] = []
        self.newest: list[dict[int, int]] = [{0: NEVER} for _ in range(streams)]  # marks: greatest times by number

    @property
    def committed(self) -> int:
        return min(self.seen, self.kept)

    @property
    def ordered(self) -> int:
        return max((entry.watermark for entry in self.order if entry.watermark is not None), default=NEVER)

    def released(self, worker: int, broken: str) -> int:
        """Return the steps whose output the replica on this worker may give."""
        applied = self.replicas[worker].applied
        return applied if broken == "uncommitted" else min(applied, self.committed)


class World:
    """One random schedule."""

    def __init__(self, seed: int, broken: str = "") -> None:
        self.rng, self.broken = random.Random(seed), broken
        self.idle_allowed, self.endless = seed % 3 == 0, seed % 7 == 1
        self.counts: Counter = Counter()
        data = self._data()
        consumers, tops = self.rng.randint(1, 4), self.rng.randint(1, 2)
        self.readers = [Reader(rows, consumers, self.endless, broken) for rows in data]
        self.a = [Partition("A", number, len(data), tops, self._pair()) for number in range(consumers)]
        self.b = [Partition("B", number, consumers, 1, self._pair()) for number in range(tops)]
        self.inbound: dict[tuple[int, str, int], Inbound] = defaultdict(Inbound)
        for part in self.parts:
            for worker in part.replicas:
                self._join(part, worker)

    @property
    def parts(self) -> list[Partition]:
        return self.a + self.b

    def _pair(self) -> list[int]:
        return self.rng.sample(range(WORKERS), 2)

    def _data(self) -> list[list[Row]]:
        rng, data = self.rng, []
        disorder = rng.choice([0, 2, 4, 8, 15])
        for _ in range(rng.randint(1, 3)):
            time, rows = rng.randint(0, 30), []
            for _ in range(rng.randint(0, 60)):
                time += rng.choice([0, 0, 1, 1, 2, 7 if rng.random() < 0.05 else 0])
                rows.append((max(0, time - rng.randint(0, disorder)), rng.randint(0, 5)))
            data.append(rows)
        return data

    # ---- streams

    def _join(self, part: Partition, worker: int) -> None:
        for stream, number in enumerate(part.replicas[worker].next):
            self.inbound[worker, part.stage, stream].received[part.number] = number

    def _leave(self, part: Partition, worker: int) -> None:
        for stream in range(len(part.checkpoint.next)):
            self.inbound[worker, part.stage, stream].received.pop(part.number, None)

    def send(self) -> None:
        """Send elements of a stream to a worker, up to a random cut, and the statement behind them, which may be lost."""
        rng = self.rng
        worker, stage = rng.randrange(WORKERS), rng.choice("AB")
        stream = rng.randrange(len(self.readers) if stage == "A" else len(self.a))
        parts = [part for part in (self.a if stage == "A" else self.b) if worker in part.replicas]
        if not parts:
            return
        inbound = self.inbound[worker, stage, stream]
        first = min(inbound.received[part.number] for part in parts)
        found = self._offer(stage, stream, first)
        if found is None:
            return
        cut, said, over, rows = found
        if self.broken == "rows" and said.sequence >= inbound.said.sequence:
            inbound.said = inbound.said.newer(said)
        for part in parts:
            self._receive(part, worker, stream, inbound, cut, rows(part.number))
        if over:
            inbound.end = cut
        if rng.random() < 0.9:
            inbound.said = inbound.said.newer(said)

    def _offer(self, stage: str, stream: int, first: int) -> Offer | None:
        """Return a cut of a stream, the statement behind the cut, whether the stream ends there, and its rows."""
        rng = self.rng
        if stage == "A":
            reader = self.readers[stream]
            if reader.gone or first < reader.base or reader.at < first:
                return None
            cut = self._cut(first, reader.at)
            over = reader.ended and cut == reader.at
            return cut, reader.state(cut), over, lambda to: reader.elements(first, cut, to)
        part = self.a[stream]
        replica = part.replicas[worker := rng.choice(list(part.replicas))]
        steps = part.released(worker, self.broken)
        batches, watermark, _ = replica.behind[steps - 1] if steps else (0, NEVER, 0)
        if batches < first:
            return None  # a replica that is behind the ones that have given before
        cut = self._cut(first, batches)
        if cut < batches:
            # The watermark known when the batch behind the cut was made: the one before its step.
            known = [step[1] for step in replica.behind[:steps] if step[0] <= cut]
            later = [step[1] for step in replica.behind[:steps] if step[0] > cut]
            watermark = later[0] if self.broken == "early" else known[-1] if known else NEVER
        over = cut == batches and watermark == END_OF_TIME
        return (
            cut,
            Statement(cut, watermark),
            over,
            lambda to: [(number, row) for number in range(first, cut) for row in replica.batches[number].get(to, [])],
        )

    def _cut(self, first: int, end: int) -> int:
        return self.rng.randint(first, end) if self.rng.random() < 0.8 else end

    def _receive(
        self, part: Partition, worker: int, stream: int, inbound: Inbound, cut: int, rows: list[tuple[int, Row]]
    ) -> None:
        received = inbound.received[part.number]
        if cut <= received:
            return
        before = self._bound(part, worker, stream, inbound, received).watermark
        mine = [row for row in rows if row[0] >= received]
        part.replicas[worker].pending[stream].append((received, cut, mine, before))
        inbound.received[part.number] = cut
        if part.stage == "A":
            part.newest[stream].update(self.readers[stream].newest_behind)

    def _bound(self, part: Partition, worker: int, stream: int, inbound: Inbound, received: int) -> StreamBound:
        """Return the bound of a stream behind all that the partition has received."""
        if self.broken == "ahead":
            received = max(received, inbound.said.sequence)
        return bound_of(inbound.said, received, None, False)

    # ---- steps

    def order(self, part: Partition) -> None:
        """Order one step at the primary: elements of a stream, or a watermark alone."""
        rng, worker = self.rng, part.primary
        replica = part.replicas[worker]
        if replica.applied < len(part.order):
            return  # the primary repeats steps that an earlier one has ordered
        ready = [stream for stream, pending in enumerate(replica.pending) if pending]
        ends = [
            stream for stream, pending in enumerate(replica.pending)
            if not pending and not replica.ended[stream] and self.inbound[worker, part.stage, stream].end == replica.next[stream]
        ]  # fmt: skip
        entry = Entry(None, 0, False, None)
        if ready and rng.random() < 0.85:
            stream = rng.choice(ready)
            first, last = replica.pending[stream][0][0], replica.pending[stream][-1][1]
            through = rng.randint(first + 1, last)
            entry = Entry(stream, through, through == last == self.inbound[worker, part.stage, stream].end, None)
        elif ends:
            stream = rng.choice(ends)
            entry = Entry(stream, replica.next[stream], True, None)
        watermark = least(self._bounds(part, worker, entry))
        floor = self._floor(part)
        if watermark > floor:
            entry.watermark = watermark
        if entry.stream is not None or entry.watermark is not None:
            part.order.append(entry)
            self.apply(part, worker)

    def _floor(self, part: Partition) -> int:
        if self.broken == "falls" and part.order and self.rng.random() < 0.3:
            return NEVER
        return part.ordered

    def _bounds(self, part: Partition, worker: int, entry: Entry) -> list[StreamBound]:
        replica, bounds = part.replicas[worker], []
        for stream, pending in enumerate(replica.pending):
            inbound = self.inbound[worker, part.stage, stream]
            left = [each for each in pending if not (stream == entry.stream and each[1] <= entry.through)]
            received = inbound.received[part.number]
            if self.broken == "ahead":
                received = max(received, inbound.said.sequence)
            ended = replica.ended[stream] or (stream == entry.stream and entry.over)
            before = left[0][3] if left and self.broken != "rows" else None
            bound = bound_of(inbound.said, received, before, ended and self.broken != "ended")
            if self.broken == "silence" and part.stage == "A" and self.readers[stream].gone and not left:
                bound = bound._replace(idle=True)
            bounds.append(bound)
        return bounds

    def apply(self, part: Partition, worker: int) -> bool:
        replica = part.replicas[worker]
        entry = part.order[replica.applied]
        if not replica.has(entry):
            return False
        if self.broken == "own" and worker != part.primary and entry.watermark is not None:
            mine = least(self._bounds(part, worker, entry))
            entry = Entry(entry.stream, entry.through, entry.over, max(replica.watermark, mine))
        replica.apply(entry)
        if not self.idle_allowed:
            check(replica.dropped == 0, "no row is below an ordered watermark, unless a source was idle")
        return True

    def follow(self, part: Partition) -> None:
        """Pass the order on, apply committed steps, show output, and compare."""
        rng = self.rng
        part.seen = rng.randint(part.seen, len(part.order))
        part.kept = rng.randint(part.kept, len(part.order))
        primary, secondary = part.replicas[part.primary], part.replicas[part.secondary]
        while secondary.applied < part.committed and rng.random() < 0.8 and self.apply(part, part.secondary):
            pass
        while primary.applied < len(part.order) and self.apply(part, part.primary):
            pass
        both = min(len(primary.behind), len(secondary.behind))
        check(primary.behind[:both] == secondary.behind[:both], "replicas are equal at each step")
        steps = part.released(part.primary, self.broken)
        shown = primary.batches[: primary.behind[steps - 1][0] if steps else 0]
        check(shown[: len(part.shown)] == part.shown[: len(shown)], "output that was shown is never contradicted")
        if len(shown) > len(part.shown):
            part.shown = copy.deepcopy(shown)
        for replica in (primary, secondary):
            if part.checkpoint.applied <= replica.applied <= part.committed and rng.random() < 0.1:
                part.checkpoint = copy.deepcopy(replica)
                part.checkpoint.pending = [[] for _ in replica.pending]

    # ---- faults

    def lose(self, dead: int) -> None:
        """Lose a worker: its partitions go on with the other replica, and a third worker gets a copy of that."""
        for part in self.parts:
            if dead not in part.replicas:
                continue
            del part.replicas[dead]
            self._leave(part, dead)
            (rest,) = part.replicas
            if dead == part.primary:
                self.counts["take-overs"] += 1
                part.order = part.order[: max(part.seen, part.committed)]
                part.kept = min(part.kept, len(part.order))
            part.primary = rest
            part.secondary = self.rng.choice([worker for worker in range(WORKERS) if worker not in (dead, rest)])
            copied = part.replicas[part.secondary] = copy.deepcopy(part.replicas[rest])
            copied.pending = [[] for _ in copied.pending]
            part.seen = len(part.order)
            self._join(part, part.secondary)
        for (worker, _, _), inbound in self.inbound.items():
            if worker == dead:
                inbound.said, inbound.end = Statement(), -1

    def lose_all(self) -> None:
        """Lose everything but the vault."""
        self.counts["total losses"] += 1
        for inbound in self.inbound.values():
            inbound.said, inbound.end = Statement(), -1
            inbound.received.clear()
        for part in self.parts:
            part.order = part.order[: part.kept]
            part.seen = part.kept
            part.primary, part.secondary = workers = self._pair()
            part.replicas = {worker: copy.deepcopy(part.checkpoint) for worker in workers}
            for worker in workers:
                self._join(part, worker)
        for stream in range(len(self.readers)):
            self.read_again(stream)

    def read_again(self, stream: int) -> None:
        """Begin a new life of a reader at a mark that all replicas and checkpoints have applied."""
        self.counts["readings again"] += 1
        held = [replica.next[stream] for part in self.a for replica in (*part.replicas.values(), part.checkpoint)]
        marks = {
            number: newest for part in self.a for number, newest in part.newest[stream].items() if number <= min(held)
        }
        mark = self.rng.choice(list(marks))
        self.readers[stream].begin_again(mark, marks[mark])

    # ---- a run

    def run(self) -> Counter:
        """Run to the end and check the laws. Return counts of events."""
        rng = self.rng
        faults_until = rng.choice([200, 1000, 3000])
        for event in range(EVENTS_MAX):
            which = rng.random()
            if which < 0.18:
                self._read(event < faults_until)
            elif which < 0.55:
                self.send()
            elif which < 0.80:
                self.order(rng.choice(self.parts))
            elif which < 0.99:
                self.follow(rng.choice(self.parts))
            elif event < faults_until:
                self._fail()
            if event % 100 == 0 and event > 200 and self._through():
                return self._checked()
        raise LawBroken("where sources stand still, each partition comes to know the least watermark")

    def _fail(self) -> None:
        which = self.rng.random()
        if which < 0.06:
            self.lose_all()
        elif which < 0.5:
            self.lose(self.rng.randrange(WORKERS))
            if self.rng.random() < 0.7:
                self.read_again(self.rng.randrange(len(self.readers)))
        else:
            self.read_again(self.rng.randrange(len(self.readers)))

    def _read(self, faults: bool) -> None:
        rng, reader = self.rng, self.rng.choice(self.readers)
        if reader.gone:
            reader.gone = rng.random() > 0.1
        elif (
            self.idle_allowed
            and not reader.ended
            and not reader.idle
            and rng.random() < 0.1
            and reader.at < len(reader.rows)
        ):
            reader.idle = True
            self.counts["idle"] += 1
        elif reader.idle and rng.random() < 0.9:
            pass
        elif not reader.ended:
            reader.idle = False
            reader.read(rng.randint(1, 5))
        if faults and rng.random() < 0.02:
            reader.gone = True

    def _through(self) -> bool:
        """Tell whether each partition has ordered and committed the last watermark that there will be."""
        goal = END_OF_TIME
        if self.endless:
            if any(reader.gone or reader.idle or reader.at < len(reader.rows) for reader in self.readers):
                return False
            goal = min(reader.judge.watermark for reader in self.readers)
        done = [part.replicas[part.primary] for part in self.parts]
        return all(replica.watermark >= goal for replica in done) and all(
            part.committed == len(part.order) == part.replicas[part.primary].applied for part in self.parts
        )

    def _checked(self) -> Counter:
        """Check the answer: that of a batch over the rows that are not late."""
        kept, late = [], 0
        for reader in self.readers:
            newest = NEVER
            for row in reader.rows:
                is_late = newest != NEVER and row[0] < newest - DELAY
                late += is_late
                newest = max(newest, row[0])
                kept += [] if is_late else [row]
        counts: dict[int, Counter] = defaultdict(Counter)
        for time, key in kept:
            for start in range(time - SIZE + 1, time + 1):
                if start % SLIDE == 0:
                    counts[start + SIZE][key] += 1
        tops = [part.replicas[part.primary] for part in self.b]
        told = min(top.watermark for top in tops)
        expected = sorted(
            (end - 1, key, count)
            for end, each in counts.items() if end <= told
            for key, count in each.items() if count == max(each.values())
        )  # fmt: skip
        got = sorted(
            row for top in tops for batch in top.batches for rows in batch.values() for row in rows if row[0] < told
        )
        check(len({row[:2] for row in got}) == len(got), "the result of a window is given once")
        if not self.counts["idle"]:
            check(got == expected, "the answer is that of a batch over the rows that are not late")
        self.counts.update(rows=len(kept), late=late, windows=len(got))
        return self.counts


def main() -> None:
    """Run many schedules, and stop at the first that breaks a law."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--without", choices=sorted(BREAKS), default="", help="leave out a rule")
    options = parser.parse_args()
    counts: Counter = Counter()
    for seed in range(options.first, options.first + options.seeds):
        try:
            counts.update(World(seed, options.without).run())
        except LawBroken as law:
            raise SystemExit(f"seed {seed} breaks a law: {law}") from None
    print(f"{options.seeds} schedules keep all laws: {dict(counts)}")


if __name__ == "__main__":
    main()
