"""The picture of ``flux bench nexmark --out``: events a second of each query, here, in Structured Streaming, and as published
for Flink."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Thousands of events a second and core that the guide of Nexmark publishes for Flink, generator included: "V2" counts the later
#: half of a hundred million events, 100,000 of them a second of event time.
FLINK_K = {
    "q0": 379, "q3": 219, "q4": 28, "q5": 75, "q7": 23, "q8": 162, "q9": 14, "q11": 46, "q12": 194, "q15": 168, "q16": 45,
    "q17": 161, "q18": 65, "q19": 43, "q20": 18, "q22": 212,
}  # fmt: skip
#: Cores of this machine that a run uses: those figures are of one core each.
CORES = 2
SIZE, DPI = (11, 6), 110


def drawer(lines: list[dict[str, Any]], cores: int = CORES) -> Callable[[Path], None]:
    """Return a function that draws the lines of queries into a file."""

    def draw(path: Path) -> None:
        from matplotlib.figure import Figure  # without pyplot: no window, nothing global

        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.subplots()
        names = [line["query"] for line in lines]
        bars = {
            "Flux": [line["events_per_s"] / cores for line in lines],
            "Structured Streaming, same run": [(line["peer_events_per_s"] or 0) / cores for line in lines],
            "Flink, as published": [FLINK_K.get(name, 0) * 1000 for name in names],
        }
        width = 0.8 / len(bars)
        for number, (label, heights) in enumerate(bars.items()):
            places = [place + (number - 1) * width for place in range(len(names))]
            axes.bar(places, [height or float("nan") for height in heights], width, label=label)
        axes.set_yscale("log")
        axes.set_xticks(range(len(names)), names)
        axes.set_ylabel("events per second and core")
        axes.set_title("Nexmark: events per second and core")
        axes.grid(visible=True, axis="y", alpha=0.3)
        axes.legend(loc="upper right", fontsize="small")
        figure.savefig(path, dpi=DPI)

    return draw
