"""Failures of inputs in reports: their beginning, the silent streams, the tentative results and their corrections (design:
failures-seen).

A failure is one stretch of time in which any stage gives tentative results: from the first one until all of them are corrected.
It is one entry of the history, written at its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from controller.report.silence import stream_name
from controller.text import count, some
from flux.dataflow.plan import FromStage, Plan
from flux.wire.statistics import EndedShadow, SilentStream, TentativeReport, TentativeState

#: Seconds for which a failure stays open though no worker reports it. A worker that is lost takes its report with it, and the
#: shadow of its successor reports later.
LOST_S = 5.0
UP_FAILURE = TentativeState.UP_FAILURE
#: Streams that a text names; it counts the others.
NAMED = 2


@dataclass
class InputFailure:
    """One failure, by the newest reports."""

    #: By the wall clock, in seconds since 1970.
    since: float
    #: The newest time at which it was reported.
    seen: float
    #: By source and partition: each stream that was silent in it, as it was first told.
    silent: dict[tuple[int, int], SilentStream] = field(default_factory=dict)
    #: By stage, partition and beginning of the shadow's work: the newest report.
    reports: dict[tuple[int, int, float], TentativeReport] = field(default_factory=dict)

    #: The partition of a source that holds the stages back, with the reason; empty: it is not known.
    holder: str = ""

    def sum(self, counted: str) -> int:
        return sum(getattr(report, counted) for report in self.reports.values())


class Availabilities:
    """The failure that lasts, the texts of those that have ended, and counts over all of them."""

    def __init__(self, plan: Plan) -> None:
        self._go_by(plan)
        self._failure: InputFailure | None = None
        self._silent: list[SilentStream] = []
        self._active: list[TentativeReport] = []
        self._ended: list[InputFailure] = []
        self._rows = self._revised = 0  # of failures that have ended
        #: By stage and partition: shadows that have ended because of an error, by the newest reports.
        self._without: dict[tuple[int, int], EndedShadow] = {}
        #: Ended shadows that are in the history.
        self._told_ended: set[EndedShadow] = set()

    def _go_by(self, plan: Plan) -> None:
        self._plan = plan
        self._asked = any(stage.availability is not None for stage in plan.stages)
        feeds = {edge.stage for edge in plan.edges if isinstance(edge, FromStage)}
        #: Stages whose results go to no other stage. Windows to correct are counted there, each once.
        self._last = {stage.id for stage in plan.stages} - feeds

    def follow(self, plan: Plan) -> None:
        """Go by another version of the plan. Reports about stages and sources that are gone do not count any more; the rows
        that they had counted stay."""
        self._go_by(plan)
        self._silent = [stream for stream in self._silent if stream.source in plan.sources]
        self._active = [report for report in self._active if report.stage in plan.stages]
        self._without = {key: each for key, each in self._without.items() if key[0] in plan.stages}
        if (failure := self._failure) is None:
            return
        failure.silent = {key: stream for key, stream in failure.silent.items() if key[0] in plan.sources}
        for key in [key for key in failure.reports if key[0] not in plan.stages]:
            report = failure.reports.pop(key)
            self._rows += report.rows
            self._revised += report.revised
        if not self._asked:
            self._end(failure, failure.seen)

    def note(self, workers: Iterable[Mapping[str, Any]], silent: list[SilentStream], wall: float) -> None:
        """Take the newest statistics of each worker, and the silent partitions. ``wall``: the time by the clock."""
        if not self._asked:
            return
        workers = list(workers)
        ended = [EndedShadow(*each) for stats in workers for each in stats.get("ended_shadows", ())]
        self._without = {(each.stage, each.partition): each for each in ended if each.stage in self._plan.stages}
        told = [TentativeReport(*each) for stats in workers for each in stats.get("tentative", ())]
        reports = [report for report in told if report.stage in self._plan.stages]
        self._silent = silent
        self._active = [report for report in reports if report.state != TentativeState.STABLE]
        if self._active:
            since = min(report.since for report in self._active)
            if self._failure is None:
                self._failure = InputFailure(since, wall)
            self._failure.since, self._failure.seen = min(self._failure.since, since), wall
        if (failure := self._failure) is not None:
            for stream in silent:
                failure.silent.setdefault((stream.source, stream.partition), stream)
            for report in reports:
                if report.since >= failure.since:
                    failure.reports[report.stage, report.partition, report.since] = report
            known = {(report.stage, report.partition) for report in reports}
            missing = any((stage, partition) not in known for stage, partition, _ in failure.reports)
            if not self._active and (not missing or wall >= failure.seen + LOST_S):
                self._end(failure, wall)

    def _end(self, failure: InputFailure, wall: float) -> None:
        failure.seen = wall
        self._rows += failure.sum("rows")
        self._revised += failure.sum("revised")
        self._ended.append(failure)
        self._failure = None

    def ended(self) -> list[tuple[str, float]]:
        """Return the text of each failure that has ended since the last call, and how long it lasted."""
        ended, self._ended = self._ended, []
        return [(self._told(failure), failure.seen - failure.since) for failure in ended]

    def warnings(self) -> list[tuple[str, str]]:
        """Return stage and text of each shadow that has ended because of an error since the last call."""
        new = [each for each in self._without.values() if each not in self._told_ended]
        self._told_ended.update(new)
        return [
            (
                self._plan.stages[each.stage].name,
                f"there are no more tentative results of partition {each.partition}, and stable ones go on: {each.reason}",
            )
            for each in new
        ]

    def _told(self, failure: InputFailure) -> str:
        streams = self._streams(list(failure.silent.values()), "was", "were")
        missed = f"waited for {failure.holder}" if failure.holder else "an input was missing"
        return (
            f"{streams or missed}; tentative from {_clock(failure.since)} to {_clock(failure.seen)}: "
            f"{failure.sum('rows'):,} tentative rows, of which the correction changed {failure.sum('revised'):,}"
        )

    def report(self, stages: Iterable[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """Return the entry of a progress report, of which ``stages`` are the entries of stages; empty: no stage has
        availability."""
        if not self._asked:
            return {}
        if self._failure is not None:
            self._note_holder(self._failure, stages)
        failure, rows, revised = self._failure, self._rows, self._revised
        if failure is not None:
            rows, revised = rows + failure.sum("rows"), revised + failure.sum("revised")
        entry = {
            "state": self._state(),
            "since": None if failure is None else _shown(failure.since),
            "windowsToCorrect": self._windows(),
            "rowsTentative": rows,
            "rowsRevised": revised,
            "stages": sorted({self._plan.stages[report.stage].name for report in self._active}),
            "silent": [
                {
                    "source": self._plan.sources[stream.source].name,
                    "partition": stream_name(self._plan, stream),
                    "since": _shown(stream.since),
                    "reason": stream.reason,
                }
                for stream in self._silent
            ],
            "ended": [
                {
                    "stage": self._plan.stages[each.stage].name,
                    "partition": each.partition,
                    "since": _shown(each.at),
                    "reason": each.reason,
                }
                for each in self._without.values()
            ],
            "message": "; ".join(filter(None, [self._message(), self._message_of_ended()])),
        }
        return {"availability": entry}

    def _note_holder(self, failure: InputFailure, stages: Iterable[Mapping[str, Any]]) -> None:
        """Note the partition of a source that holds tentative stages back: it may answer, and have no rows."""
        active = {self._plan.stages[report.stage].name for report in self._active if report.state == UP_FAILURE}
        for entry in stages:
            if entry["name"] in active and (holder := entry.get("eventTime", {}).get("heldBackBy")):
                failure.holder = holder
                return

    def _state(self) -> str:
        if self._failure is None:
            return "stable"
        failing = any(report.state == TentativeState.UP_FAILURE for report in self._active)
        return "tentative" if failing or not self._active else "correcting"

    def _windows(self) -> int:
        return sum(report.windows for report in self._active if report.stage in self._last)

    def _message(self) -> str:
        """Describe the present in words; empty: nothing is missing."""
        streams = self._streams(self._silent, "is", "are")
        if self._failure is None:
            return streams
        left = f"{count(self._windows(), 'window')} to correct"
        holder = f"waiting for {self._failure.holder}" if self._failure.holder else "an input is missing"
        why = "all inputs are back" if self._state() == "correcting" else streams or holder
        return f"tentative since {_clock(self._failure.since)}: {why}, {left}"

    def _message_of_ended(self) -> str:
        """Name the partitions without tentative results, with the reason of the first; empty: there are none."""
        if not self._without:
            return ""
        names = [f"{self._plan.stages[stage].name}/{partition}" for stage, partition in sorted(self._without)]
        first = self._without[min(self._without)]
        return f"no more tentative results of {some(names, NAMED)} ({first.reason})"

    def _streams(self, silent: Sequence[SilentStream], one: str, several: str) -> str:
        """Name silent streams with the reason of the first one."""
        if not silent:
            return ""
        names = [stream_name(self._plan, stream) for stream in silent[:NAMED]]
        if more := len(silent) - len(names):
            names.append(f"{more} more")
        listed = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
        reason = f" ({silent[0].reason})" if silent[0].reason else ""
        return f"{listed} {one if len(silent) == 1 else several} silent{reason}"


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%H:%M:%S")


def _shown(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
