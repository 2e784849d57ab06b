"""Answers with rows, as JSON or Arrow (design: output-json)."""

from __future__ import annotations

from typing import Any

import msgspec
import pyarrow as pa

from flux.gateway.answers import RowsAnswer
from flux.gateway.reads.follower import FoundRows
from flux.gateway.reads.tentative_tail import TentativeTail
from flux.outputs.catalogue import OutputDefinition
from flux.outputs.cursor import OutputCursor

#: Headers of an answer in Arrow: the next cursor, and the missed rows as JSON.
CURSOR_HEADER, MISSED_HEADER = "Flux-Cursor", "Flux-Missed"


def json_answer(
    of: OutputDefinition, found: FoundRows, cursor: OutputCursor, tentative: TentativeTail | None = None
) -> bytes:
    """Return an answer. ``tentative``: the tentative rows of the output. They are read behind the stable ones, or an answer would
    have both for one place."""
    rows = b",".join(entry.json[1:-1] for entry in found.entries)
    standing: Any = msgspec.UNSET
    if tentative is not None:
        tentative.poll()
        standing = [msgspec.Raw(each.data) for each in tentative.standing()[1]]
    answer = RowsAnswer(of.name, of.mode, msgspec.Raw(b"[" + rows + b"]"), str(cursor), found.missed, standing)
    return msgspec.json.encode(answer)


def arrow_answer(of: OutputDefinition, found: FoundRows) -> bytes:
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, of.columns()) as writer:
        for entry in found.entries:
            writer.write_batch(entry.piece.rows)
    made: bytes = stream.getvalue().to_pybytes()
    return made


def arrow_headers(found: FoundRows, cursor: OutputCursor) -> dict[str, str]:
    headers = {CURSOR_HEADER: str(cursor)}
    if found.missed:
        headers[MISSED_HEADER] = msgspec.json.encode(found.missed).decode()
    return headers
