"""Duplicates and ranks of flows: ``flux.dedup``, ``dropDuplicatesWithinWatermark`` (design: duplicates).

A flow keeps the call of its user. The operator, its key and the steps in front are found when the plan is compiled, because the
columns of rows and their event time are known only then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

import flux
from flux.arguments import checked, key_columns
from flux.dataflow.flow import Flow, Stage, node
from flux.dataflow.row_flow import RowFlow, _passed
from flux.dataflow.row_operators import AS_THEY_COME, ONCE
from flux.dataflow.source import Source
from flux.errors import UsageError
from flux.operators.operator import Operator
from flux.windows.durations import microseconds, words

if TYPE_CHECKING:
    from flux.expressions.steps import RowSteps
    from flux.ranks.top import OrderColumn


@dataclass(frozen=True)
class RankInput:
    """An input of a ranking, as the plan has it."""

    schema: pa.Schema
    #: The name of the source or stage in front, for messages.
    name: str
    #: The columns that have the event time of rows here, and those where the rows come from; empty: they have none.
    times: tuple[str, ...] = ()
    origin_times: tuple[str, ...] = ()
    #: Microseconds by which a row may be late, the most of all sources behind it.
    delay: int = 0

    def time(self, who: str) -> str:
        """Return the column with the event time of rows. UsageError: there is none, with the line to write."""
        if self.times:
            return self.times[0]
        if self.origin_times:
            raise UsageError(
                f"{who}: the event time of {self.name} is {' or '.join(map(repr, self.origin_times))}, which is not among the "
                f"columns any more ({', '.join(self.schema.names)}): keep it, as in select('*')"
            )
        raise UsageError(
            f"{who} needs event time, and {self.name} has none. Declare it where rows are read: "
            "source.withWatermark('ts', '10 seconds'); a stage that keeps a time says so: @flux.stage(event_time='ts')"
        )


@dataclass(frozen=True)
class ResolvedRanking:
    """A ranking as workers compute it."""

    make: Callable[[], Operator]
    key: tuple[str, ...]
    #: The steps in front of it, by input; None: rows come as they are.
    before: tuple[RowSteps | None, ...] = (None,)


@dataclass(frozen=True)
class ResolvedOrder:
    """An order of rows as workers compute it."""

    #: The steps that add the columns that only the order has; None: it has none.
    before: RowSteps | None
    by: tuple[OrderColumn, ...]


#: A function from the schema of rows, and an order of them, to the order as workers compute it.
ToOrder = Callable[[pa.Schema, Any], ResolvedOrder]


class Ranking:
    """A declaration: a deduplication, ``tops.TopRows``, and others."""

    #: The name of its stage behind that of its input.
    name = ""

    #: Its inputs, for messages.
    takes = "the rows of one flow: call union() first"
    #: The meaning of its rows.
    gives = ONCE

    def resolved(self, inputs: Sequence[RankInput], to_order: ToOrder | None) -> ResolvedRanking:
        """Find the operator for inputs. ``to_order``: None, if there is no session. UsageError: a column is not there, or event
        time is missing."""
        raise NotImplementedError


@dataclass(frozen=True)
class Deduplication(Ranking):
    """A call of ``dropDuplicatesWithinWatermark`` or ``flux.dedup``."""

    #: Empty: all columns.
    key: tuple[str, ...]
    #: Microseconds; None: the delay of the watermark.
    ttl: int | None
    called: str
    name: str = field(default="dedup", init=False)
    gives = AS_THEY_COME

    def resolved(self, inputs: Sequence[RankInput], to_order: ToOrder | None) -> ResolvedRanking:
        from flux.ranks.dedup import Dedup, DedupSpec  # it loads kernels, which importing flux does not

        (given,) = inputs
        key = self.key or tuple(given.schema.names)
        if self.ttl is None:
            return ResolvedRanking(partial(Dedup, DedupSpec(given.delay, given.time(self.called))), key)
        time = given.time(self.called) if given.origin_times else None
        if time is not None:
            check_ttl(self.called, self.ttl, given)
        return ResolvedRanking(partial(Dedup, DedupSpec(self.ttl, time)), key)

    def __repr__(self) -> str:
        if self.ttl is None:
            return f"{self.called}({list(self.key) if self.key else ''})"
        return f"dedup(key={list(self.key)}, ttl={words(self.ttl)!r})"


def check_ttl(called: str, ttl: int, given: RankInput) -> None:
    """Raise UsageError if keys would be forgotten before rows that may still come."""
    if ttl < given.delay:
        raise UsageError(
            f"{called}: ttl={words(ttl)!r} is shorter than the {words(given.delay)!r} by which rows of {given.name} may be late: "
            f"say ttl={words(given.delay)!r} or more"
        )


class RankFlow(Flow):
    """A ranking behind its inputs. ``stage`` has everything but the operator and the key, which are those of the resolved
    ranking."""

    def __init__(self, declared: Ranking, inputs: list[Flow | Source], stage: Stage | None = None) -> None:
        self.declared = declared
        made = Stage(_passed, (), None, None, None, "append", f"{_name_of(inputs[0])}.{declared.name}")
        super().__init__(made if stage is None else stage, inputs)

    def connect(self, *inputs: Any) -> Flow:
        raise UsageError(f"connect() adds inputs to a stage, and {self.declared.name} takes {self.declared.takes}")

    def copied(self, inputs: list[Flow | Source]) -> Flow:
        made = RankFlow(self.declared, list(self.inputs), self.stage)
        made.inputs = inputs
        return made

    @property
    def _gives(self) -> str:
        return self.declared.gives

    def __repr__(self) -> str:
        return f"{self.inputs[0]!r}.{self.declared!r}"


def _name_of(origin: Flow | Source) -> str:
    """Return the name of the source or stage whose rows come."""
    while isinstance(origin, RowFlow):
        origin = origin.inputs[0]
    return origin.stage.name if isinstance(origin, Flow) else origin.name


def ranked(declared: Ranking, *inputs: Flow | Source) -> RankFlow:
    """Return the flow of a ranking, checked as far as a session allows it."""
    made = RankFlow(declared, list(inputs))
    flux._check_columns(made)
    return made


def needed_key(given: Any, what: str, example: str, name: str = "key") -> tuple[str, ...]:
    """Return a key as names of columns. UsageError: it names none; ``name`` is that of the argument."""
    if given is None or (isinstance(given, list | tuple) and not given):
        raise UsageError(f"{what}, as in {example}; got {given!r}")
    return key_columns(given, name)


def positive(text: Any, what: str) -> int:
    length = microseconds(text, what)
    if length <= 0:
        raise UsageError(f"{what}: expected a duration above zero, got {text!r:.100}")
    return length


def without_duplicates(given: Flow | Source, subset: Any) -> RankFlow:
    """Return the rows without those that repeat an earlier one within the delay of the watermark."""
    called = "dropDuplicatesWithinWatermark"
    if subset is not None and (not isinstance(subset, list | tuple) or not subset):
        raise UsageError(
            f"{called}: expected a list of names of columns, as in ['event_id'], got {subset!r:.100}. Leave it out for all "
            "columns"
        )
    return ranked(Deduplication(() if subset is None else key_columns(subset), None, called), given)


@checked("flux.dedup")
def dedup(flow: Any, *, key: Any, ttl: str) -> RankFlow:
    """Leave out rows whose key came before, within ``ttl``: the first row of each key is given at once, as it is.

    With event time, a row is a duplicate if its time is at most ``ttl`` behind that of the last given row of its key, or before
    it. So the rows that are given follow from the rows of a key and their order alone. Rows of a key in one source partition have
    the same order in every run; those in several meet in another one, and another row, and another number of rows more than
    ``ttl`` apart, may be given then. A key is forgotten when the watermark has passed that time. The time of a row stays its
    event time. Without event time, the time of the step counts; other runs have others.

    key  column or columns that make two rows duplicates; nulls equal each other
    ttl  such as "1 hour"; not shorter than the delay of the watermark"""
    names = needed_key(key, "flux.dedup: key must name the columns that make two rows duplicates", "key='event_id'")
    return ranked(Deduplication(names, positive(ttl, "flux.dedup, ttl"), "flux.dedup"), node(flow))
