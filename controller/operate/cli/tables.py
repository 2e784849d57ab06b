"""Tables and texts for people, made from the answers of a query. This module asks nothing and prints nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from controller.operate.client import Sighting
from controller.operate.requests import (
    MoveStatus,
    Partitions,
    RepairStatus,
    ReplicaStatus,
    RequestStatus,
    StageStatus,
    Status,
    WorkerStatus,
)
from controller.report.events import Event
from controller.text import count, named, some
from partitioning.ids import ACTIVE

#: Partitions in one frame of ``flux top``.
TOP_PARTITIONS = 15
#: Longest name of an executor or a partition in ``flux top``, whose lines have 80 characters.
NAME_CHARACTERS = 20
#: Replicas that are shown one by one unless all are asked for: no person reads more.
MANY = 1000


def table(*columns: str) -> Table:
    """Make a table. A name that begins with ">" is a column of numbers; with "~", a column of text that may be wrapped."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        number, long = column.startswith(">"), column.startswith("~")
        made.add_column(column.lstrip(">~"), justify="right" if number else "left", no_wrap=not long)
    return made


def narrow(*columns: str) -> Table:
    """Make a table with less space between columns, in which names of executors and partitions are cut to ``NAME_CHARACTERS``."""
    made = table(*columns)
    made.collapse_padding = True
    for column in made.columns:
        if column.header in ("executor", "partition"):
            column.max_width = NAME_CHARACTERS
    return made


# ---- numbers


def size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:,.0f} {unit}" if unit == "B" else f"{nbytes:,.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.1f} GiB"


def percent(share: float) -> str:
    return f"{share:.0%}"


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.0f} s"


def moment(at: float) -> str:
    """Format a time of the wall clock as local time."""
    return datetime.fromtimestamp(at).isoformat(" ", "milliseconds")


def latency(p50_ms: float | None, p99_ms: float | None) -> str:
    return "" if p50_ms is None or p99_ms is None else f"{p50_ms:.1f} / {p99_ms:.1f} ms"


def worker(number: int) -> str:
    return "any" if number < 0 else str(number)


# ---- queries


def queries(sightings: Sequence[Sighting]) -> RenderableType:
    made = table("query", "id", "~state", "~application", ">pid", ">workers", ">rows in/s", ">up")
    for sighting in sightings:
        status, connection = sighting.status, sighting.found.connection
        if status is not None:
            made.add_row(
                status.name or "", status.id[:8], status.phase, status.application, str(status.pid),
                str(len(status.workers)), f"{status.rows_per_s:,.0f}", duration(status.uptime_s),
            )  # fmt: skip
        elif connection is not None:
            made.add_row(
                connection.name or "", connection.id[:8], f"stale: {sighting.stale}", connection.application,
                str(connection.pid), "", "", "",
            )  # fmt: skip
        else:
            made.add_row("", sighting.found.path.name, f"unreadable: {sighting.stale}", "", "", "", "", "")
    return made


def status(query: Status) -> RenderableType:
    rows = stages(query.stages, query.tentative)
    return Group(head(query), "", rows, "", workers(query.workers), *under_way(query))


def _watermark(stage: StageStatus) -> str:
    """Say how far the event time of a stage is, and the partition that holds it back."""
    text = f"stage {stage.name}: watermark {stage.watermark or 'not known yet'}"
    if stage.watermark_lag_s is not None:
        text += f", {duration(max(stage.watermark_lag_s, 0.0))} behind the clock"
    if stage.held_back_by:
        text += f"; held back by {stage.held_back_by}"
    if stage.rows_behind_watermark:
        text += f"; {count(stage.rows_behind_watermark, 'row')} behind it left out"
    return text


