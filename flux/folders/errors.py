"""What goes wrong with files that are read, each error with the name of the file and what to do. A wrong call is a UsageError
as everywhere."""

from __future__ import annotations

from flux.errors import FluxError


class FileError(FluxError):
    """Base of what the files of a folder do to a query."""


class FileChanged(FileError):
    """A file is not as it was when it was found: it grew, or was written anew. Its rows would be lost, or come twice."""


class FileGone(FileError):
    """A file that was found, and still is to be read, is not there."""


class BadFile(FileError):
    """A file cannot be read, or its rows do not fit the schema."""
