"""Rows of JSON that are ``null`` in place of an object.

Arrow's readers of JSON look for the parent of each value, and such a row has none: the process dies of it, or the row comes
without a value in any column. So text is searched for these rows before a reader sees it.
"""

from __future__ import annotations

import codecs

import numpy as np

_BLANKS = b" \t\r\n"
_QUOTE = ord('"')


def has_null_row(text: bytes, begins: bool = True) -> bool:
    """Return whether a row of JSON is ``null``. ``begins``: a row begins with the text; otherwise the text may go on within one.

    The text is looked at five times at most, without a loop over its rows: it may be a stranger's.
    """
    if b"null" not in text:
        return False
    dense = text.translate(None, _BLANKS)
    if begins and dense.removeprefix(codecs.BOM_UTF8).startswith(b"null"):
        return True
    # Inside of an object, a colon, a comma or a bracket comes before null.
    return b"}null" in dense and b"}null" in _without_strings(dense)


def _without_strings(text: bytes) -> bytes:
    """Return text with a quote in place of each string."""
    signs = np.frombuffer(text.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    # A sum beyond 255 begins at 0 again, which keeps its lowest bit.
    quotes = np.cumsum(signs == _QUOTE, dtype=np.uint8)
    return bytes(signs[quotes & 1 == 0])
