"""Kafka topics as sources, exactly where each row came from included, and as sinks, each record once.

``flux.kafka(topics, bootstrap, ...)`` is a call of this package: it has the name that people look for, and so has the
function ``source.kafka``, which says what it takes.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        from flux.kafka.source import kafka

        return kafka(*args, **options)


sys.modules[__name__].__class__ = _Callable
