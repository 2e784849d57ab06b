"""Errors about the files of a folder. Each message has the name of the file and the way out. A wrong call is a UsageError, as
everywhere."""

from __future__ import annotations

from flux.errors import FluxError


class FileError(FluxError):
    """Base of errors about the files of a folder."""

    #: The defect alone, in a few words: no path, no advice. It is shown where the file is left out.
    defect = ""
    #: The folder itself could not be asked.
    no_answer = False


class FileChanged(FileError):
    """A file is not as it was when it was found: it grew, or was written anew. Its rows would be lost, or would come twice."""


class FileGone(FileError):
    """A file that was found, and is still to be read, is not there."""


class BadFile(FileError):
    """A file cannot be read, or its rows do not fit the schema."""


def no_answer(text: str) -> FileError:
    """Return the error about a folder that could not be asked."""
    error = FileError(text)
    error.no_answer = True
    return error


def gone(path: str) -> FileGone:
    """Return the error about a file that is not there."""
    error = FileGone(
        f"{path} was found, and is gone before all its rows were read. Put it back, or start the query again with "
        "ignoreMissingFiles=True, which leaves out the rows that are gone; remove files only when every row of them has left the "
        "query"
    )
    error.defect = "it is gone"
    return error
