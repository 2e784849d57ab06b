"""Numbers that travel, with their bounds (design: bounded-decoding).

A decoder refuses what is beyond: it is malformed, and never reaches arithmetic of 64 bits, an array or a packed field. Whether
a number makes sense, its reader asks.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

#: What is counted from 0: batches, messages, steps. Sums of two of them are numbers of 64 bits, too.
Natural = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
#: The same, or -1: none yet.
Sequence = Annotated[int, msgspec.Meta(ge=-1, le=1 << 62)]
#: Which edge, stage, partition or worker; -1: none.
Id = Annotated[int, msgspec.Meta(ge=-1, le=(1 << 31) - 1)]
#: Bytes of one message, so that sums of them stay numbers too.
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
#: Of 64 bits: the format has none above.
Checksum = Annotated[int, msgspec.Meta(ge=0)]
#: Where a reader goes on, in its own words.
Position = Annotated[bytes, msgspec.Meta(max_length=1024)]
