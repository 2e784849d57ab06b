"""The laws of alignment, checked with bookkeeping of the simulation's own (design: alignment).

(j) no reader runs away               a reader that is asked for new rows is at most the drift ahead of each partition that the
                                      controller knew to hold others back when it last told the reader
(k) no reader waits for nothing       a reader that has waited for a while, with all messages through, waits for a partition
                                      that is more than the drift behind it, and neither idle nor at its end
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from flux.windows.window import NEVER
from flux.wire.control import HeartbeatSeen
from flux.wire.statistics import ReaderState, SourceTime, holds_back
from flux.worker.core import WorkerCore
from tests.simulation.process import TURN_S
from tests.simulation.violation import Violation
from tests.simulation.world import TICK_S

if TYPE_CHECKING:
    from tests.simulation.run import Simulation

RUNS_AWAY = "(j) no reader runs away from others"
FOR_NOTHING = "(k) no reader waits for nothing"

#: A partition of a source.
Partition = tuple[int, int]


class AlignmentLaws:
    """Laws of alignment in one life of a query."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._drift = round(getattr(sim.plan.settings, "watermark_drift", 0.0) * 1e6)
        #: Since when all reports of a partition say that it holds others back, and the greatest watermark in them.
        self._since: dict[Partition, float] = {}
        self._newest: dict[Partition, int] = {}
        #: By the time that the controller tells readers: the moment of its first look that found this time.
        self._told: dict[int, float] = {NEVER: 0.0}
        self._looked_at = sim.world.now
        #: By worker and partition: since when nothing has held it back that a message could change.
        self._free: dict[tuple[int, Partition], float] = {}

    # ---- the controller's side

    def reported(self, stats: dict[str, Any]) -> None:
        """Take a report of a worker as it reaches the controller."""
        for told in stats.get("times", ()) if self._drift else ():
            time = SourceTime(*told)
            key = time.source, time.partition
            if holds_back(time):
                self._since.setdefault(key, self._sim.world.now)
                self._newest[key] = max(time.watermark, self._newest.get(key, NEVER))
            else:
                self._since.pop(key, None)

    def ticked(self) -> None:
        """Note that the controller has looked at its reports."""
        self._looked_at = self._sim.world.now

    def tells(self, command: Any) -> None:
        if self._drift and isinstance(command, HeartbeatSeen):
            self._told.setdefault(command.others_at, self._looked_at)

    # ---- the readers' side

    def asked(self, core: WorkerCore, key: Partition) -> None:
        """Check law (j) when a reader is asked for rows."""
        streams = core.sources.get(key)  # type: ignore[call-overload]
        if not self._drift or streams is None or streams.timed is None or streams.comes_again():
            return
        known_at, now = self._told[core.reading._others_at], dict(self._as_read())
        for other, since in self._since.items():
            time = now.get(other)
            if other == key or since >= known_at or (time is not None and not holds_back(time)):
                continue
            at = max(self._newest[other], NEVER if time is None else time.watermark)
            if streams.timed.watermark > at + self._drift:
                raise Violation(
                    RUNS_AWAY,
                    f"source {key} is at {streams.timed.watermark} on worker {core.worker}, and {other} at {at} with a drift of "
                    f"{self._drift}",
                )

    def look(self, core: WorkerCore) -> None:
        """Check law (k) when a worker reports: some of its readers may wait."""
        sim, now = self._sim, self._sim.world.now
        if not self._drift:
            return
        calm = sim.network.calm and now > sim.network.disturbed_until and sim.controller.phase == "running"
        for time in core.reading.times():
            mine, key = (core.worker, (time.source, time.partition)), (time.source, time.partition)
            if time.state != ReaderState.HELD:
                self._free.pop(mine, None)
                continue
            sim.counts["readers that waited for others"] += 1
            holders = {other: at.watermark for other, at in self._as_read() if holds_back(at)}
            held = any(at + self._drift < time.watermark for at in holders.values())
            if held or not calm:
                self._free.pop(mine, None)
            elif now - self._free.setdefault(mine, now) > self._patience_s():
                raise Violation(FOR_NOTHING, f"{key} on worker {core.worker} at {time.watermark}: {holders}")

    def _as_read(self) -> Iterator[tuple[Partition, SourceTime]]:
        """Yield the partitions with event time, as the workers that read them report them."""
        for core in self._sim.hosts():
            for time in core.reading.times():
                yield (time.source, time.partition), time

    def _patience_s(self) -> float:
        settings, faults = self._sim.plan.settings, self._sim.faults
        turn_s = 10 * (faults.delay_s + TURN_S * faults.slowness)
        return 3 * settings.heartbeat_interval + 2 * TICK_S + 4 * turn_s + 0.1
