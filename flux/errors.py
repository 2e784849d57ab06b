"""Errors, divided by the party at fault (after trio's and h2's habit).

A failure of the world (a lost connection, a dead worker) is an event, not an exception. Exceptions are: the user misusing
the library (UsageError), the user's own code failing (UserCodeError), a peer breaking the protocol (ProtocolError),
and a query that cannot go on (QueryFailed). A broken invariant is an AssertionError and ends the query.
"""

from __future__ import annotations

from flux.tracebacks import print_shortened


class FluxError(Exception):
    """Base of all errors that this project raises on purpose. ``traceback`` is that of the user's code if that code has raised,
    perhaps in another process; the message ends with it. ``summary`` is the message without the traceback."""

    traceback = ""

    @property
    def summary(self) -> str:
        return super().__str__()

    def __str__(self) -> str:
        return f"{self.summary}\n\n{self.traceback}" if self.traceback else self.summary


class UsageError(FluxError, ValueError):
    """A call that cannot be carried out as written. The message names the expected value, the given value and the
    remedy. It is printed without the frames of this project, because the line of the call is wrong."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        print_shortened()


class SchemaError(UsageError):
    """Columns or types that do not fit: unknown key column, schema mismatch between stages."""


class NoSuchAttribute(UsageError, AttributeError):
    """A missing attribute that a user may expect. The message names the replacement. ``hasattr`` returns False."""


class ProtocolError(FluxError):
    """A message of a peer that is malformed, of another version, or unauthenticated. It is counted and refused."""


class RefusedError(ProtocolError):
    """Refusal of a stream by a consumer. ``code`` is "stale" (a newer life of this producer is at work) or "edge"."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Fenced(FluxError):
    """End of a worker that was given up while it was silent. Its part has been taken over, so its task ends well."""


class UserCodeError(FluxError):
    """An error raised by code of the user. The message names stage, partition, stream, sequence and the first bad row, and ends
    with the traceback of the user's code."""

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


class SnapshotError(UserCodeError):
    """An operator's snapshot that cannot be serialised."""


class NonDeterministicInputError(FluxError):
    """A retried ingress task that produced other rows than the attempt that it replaces."""


class QueryFailed(FluxError):
    """An end of a running query that no user asked for. The message says what would have prevented it."""


class DataLost(FluxError):
    """Loss of data. Rows that were still to be read, or that a step has to repeat, are gone from the log of a source; a log ends
    before a position that was read or written; or a topic was deleted and made anew."""


class MoveFailed(FluxError):
    """A move that was asked for and given up; its partition is as well off as before. The message gives the reason."""


class Unreachable(FluxError):
    """A search for a query to which no query answers. The message names the searched queries and places."""


class QueryTimeout(FluxError, TimeoutError):
    """A wait that reached its limit. The message names the awaited event and the missing part."""


class ContractBroken(AssertionError):
    """A source, sink or policy that does not keep its contract: the answer of the ``check_...`` functions of ``flux.testing``."""


def rebuilt(kind: str, message: str, traceback: str = "") -> FluxError:
    """Make the error of another process anew: of the class with this name if that is a FluxError of a module that is loaded
    here, such as ``BadFile`` of a source of files, else QueryFailed. Only message and traceback have travelled."""
    found = _subclasses(FluxError).get(kind, QueryFailed)
    error = found.__new__(found, message)  # some classes take more arguments than a message
    error.traceback = traceback
    return error


def _subclasses(cls: type[FluxError]) -> dict[str, type[FluxError]]:
    found = {cls.__name__: cls}
    for each in cls.__subclasses__():
        found |= _subclasses(each)
    found.pop(RefusedError.__name__, None)  # it stays between two workers, about a stream
    return found
