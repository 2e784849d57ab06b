"""Jobs that another thread does for a state machine. Their results come back as events, also if a job raises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class JobFailed:
    """The error of a job that raised, in place of its result."""

    error: BaseException


def attempt(job: Callable[[], Any]) -> Any:
    """Do a job. Return its result, or Failed."""
    try:
        return job()
    except BaseException as error:  # handed to the caller that asks for the result
        return JobFailed(error)
