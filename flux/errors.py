"""Errors by whose fault they are (after trio's and h2's habit).

The world failing (a lost connection, a dead worker) is an event, not an exception. What raises is: the user misusing
the library (UsageError), the user's own code failing (UserCodeError), a peer breaking the protocol (ProtocolError),
and a query that cannot go on (QueryFailed). A broken invariant is an AssertionError and ends the query.
"""

from __future__ import annotations

from flux.tracebacks import print_shortened


class FluxError(Exception):
    """Base of everything this project raises on purpose. ``traceback``: of the user's code where that has raised, perhaps
    in another process; the message ends with it. ``summary`` is the message without."""

    traceback = ""

    @property
    def summary(self) -> str:
        return super().__str__()

    def __str__(self) -> str:
        return f"{self.summary}\n\n{self.traceback}" if self.traceback else self.summary


class UsageError(FluxError, ValueError):
    """The call cannot be carried out as written: says what was expected, what came, and what to do. Printed without the frames of
    this project, because the line of the call is what is wrong."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        print_shortened()


class SchemaError(UsageError):
    """Columns or types do not fit: unknown key column, schema mismatch between stages."""


class NoSuchAttribute(UsageError, AttributeError):
    """An object has no attribute of this name, which somebody may expect: says what there is. ``hasattr`` says no."""


class ProtocolError(FluxError):
    """A peer sent something malformed, of another version, or unauthenticated. Counted and refused."""


class RefusedError(ProtocolError):
    """A consumer refuses a stream. ``code``: "stale" (a newer life of this producer is at work) or "edge"."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Fenced(FluxError):
    """This worker was given up while it was silent; its part has been taken over. Its task ends well, another has come."""


class UserCodeError(FluxError):
    """Code given by the user raised. Names stage, partition, stream, sequence and the first bad row, and ends with the
    traceback of the user's code."""

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


class SnapshotError(UserCodeError):
    """An operator's snapshot cannot be serialised."""


class NonDeterministicInputError(FluxError):
    """A retried ingress task produced other rows than the attempt that it replaces."""


class QueryFailed(FluxError):
    """A running query came to an end that nobody asked for. The message says what would have prevented it."""


class MoveFailed(FluxError):
    """A move that was asked for was given up; its partition is as well off as before. The message says why."""


class Unreachable(FluxError):
    """No query that could be asked answers; the message says what was looked for, and where."""


class QueryTimeout(FluxError, TimeoutError):
    """A wait reached its limit; the message says what was waited for and what was missing."""


def rebuilt(kind: str, message: str, traceback: str = "") -> FluxError:
    """Make the error of another process anew: of the class with this name if that is a FluxError of a module that is loaded
    here, such as ``BadFile`` of a source of files, else QueryFailed. Only message and traceback have travelled."""
    found = _subclasses(FluxError).get(kind, QueryFailed)
    error = found.__new__(found, message)  # some take more than a message
    error.traceback = traceback
    return error


def _subclasses(cls: type[FluxError]) -> dict[str, type[FluxError]]:
    found = {cls.__name__: cls}
    for each in cls.__subclasses__():
        found |= _subclasses(each)
    found.pop(RefusedError.__name__, None)  # between two workers, about a stream
    return found
