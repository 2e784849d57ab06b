"""``flux.files``: a folder of files that keep coming, as a source of a flow that is read inside the workers.

Partitions share the files: file number n, as the ledger counts them, is read by partition n modulo their number.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyarrow import fs

import flux
from flux.arguments import checked, parameters, unknown
from flux.connectors.files.formats import CsvFormat, FileFormat, JsonFormat, ParquetFormat, check_flat, check_json
from flux.connectors.files.listing import Rules
from flux.connectors.files.reader import FileRows
from flux.connectors.files.watch import Watch, WatchedFolder
from flux.connectors.ledger import HasLedger, ledger_folder
from flux.dataflow.source import Source, source
from flux.dataflow.source_reader import SourceReader, SourceSettings
from flux.errors import UsageError
from flux.operators.plain_columns import plain_schema
from flux.operators.schema import parse_ddl
from flux.settings import parse_seconds

FORMATS: dict[str, type[FileFormat]] = {"parquet": ParquetFormat, "csv": CsvFormat, "json": JsonFormat}
#: Options of CSV in Spark's names, with their fields here and their types.
_CSV = {
    "header": ("header", bool),
    "sep": ("sep", str),
    "delimiter": ("sep", str),
    "quote": ("quote", str),
    "escape": ("escape", str),
    "nullvalue": ("null", str),
    "encoding": ("encoding", str),
    "charset": ("encoding", str),
    "multiline": ("multi_line", bool),
}
#: Names of these options in messages.
_CSV_OPTIONS = ("header", "sep", "quote", "escape", "nullValue", "encoding", "multiLine")
#: Options that Spark has for files, each with the reason why it cannot be set here.
_REFUSED = {
    "maxfilespertrigger": "there are no triggers: files are read one after the other as fast as the query takes them",
    "maxbytespertrigger": "there are no triggers: files are read one after the other as fast as the query takes them",
    "latestfirst": "files are read in the order in which they are found, and those found together by modification time",
    "maxfileage": "every file is read, however old it is when it is found",
    "filenameonly": "a file is known by its whole path below the folder",
    "cleansource": "nothing is removed; a file may go once every row of it has left the query",
    "sourcearchivedir": "nothing is moved",
    "mode": "a row that does not fit the schema ends the query, and its file is named",
    "inferschema": "the schema is given with schema=...",
    "mergeschema": "the schema is given with schema=...",
}
#: Default folder of a ledger, in the folder itself: Spark and other readers do not see it there.
LEDGER = "_flux"
_PARTITIONS = 4
#: The kind of row numbers in the streams of a query, as checkpoint locations name it.
_NUMBERS = "file and row"


class FilesReader(HasLedger, SourceReader):
    """The reader of a source of files."""

    endless = True
    row_numbers = True  # of file and row
    lag_unit = "file"
    partitions: int

    def __init__(
        self,
        folder: WatchedFolder,
        partitions: int,
        ledgers: str,
        own: bool,
        missing: bool | None,
        corrupt: bool | None,
    ) -> None:
        """``missing`` and ``corrupt`` tell whether such files are left out; None: as in the session."""
        super().__init__(ledgers, own)
        self.folder, self.partitions, self.schema = folder, partitions, folder.format.schema
        self._settings = SourceSettings()
        self._missing, self._corrupt = missing, corrupt
        self._watch: Watch | None = None  # shared by the partitions that are read in a process

    def configure(self, settings: SourceSettings) -> None:
        self._settings = settings

    def prepare(self, kept: Any) -> Any:
        _check_there(self.folder.path)
        if kept is not None and kept.get("numbers") != _NUMBERS:
            raise UsageError(
                "the checkpoint location is of a release of Flux that counted the rows of files. This one tells rows by file and "
                f"row, and cannot know which of {self.folder.path} that query has read. Go on with that release, or start with "
                "another checkpointLocation"
            )
        return {**super().prepare(kept), "numbers": _NUMBERS}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_watch": None}

    def read(self, partition: int, start: Any) -> FileRows:
        return FileRows(self._watched(), partition, self.partitions, start)

    def unread_files(self) -> dict[str, dict[str, str]]:
        """Return the files with rows that are not read, by the kind of their defect, each with the reason."""
        return self._watched().unread()

    def _watched(self) -> Watch:
        if self._watch is None:
            missing, corrupt, settings = self._missing, self._corrupt, self._settings
            folder = replace(
                self.folder,
                format=replace(self.folder.format, case_sensitive=settings.case_sensitive),
                bad_after_s=settings.bad_file_after_s,
                ignore_missing=settings.ignore_missing_files if missing is None else missing,
                ignore_corrupt=settings.ignore_corrupt_files if corrupt is None else corrupt,
                may_be_silent=settings.may_be_silent,
            )
            self._watch = Watch(folder, self.ledger)
        return self._watch


@checked("flux.files")
def files(
    path: str | os.PathLike[str],
    format: str = "parquet",
    schema: Any = None,
    *,
    partitions: int = _PARTITIONS,
    pathGlobFilter: str | None = None,  # noqa: N803
    recursiveFileLookup: bool = False,  # noqa: N803
    onChanged: str = "fail",  # noqa: N803
    ignoreMissingFiles: bool | None = None,  # noqa: N803
    ignoreCorruptFiles: bool | None = None,  # noqa: N803
    poll: float | str = "200ms",
    settle: float | str | None = None,
    ledger: str | os.PathLike[str] | None = None,
    name: str | None = None,
    **options: Any,
) -> Source:
    """Read a folder of files that keep coming: every file that is there or comes later, once, in the workers. Never ends.

    path            a path that all workers reach, or a URI that pyarrow.fs knows; a relative path begins at the current
                    folder
    format          "parquet", "csv" or "json" (an object in each line)
    schema          schema of the rows: DDL string, StructType or pyarrow schema. May be left out if a parquet file is there
    partitions      number of files that are read at the same time
    pathGlobFilter  names of files, as in "*.parquet". Names that begin with a dot or an underscore, or end in ".tmp", are left
                    out in any case
    recursiveFileLookup  whether files in folders below are read, too
    ignoreMissingFiles  whether files that are gone before all their rows were read are left out; None: as
                    ``spark.sql.files.ignoreMissingFiles`` says. Otherwise they end the query
    ignoreCorruptFiles  whether unreadable files, or the rest of them, and files that do not fit the schema are left out; None:
                    as ``spark.sql.files.ignoreCorruptFiles`` says. ``lastProgress`` counts and names files that were left out
    onChanged       reaction to a change of a file after it was found: "fail" ends the query, "ignore" leaves the change out
    poll            time between two looks at the folder
    settle          time that a file must stay unchanged before it is read; by default 0 for parquet files, which have
                    a footer when they are complete, and one second for others
    ledger          a folder on a local disk or network mount that all workers reach, for the order in which files were found;
                    default: ``_flux`` in ``path``
    options         options of CSV, in Spark's names: header, sep, quote, escape, nullValue, encoding, multiLine

    Write a file under a hidden name and rename it, or write parquet. Remove it when its rows have left the query."""
    path = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(path, str) or not path:
        raise UsageError(f"flux.files wants the path of a folder, got {path!r}")
    if not isinstance(partitions, int) or isinstance(partitions, bool) or not 1 <= partitions <= 4096:
        raise UsageError(f"flux.files: partitions must be 1 to 4096, got {partitions!r}")
    if not isinstance(format, str) or format.lower() not in FORMATS:
        raise UsageError(f"flux.files: format must be one of {', '.join(FORMATS)}; got {format!r}")
    if onChanged not in ("fail", "ignore"):
        raise UsageError(f"flux.files: onChanged must be 'fail' or 'ignore', got {onChanged!r}")
    where = path if "://" in path else os.path.abspath(os.path.expanduser(path))
    kind = FORMATS[format.lower()]
    folder = WatchedFolder(
        where,
        kind(pa.schema([])),
        Rules(_glob(pathGlobFilter), _flag("recursiveFileLookup", recursiveFileLookup)),
        _seconds("poll", poll, least=0.01),
        _seconds("settle", settle, least=0) if settle is not None else 0.0 if kind is ParquetFormat else 1.0,
        ignore_changes=onChanged == "ignore",
    )
    missing, corrupt = (
        None if given is None else _flag(option, given)
        for option, given in (("ignoreMissingFiles", ignoreMissingFiles), ("ignoreCorruptFiles", ignoreCorruptFiles))
    )
    wanted = _options(kind, options)
    ledgers = _ledger(where, ledger)
    _check_there(where)
    columns = _schema(schema, folder)
    folder = _with(folder, kind(columns, **wanted))
    return source(FilesReader(folder, partitions, *ledgers, missing, corrupt), name=name or "files")


def _with(folder: WatchedFolder, format: FileFormat) -> WatchedFolder:
    if isinstance(format, CsvFormat):
        check_flat(format.schema)
    elif isinstance(format, JsonFormat):
        check_json(format.schema)
    return replace(folder, format=format)


def _check_there(where: str) -> None:
    """Refuse a folder that is not there, as Spark does when a stream is made. Without this check, the query would wait for a
    wrong name for ever. Only a local folder is looked at."""
    files, path = fs.FileSystem.from_uri(where)
    if not isinstance(files, fs.LocalFileSystem):
        return
    if not os.path.exists(path) and set(path) & set("*?[{"):
        folder, name = os.path.split(path)
        if set(folder) & set("*?[{"):
            say = "Name the folder above; recursiveFileLookup=True reads the folders below"
        elif "{" in name:
            say = f"Name the folder {folder!r}; pathGlobFilter knows *, ? and [...], and no braces"
        else:
            say = f"Name the folder {folder!r}, and its files with pathGlobFilter={name!r}"
        raise UsageError(f"flux.files: {path!r} is a pattern, and a folder is wanted. {say}")
    if not os.path.exists(path):
        raise UsageError(
            f"flux.files: there is no folder {path!r} on the machine that starts the query. Check the name, or make the folder "
            "first: files may come later. It must be there for all workers, and here"
        )
    if not os.path.isdir(path):
        raise UsageError(
            f"flux.files: {path!r} is a file. Name its folder, and the file with pathGlobFilter={os.path.basename(path)!r}"
        )


def _ledger(where: str, given: str | os.PathLike[str] | None) -> tuple[str, bool]:
    try:
        found, root = fs.FileSystem.from_uri(where)
    except (pa.ArrowInvalid, OSError) as error:
        raise UsageError(f"flux.files cannot read {where!r}: {error}") from error
    if given is not None:
        return ledger_folder(given, "flux.files"), False
    if not isinstance(found, fs.LocalFileSystem):
        raise UsageError(
            f"flux.files: {where!r} is no file system where only one process can take a name. Name a folder on a local disk or "
            "network mount that all workers reach, with ledger=...; the order in which files were found is written there"
        )
    return os.path.join(root, LEDGER), True


def _schema(given: Any, folder: WatchedFolder) -> pa.Schema:
    if given is None:
        return _schema_of_a_file(folder)
    columns = parse_ddl(given) if isinstance(given, str) else given
    if not isinstance(columns, pa.Schema):
        if type(columns).__name__ != "StructType":
            raise UsageError(
                f"flux.files: schema must be DDL, a StructType or a pyarrow schema; got {type(columns).__name__}"
            )
        columns = flux._arrow_schema(columns)
    if not len(columns):
        raise UsageError("flux.files: schema names no column")
    return columns.remove_metadata()


def _schema_of_a_file(folder: WatchedFolder) -> pa.Schema:
    if not isinstance(folder.format, ParquetFormat):
        raise UsageError("flux.files: CSV and JSON need a schema, as in schema='user BIGINT, amount DOUBLE'")
    watch = Watch(folder, "")
    try:
        for name in sorted(watch.listed()):
            path = f"{watch.root}/{name}"
            if not folder.format.lacks(watch.fs, path):
                return plain_schema(folder.format.schema_of(watch.fs, path), path).remove_metadata()
    except flux.FluxError as error:
        raise UsageError(f"flux.files: {error}. Give schema=... to read it nevertheless") from error
    raise UsageError(f"flux.files: there is no parquet file in {folder.path} yet: give schema=...")


def _glob(given: Any) -> str | None:
    if given is None or (isinstance(given, str) and given and not set(given) & set("{}/")):
        return given
    raise UsageError(
        f"flux.files: pathGlobFilter is a pattern for names of files, with *, ? and [...], as in '*.parquet'; got {given!r}"
    )


def _options(kind: type[FileFormat], given: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for option, value in given.items():
        if option.lower() in _REFUSED:
            raise UsageError(f"flux.files has no option {option}: {_REFUSED[option.lower()]}")
        if option.lower() not in _CSV:
            raise unknown("flux.files", option, [*parameters(files), *_CSV_OPTIONS])
        if kind is not CsvFormat:
            raise UsageError(f"flux.files: option {option} is for format='csv'")
        known, type_ = _CSV[option.lower()]
        read: Callable[[str, Any], Any] = _flag if type_ is bool else _text
        found[known] = read(option, value)
    for known in ("sep", "quote", "escape"):
        if len(found.get(known, "").encode()) > 1 or (known == "sep" and found.get(known) == ""):
            raise UsageError(f"flux.files: {known} must be one character of ASCII, got {found[known]!r}")
    return found


def _flag(option: str, given: Any) -> bool:
    if isinstance(given, bool):
        return given
    if isinstance(given, str) and given.lower() in ("true", "false"):
        return given.lower() == "true"
    raise UsageError(f"flux.files: {option} must be True or False, got {given!r}")


def _text(option: str, given: Any) -> str:
    if not isinstance(given, str):
        raise UsageError(f"flux.files: {option} must be text, got {given!r}")
    return given


def _seconds(option: str, given: Any, least: float) -> float:
    seconds = parse_seconds(option, given)
    if seconds < least:
        raise UsageError(f"flux.files: {option} must be {least:g} s or longer, got {given!r}")
    return seconds
