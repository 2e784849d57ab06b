"""The sink that writes the results of a flow into an output log (design: output-log)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from flux.dataflow.sink import Position, Sink, SinkContext, SinkTraits
from flux.errors import QueryFailed, UsageError
from flux.eventlog.log_store import LogStore, open_log
from flux.eventlog.records import packed_rows
from flux.eventlog.streams import Retention
from flux.outputs.catalogue import OutputCatalogue, OutputDefinition, OutputMode, output_of
from flux.outputs.log_owner import ExitBatch, OutputLogOwner
from flux.vault.directory_store import TakenOver
from flux.vault.location import Place, place_of


class _OpenLog(NamedTuple):
    """A log that this primary owns, or did."""

    store: LogStore
    owner: OutputLogOwner


class OutputLogSink(Sink):
    """The end of a query whose results any number of readers may follow. Each result is in the log once, on disk before a
    reader sees it, and stays there for the time and the bytes of ``retain``. Readers hold no worker up.

    location  the directory or URI of the service's location, which the workers reach, too; or a place that was opened
    name      name of the query; its output is registered under it when the query starts
    retain    the least that is kept
    mode      the mode of the results, for readers: "append" or "update"

    A log goes by the id of the query (``SinkContext.query``): with a ``checkpointLocation`` no result comes again after a
    restart. Without one, a later start computes results again, and they follow the earlier ones."""

    #: Batches that wait for a flush go together with the next one.
    traits = SinkTraits(exactly_once=True, joins_bytes=4 << 20)
    #: Whether readers get tentative rows, too.
    _tentative = False

    def __init__(
        self, location: str | Place, name: str, retain: Retention | None = None, mode: OutputMode = "append"
    ) -> None:
        self._place = place_of(location) if isinstance(location, str) else location
        self.name = name
        self._retain, self._mode = retain or Retention(), mode
        self._schema: pa.Schema | None = None
        self._output: OutputDefinition | None = None
        self._exit, self._partition = "", 0
        self._open: _OpenLog | None = None

    def __repr__(self) -> str:
        return f"output {self.name} at {self._place}"

    # ---- in the program that starts the query

    def destination(self) -> str:
        """Name the output alone: a location may be reached by several paths."""
        return f"output {self.name}"

    def check(self, schema: pa.Schema) -> None:
        output_of(self.name, schema, 1, self._retain, self._mode)
        self._schema = schema

    def prepare(self, partitions: int, kept: Any) -> Any:
        """Register the output. OutputExists: the name has an output with other columns."""
        if self._schema is None:
            raise UsageError(f"{self!r}: the columns of its query are not known; declare the schema of the last stage")
        wanted = output_of(self.name, self._schema, partitions, self._retain, self._mode, self._tentative)
        made = self._output = OutputCatalogue(self._place).register(wanted)
        if kept is not None and kept["output"] != made.id:
            raise UsageError(
                f"{self!r} was removed and registered again since this query was started for the first time: readers would "
                "miss the results between. Start the query with another checkpointLocation"
            )
        return {"output": made.id}

    # ---- in the worker

    def open(self, context: SinkContext) -> None:
        """Take the log over: earlier primaries of the partition cannot write to it any more."""
        self._exit, self._partition = f"{context.query}/{context.number}", context.partition
        self.close()
        self._opened()

    def committed(self, partition: int) -> int:
        return self._opened().owner.next_exit

    def write(self, batch: pa.RecordBatch, position: Position) -> None:
        self.write_joined([(position, batch)])

    def write_joined(self, batches: Sequence[tuple[Position, pa.RecordBatch]]) -> None:
        """Bring batches into the log in one flush. It is opened anew after an error: the content found there counts."""
        opened = self._opened()
        given = [ExitBatch(at.sequence, packed_rows(batch), batch.num_rows) for at, batch in batches]
        try:
            for _ in opened.owner.write(given, int(time.time() * 1_000_000)):
                pass
        except BaseException:
            self.close()
            raise

    def is_transient(self, error: Exception) -> bool:
        """Return whether the log is opened again: also after another primary has taken it over, which may be one that was given
        up and woke late. Both write the same batches at the same exits, and the loser finds them there."""
        return isinstance(error, OSError | TakenOver)

    def close(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.store.close()

    def _opened(self) -> _OpenLog:
        if self._open is not None:
            return self._open
        of = self._output
        if of is None:
            raise UsageError(f"{self!r} was not prepared")
        where = f"partition {self._partition} of {self!r}"
        store: LogStore | None = None
        try:
            store = open_log(OutputCatalogue(self._place).log_place(of, self._partition), writes=True)
            owner = OutputLogOwner(store, where, self._exit, of.limits())
            for _ in owner.open():
                pass
        except BaseException as error:
            if store is not None:
                store.close()
            if isinstance(error, FileNotFoundError):
                raise QueryFailed(f"{where} is not there any more: it was removed while a query wrote to it") from error
            raise
        self._open = _OpenLog(store, owner)
        return self._open
