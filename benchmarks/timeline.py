"""The picture of a benchmark: throughput and latency over time, and the events meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arrivals import Seen
from flux.errors import UsageError

#: Width of one point of the plots.
BIN_S = 0.1
#: Size of a picture in inches, and dots per inch.
SIZE, DPI = (11, 6), 110


@dataclass(frozen=True)
class Mark:
    """An event, from ``start`` to ``end``; they are equal if it takes no time."""

    start: float
    end: float
    label: str


@dataclass
class Line:
    """The line of one run. ``at`` is in seconds since the epoch; latencies are in milliseconds, NaN for times without rows."""

    name: str
    at: np.ndarray
    rows_per_s: np.ndarray
    latency_ms: np.ndarray
    marks: list[Mark] = field(default_factory=list)


@dataclass
class Report:
    """The outcome of a benchmark. ``figures`` are printed; ``lines`` are drawn, each from its own beginning; ``failed`` is the
    reason why the command ends with an error after it has printed them; ``picture`` draws something else than lines over time."""

    figures: dict[str, Any]
    lines: list[Line] = field(default_factory=list)
    latency: str = "latency (ms)"
    failed: str | None = None
    picture: Callable[[Path], None] | None = None


def of_arrivals(name: str, seen: Seen, marks: Iterable[Mark], start: float, end: float) -> Line:
    """Make a line of rows per second and the highest latency in each tenth of a second."""
    edges = np.arange(start, max(end, start + BIN_S) + BIN_S, BIN_S)
    rows, _ = np.histogram(seen.at, edges, weights=seen.rows)
    age = np.full(len(edges) - 1, np.nan)
    due = seen.between(edges[0], edges[-1])
    place = np.minimum(np.searchsorted(edges, seen.at[due], "right") - 1, len(age) - 1)
    np.fmax.at(age, place, seen.age_ms[due])
    return Line(name, edges[:-1], rows / BIN_S, age, list(marks))


def of_progress(name: str, reports: Iterable[Mapping[str, Any]], stage: int) -> Line:
    """Make a line from the progress reports of a query: rows that a stage applied per second, and the 99th percentile of the
    latency of its last steps."""
    points = [
        (
            datetime.fromisoformat(report["timestamp"]).timestamp(),
            report["stages"][stage]["rowsPerSecond"],
            (report["stages"][stage]["latencyMs"] or (np.nan, np.nan))[1],
        )
        for report in reports
    ]
    at, rows, latency = np.array(points, float).reshape(-1, 3).T
    return Line(name, at, rows, latency)


def write(report: Report, folder: Path) -> list[Path]:
    """Write ``<benchmark>.json`` and ``<benchmark>.png`` to this folder, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = folder / f"{report.figures['benchmark']}.json"
    figures.write_text(json.dumps(report.figures, indent=2) + "\n")
    picture = figures.with_suffix(".png")
    if report.picture is not None:
        report.picture(picture)
    elif report.lines:
        draw(report, picture)
    else:
        return [figures]
    return [figures, picture]


def require_plots() -> None:
    """Check for the plotting library before a benchmark runs for minutes. UsageError: it is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("--out draws with matplotlib, which is missing: pip install 'flux-exchange[bench]'") from None


def draw(report: Report, path: Path) -> None:
    from matplotlib.figure import Figure  # without pyplot: no window, nothing global

    figure = Figure(figsize=SIZE, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    figure.suptitle(f"flux bench {report.figures['benchmark']}")
    labelled: set[str] = set()
    for line in report.lines:
        start = float(line.at[0]) if len(line.at) else 0.0
        (drawn,) = above.plot(line.at - start, line.rows_per_s, linewidth=1, label=line.name)
        below.plot(line.at - start, line.latency_ms, linewidth=1, color=drawn.get_color(), label=line.name)
        for mark in line.marks:
            label = None if mark.label in labelled else mark.label
            labelled.add(mark.label)
            for axes in (above, below):
                if mark.end > mark.start:
                    axes.axvspan(mark.start - start, mark.end - start, color="tab:orange", alpha=0.3, label=label)
                else:
                    axes.axvline(mark.start - start, color="tab:red", linestyle=":", linewidth=1, label=label)
    above.set_ylabel("rows/s")
    below.set_ylabel(report.latency)
    below.set_xlabel("seconds")
    above.set_ylim(bottom=0)
    if any(np.nanmax(line.latency_ms, initial=0.0) > 0 for line in report.lines):
        below.set_yscale("log")
    for axes in (above, below):
        axes.grid(visible=True, alpha=0.3)
    below.legend(loc="upper right", fontsize="small")
    figure.savefig(path, dpi=DPI)