def head(query: Status) -> Text:
    text = Text()
    text.append(f"{query.name or query.id}", style="bold")
    text.append(
        f" ({query.id[:8]}) {query.phase} for {duration(query.uptime_s)}, {query.application} pid {query.pid}\n"
    )
    text.append(
        f"epoch {query.epoch}, rows in {query.rows_in:,}, {query.rows_per_s:,.0f} input rows/s, "
        f"backlog {query.backlog_slices:,} slices and {size(query.backlog_bytes)}\n"
        f"{query.take_overs} take-overs, {query.repairs} repairs, {query.moves} moves, longest stall "
        f"{query.stall_ms_max:.1f} ms"
    )
    for line in filter(None, [query.missing, *query.incomplete, *query.links]):
        text.append(f"\n{line}", style="yellow")
    for source, records in query.source_lags.items():
        unit = query.lag_units.get(source, "record")
        text.append(f"\nsource {source} is {records:,} {unit if records == 1 else unit + 's'} behind")
    for stage in query.stages:
        if stage.watermark is not None or stage.held_back_by:
            text.append(f"\n{_watermark(stage)}")
    for source, rows in query.late_rows.items():
        if rows:
            text.append(f"\n{count(rows, 'row')} of source {source} came too late")
    for source, records in query.bad_records.items():
        text.append(f"\n{count(records, 'record')} of source {source} did not fit its format", style="yellow")
    for source, names in query.not_read.items():
        text.append(f"\nsource {source} does not read {some(names, 5)}: start the query again", style="yellow")
    for source, kinds in query.unread_files.items():
        for kind, files in kinds.items():
            name, why = next(iter(files.files.items()))
            more = f", and {files.count - 1:,} more" if files.count > 1 else ""
            text.append(f"\nsource {source}: {kind} file {name}{more}: {why}", style="yellow")
    if query.copies_on:
        text.append(f"\nreplicas of a partition are on {query.copies_on}")
    for stage in query.stages:
        if stage.sink:
            text.append(f"\n{stage.name} goes to {stage.sink}; {size(stage.sink_bytes)} still to go")
        if stage.wait_for_sink:
            waiting = count(stage.wait_for_sink, "partition")
            until = "its output is read" if stage.sink.startswith("readers,") else "the sink has taken more"
            text.append(f"\n{waiting} of {stage.name} cannot go on before {until}", style="yellow")
        if stage.recovery != ACTIVE or stage.standbys:
            text.append(
                f"\n{stage.name} is kept by {count(stage.standbys, 'standby')}: {size(stage.checkpoint_bytes)} of checkpoints, "
                f"{stage.checkpoint_behind_s:.1f} s old; a loss now costs about {stage.replay_s:.1f} s of repetition"
            )
    if query.checkpoint is not None:
        kept = query.checkpoint
        text.append(
            f"\nthe checkpoint location holds {size(kept.bytes)}, {kept.behind_s:.1f} s old; to go on from it would repeat "
            f"about {kept.replay_s:.1f} s"
        )
    for line, style in _notices(query):
        text.append(f"\n{line}", style=style)
    if query.metrics:
        text.append(f"\nmetrics at {query.metrics}")
    if query.error:
        text.append(f"\n{query.error}", style="red")
    return text


def _notices(query: Status) -> list[tuple[str, str]]:
    """Describe the plan and its changes, workers that come, and stages that have failed, each with a style."""
    lines = [(f"version {query.plan} of the plan (flux plan)", "")] if query.plan else []
    lines += [(f"change of the plan: {change}", "yellow") for change in query.plan_changes]
    if query.missing_slots:
        lines.append((f"waiting for workers in {named('slot', query.missing_slots)}", "yellow"))
    if query.evening_out:
        lines.append(("workers have joined, and are given their share of the partitions", "yellow"))
    for stage in query.failed:
        why = stage.error if stage.because_of == stage.stage else f"it depends on {stage.because_of}"
        lines.append((f"stage {stage.stage} FAILED: {why}", "red"))
    return lines


def stages(rows: Sequence[StageStatus], tentative: Collection[str] = ()) -> Table:
    """Show one line for each stage. ``tentative``: names of those with tentative results, which are not among the rows out."""
    made = table("stage", ">partitions", ">done", "replicas", ">short", ">rows in", ">rows out", ">rows/s",
                 ">queued", ">in logs", ">age p50 / p99", ">a loss costs")  # fmt: skip
    for row in rows:
        name = f"{row.name} (tentative)" if row.name in tentative else row.name
        made.add_row(
            name, str(row.partitions), str(row.finished), _replicas(row),
            str(row.short), f"{row.rows_in:,}", f"{row.rows_out:,}", f"{row.rows_per_s:,.0f}", f"{row.queued:,}",
            size(row.kept_bytes), latency(row.p50_ms, row.p99_ms), _cost(row),
        )  # fmt: skip
    return made


def _replicas(row: StageStatus) -> str:
    kept = "" if row.recovery == ACTIVE else f", {row.recovery}"
    return f"{row.safe} of {row.replicas}{kept}"


def _cost(row: StageStatus) -> str:
    """Format the cost of a loss of a worker now."""
    if row.loss_s is not None:
        return f"{row.loss_s:.1f} s"
    return "the query" if row.replicas == 1 else ""


def workers(rows: Sequence[WorkerStatus]) -> Table:
    made = table(">worker", ">slot", "host", ">pid", "executor", ">primaries", ">replicas", ">load", ">CPU", ">rows/s", ">queued",
                 ">log", ">memory", "")  # fmt: skip
    for row in rows:
        made.add_row(
            str(row.worker), str(row.slot), row.host, str(row.pid), row.executor, str(row.primaries), str(row.replicas),
            percent(row.load), percent(row.cpu), f"{row.rows_per_s:,.0f}", f"{row.queued:,}", size(row.log_bytes),
            size(row.rss_bytes), "leaving" if row.leaving else "",
        )  # fmt: skip
    return made


