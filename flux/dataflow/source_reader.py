"""The contract of a source that workers read: one reader of the source, and one of each of its partitions (design: position).

Kafka, files, Python data sources and functions of users are all such readers. The exchange calls the methods below and looks for
no others. A public method that is not in the contract is refused where its class is defined, because it would never be called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from flux.arguments import nearest
from flux.errors import UsageError

if TYPE_CHECKING:
    from flux.dataflow.source import Positioned


class Silence(Enum):
    """The answer of a reader that has asked outside and got no answer."""

    SILENT = "silent"


#: In place of None: the reader does not know whether there are rows, because the broker or folder that has them does not answer.
#: Such a partition is not idle, and holds the watermark (``withWatermark``).
SILENT = Silence.SILENT
#: Seconds without an answer after which a partition is silent.
SILENCE_S = 5.0
#: Seconds without an answer after which a partition that results go on without (``availability``) is told as silent. Its being
#: idle does not depend on it.
SILENCE_TOLD_S = 0.3


class Contract:
    """Base of classes from which users derive. The public names of its direct subclasses are all that the exchange uses. A class
    further down may define these, and private names of its own; any other public method is a mistake, and the error names the
    nearest right name. Names of other base classes are free."""

    #: The names of the contract that a class, or an object, defines itself.
    defines: frozenset[str] = frozenset()
    _contract: ClassVar[type]
    _names: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if Contract in cls.__bases__:
            cls._contract = cls
            cls._names = frozenset(name for name in vars(cls) if not name.startswith("_")) - {"defines"}
            return
        for name, value in vars(cls).items():
            if not name.startswith("_") and name not in cls._names and not cls._inherits(name):
                cls._check_free(name, value)
        cls.defines = frozenset(name for name in cls._names if _static(cls, name) is not _static(cls._contract, name))

    @classmethod
    def _inherits(cls, name: str) -> bool:
        return any(name in vars(base) for base in cls.__mro__[1:] if not issubclass(base, Contract))

    @classmethod
    def _check_free(cls, name: str, value: Any) -> None:
        """Refuse a method that would never be called, and a value that is probably a misspelt setting."""
        hint = nearest(name, cls._names)
        is_method = callable(value) or isinstance(value, property | classmethod | staticmethod)
        if not is_method and not hint:
            return
        base = cls._contract.__name__
        raise UsageError(
            f"{cls.__name__}.{name} is not part of flux.{base}, so nothing would ever use it{hint or '.'} Methods and settings "
            f"are {', '.join(sorted(cls._names))}; names of your own begin with an underscore"
        )


def _static(owner: type, name: str) -> Any:
    return inspect.getattr_static(owner, name, None)


@dataclass(frozen=True)
class SourceSettings:
    """Settings of the session and of the query that concern sources."""

    #: Whether names of columns differ if they differ only in upper and lower case (``spark.sql.caseSensitive``).
    case_sensitive: bool = False
    #: As ``spark.sql.files.ignoreMissingFiles`` and ``spark.sql.files.ignoreCorruptFiles`` say.
    ignore_missing_files: bool = False
    ignore_corrupt_files: bool = False
    #: Seconds for which a file may stay incomplete (``spark.flux.files.badAfter``).
    bad_file_after_s: float = 600.0
    #: Whether results go on without the source (``availability``): no answer from outside is silence then, however long.
    may_be_silent: bool = False


class PartitionReader(Contract):
    """The reader of one partition, in the worker that owns the partition: derive from it, define ``next``, and return an instance
    from ``SourceReader.read``. The worker's thread calls all methods, so none of them may wait; other threads may be the reader's
    own. Any error ends the query, and its text reaches the user."""

    #: The reader gives ``flux.SILENT`` itself when it gets no answer. Otherwise its count of pauses tells.
    _tells_silence = False
    #: The reason of its silence, for people.
    _silence = "its reader has not come back since"

    def _asked_in_vain_since(self) -> float | None:
        """Return the time since which the outside owes an answer, by the monotonic clock; None: it owes none, or the count of
        pauses tells."""
        return None

    def next(self) -> pa.RecordBatch | Positioned | Silence | None:
        """Return the next rows; None if there are none now, ``flux.SILENT`` if there may be some and the outside does not answer.
        Raise StopIteration behind the last row.

        A source with positions returns ``flux.Positioned(batch, position)``, and ``flux.Positioned(batch, position, numbers)``
        if it has ``row_numbers``. The memory of a batch may be used again when ``next`` is called the next time, not before."""
        raise NotImplementedError(f"{type(self).__name__} must define next(self)")

    def close(self) -> None:
        """Release files, connections and threads: no more rows are taken. It may be called before the first ``next``, and
        twice."""

    def when_ready(self, ring: Callable[[], None]) -> None:
        """Keep ``ring``, and call it whenever rows, an error or the end have come after ``next`` had nothing. Called once, before
        the first ``next``. Any thread may call ``ring``, which does not wait. A reader that defines this method is asked when it
        has rung, and only now and then otherwise."""

    def pauses(self) -> int:
        """Return the number of times that the source has answered that it has no rows, until now. It never falls. If it is not
        defined, each None counts; a reader that reads ahead gives None also while rows are on their way, and
        ``processAllAvailable`` would not wait for these. A reader that gives no rows and whose count does not rise for five
        seconds gets no answer from outside."""
        return 0

    def lag(self) -> tuple[int, int] | None:
        """Return two numbers from 0: that of the next record, and the one behind the last existing record. None: not known yet.
        ``lastProgress``, ``flux status`` and the metrics show the difference."""
        return None

    def bad_records(self) -> int:
        """Return the number of records that this reader could not read and left out or put aside. ``lastProgress``,
        ``flux status`` and the metrics show the sum over all partitions."""
        return 0

    def applied(self, position: Any) -> None:
        """Hear that every replica of every consumer has applied all rows before a position that ``next`` has given. Called about
        once a second, if there is news. A later reader may be asked to begin somewhat before it."""

    def __iter__(self) -> PartitionReader:
        return self

    def __next__(self) -> pa.RecordBatch | Positioned | Silence | None:
        return self.next()


class SourceReader(Contract):
    """A source of rows that workers read: derive from it, define ``read``, and give an instance to ``flux.source``.

    The instance is made in the program. It travels to the workers by pickle, and opens files and connections in ``read`` only.
    Rows are counted, so each life of the query must get the same rows in the same order: after a loss, another worker calls
    ``read`` again and goes on behind a position that was given before."""

    #: The schema of the rows: DDL, a StructType or a pyarrow schema; None: ``flux.source`` is given one.
    schema: Any = None
    #: The number of partitions, 1 to 4096; None: ``flux.source`` is given one.
    partitions: int | None = None
    #: Rows come with positions of the reader's own (``flux.Positioned``), and batches may be cut elsewhere in each life.
    #: Otherwise batches are counted and must be the same again, and ``start`` is the number of the first wanted batch.
    positions: bool = True
    #: A later life may begin in the middle. Otherwise it begins at the start, and ``start`` says nothing.
    seeks: bool = True
    #: Rows bring numbers, as offsets of a log are: int64, ascending from row to row, the same for a row in each life. It is for
    #: logs that may lose rows, as by retention. ``start`` is then None or a ``flux.RowStart``.
    row_numbers: bool = False
    #: Rows that have to be read again and are gone are passed over, if rows bring numbers. Otherwise their loss ends the query.
    goes_on_after_loss: bool = False
    #: The source never ends: calls that would wait for its end are refused.
    endless: bool = False
    #: A later start may have more partitions than the checkpoint location knows. Older partitions keep their numbers, and
    #: ``prepare`` is given the result of the last start.
    may_grow: bool = False
    #: A query that goes on from a checkpoint location has as many partitions as at its first start, whatever ``partitions`` says
    #: by then; ``prepare`` must ensure that these are the same.
    keeps_partitions: bool = False
    #: The things that ``PartitionReader.lag`` counts, in the singular, as "file"; empty: records.
    lag_unit: str = ""

    def read(self, partition: int, start: Any) -> PartitionReader | Iterable[pa.RecordBatch | Positioned | None]:
        """Open a partition, 0 <= ``partition`` < ``partitions``, in the worker that reads it. ``start``: None for the beginning,
        or a position that was given before. Returns a PartitionReader; a generator does if no other method is needed."""
        raise NotImplementedError(f"{type(self).__name__} must define read(self, partition, start)")

    def configure(self, settings: SourceSettings) -> None:
        """Take settings of the session and the query. Called on a copy, before ``prepare``."""

    def prepare(self, kept: Any) -> Any:
        """Settle facts on which all lives of a query must agree, such as the first offsets, and return them as data for JSON.
        Called on a copy, in the program, before the query starts. ``kept``: None, or the result of ``prepare`` when a query with
        the same ``checkpointLocation`` was started for the first time."""
        return None

    def forget(self) -> None:
        """Remove everything outside that ``prepare`` and the readers have made. Called in the program when a query without a
        ``checkpointLocation`` has ended."""

    def partition_name(self, partition: int) -> str:
        """Return the name of a partition in reports."""
        return str(partition)

    def unread(self) -> Sequence[str]:
        """Return the names of things that have come since the start and are not read, such as new partitions. Called every few
        seconds in a thread of the program; it may take some seconds. ``lastProgress``, ``flux status`` and the log show them."""
        return ()

    def unread_files(self) -> Mapping[str, Mapping[str, str]]:
        """Return files with rows that are not read: by the kind of their defect, the reason for each file. Called as ``unread``
        is."""
        return {}


#: Settings of a source that a function may have as attributes.
SETTINGS = ("row_numbers", "goes_on_after_loss", "endless", "may_grow", "keeps_partitions", "lag_unit")


class IteratorReader(PartitionReader):
    """The reader of a partition that a function has returned as an iterable. Methods of the iterator that have names of the
    contract are taken, ``done`` as ``applied``."""

    _TAKEN = {name: name for name in ("close", "when_ready", "pauses", "lag", "bad_records")} | {"applied": "done"}

    def __init__(self, items: Iterable[pa.RecordBatch | Positioned | None]) -> None:
        iterator = iter(items)
        found = {
            name: method for name, own in self._TAKEN.items() if (method := getattr(iterator, own, None)) is not None
        }
        # Set on the object: the worker calls the iterator's own methods, with nothing between.
        vars(self).update(found, next=iterator.__next__, defines=frozenset({"next", *found}))


class FunctionReader(SourceReader):
    """The reader of a source whose partitions a function of the user reads. Attributes and methods of that function, or of the
    object with ``__call__``, that have names of the contract are taken."""

    _TAKEN = ("prepare", "forget", "partition_name", "unread")

    def __init__(
        self,
        function: Callable[..., Iterable[pa.RecordBatch | Positioned | None]],
        seeks: bool = False,
        positions: bool = False,
    ) -> None:
        """``seeks``: the function takes the start as its second argument; ``positions``: it gives positions of its own."""
        self.function, self.seeks, self.positions = function, seeks, positions
        self.defines = frozenset({"read", *(name for name in self._TAKEN if hasattr(function, name))})
        vars(self).update({name: getattr(function, name) for name in SETTINGS if hasattr(function, name)})

    def read(self, partition: int, start: Any) -> Iterable[pa.RecordBatch | Positioned | None]:
        return self.function(partition, start) if self.seeks else self.function(partition)

    def prepare(self, kept: Any) -> Any:
        own: Any = self.function
        return own.prepare(kept)

    def forget(self) -> None:
        own: Any = self.function
        if "forget" in self.defines:
            own.forget()

    def partition_name(self, partition: int) -> str:
        own: Any = self.function
        return str(own.partition_name(partition)) if "partition_name" in self.defines else str(partition)

    def unread(self) -> Sequence[str]:
        own: Any = self.function
        return list(own.unread())


class AbsentReader(SourceReader):
    """The place of a reader in a process that reads nothing: the settings of the source without its code."""

    def __init__(self, reader: SourceReader) -> None:
        vars(self).update({name: getattr(reader, name) for name in ("positions", "seeks", *SETTINGS)})

    def read(self, partition: int, start: Any) -> PartitionReader:
        raise AssertionError("this process reads no source")


def opened(reader: SourceReader, partition: int, start: Any) -> PartitionReader:
    """Open a partition of a source."""
    given = reader.read(partition, start)
    return given if isinstance(given, PartitionReader) else IteratorReader(given)
