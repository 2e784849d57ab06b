"""Kafka topics as sources, exactly where each row came from included, and as sinks, each record once.

``flux.kafka(topics, bootstrap, ...)`` is a call of this package: it has the name that people look for, and so has the
function ``source.kafka``, which says what it takes.
"""

from __future__ import annotations

import sys

from flux.calls import CallablePackage

__all__ = ["kafka"]
HOME = "flux.kafka.source"

sys.modules[__name__].__class__ = CallablePackage
