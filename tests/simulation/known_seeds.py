"""Seeds that ``make seeds`` has found, and writes into ``seeds.json``."""

from __future__ import annotations

import json
from pathlib import Path

FILE = Path(__file__).parent / "seeds.json"
_READ = json.loads(FILE.read_text())
#: By broken variant: seeds that show it soon.
OF_VARIANTS: dict[str, list[int]] = _READ["variants"]
#: A few of the fixed seeds, in which together every event of ``events.py`` happens.
EVENTFUL: list[int] = _READ["eventful"]


def write(of_variants: dict[str, list[int]], eventful: list[int]) -> None:
    """Write one line for each variant, so that a change of one is a change of one line."""
    variants = ",\n".join(f"    {json.dumps(key)}: {json.dumps(seeds)}" for key, seeds in of_variants.items())
    FILE.write_text(f'{{\n  "eventful": {json.dumps(eventful)},\n  "variants": {{\n{variants}\n  }}\n}}\n')
