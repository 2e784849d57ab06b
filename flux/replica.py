"""One copy of one partition of a stage: what waits for it, in which order it is applied, when it is through (DESIGN 4).

With one replica every step is committed at once: the primary takes slices in the order in which they came, groups
small ones into one step, applies it and hands the output to the logs of its streams. The order of steps is decided
here and nowhere else, so that an order log for secondaries has one place to be written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa

from flux.errors import SchemaError, UserCodeError
from flux.operator import Batches, Context, Operator
from flux.plan import StagePlan
from flux.producer import Producer
from flux.receiver import Slice
from flux.snapshot import encode_snapshot
from partitioning.cluster import cluster_by_key, whole


@dataclass(frozen=True)
class Outlet:
    """Where output goes: the stream of this partition on one outgoing edge. ``key`` empty: rotate over partitions."""

    producer: Producer
    key: tuple[int, ...]

    def send(self, batch: pa.RecordBatch, created: float) -> None:
        order, partitions = self.producer.order, self.producer.partitions
        if self.key:
            data = cluster_by_key(batch, self.key, partitions, order)
        else:
            turn = (self.producer.stream.producer + self.producer.next_sequence) % partitions
            data = whole(batch, turn, partitions, order)
        self.producer.append(data, created)


class Replica:
    """``add`` slices, ``step`` while ``ready``."""

    def __init__(
        self, stage: StagePlan, partition: int, incarnation: int, outlets: list[Outlet], step_rows_max: int
    ) -> None:
        self.stage = stage
        self.partition = partition
        self.incarnation = incarnation
        self.outlets = outlets
        self.finished = False
        self.rows_in = 0
        self.rows_out = 0
        self.busy_s = 0.0
        self.context = Context(
            stage.name, partition, stage.partitions, stage.key, stage.schemas, stage.output_mode
        )  # fmt: skip
        self._step_rows_max = step_rows_max
        self._queue: deque[Slice] = deque()
        self._ended: dict[int, set[int]] = {edge: set() for edge in stage.edges_in}
        self._expected: dict[int, set[int]] = {}
        self.operator = self._guard("open", None, self._open)

    @property
    def where(self) -> str:
        return f"stage {self.stage.name}, partition {self.partition}"

    @property
    def queued(self) -> int:
        return len(self._queue)

    def _open(self) -> Operator:
        operator = self.stage.make()
        operator.open(self.context)
        # A state that cannot travel cannot be repaired or moved: say so before there is any.
        encode_snapshot(operator.snapshot(), self.where)
        return operator

    # ---- input

    def add(self, slice_: Slice) -> None:
        self._queue.append(slice_)

    def expect(self, edge: int, producers: Iterable[int]) -> None:
        """These are all the streams of an edge."""
        self._expected[edge] = set(producers)

    @property
    def _input_ended(self) -> bool:
        return all(edge in self._expected and self._expected[edge] <= self._ended[edge] for edge in self.stage.edges_in)

    @property
    def ready(self) -> bool:
        """Whether there is something to do and room for what comes of it."""
        if self.finished or not all(outlet.producer.has_room for outlet in self.outlets):
            return False
        return bool(self._queue) or self._input_ended

    # ---- steps

    def step(self, now: float) -> list[Slice]:
        """Apply the next step; returns the slices that are applied now, in the order of each stream."""
        assert self.ready
        self.context.now = now
        if not self._queue:
            self._finish(now)
            return []
        slices = self._choose()
        first = slices[0]
        if first.last:
            self._ended[first.stream.edge].add(first.stream.producer)
            return slices
        batch = self._joined(slices)
        self.context.input = first.input
        self.context.created = min(slice_.created for slice_ in slices)
        self._guard("process", slices, lambda: self._emit(self.operator.process(batch)))
        self.rows_in += batch.num_rows
        self.context.step += 1
        return slices

    def _choose(self) -> list[Slice]:
        """The oldest slice, and with it the following ones of the same input as long as they are few rows together."""
        chosen = [self._queue.popleft()]
        if chosen[0].batch is None:
            return chosen
        rows = chosen[0].batch.num_rows
        while self._queue:
            head = self._queue[0]
            if head.batch is None or head.input != chosen[0].input or rows + head.batch.num_rows > self._step_rows_max:
                break
            rows += head.batch.num_rows
            chosen.append(self._queue.popleft())
        return chosen

    @staticmethod
    def _joined(slices: list[Slice]) -> pa.RecordBatch:
        if len(slices) == 1:
            assert slices[0].batch is not None
            return slices[0].batch
        return pa.concat_batches([slice_.batch for slice_ in slices])

    def _finish(self, now: float) -> None:
        self.context.created = now
        self._guard("finish", None, lambda: self._emit(self.operator.finish()))
        for outlet in self.outlets:
            outlet.producer.finish(now)
        self.finished = True

    def _emit(self, batches: Batches) -> None:
        if batches is None:
            return
        for batch in batches:
            checked = conform(batch, self.stage.output_schema, f"output of stage {self.stage.name}")
            if checked.num_rows == 0:
                continue
            self.rows_out += checked.num_rows
            for outlet in self.outlets:
                outlet.send(checked, self.context.created)

    def close(self) -> None:
        self._guard("close", None, self.operator.close)

    # ---- whose fault

    def _guard(self, doing: str, slices: list[Slice] | None, call):  # type: ignore[no-untyped-def]
        try:
            return call()
        except AssertionError as error:
            raise self._blame(doing, slices, error) from error
        except Exception as error:
            if isinstance(error, UserCodeError):
                raise
            raise self._blame(doing, slices, error) from error

    def _blame(self, doing: str, slices: list[Slice] | None, error: BaseException) -> UserCodeError:
        text = f"{self.where}: {doing}() raised {type(error).__name__}: {error}"
        if slices:
            names = ", ".join(f"stream {s.stream} sequence {s.sequence}" for s in slices[:3])
            text += f" (at {names}{', ...' if len(slices) > 3 else ''}; {self._first_bad_row(slices, type(error))})"
        return UserCodeError(text)

    def _first_bad_row(self, slices: list[Slice], kind: type[BaseException]) -> str:
        """Look for the shortest prefix that fails on a fresh operator: the failing one may be half-way through."""
        batch = self._joined(slices)

        def fails(rows: int) -> bool:
            try:
                operator = self.stage.make()
                operator.open(self.context)
                for _ in operator.process(batch.slice(0, rows)) or ():
                    pass
            except Exception as error:
                return isinstance(error, kind)
            return False

        if not fails(batch.num_rows):
            return f"no single row is at fault, it fails with the state built before, {batch.num_rows} rows in the step"
        low, high = 0, batch.num_rows  # fails(high), not fails(low)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fails(middle) else (middle, high)
        text = str(batch.slice(high - 1, 1).to_pylist()[0])
        return f"first bad row is number {high - 1} of the step: {text if len(text) < 500 else text[:500] + '...'}"


def conform(batch: object, schema: pa.Schema | None, what: str) -> pa.RecordBatch:
    """The batch with exactly the schema's fields; SchemaError names what was declared and what came."""
    if not isinstance(batch, pa.RecordBatch):
        raise SchemaError(f"{what}: expected a pyarrow.RecordBatch, got {type(batch).__name__}")
    if schema is None:
        raise SchemaError(
            f"{what}: rows came, but it declares no schema; give schema=... to the decorator, or yield nothing"
        )
    if batch.schema.equals(schema):
        return batch
    if batch.schema.names == schema.names and batch.schema.types == schema.types:
        return pa.RecordBatch.from_arrays(batch.columns, schema=schema)
    raise SchemaError(f"{what}: declared ({_ddl(schema)}), got ({_ddl(batch.schema)})")


def _ddl(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
