"""One stream from one producer to its consumers: numbered, logged, acked, within credit.

``flux.stream(streaming_df)`` calls this package, which has the name that users look for. The function behind it is
``flux.dataflow.streaming.stream``, which describes the arguments.
"""

from __future__ import annotations

import sys

from flux.calls import CallablePackage

__all__ = ["stream"]
HOME = "flux.dataflow.streaming"

sys.modules[__name__].__class__ = CallablePackage
