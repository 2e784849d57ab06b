"""Two operators in one stage: the output of the first goes to the second in the same step (design: chained).

A stage behind another costs an exchange, with replicas and an order of its own. If the second operator needs neither other keys
nor other partitions, it works in the steps of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from flux.dataflow.attributes import open_operator
from flux.dataflow.batches import conform, given_batches
from flux.dataflow.operator import Batches, Context, Operator, gives_changes
from flux.errors import SchemaError, UserCodeError


class Chained(Operator):
    """An operator made of two. ``first`` is the user's operator. ``then`` belongs to Flux: it sets no timers, gives nothing at
    the end, and its state is small enough to travel whole with all changes of the first. ``schema`` is that of the output of
    ``first``."""

    def __init__(self, first: Operator, then: Operator, schema: pa.Schema) -> None:
        self.first, self.then = first, then
        self._given = schema
        self.restores_in_background = first.restores_in_background
        ours, theirs = then.snapshot_classes, first.snapshot_classes
        self.snapshot_classes = None if ours is None or theirs is None else theirs + ours

    def open(self, context: Context) -> None:
        super().open(context)
        open_operator(self.first, context)
        open_operator(self.then, context)

    def process(self, batch: pa.RecordBatch) -> Batches:
        return self.through(self.first.process(batch))

    def on_timer(self, name: str) -> Batches:
        return self.through(self.first.on_timer(name))

    def finish(self) -> Batches:
        return self.through(self.first.finish())

    def through(self, output: Batches) -> Iterator[pa.RecordBatch]:
        """Yield the output of the second operator for an output of the first."""
        for batch in given_batches(output):
            try:
                checked = conform(batch, self._given, f"output of stage {self.context.stage}")
            except SchemaError as error:  # no row is at fault
                where = f"stage {self.context.stage}, partition {self.context.partition}"
                raise UserCodeError(f"{where}: {error}") from None
            yield from given_batches(self.then.process(checked))

    def output_schema(self, schemas: Sequence[pa.Schema], key: tuple[str, ...]) -> Any:
        return self.then.output_schema((self._given,), ())

    def snapshot(self) -> Any:
        return {"first": self.first.snapshot(), "then": self.then.snapshot()}

    def restore(self, snapshot: Any) -> None:
        if snapshot["first"] is not None:
            self.first.restore(snapshot["first"])
        self.then.restore(snapshot["then"])

    def state_bytes(self) -> int:
        known = self.first.state_bytes()
        return known and known + self.then.state_bytes()

    def close(self) -> None:
        try:
            self.first.close()
        finally:
            self.then.close()


class ChainedWithChanges(Chained):
    """A chained operator whose first operator tells the changes of its state."""

    def changes(self) -> Any:
        changed = self.first.changes()
        return None if changed is None else {"first": changed, "then": self.then.snapshot()}

    def apply_changes(self, changes: Any) -> None:
        self.first.apply_changes(changes["first"])
        self.then.restore(changes["then"])


@dataclass(frozen=True)
class Chain:
    """Factory of the operators of a stage that has two in one."""

    first: Callable[[], Operator]
    then: Callable[[], Operator]
    schema: pa.Schema

    def __call__(self) -> Operator:
        first = self.first()
        kind = ChainedWithChanges if gives_changes(first) else Chained
        return kind(first, self.then(), self.schema)


def chain_of(operator: Operator) -> list[Operator]:
    """Return the operators that work in one stage, in order."""
    return [operator.first, operator.then] if isinstance(operator, Chained) else [operator]


def note_of_output(operator: Operator) -> Any:
    """Return the note of a stage's last operator on the whole output until now, for a sink behind it; None if it has none."""
    tell = getattr(chain_of(operator)[-1], "note_of_output", None)
    return None if tell is None else tell()
