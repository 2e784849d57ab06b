"""Partitions that have begun empty, because the last replica was lost with its state, and the results that lack rows since then
(design: converge).

The lost replica may have acked rows up to the newest one of each stream. So results are whole again from the first window on that
begins behind all of these rows. Readers report how far they are: a report of a worker that goes by the table of the beginning was
made after everything that the lost replica could ack.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from controller.report.watermarks import shown
from controller.text import count
from flux.dataflow.plan import FromSource, Plan
from flux.operators.operator import chain_of
from flux.windows.window import NEVER, Window
from flux.wire.statistics import SourceTime
from partitioning.ids import PartitionKey, SourcePartition
from partitioning.table import Table


@dataclass
class EmptyBeginning:
    """The beginning of one partition without the state of the replica before."""

    key: PartitionKey
    #: The epoch of the table in which it has begun.
    epoch: int
    #: The readers of its input by the table before, by partition of the source.
    readers: dict[SourcePartition, int]
    #: Partitions of sources whose readers have not reported since.
    awaited: set[SourcePartition]
    #: The newest time of a row that the lost replica may have had, by the reports until now; ``NEVER``: there was none.
    newest: int = NEVER
    #: The event time up to which results lack rows; None: not known before all readers have reported.
    through: int | None = None


class EmptyBeginnings:
    """All such beginnings of a query. ``note`` takes each report about event time."""

    def __init__(self) -> None:
        self._all: list[EmptyBeginning] = []

    def __bool__(self) -> bool:
        return bool(self._all)

    def begin(self, keys: Iterable[PartitionKey], before: Table, epoch: int, plan: Plan) -> None:
        """Note that partitions begin empty in this epoch. ``before``: the table before it."""
        for key in keys:
            readers = {
                SourcePartition(source, partition): worker
                for source in _sources(plan, key.stage)
                for partition, worker in enumerate(before.sources[source])
            }
            self._all.append(EmptyBeginning(key, epoch, readers, set(readers)))

    def forget(self, stages: Collection[int]) -> None:
        """Forget the partitions of stages that are about to go."""
        self._all = [each for each in self._all if each.key.stage not in stages]

    def note(
        self, worker: int, epoch: int, times: Collection[Sequence[Any]], table: Table, plan: Plan
    ) -> list[EmptyBeginning]:
        """Take the event times of the readers on a worker, which goes by the table of ``epoch``. Return the beginnings whose time
        is known now up to which results lack rows."""
        known = []
        for beginning in self._all:
            if beginning.through is None and epoch >= beginning.epoch:
                for told in times:
                    _take(beginning, worker, SourceTime(*told), table, plan)
                if not beginning.awaited:
                    beginning.through = _through(beginning, plan)
                    known.append(beginning)
        return known

    def of_stage(self, stage: int) -> dict[str, Any]:
        """Return the entry of a stage in reports; empty: no partition of it has begun empty."""
        mine = [each for each in self._all if each.key.stage == stage]
        if not mine:
            return {}
        ends = [each.through for each in mine]
        through = None if None in ends else max(end for end in ends if end is not None)
        return {"begunEmpty": len(mine), "incompleteThrough": None if through is None else shown(through)}


def incomplete(stages: Iterable[Mapping[str, Any]]) -> list[str]:
    """Put into words which stages give results that lack rows, because partitions have begun empty. ``stages``: those of a
    progress report. A stage whose watermark has passed the time behind which its results are whole has no line."""
    lines = []
    for stage in stages:
        if begun := stage.get("begunEmpty"):
            through, watermark = stage.get("incompleteThrough"), stage.get("eventTime", {}).get("watermark")
            if through is not None and watermark is not None and watermark >= through:
                continue
            until = "for a time that is not known yet" if through is None else f"up to {through}"
            lines.append(
                f"results of stage {stage['name']} lack rows {until}: {count(begun, 'partition')} of it "
                f"{'has' if begun == 1 else 'have'} begun empty, because the last replica was lost"
            )
    return lines


def _sources(plan: Plan, stage: int) -> set[int]:
    edges = [plan.edges[edge] for edge in plan.stages[stage].edges_in]
    return {edge.source for edge in edges if isinstance(edge, FromSource)}


def _take(beginning: EmptyBeginning, worker: int, time: SourceTime, table: Table, plan: Plan) -> None:
    """Take the event time of one reader, if it is awaited."""
    read = SourcePartition(time.source, time.partition)
    if read not in beginning.awaited or table.sources[time.source][time.partition] != worker:
        return
    if time.watermark == NEVER and beginning.readers[read] != worker:
        return  # another reader has still to find the place at which it goes on
    beginning.awaited.discard(read)
    event_time = plan.sources[time.source].event_time
    if time.watermark != NEVER and event_time is not None:
        beginning.newest = max(beginning.newest, time.watermark + event_time.delay)


def _through(beginning: EmptyBeginning, plan: Plan) -> int:
    """Return the end of the last window with the newest lost row."""
    window = chain_of(plan.stages[beginning.key.stage].make())[0]._flux_window
    assert isinstance(window, Window)
    return NEVER if beginning.newest == NEVER else beginning.newest + window.size
