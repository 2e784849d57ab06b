"""The picture of the figures in README.md: ``python -m benchmarks.figures`` draws it anew from the table there.

The picture is plain SVG, made from nothing but the text of the table, so a test can compare both byte for byte.
"""

from __future__ import annotations

import math
import re
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "images" / "figures.svg"

#: All sizes in pixels: height of a line, left edge and greatest length of the bars, width of the picture.
LINE, LEFT, LONGEST, WIDTH = 34, 360, 360, 790
#: The ratio at the right end of the scale.
RATIO_MAX = 50
#: Ratios with a line in the background.
TICKS = (1, 2, 5, 10, 20, 50)


def table(text: str) -> list[tuple[str, float]]:
    """Return name and ratio of each benchmark in the table of figures of README.md."""
    (rows,) = re.findall(r"^\| benchmark \| command \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()]
    return [(row[0], float(row[-1])) for row in cells]


def _length(ratio: float) -> float:
    """Return the length of a bar. The scale is logarithmic, because the ratios differ by more than ten times."""
    return round(LONGEST * math.log(ratio) / math.log(RATIO_MAX), 1)


def draw(rows: list[tuple[str, float]]) -> str:
    """Return the picture: a bar for each row, as long as the logarithm of its ratio."""
    bottom = 48 + LINE * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{bottom + 28}" '
        f'font-family="sans-serif" font-size="14" fill="#222">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        '<text x="12" y="26" font-weight="bold">Times better than Spark Structured Streaming, same run</text>',
    ]
    for tick in TICKS:
        x = LEFT + _length(tick)
        parts.append(f'<line x1="{x}" y1="42" x2="{x}" y2="{bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{x}" y="{bottom + 18}" text-anchor="middle" fill="#777">{tick}</text>')
    for number, (name, ratio) in enumerate(rows):
        y = 48 + LINE * number
        parts.append(f'<text x="{LEFT - 10}" y="{y + 19}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y + 4}" width="{_length(ratio)}" height="22" fill="#3b6ea8"/>')
        parts.append(f'<text x="{LEFT + _length(ratio) + 8}" y="{y + 20}">{ratio:g}</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw(table(README.read_text())))
