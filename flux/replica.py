"""One copy of one partition of a stage: what waits for it, in which order it is applied, when it is through (DESIGN 4).

With one replica every step is committed at once: the primary takes slices in the order in which they came, groups
small ones into one step, applies it and hands the output to the logs of its streams. The order of steps is decided
here and nowhere else, so that an order log for secondaries has one place to be written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from flux.batches import conform, split
from flux.errors import UserCodeError
from flux.operator import Batches, Context, Operator
from flux.plan import StagePlan
from flux.producer import Producer
from flux.receiver import Slice
from flux.settings import Settings
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
        self, stage: StagePlan, partition: int, incarnation: int, outlets: list[Outlet], limits: Settings
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
        self._limits = limits
        self._queue: deque[Slice] = deque()
        self._applying: list[Slice] = []
        self._output: Iterator[pa.RecordBatch] | None = None  # of the step under way
        self._unsent: pa.RecordBatch | None = None  # came when the logs were full
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
        return self._output is not None or bool(self._queue) or self._input_ended

    # ---- steps

    def step(self, now: float) -> list[Slice]:
        """Apply the next step, or go on with one whose output did not fit into the logs; returns the slices that are
        applied now, in the order of each stream."""
        assert self.ready
        if self._output is None and not self._begin(now):
            return self._applying  # the end of a stream, which the operator does not see
        if not self._guard(self._doing, self._applying, self._emit):
            return []
        self._output = None
        return self._complete(now)

    @property
    def _doing(self) -> str:
        return "process" if self._applying else "finish"

    def _begin(self, now: float) -> bool:
        self.context.now = now
        self._applying = self._choose() if self._queue else []
        if not self._applying:
            self.context.created = now
            self._output = self._guard("finish", None, lambda: self._parts(self.operator.finish()))
            return True
        first = self._applying[0]
        if first.last:
            self._ended[first.stream.edge].add(first.stream.producer)
            return False
        batch = self._joined(self._applying)
        self.context.input = first.input
        self.context.created = min(slice_.created for slice_ in self._applying)
        self._output = self._guard("process", self._applying, lambda: self._parts(self.operator.process(batch)))
        return True

    def _complete(self, now: float) -> list[Slice]:
        if self._applying:
            self.rows_in += sum(slice_.batch.num_rows for slice_ in self._applying if slice_.batch is not None)
            self.context.step += 1
        else:
            for outlet in self.outlets:
                outlet.producer.finish(now)
            self.finished = True
        return self._applying

    def _choose(self) -> list[Slice]:
        """The oldest slice, and with it the following ones of the same input as long as they are few rows together."""
        chosen = [self._queue.popleft()]
        if chosen[0].batch is None:
            return chosen
        rows = chosen[0].batch.num_rows
        while self._queue:
            head = self._queue[0]
            if (
                head.batch is None
                or head.input != chosen[0].input
                or rows + head.batch.num_rows > self._limits.step_max_rows
            ):
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

    def _parts(self, output: Batches) -> Iterator[pa.RecordBatch]:
        """Output batches checked and cut to size."""
        for batch in output or ():
            checked = conform(batch, self.stage.output_schema, f"output of stage {self.stage.name}")
            yield from split(checked, self._limits.batch_max_rows, self._limits.batch_max_bytes)

    def _emit(self) -> bool:
        """Hand on output as long as the logs have room; False if more is to come. However much a step gives, a log
        stays within its bound and one batch."""
        assert self._output is not None
        while True:
            if self._unsent is None:
                self._unsent = next(self._output, None)
                if self._unsent is None:
                    return True
            if not all(outlet.producer.has_room for outlet in self.outlets):
                return False
            batch, self._unsent = self._unsent, None
            self.rows_out += batch.num_rows
            for outlet in self.outlets:
                outlet.send(batch, self.context.created)

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
