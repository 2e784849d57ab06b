"""Numbers that travel, with their bounds (design: bounded-decoding).

A decoder refuses a number beyond its bounds as malformed, so that it never reaches 64-bit arithmetic, an array or a packed field.
Whether a number makes sense is left to the receiver of the message.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

#: A count from 0: of batches, messages, steps. The sum of two of them fits into 64 bits, too.
Natural = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
#: A count from 0, or -1: none yet.
Sequence = Annotated[int, msgspec.Meta(ge=-1, le=1 << 62)]
#: An edge, stage, partition or worker; -1: none.
Id = Annotated[int, msgspec.Meta(ge=-1, le=(1 << 31) - 1)]
#: Bytes of one message. Bounded so that sums of many fit into 64 bits.
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
#: 64 bits. It has no upper bound here because msgpack has no larger integers.
Checksum = Annotated[int, msgspec.Meta(ge=0)]
#: A reader position. Only the reader of the source can interpret it.
Position = Annotated[bytes, msgspec.Meta(max_length=1024)]
