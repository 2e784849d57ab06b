"""One stream from one producer to its consumers: numbered, logged, acked, within credit.

``flux.stream(streaming_df)`` is a call of this package: it has the name that people look for, and so has the function
``flux.dataflow.streaming.stream``, which says what it takes.
"""

from __future__ import annotations

import sys

from flux.calls import CallablePackage

__all__ = ["stream"]
HOME = "flux.dataflow.streaming"

sys.modules[__name__].__class__ = CallablePackage
