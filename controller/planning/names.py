"""Names in a plan: of columns, which steps and Spark find by them, and of stages and sources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass

import pyarrow as pa

from flux.dataflow.flow import ChangedStage, Flow
from flux.dataflow.plan import SourcePlan, StagePlan
from flux.dataflow.source import DataFrameSource, Source
from flux.errors import SchemaError, UsageError

#: Characters of the name of a stage or source, at most.
NAME_MAX = 200


def check_names(schema: pa.Schema, what: str) -> None:
    """Raise SchemaError unless there is a column, and each has a name of its own: steps find columns by their names."""
    twice = [name for name, count in Counter(schema.names).items() if count > 1]
    if twice:
        raise SchemaError(
            f"{what}: several columns are called {twice[0]!r}; give each a name of its own, as with alias()"
        )
    if not len(schema):
        raise SchemaError(f"{what}: no column is left; keep one at least")


def check_cases(schema: pa.Schema, what: str) -> None:
    """Raise SchemaError if names of columns differ only in case, because Spark finds neither of them."""
    known: dict[str, str] = {}
    for name in schema.names:
        other = known.setdefault(name.lower(), name)
        if other != name:
            raise SchemaError(
                f"{what}: columns {other!r} and {name!r} differ only in case, and Spark does not tell them apart; rename one of "
                "them, or set spark.sql.caseSensitive to true"
            )


def check_part_name(name: str, what: str) -> None:
    """Raise UsageError unless reports, events and commands can show the name of a stage or source within a line."""
    if not name.strip() or len(name) > NAME_MAX or not name.isprintable():
        raise UsageError(
            f"name of a {what}: expected printable text of up to {NAME_MAX} characters, got {name!r:.250}; give it another "
            "one, name=..."
        )


def free_names(wanted: Sequence[str], taken: Sequence[str]) -> list[str]:
    """Return a name for each wanted one, with a number behind it where it is taken, by another one or from the start. Names that
    differ in case alone count as the same."""
    known, found = {name.lower() for name in taken}, []
    for each in wanted:
        name, number = each, 2
        while name.lower() in known:
            name, number = f"{each} {number}", number + 1
        known.add(name.lower())
        found.append(name)
    return found


@contextmanager
def place_of_errors(where: str) -> Iterator[None]:
    """Say in a UsageError which source or stage it is about."""
    try:
        yield
    except UsageError as error:
        named = copy(error)
        named.args = (f"{where}: {error.summary}",)
        raise named from error.__cause__


@dataclass(frozen=True)
class KeptNames:
    """The names that a checkpoint location has for a version of the plan, which is compiled again by them (design: same-form)."""

    #: Names of parts that were there then and are gone: numbers in other names count them.
    gone: frozenset[str] = frozenset()
    #: Stages of the version, none of which is chained into the stage before it.
    stages: frozenset[str] = frozenset()
    #: Stages without a sink, behind which a sink has a stage of its own.
    sinkless: frozenset[str] = frozenset()


class PlanNames:
    """The names of the sources and stages of a plan that is being compiled, each of which is there once."""

    def __init__(
        self, sources: Iterable[SourcePlan], stages: Iterable[StagePlan], kept: KeptNames | None = None
    ) -> None:
        """Begin with the names of parts that run already. ``kept``: names of the version that is compiled again."""
        self._sources, self._stages = {each.name for each in sources}, {each.name for each in stages}
        self._kept = kept or KeptNames()
        self._taken = self._sources | self._stages | self._kept.gone

    def stands_alone(self, flow: Flow) -> bool:
        """Tell whether a flow has a stage of its own in the version that is compiled again: another reader of the stage before
        it, which is gone, may have kept the two apart."""
        return flow.stage.name in self._kept.stages

    def sinks_apart(self, stage: str) -> bool:
        """Tell whether sinks behind a stage have stages of their own in the version that is compiled again."""
        return stage in self._kept.sinkless

    def of_stage(self, flow: Flow) -> str:
        """Return a name for the stage of a flow. UsageError: the program has given it that of a running stage or source."""
        name, stage = flow.stage.name, flow.stage
        check_part_name(name, "stage")
        # Stages of Flux's own, as those that gather files for a sink, are named after the stage before them.
        own = str(getattr(stage.target, "__module__", "")).startswith("flux.")
        given = (type(flow) is Flow and not own) or (isinstance(stage, ChangedStage) and "name" in stage.changes)
        if given and name in self._stages:
            raise UsageError(
                f"stage {name}: a stage of that name runs. query[{name!r}] is its flow; a second one needs a name of its own, as "
                "in flow.withStage(name=...)"
            )
        if given and name in self._sources:
            raise UsageError(
                f"stage {name}: a source of that name runs. Give the stage another one: flow.withStage(name=...)"
            )
        return self.unique(name)

    def of_source(self, given: Source) -> str:
        """Return a name for a source. UsageError: one of that name runs; a DataFrame is read by a job of its own each time."""
        check_part_name(str(given.name), "source")
        if given.name in self._stages and not isinstance(given, DataFrameSource):
            raise UsageError(f"source {given.name}: a stage of that name runs. Give the source another one: name=...")
        if given.name in self._sources and not isinstance(given, DataFrameSource):
            raise UsageError(
                f"source {given.name}: a source of that name runs. query.source({given.name!r}) is its rows from now on; another "
                "source needs a name of its own, name=..., and its input is read once more"
            )
        return self.unique(given.name)

    def unique(self, name: str) -> str:
        """Make a unique name. A stage that is used twice in a flow gets a number in its name, so that users can tell the two
        apart in reports."""
        candidate, number = name, 2
        while candidate in self._taken:
            candidate, number = f"{name}#{number}", number + 1
        self._taken.add(candidate)
        return candidate
