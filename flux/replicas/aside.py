"""Jobs that another thread does for a state machine: what they give comes back as an event, also where they raise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Failed:
    """Instead of the result of a job that raised."""

    error: BaseException


def attempt(job: Callable[[], Any]) -> Any:
    """The result of the job, or Failed."""
    try:
        return job()
    except BaseException as error:  # handed to whoever asks for the result
        return Failed(error)
