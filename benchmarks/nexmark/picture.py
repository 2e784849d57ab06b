"""The picture of ``flux bench nexmark --out``: events a second and core of each query, here, in Structured Streaming, and as
published for Flink; and the table of benchmarks/README.md.

``python -m benchmarks.nexmark.picture FIGURES.json PICTURE.png COMMIT`` draws the one and prints the other."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Flink's figures are those of GUIDE_V2.md in https://github.com/nexmark/nexmark, generator included: the last fifty
#: million of two hundred million events, 100,000 of them a second of event time. Flink cannot run q6.
FLINK_SOURCE = "https://github.com/nexmark/nexmark/blob/master/GUIDE_V2.md"
FLINK_EVENTS = 50_000_000
#: Cores that Flink used, and seconds.
FLINK = {
    "q0": (7.0, 18.875), "q1": (7.24, 17.462), "q2": (7.13, 16.927), "q3": (8.69, 26.25), "q4": (12.33, 143.745),
    "q5": (12.35, 54.324), "q7": (11.45, 190.508), "q8": (12.83, 23.994), "q9": (10.86, 334.395), "q10": (6.81, 55.29),
    "q11": (9.29, 116.856), "q12": (10.03, 25.656), "q13": (7.97, 33.326), "q14": (7.83, 24.66), "q15": (8.16, 36.419),
    "q16": (10.77, 102.608), "q17": (10.15, 30.599), "q18": (11.77, 64.954), "q19": (13.09, 89.471),
    "q20": (10.98, 256.461), "q21": (7.81, 43.492), "q22": (7.7, 30.725),
}  # fmt: skip
#: Size of a picture in inches, and dots per inch.
SIZE, DPI = (11, 6), 110


def flink_per_core(query: str) -> int | None:
    """Return the published events a second and core of Flink; None: there is no figure."""
    if query not in FLINK:
        return None
    cores, seconds = FLINK[query]
    return round(FLINK_EVENTS / seconds / cores)


def drawer(lines: list[dict[str, Any]], cores: int) -> Callable[[Path], None]:
    """Return a function that draws the lines of queries into a file. Their events a second are those of all ``cores``."""

    def draw(path: Path) -> None:
        from matplotlib.figure import Figure  # without pyplot: no window, nothing global

        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.subplots()
        names = [line["query"] for line in lines]
        bars = {
            "Flux": [line["events_per_s"] / cores for line in lines],
            "Structured Streaming, same run": [(line["peer_events_per_s"] or 0) / cores for line in lines],
            "Flink, as published (V2)": [flink_per_core(name) or 0 for name in names],
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
        axes.set_axisbelow(True)
        figure.legend(loc="outside lower center", ncols=len(bars), fontsize="small")
        figure.savefig(path, dpi=DPI)

    return draw


def table(lines: list[dict[str, Any]], cores: int, commit: str) -> str:
    """Return the lines of queries as the table of benchmarks/README.md. Rates are thousands of events a second."""
    rows = [
        "| query | Flux | Structured Streaming | ratio | Flux per core | Flink per core, published | ratio | commit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        ours, peer, flink = line["events_per_s"], line["peer_events_per_s"], flink_per_core(line["query"])
        cells = [line["query"], _thousands(ours), _thousands(peer), _times(ours, peer)]
        cells += [_thousands(ours / cores), _thousands(flink), _times(ours / cores, flink), commit]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _thousands(rate: float | None) -> str:
    return "" if rate is None else f"{rate / 1e3:,.0f} k"


def _times(ours: float, theirs: float | None) -> str:
    return "" if theirs is None else f"{ours / theirs:.1f}"


def main() -> None:
    figures, picture, commit = sys.argv[1:]
    found = json.loads(Path(figures).read_text())
    drawer(found["queries"], found["cores"])(Path(picture))
    print(table(found["queries"], found["cores"], commit))


if __name__ == "__main__":
    main()
