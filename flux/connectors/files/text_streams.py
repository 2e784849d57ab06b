"""Files of text as pyarrow's parsers of CSV and JSON should see them.

Both parsers take a file without rows for an error. The parser of CSV reads a file in blocks and drops a line feed at the
beginning of a block if the block before ended with a carriage return, also inside of quotes, where both are part of a value.
"""

from __future__ import annotations

import codecs
import io
from typing import Any

import pyarrow as pa

from flux.json_rows import has_null_row

#: Bytes that are read to find out whether a file has any content.
_FIRST_BYTES = 64 << 10
#: Further bytes that are read behind a block that ends with a carriage return.
_MORE_BYTES = 4096


class CsvText(io.RawIOBase):
    """Lines of CSV as UTF-8. ``read`` ends with a carriage return at the end of the file only, and may give a few thousand bytes
    more than it was asked for. A file of one line ends with a line break, because the parser looks for one behind a header."""

    def __init__(self, stream: Any, encoding: str) -> None:
        super().__init__()
        is_utf8 = codecs.lookup(encoding).name == "utf-8"
        self._stream = stream if is_utf8 else pa.transcoding_input_stream(stream, encoding, "utf-8")
        self._first: bytes | None = self._stream.read(_FIRST_BYTES)
        self.is_empty = not self._first.removeprefix(codecs.BOM_UTF8)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if self._first is None:
            return self._whole_breaks(self._stream.read(size))
        data, self._first = self._first, None
        while len(data) < size and (more := self._stream.read(size - len(data))):
            data += more
        data = self._whole_breaks(data)
        is_one_line = len(data) < size and b"\n" not in data and b"\r" not in data
        return data + b"\n" if is_one_line else data

    def _whole_breaks(self, data: bytes) -> bytes:
        while data.endswith(b"\r") and (more := self._stream.read(_MORE_BYTES)):
            data += more
        return data


class JsonText(io.RawIOBase):
    """Lines of JSON without the blanks before the first line. pa.ArrowInvalid: a row is ``null``."""

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self._stream = stream
        self._first: bytes = stream.read(_FIRST_BYTES).removeprefix(codecs.BOM_UTF8).lstrip(b" \t\r\n")
        while not self._first and (more := stream.read(_FIRST_BYTES)):
            self._first = more.lstrip(b" \t\r\n")
        self.is_empty = not self._first
        #: The beginning of a line whose end has not been read, and whether a row begins with it.
        self._line, self._begins = b"", True

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data, self._first = self._first, b""
        more: bytes = self._stream.read(size - len(data)) if len(data) < size or size < 0 else b""
        data += more
        self._check(data)
        return data

    def _check(self, data: bytes) -> None:
        """Look at whole lines: the parser waits for the end of a line, too."""
        text = self._line + data
        end = text.rfind(b"\n") + 1 if data else len(text)
        if has_null_row(text[:end], self._begins):
            raise pa.ArrowInvalid("a row is null, and an object is expected in each line")
        if text[:end].strip():
            self._begins = text[:end].rstrip().endswith(b"}")
        self._line = text[end:]
