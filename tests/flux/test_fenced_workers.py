"""A worker that was given up and lives ends its task well, and another has come for it."""

from __future__ import annotations

import pyarrow as pa
from harness import LIMIT_S, Rows, ThreadQuery, dataframe

import flux

SCHEMA = pa.schema([("k", pa.int64())])


@flux.stage(key="k", partitions=4, replicas=2)
class Count(flux.Aggregate):
    n = flux.count()


def test_the_task_of_a_worker_that_was_given_up_ends_well_and_a_slot_is_open_in_its_place() -> None:
    """End the task well: a failed task for each such worker made Spark end the job after a few."""
    with ThreadQuery(Rows().stage(Count(dataframe(SCHEMA))), workers=3, replicas_allow_same_executor=True) as query:
        query.started()
        core = query.server.core
        worker = next(node for node in core.members.workers if not held_alone(query, node))
        slot = core.members.workers[worker].about.index
        query.server.command(lambda now: core.fail(worker, now))
        query._threads[slot].join(LIMIT_S)
        assert not query._threads[slot].is_alive()
        assert not query.raised
        assert query.server.look(core.driver.missing_slots) == [3]


def held_alone(query: ThreadQuery, worker: int) -> bool:
    """Tell whether the worker has the only copy of a partition, for example of the sink."""
    table = query.server.core.table
    assert table is not None
    return any([r.worker for r in replicas] == [worker] for stage in table.stages for replicas in stage)
