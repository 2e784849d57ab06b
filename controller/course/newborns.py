"""The table with which a change of the plan begins: replicas of new stages, readers of new sources, and nothing of those that are
gone (design: change-of-plan)."""

from __future__ import annotations

from msgspec.structs import replace

from controller.replicas.placement import Placement
from flux.dataflow.plan import Plan
from flux.dataflow.plan_change import PlanChange
from flux.errors import QueryFailed
from partitioning.table import Table, spread


def grown_table(table: Table, plan: Plan, change: PlanChange, placement: Placement) -> Table:
    """Make the table of the plan that a change has made. QueryFailed: the workers cannot hold the replicas of a new stage.

    Replicas of a new stage are live at once, because they begin empty. Workers that leave get none. The first ones go to the
    workers with the fewest primaries."""
    epoch = table.epoch + 1
    sources_end, stages_end, _ = plan.next_ids()
    stages = [*table.stages, *[()] * (stages_end - len(table.stages))]
    sources = [*table.sources, *[()] * (sources_end - len(table.sources))]
    for gone in change.removed_stages:
        stages[gone] = ()
    for gone in change.removed_sources:
        sources[gone] = ()
    leads = dict.fromkeys((worker for worker in table.endpoints if worker not in placement.leaving), 0)
    for rows in stages:
        for replicas in rows:
            if replicas and replicas[0].worker in leads:
                leads[replicas[0].worker] += 1
    if not leads and (change.stages or change.sources):
        raise QueryFailed(
            "all workers are leaving, so there is no place for anything new: ask again when others have come"
        )
    workers = sorted(leads, key=lambda worker: (leads[worker], worker))
    start = 0
    for new in change.stages:
        stages[new.id] = placement.first_rows(plan.stages[new.id], workers, start, epoch)
        start += new.partitions
    for source in change.sources:
        sources[source.id] = tuple(spread(source.worker_partitions, workers, start % len(workers)))
        start += source.worker_partitions
    born = {stage: birth for stage, birth in table.born.items() if stages[stage]}
    return replace(
        table,
        epoch=epoch,
        stages=tuple(stages),
        sources=tuple(sources),
        plan=plan.version,
        born=born | {stage.id: epoch for stage in change.stages},
    )
