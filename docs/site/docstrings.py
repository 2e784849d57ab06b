"""Docstrings on the pages of the reference (an extension of griffe): arguments that stand in two columns become a list."""

from __future__ import annotations

import re
from typing import Any

import griffe

#: As in ``schema      DDL or a StructType``: a name or two, at least two spaces, and text.
_COLUMNS = re.compile(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: {2,})(\S.*)$")


def as_list(text: str) -> str:
    """Return a docstring with its columns as a list. The lines that continue an argument are indented."""
    lines: list[str] = []
    in_list = False
    for line in text.splitlines():
        if found := _COLUMNS.match(line):
            lines += [*([] if in_list or not lines else [""]), f"- **`{found[1]}`** {found[2]}"]
            in_list = True
        elif in_list and line.startswith("  "):
            lines.append(f"    {line.strip()}")
        else:
            lines += ["", line] if in_list and line.strip() else [line]
            in_list = False
    return "\n".join(lines)


class Columns(griffe.Extension):
    """Converter of the docstrings of all objects."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_list(obj.docstring.value)
