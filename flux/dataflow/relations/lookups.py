"""``flux.lookup``: a table of a DataFrame that is read anew while the query runs (design: refreshed-lookup)."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from flux.arguments import checked
from flux.dataflow.flow import Flow, Stage, node
from flux.dataflow.relations.join_flow import JoinFlow, Joining
from flux.dataflow.row_flow import RowFlow
from flux.dataflow.source import DataFrameSource, Source, StreamSource
from flux.errors import UsageError
from flux.windows.durations import microseconds

#: The column with the number of a version, behind those of the table.
VERSION = pa.field("version of the table", pa.int64(), nullable=False)
#: The least time between two readings: each one is a Spark job.
REFRESH_MIN_US = 1_000_000


class LookupSource(StreamSource):
    """A table that is read anew: each version is a micro-batch of one partition."""

    def __init__(self, name: str, dataframe: Any, refresh_us: int) -> None:
        super().__init__(name, dataframe, dataframe)
        #: Microseconds between two readings.
        self.refresh_us = refresh_us

    def __repr__(self) -> str:
        return f"<flux lookup {self.name}>"


class RefreshedFlow(JoinFlow):
    """A join whose right side is a table that is read anew. Its operator is made of the resolved join, like that of others."""

    @property
    def table(self) -> Flow | Source:
        """The table, perhaps with an alias."""
        return self.inputs[1]

    @property
    def source(self) -> LookupSource:
        """The table itself."""
        source = table_of(self.table)
        assert source is not None, "checked when the flow was made"
        return source

    @property
    def dataframe(self) -> Any:
        return self.source.dataframe

    @property
    def _gives(self) -> str:
        return self.inputs[0]._gives

    def copied(self, inputs: list[Flow | Source]) -> Flow:
        made = RefreshedFlow(self.inputs[0], self.inputs[1], self.joining, self.stage)
        made.inputs = inputs
        return made


def table_of(given: Flow | Source) -> LookupSource | None:
    """Return the table of an input that is one, perhaps with an alias; None: it is something else."""
    origin = given.inputs[0] if isinstance(given, RowFlow) else given
    return origin if isinstance(origin, LookupSource) else None


def refreshed(left: Flow | Source, table: Flow | Source, joining: Joining, stage: Stage | None = None) -> RowFlow:
    """Return the join of a flow with a table that is read anew. UsageError names the argument that does not fit."""
    if joining.says_ttl:
        raise UsageError("join: rows of flux.lookup do not wait, they are those of its newest version: leave ttl out")
    if joining.how in ("right_outer", "full_outer"):
        raise UsageError(
            f"join: how={joining.how!r} gives rows of the table without a match, when all rows of the other side have come, and "
            "the table has others by then. Use inner, left, left_semi or left_anti"
        )
    if isinstance(table, RowFlow) and (table.watermark or any(each.name != "alias" for each in table.operators)):
        raise UsageError(
            "join: conditions and columns of a table that is read anew belong to its DataFrame: "
            "flux.lookup(df.where(...).select(...), refresh=...)"
        )
    return RowFlow(RefreshedFlow(left, table, joining, stage), ())


@checked("flux.lookup")
def lookup(dataframe: Any, *, refresh: str, name: str | None = None) -> Source:
    """Make a table of a small DataFrame that is read anew while the query runs, as the right side of a join:
    ``bids.join(flux.lookup(names, refresh="10 minutes"), "item")``.

    Rows are looked up in a stage, partitioned by the key, each in the newest version that its partition has by then. The order of
    rows and versions is part of the order of the stage, so all replicas, and all repetitions after a loss or a restart, meet the
    same version. Partitions change over one by one.

    The first version is read when the query starts, and an error there ends the start. A later version that cannot be read, is
    larger than ``spark.flux.lookup.maxBytes``, or has a key twice, is left out with a warning: the table stays as it is, and is
    read again at the next time.

    dataframe  a batch DataFrame whose keys are unique, or the same one again that gives other rows by then: files or tables that
               others write. A DataFrame that is cached gives the same rows for ever
    refresh    time between two readings, such as "10 minutes", at least a second
    name       name of the table in reports"""
    source = node(dataframe)
    if not isinstance(source, DataFrameSource):
        raise UsageError(f"flux.lookup: expected a batch DataFrame, got {type(dataframe).__name__} {dataframe!r:.100}")
    refresh_us = microseconds(refresh, "flux.lookup, refresh")
    if refresh_us < REFRESH_MIN_US:
        raise UsageError(
            f"flux.lookup, refresh: expected a duration of at least 1 second, because each reading is a Spark job, got "
            f"{refresh!r:.100}"
        )
    if name is not None and (not isinstance(name, str) or not name):
        raise UsageError(f"flux.lookup: name must be a text, got {name!r:.100}")
    return LookupSource(name or "lookup", source.dataframe, refresh_us)
