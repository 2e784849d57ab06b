"""Steps of several partitions of a stage, applied with one call of their operators (design: together).

The steps are those that each replica would apply alone: in its order, with its rows, with output in the same batches. Only the
calls that they have in common are made once for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from flux.operators.batches import conform
from flux.operators.operator import Batches, Chained, JointOutput
from flux.replica.replica import Replica
from flux.replica.step_queue import ReplicaStep
from flux.wire.checksum import extend_apart
from partitioning.clustering import owned
from partitioning.errors import FailedPartition

#: Above this many rows, per-row work dominates call overhead.
ROWS_MAX = 1024
#: Steps whose rows lie in more memory than this are applied alone, too, because all rows of a call are copied together. Much of
#: that memory may belong to other rows.
BYTES_MAX = 1 << 20
#: Output of one call shares memory until the last of it is gone. A partition's output that is smaller than this part of a fair
#: share is copied, so that all logs of a worker together hold at most four times their bound. Output that waits for a sink has a
#: bound for each partition, and is always copied.
LEAST_SHARE = 1 / 4


def may_go_together(replica: Replica) -> bool:
    """Tell whether the next step of a ready replica suits ``next_together``: it has rows, few of them as far as is known, and
    runs no user code. A timer or an end may take any time, and the worker announces it, so these steps are applied alone."""
    if not replica.goes_together or not replica.between_steps:
        return False
    if replica.applied < replica.order.end:
        entry = replica.order[replica.applied]
        return 0 < entry.rows <= ROWS_MAX and not replica.waits.lacks_rows(entry)
    waits = replica.waits
    rows_next = not (waits.change_due or replica.context.timers.pending or waits.watermark_due(replica.order))
    return rows_next and 0 < waits.next_rows <= ROWS_MAX


def next_together(replicas: Sequence[Replica], now: float) -> list[ReplicaStep]:
    """Return the next steps of replicas, through the first one that is large after all: the replicas behind it have their turn
    later. All replicas are of one stage, ready, and such that ``may_go_together`` holds."""
    steps: list[ReplicaStep] = []
    for replica in replicas:
        steps.append(replica.next_step(now))
        if not _is_small(steps[-1], steps[0]):
            break
    return steps


def _is_small(step: ReplicaStep, first: ReplicaStep) -> bool:
    rows = step.rows
    assert rows is not None, f"{step.key}: a step without rows among those that go together"
    small = 0 < rows.num_rows <= ROWS_MAX and rows.get_total_buffer_size() <= BYTES_MAX
    return small and step.slices[0].input == first.slices[0].input


def apply_together(turns: Sequence[tuple[Replica, ReplicaStep]]) -> list[bool]:
    """``apply`` several steps of ``next_together``. The last one may be large, and is then applied alone."""
    replica, last = turns[-1]
    few = turns if _is_small(last, turns[0][1]) else turns[:-1]
    alone = [replica.call(last)] if len(few) < len(turns) else []
    outputs = _process_each(few) if len(few) > 1 else [replica.call(step) for replica, step in few]
    return [replica.conclude(step, output) for (replica, step), output in zip(turns, [*outputs, *alone], strict=True)]


def _process_each(few: Sequence[tuple[Replica, ReplicaStep]]) -> list[Batches]:
    """Return the output of each step that is not sent yet."""
    first, step = few[0]
    output = first.guard.call("process_many", step, _output_of_all, few)
    if output is None:
        return [None] * len(few)
    if isinstance(output, JointOutput):
        return list(_give_each(few, output))
    chained = [replica.operator for replica, _ in few if isinstance(replica.operator, Chained)]
    return [operator.through(given) for operator, given in zip(chained, output, strict=True)] if chained else output


def _output_of_all(few: Sequence[tuple[Replica, ReplicaStep]]) -> JointOutput | list[Batches] | None:
    """Call the operators, and check the form of their output. UserCodeError names the partition whose rows do not fit."""
    operators = [replica.guard.first for replica, _ in few]
    parts = [step.rows for _, step in few if step.rows is not None]
    together, rows = pa.concat_batches(parts), [part.num_rows for part in parts]
    try:
        output = operators[0].process_many(operators, together, rows)
    except FailedPartition as failed:
        replica, step = few[failed.at]
        raise replica.guard.error("process", step, failed.error) from failed.error
    if not isinstance(output, JointOutput):
        if output is not None and len(output) != len(few):
            raise ValueError(f"the output of {len(few)} partitions must be a list of as many, got {len(output)}")
        return output
    ends = [0, *output.ends]
    if len(ends) != len(few) + 1 or ends[-1] != output.batch.num_rows or sorted(ends) != ends:
        raise ValueError(
            f"the output of {len(few)} partitions must have {len(few)} ends, ascending up to its {output.batch.num_rows} rows; "
            f"got {output.ends}"
        )
    stage = few[0][0].stage
    if isinstance(few[0][0].operator, Chained):  # its second operator checks its own input
        return output
    return output._replace(batch=conform(output.batch, stage.output_schema, f"output of stage {stage.name}"))


def _give_each(few: Sequence[tuple[Replica, ReplicaStep]], results: JointOutput) -> Iterator[Batches]:
    """Send the results of each step that need no check and no cut, and yield those that do; None: they are sent."""
    batch, first = results.batch, few[0][0]
    rows = [end - start for start, end in zip([0, *results.ends], results.ends, strict=False)]
    least = LEAST_SHARE * batch.num_rows / len(rows)
    chained = isinstance(first.operator, Chained)
    # A partition that has not begun its new edges yet, or begins them before the others, has other outlets than they.
    alike = all(replica.version == first.version for replica, _ in few)
    of_outlets = [] if chained or not alike else [outlet.clustered_each(batch, rows) for outlet in first.outlets]
    whole = batch.nbytes <= first.limits.batch_max_bytes
    checksums = [replica.output.checksum for replica, _ in few]
    if any(replica.output.compared for replica, _ in few) and not chained:
        checksums = extend_apart(checksums, batch, rows)
    for at, ((replica, step), end) in enumerate(zip(few, results.ends, strict=True)):
        output, mine = replica.output, _as_alone(batch.slice(end - rows[at], rows[at]))
        if rows[at] < least or output.exit is not None:
            mine = owned(mine)
        elif of_outlets and whole and rows[at] <= first.limits.batch_max_rows:
            output.send(step, mine, [clustered[at] for clustered in of_outlets], checksums[at])
            yield None
            continue
        yield _through(replica, step, mine) if chained else [mine]


def _as_alone(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Drop validity bitmaps without nulls, which exist because of another partition: they would count as bytes."""
    columns = batch.columns
    spare = [not column.null_count and column.buffers()[0] is not None for column in columns]
    if not any(spare):
        return batch
    plain = [
        pa.Array.from_buffers(column.type, len(column), [None, *column.buffers()[1:]], 0, column.offset)
        if drop
        else column
        for column, drop in zip(columns, spare, strict=True)
    ]
    return pa.RecordBatch.from_arrays(plain, schema=batch.schema)


def _through(replica: Replica, step: ReplicaStep, results: pa.RecordBatch) -> list[pa.RecordBatch]:
    """Pass the results of the first operator of the stage through the second one."""
    operator = replica.operator
    assert isinstance(operator, Chained)
    return replica.guard.call("process", step, lambda: list(operator.through([results])))
