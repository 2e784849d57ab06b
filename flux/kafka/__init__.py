"""Kafka topics as sources, which show where exactly each row came from, and as sinks, which write each record once.

``flux.kafka(topics, bootstrap, ...)`` calls this package, because users look for that name. The function ``source.kafka``,
which has the same name, lists the arguments.
"""

from __future__ import annotations

import sys

from flux.calls import CallablePackage

__all__ = ["kafka"]
HOME = "flux.kafka.source"

sys.modules[__name__].__class__ = CallablePackage
