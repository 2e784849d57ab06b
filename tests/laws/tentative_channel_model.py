"""A model of primaries that show tentative rows beside an output log, one after the other, and of readers at a gateway.

Owner, reader, tail and follower are those of the product; the disk is that of the event log's model, and the output log is a
list of windows. Each window has one row, so a tentative row beside its stable one is seen at once. A primary is killed, or goes
on for a while though another one has taken over, as the old one does not know that it was given up. Power is lost. A reader comes
back with the rows that it showed before, or is behind by more changes than are kept.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field

import pyarrow as pa

from flux.eventlog.records import packed_rows
from flux.eventlog.streams import Retention
from flux.gateway.reads.tentative_tail import TentativeChange, TentativeFollower, TentativeTail, instant
from flux.outputs.catalogue import OutputDefinition, output_of
from flux.outputs.tentative_channel import ChannelOwner, ChannelReader
from flux.vault.location import Folder
from tests.laws.event_log_model import LawBroken, VirtualDisk, VirtualStore

COLUMNS = pa.schema([pa.field("window", pa.int64())])
#: Windows that a primary may show beyond the stable ones, and the bytes of all it shows, which are fewer at times.
AHEAD, BYTES = 12, 2500


def row_of(window: int) -> bytes:
    return bytes(packed_rows(pa.record_batch([[window]], schema=COLUMNS)))


@dataclass(eq=False)
class ShowingPrimary:
    """A process that shows tentative rows, or believes that it may."""

    channel: ChannelOwner
    #: The windows that the primary has shown and not taken back.
    shown: set[int] = field(default_factory=set)


@dataclass(eq=False)
class ShownReader:
    """A reader with its place, its way through tentative rows, and the rows that it shows."""

    follower: TentativeFollower
    position: int = 0
    stable: list[int] = field(default_factory=list)
    #: Time and window of the tentative rows that stand.
    tentative: list[tuple[str, int]] = field(default_factory=list)


class ChannelRun:
    """One run of the model. ``rivals``: a primary may go on while another one has taken over."""

    store: type[VirtualStore] = VirtualStore
    owner: type[ChannelOwner] = ChannelOwner
    reader: type[ChannelReader] = ChannelReader
    follower: type[TentativeFollower] = TentativeFollower

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.happened: Counter[str] = Counter()
        self.rivals = seed % 2 == 1
        self.disk = VirtualDisk(self.rng)
        #: The output log: its rows that all see, each a window.
        self.log: list[int] = []
        self.of: OutputDefinition = output_of("q", COLUMNS, 1, Retention(), "append", True)
        self.tail = TentativeTail(Folder("/nowhere"), self.of)  # type: ignore[arg-type]
        self.tail._channels = [self.reader(self.store(self.disk, writes=False))]
        #: The rows of the log that the gateway knows.
        self.ring = 0
        self.primaries = [self._primary()]
        self.readers = [ShownReader(self.follower(self.tail, 1)) for _ in range(2)]

    def _primary(self) -> ShowingPrimary:
        made = ShowingPrimary(self.owner(lambda: self.store(self.disk), bytes_max=BYTES))
        made.channel.open()
        return made

    def go(self, turns: int = 250) -> None:
        for _ in range(turns):
            self._turn()
        self._end()

    def _turn(self) -> None:
        dice = self.rng.random()
        if dice < 0.02:
            self.primaries.append(self._primary())
            if not self.rivals or len(self.primaries) > 2:
                self.primaries.pop(0)
            self.happened["take-over"] += 1
        elif dice < 0.03 and len(self.primaries) > 1:
            self.primaries.pop(0)  # the primary has learned that it was given up
            self.happened["rival ends"] += 1
        elif dice < 0.035:
            self.disk.lose_power()
            self.primaries = [self._primary()]
            self.happened["power lost"] += 1
        elif dice < 0.3:
            self.poll()
        elif dice < 0.5:
            self._read(self.rng.choice(self.readers[: 1 if self.rng.random() < 0.9 else 2]))
        elif dice < 0.52:
            self._come_back(self.rng.choice(self.readers))
        else:
            self._work(self.primaries[-1] if self.rng.random() < 0.7 else self.primaries[0])

    # ---- primaries

    def _work(self, primary: ShowingPrimary) -> None:
        newest = self.log[-1] if self.log else -1
        dice = self.rng.random()
        if dice < 0.5 and len(primary.shown) < AHEAD:
            window = max(primary.shown | {newest}) + 1
            self._show(primary, window)
        elif dice < 0.7 and primary.shown:
            window = self.rng.choice(sorted(primary.shown))
            primary.channel.void(window - 1, window, len(self.log))
            self._show(primary, window)
            self.happened["revision"] += 1
        elif dice < 0.9 and primary is self.primaries[-1]:
            self.heal(primary, newest + self.rng.randint(1, 3))
        elif dice < 0.93 and primary.shown and primary is self.primaries[-1]:
            self.heal(primary, max(primary.shown))
            primary.channel.corrected(max(self.log), len(self.log))
            self.happened["corrected"] += 1

    def _show(self, primary: ShowingPrimary, window: int) -> None:
        before = primary.channel.left_out
        primary.channel.show(row_of(window), window, len(self.log))
        primary.shown.add(window)
        self.happened["beyond the bound"] += primary.channel.left_out > before
        if primary.channel.nbytes > BYTES:
            raise LawBroken(f"{primary.channel.nbytes} bytes are kept")

    def heal(self, primary: ShowingPrimary, through: int) -> None:
        """Take tentative rows back, and write the stable ones of their windows."""
        newest = self.log[-1] if self.log else -1
        if primary.shown and min(primary.shown) <= through:
            primary.channel.void(newest, through, len(self.log))
            primary.shown = {each for each in primary.shown if each > through}
        for window in range(newest + 1, through + 1):
            self.log.append(window)
            primary.channel.keep()
        self.happened["healed"] += 1

    # ---- gateway and readers

    def poll(self) -> None:
        """Ask the disk, stable rows first."""
        known = len(self.log)
        self.between()
        self.tail.poll()
        self.ring = known

    def between(self) -> None:
        """Let a primary work between the looks at the two logs."""
        if self.rng.random() < 0.5:
            self._work(self.primaries[-1])

    def _read(self, reader: ShownReader, most: int = 4) -> None:
        for _ in range(most):
            self.events(reader)
            if reader.position >= self.ring:
                return
            self._stable(reader, self.log[reader.position])
            reader.position += 1
        self.events(reader)

    def events(self, reader: ShownReader) -> None:
        """Give a reader the changes that are due."""
        for change in reader.follower.take((reader.position,)):
            self._follow(reader, change)

    def _stable(self, reader: ShownReader, window: int) -> None:
        reader.stable.append(window)
        if not self.rivals and any(shown == window for _, shown in reader.tentative):
            raise LawBroken(f"window {window} is tentative beside its stable row")

    def _follow(self, reader: ShownReader, change: TentativeChange) -> None:
        told = json.loads(change.data)
        if change.kind == "tentative":
            self.happened["shown"] += 1
            reader.tentative += [(told["through"], row["window"]) for row in told["rows"]]
            if not self.rivals and any(row["window"] in reader.stable for row in told["rows"]):
                raise LawBroken(f"{told['rows']} come behind the stable row")
        elif change.kind == "undo":
            start, end = told["start"] or "", told["end"] or "~"
            reader.tentative = [each for each in reader.tentative if not start < each[0] <= end]
        elif not self.rivals and told["through"] > instant(max(reader.stable, default=-1)):
            raise LawBroken(f"all was said to be stable before {told['through']}, and the reader has not got it")

    def _come_back(self, reader: ShownReader) -> None:
        reader.follower = self.follower(self.tail, 1)
        self.happened["came back"] += 1

    def _end(self) -> None:
        """Have the last primary go on alone. All readers come to the end, and show its rows: none, when all is healed."""
        del self.primaries[:-1]
        last = self.primaries[-1]
        self.heal(last, (self.log[-1] if self.log else -1) + 1)
        self._compare(set(last.shown) if last.channel.left_out == 0 else None)
        self.heal(last, max(last.shown | {self.log[-1] + 1}))
        self._compare(set())

    def _compare(self, wanted: set[int] | None) -> None:
        for _ in range(3):
            self.tail.poll()
            self.ring = len(self.log)
            for reader in self.readers:
                self._read(reader, len(self.log) + 1)
        for reader in self.readers:
            found = sorted(window for _, window in reader.tentative)
            if reader.stable != self.log:
                raise LawBroken("a reader lacks stable rows")
            if wanted is not None and found != sorted(wanted):
                raise LawBroken(f"a reader shows {found} in the end, and the primary {sorted(wanted)}")
