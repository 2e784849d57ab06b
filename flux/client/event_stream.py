"""Server-sent events: bytes of a response as events, by the rules of the HTML standard.

Lines end with CR, LF or both, and with nothing else: a row may hold U+2028 and the like, which end lines of Python's text. So the
bytes are cut here, and not by httpx.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from flux.errors import FluxError

_LINE_END = re.compile(rb"\r\n|\n|\r")
#: Bytes of one event: a gateway sends fewer, and what sends more is none.
EVENT_BYTES = 64 << 20


class ServerEvent(NamedTuple):
    """One event of a stream."""

    #: The kind; "message" if the stream names none.
    kind: str
    data: str
    #: The newest id until then; "": there was none.
    id: str


class EventStreamParser:
    """Bytes in, events out. An event that has not ended is kept for the next bytes, and is lost with the connection."""

    def __init__(self) -> None:
        self._rest = b""
        self._kind, self._data, self._bytes = "", list[str](), 0
        self._first = True
        #: The newest id, with which a reader goes on elsewhere.
        self.last_id = ""

    def feed(self, data: bytes) -> Iterator[ServerEvent]:
        """Yield the events that end in these bytes. FluxError: one is larger than ``EVENT_BYTES``."""
        if self._first and data:
            data, self._first = data.removeprefix(b"\xef\xbb\xbf"), False
        whole = self._rest + data
        begin = 0
        for end in _LINE_END.finditer(whole):
            if end.end() == len(whole) and end[0] == b"\r":
                break  # it may be the first half of CR LF
            found = self._line(whole[begin : end.start()])
            begin = end.end()
            if found is not None:
                yield found
        self._rest = whole[begin:]
        if self._bytes + len(self._rest) > EVENT_BYTES:
            raise FluxError(f"an event of the stream has more than {EVENT_BYTES:,} bytes: no gateway sends such")

    def _line(self, line: bytes) -> ServerEvent | None:
        if not line:
            return self._ended()
        name, _, value = line.partition(b":")
        text = value.removeprefix(b" ").decode(errors="replace")
        if name == b"data":
            self._data.append(text)
            self._bytes += len(line)
        elif name == b"event":
            self._kind = text
        elif name == b"id" and "\0" not in text:
            self.last_id = text
        return None

    def _ended(self) -> ServerEvent | None:
        kind, data = self._kind or "message", self._data
        self._kind, self._data, self._bytes = "", [], 0
        return ServerEvent(kind, "\n".join(data), self.last_id) if data else None