def workers_in_short(rows: Sequence[WorkerStatus]) -> Table:
    """Make the table of workers that fits into 80 columns. The column for workers that leave is there only while one does."""
    leaving = any(row.leaving for row in rows)
    made = narrow(">worker", "executor", ">primaries", ">load", ">CPU", ">rows/s", ">queued", ">memory",
                  *[""] * leaving)  # fmt: skip
    for row in rows:
        made.add_row(
            str(row.worker), row.executor, f"{row.primaries} of {row.replicas}", percent(row.load), percent(row.cpu),
            f"{row.rows_per_s:,.0f}", f"{row.queued:,}", size(row.rss_bytes),
            *["leaving" if row.leaving else ""] * leaving,
        )  # fmt: skip
    return made


def under_way(query: Status) -> list[RenderableType]:
    """List moves, repairs and requests under way, each with a title. Kinds without any are left out."""
    parts: list[RenderableType] = []
    if query.moves_pending:
        parts += ["", Text("moves", style="bold"), moves(query.moves_pending, progress=True)]
    if query.repairs_under_way:
        parts += ["", Text("repairs", style="bold"), repairs(query.repairs_under_way)]
    if query.requests:
        parts += ["", Text("requests", style="bold"), requests(query.requests)]
    return parts


def requests(rows: Sequence[RequestStatus]) -> Table:
    made = table(">request", "~what", "state", "~still to come")
    for row in rows:
        made.add_row(str(row.request), row.what, row.state, row.left)
    return made


def repairs(rows: Sequence[RepairStatus]) -> Table:
    made = table("partition", ">worker", "step", "~why")
    for row in rows:
        made.add_row(f"{row.stage}/{row.partition}", str(row.worker), row.phase, row.why)
    return made


def moves(rows: Sequence[MoveStatus], progress: bool = False) -> Table:
    """List suggested moves with gain and cost, or, with ``progress``, planned and begun moves with the step that they have
    reached."""
    made = table("partition", ">from", ">to", *(["step"] if progress else [">gain", ">state to copy"]))
    for row in rows:
        more = [row.phase] if progress else [percent(row.gain), size(row.cost)]
        made.add_row(f"{row.stage}/{row.partition}", worker(row.source), worker(row.target), *more)
    return made


# ---- partitions and history


def partitions(rows: Sequence[ReplicaStatus], seconds: float) -> RenderableType:
    made = table("partition", ">worker", "role", "safe", ">load", ">rows/s", ">queued", ">state", ">age")
    for row in rows:
        made.add_row(
            f"{row.stage}/{row.partition}", str(row.worker), _role(row),
            "yes" if row.safe else f"{row.behind:,} behind" if row.behind else "no", percent(row.load),
            f"{row.rows_per_s:,.0f}", f"{row.queued:,}", size(row.state_bytes),
            "" if row.checkpoint_behind_s is None else f"{row.checkpoint_behind_s:.1f} s",
        )  # fmt: skip
    note = f"load and rows/s over the last {seconds:.1f} s" if seconds else "no load is known yet"
    return Group(made, Text(note, style="dim"))


def _role(row: ReplicaStatus) -> str:
    return f"new {row.kind}" if row.role == "new" and row.kind != ACTIVE else row.role


def many_partitions(rows: Sequence[StageStatus], heaviest: Partitions) -> RenderableType:
    """Show the stages, and the replicas with the highest loads, if a line for each replica would be too many."""
    note = Text(f"{heaviest.total:,} replicas in all: --all shows each, --stage those of one stage", style="dim")
    return Group(stages(rows), "", *_heaviest(heaviest), note)


def history(events: Sequence[Event]) -> RenderableType:
    made = table("when", "what", "partition", ">from", ">to", ">state", ">took", ">stall", "~why")
    for event in events:
        made.add_row(
            moment(event.at), event.kind,
            f"{event.stage}/{event.partition}" if event.stage and event.partition >= 0 else event.stage,
            "" if event.source < 0 else str(event.source), "" if event.worker < 0 else str(event.worker),
            size(event.bytes) if event.bytes else "", f"{event.seconds:.3f} s" if event.seconds else "",
            f"{event.stall_ms:.1f} ms" if event.stall_ms else "", event.why,
        )  # fmt: skip
    return made


# ---- top


def top(query: Status, heaviest: Partitions) -> RenderableType:
    """Make one frame: workers and the heaviest partitions by load, moves and repairs under way. It fits into 80 columns."""
    busiest = sorted(query.workers, key=lambda row: (-row.load, row.worker))
    return Group(head(query), "", workers_in_short(busiest), "", *_heaviest(heaviest), *under_way(query))


def _heaviest(answer: Partitions) -> list[RenderableType]:
    made = narrow("partition", ">worker", "role", ">load", ">rows/s", ">queued", ">state")
    for row in answer.replicas[:TOP_PARTITIONS]:
        made.add_row(
            f"{row.stage}/{row.partition}", str(row.worker), _role(row), percent(row.load), f"{row.rows_per_s:,.0f}",
            f"{row.queued:,}", size(row.state_bytes),
        )  # fmt: skip
    left = answer.total - made.row_count
    return [made, Text(f"and {left} more replicas", style="dim")] if left > 0 else [made]
