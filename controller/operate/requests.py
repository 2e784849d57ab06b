"""Requests of people to the controller of a running query, and its answers (design: people).

A request or an answer is one frame in the encoding of all Flux messages (version, length and types are checked). An answer
carries the number of its request. Both travel on a sealed connection whose ends have proved the secret of the connection file
to each other (``flux.wire.handshake``), so nothing from strangers arrives here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec

from controller.report.events import Event
from flux.errors import ProtocolError
from flux.wire.frames import Natural, decode, encode
from partitioning.ids import ACTIVE

#: Enough for moves of 10,000 partitions.
REQUEST_BYTES_MAX = 1 << 20
#: Enough for the placement of 100,000 partitions with three replicas each.
ANSWER_BYTES_MAX = 128 << 20
#: Moves of one request.
MOVES_MAX = 10_000

Name = Annotated[str, msgspec.Meta(max_length=256)]


class Request(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of the requests. ``number`` comes back with the answer."""

    number: Natural = 0


class GetStatus(Request, frozen=True):
    """Question about the state of the query, answered by ``Status``."""


class GetPartitions(Request, frozen=True):
    """Question about placement and load, answered by ``Partitions``, page by page."""

    #: None: all stages.
    stage: Name | None = None
    #: The first partition of the page, counted through all that are asked for.
    first: Natural = 0
    #: Ask only for this number of replicas, with the highest loads.
    heaviest: Annotated[int, msgspec.Meta(ge=1, le=1000)] | None = None


class GetHistory(Request, frozen=True):
    """Question about take-overs, repairs and moves, answered by ``History``."""

    #: None: all stages.
    stage: Name | None = None


class GetMetrics(Request, frozen=True):
    """Question about the metrics, answered by ``MetricsText``."""


class Suggest(Request, frozen=True):
    """Question about the moves that a policy would make now, answered by ``Suggested``. Nothing is moved."""

    #: Empty: the configured one.
    policy: Name = ""


class GetOutput(Request, frozen=True):
    """Question about the way to output that is kept for readers, answered by ``OutputPlace``."""

    #: None: the only stage that keeps output.
    stage: Name | None = None


class GetPlanStatus(Request, frozen=True):
    """Question about the versions of the plan, and stages that have failed, answered by ``PlanStatus``."""


class AddFlow(Request, frozen=True):
    """Request to the program of the query to add a flow, answered by ``Accepted`` at once."""

    #: MODULE:FLOW, a flow of a module that the program can import, or a function of the query that returns one.
    target: Annotated[str, msgspec.Meta(max_length=1024)]


class RestartStage(Request, frozen=True):
    """Request to the program of the query to begin a failed stage anew, answered by ``Accepted`` at once."""

    name: Name


class RemoveStage(Request, frozen=True):
    """Request to remove a stage or a source, answered by ``Accepted`` at once."""

    name: Name
    #: With all that depends on it.
    cascade: bool = False


class WantedMove(msgspec.Struct, frozen=True, kw_only=True):
    """A move of one replica, by request."""

    stage: Name
    partition: Natural
    #: The worker of the replica after the move.
    target: Natural
    #: The worker of the replica before the move; None: the primary's worker.
    source: Natural | None = None


class StartMoves(Request, frozen=True):
    """Request for moves, all of them or none, answered by ``Accepted`` when they are planned, not when they are done."""

    moves: Annotated[list[WantedMove], msgspec.Meta(min_length=1, max_length=MOVES_MAX)]
    #: The reason, for the history.
    why: Name


class DrainWorker(Request, frozen=True):
    """Request to move everything away from a worker, answered by ``Accepted`` at once."""

    worker: Natural


class FailWorker(Request, frozen=True):
    """Request to treat a worker as lost, for rehearsals, answered by ``Accepted`` at once."""

    worker: Natural


class SetWorkers(Request, frozen=True):
    """Request to run with another number of workers from now on, answered by ``Accepted`` at once."""

    workers: Annotated[int, msgspec.Meta(ge=1, le=4096)]


class ProtectStage(Request, frozen=True):
    """Request for another number or kind of replicas of a stage from now on, answered by ``Accepted`` at once."""

    stage: Name
    #: None: no change.
    replicas: Natural | None = None
    #: None: no change.
    recovery: Name | None = None


class Follow(Request, frozen=True):
    """Question about the state of an earlier request, answered by ``Followed``."""

    #: The number of that request.
    request: Natural


AnyRequest = (
    GetStatus
    | GetPartitions
    | GetHistory
    | GetMetrics
    | GetOutput
    | Suggest
    | StartMoves
    | DrainWorker
    | FailWorker
    | SetWorkers
    | ProtectStage
    | GetPlanStatus
    | AddFlow
    | RemoveStage
    | RestartStage
    | Follow
)


class RequestAnswer(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of the answers. ``number`` is that of the request."""

    number: Natural = 0


class StageStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of one stage. Latencies are those of the slowest worker."""

    name: str
    partitions: int
    #: Partitions that have reached their end.
    finished: int
    #: Wanted replicas of each partition.
    replicas: int
    #: Safe replicas of the partition that has the fewest.
    safe: int
    #: Partitions with fewer replicas than wanted.
    short: int
    rows_in: int
    rows_out: int
    rows_per_s: float
    #: Slices that are not applied yet.
    queued: int
    p50_ms: float | None = None
    p99_ms: float | None = None
    #: The sink and its guarantee; empty without one.
    sink: str = ""
    #: Output that the sink does not have yet.
    sink_bytes: int = 0
    #: Partitions that stand still until the sink takes more.
    wait_for_sink: int = 0
    #: "active" or "standby", by the wish of the moment.
    recovery: str = ACTIVE
    #: Size of the checkpoints of all standbys.
    checkpoint_bytes: int = 0
    #: Time by which the oldest checkpoint is behind its partition.
    checkpoint_behind_s: float = 0.0
    #: Estimated time to repeat the steps after that checkpoint.
    replay_s: float = 0.0
    #: Active replicas of all partitions.
    active: int = 0
    #: Standbys of all partitions.
    standbys: int = 0
    #: Rows for the stage in the logs of producers.
    kept_bytes: int = 0
    #: Estimated cost of the loss of a worker now; None: the query itself, or it is not known yet.
    loss_s: float | None = None
    #: The watermark as a time in UTC, and the seconds by which it is behind the clock; None: it is not known yet, or the stage
    #: has no event time.
    watermark: str | None = None
    watermark_lag_s: float | None = None
    #: The partition of a source that holds the watermark back, and why.
    held_back_by: str = ""
    #: Rows below the watermark of their step, which the stage has left out.
    rows_behind_watermark: int = 0


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of one worker."""

    worker: int
    slot: int
    host: str
    pid: int
    executor: str
    primaries: int
    replicas: int
    #: Rows applied.
    rows_in: int
    rows_per_s: float
    #: Slices that are not applied yet.
    queued: int
    #: Seconds per second in which it applies rows.
    load: float
    #: Processor seconds per second of its process.
    cpu: float
    rss_bytes: int
    log_bytes: int
    #: The worker is being emptied.
    leaving: bool = False


class MoveStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A move that is suggested, planned or under way."""

    stage: str
    partition: int
    source: int
    target: int
    #: Fall of the higher load of the two workers.
    gain: float = 0.0
    #: Bytes of state to copy.
    cost: int = 0
    #: "waiting" before its first step.
    phase: str = "waiting"


class Carried(msgspec.Struct, frozen=True, kw_only=True):
    """A move of a request."""

    move: MoveStatus
    done: bool
    #: The event with which it ended; None: it has not ended.
    event: Event | None = None

    def __str__(self) -> str:
        return f"{self.move.stage}/{self.move.partition} from worker {self.move.source} to worker {self.move.target}"


class RequestStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of an earlier request."""

    #: Its number.
    request: int
    #: Its name in sentences.
    what: str
    #: "waiting", "under way", "done" or "given up".
    state: str
    #: Reason for giving it up.
    why: str
    #: The rest of the work, in words.
    left: str
    #: Moves, replicas or workers that are done.
    done: int
    #: Moves, replicas or workers of the request.
    total: int

    @property
    def over(self) -> bool:
        return self.state in ("done", "given up")


class RepairStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that is being added."""

    stage: str
    partition: int
    worker: int
    #: "retain", "ready", "copy", "follows" or "live" (design: add-replica).
    phase: str
    why: str


class KeptStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a checkpoint location."""

    #: Size of all checkpoints.
    bytes: int
    #: Time by which the oldest checkpoint is behind its partition.
    behind_s: float
    #: Estimated time to repeat the steps after the checkpoints.
    replay_s: float


class UnreadFiles(msgspec.Struct, frozen=True):
    """Files of one source that are incomplete, missing or corrupt."""

    #: The number of files.
    count: int
    #: Names of some of them, with the reasons.
    files: dict[str, str]


class FailedStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A stage that has failed, or depended on one that has."""

    stage: str
    #: In seconds since 1970.
    at: float
    #: The stage whose failure it was.
    because_of: str
    error: str
    #: That of the user's code; empty: the error is not one of such code.
    traceback: str = ""


class RunningPart(msgspec.Struct, frozen=True, kw_only=True):
    """A stage or a source of the plan, and the version that brought it."""

    name: str
    since: int
    source: bool = False
    #: Names of the stages and sources that a stage reads.
    reads: list[str] = []


class VersionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A version of the plan."""

    version: int
    #: Time at which it was running, in seconds since 1970; 0: not yet.
    at: float
    added: list[str]
    removed: list[str]


class PlanStatus(RequestAnswer, frozen=True):
    """The plan of a query: its parts, its versions, and the changes that are not over."""

    version: int
    parts: list[RunningPart]
    versions: list[VersionStatus]
    failed: list[FailedStatus]
    #: In words.
    changes: list[str]
    #: No more additions are accepted.
    sealed: bool


class Status(RequestAnswer, frozen=True):
    """State of a query."""

    id: str
    name: str | None
    application: str
    pid: int
    phase: str
    error: str | None
    #: In seconds since 1970.
    started: float
    #: Time since then.
    uptime_s: float
    epoch: int
    rows_in: int
    rows_per_s: float
    backlog_slices: int
    backlog_bytes: int
    take_overs: int
    repairs: int
    moves: int
    #: The longest time for which a partition stood still for a copy.
    stall_ms_max: float
    #: Address of the Prometheus metrics; empty if they are not served.
    metrics: str
    stages: list[StageStatus]
    workers: list[WorkerStatus]
    moves_pending: list[MoveStatus]
    repairs_under_way: list[RepairStatus]
    #: Slots of workers that are still to join.
    missing_slots: list[int]
    #: Partitions move for balance.
    balancing: bool
    #: Workers have joined that do not have their share of the partitions yet.
    evening_out: bool
    #: The distance between the replicas of each partition, such as "different hosts".
    copies_on: str = ""
    #: Requests that are not over.
    requests: list[RequestStatus] = []
    #: Content of the checkpoint location, if the query has one.
    checkpoint: KeptStatus | None = None
    #: Records that are still to be read, for sources that know the number.
    source_lags: dict[str, int] = {}
    #: The things that these numbers count, as "file", for sources where they are not records.
    lag_units: dict[str, str] = {}
    #: Inputs that are missing, and the results that are tentative for that, in words; empty: none are.
    missing: str = ""
    #: Workers that read streams elsewhere, because nothing came over a link, and loans of secondaries, in words.
    links: list[str] = []
    #: Stages with results that lack rows, because partitions of them have begun empty, in words.
    incomplete: list[str] = []
    #: Names of the stages with tentative results.
    tentative: list[str] = []
    #: Records that did not fit their format, for sources with any.
    bad_records: dict[str, int] = {}
    #: Rows that came too late, for sources with event time.
    late_rows: dict[str, int] = {}
    #: Names of partitions that sources have got since the start.
    not_read: dict[str, list[str]] = {}
    #: Files whose rows are not read, by source and kind of problem.
    unread_files: dict[str, dict[str, UnreadFiles]] = {}
    #: The version of the plan.
    plan: int = 0
    #: Changes of the plan that are under way or wait, in words.
    plan_changes: list[str] = []
    #: Stages that have failed.
    failed: list[FailedStatus] = []


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of one replica."""

    stage: str
    partition: int
    worker: int
    #: "primary", "secondary", "standby", or "new" (not live yet).
    role: str
    #: It could take over.
    safe: bool
    load: float
    queued: int
    #: For a standby, the size of its newest checkpoint.
    state_bytes: int
    rows_per_s: float
    #: See ``balance.load``.
    movable: bool
    #: Steps that it would have to apply before a take-over, if it is not safe for this reason.
    behind: int = 0
    #: "active" or "standby".
    kind: str = ACTIVE
    #: For a standby, the time by which its newest checkpoint is behind.
    checkpoint_behind_s: float | None = None


class Partitions(RequestAnswer, frozen=True):
    """One page of replicas."""

    replicas: list[ReplicaStatus]
    #: Length of the interval over which the loads are averaged; 0: no loads are known yet.
    seconds: float
    #: ``first`` of the next page; None: this is the last one.
    following: int | None = None
    #: Replicas on all pages.
    total: int = 0


class History(RequestAnswer, frozen=True):
    """The newest events, the oldest of them first."""

    events: list[Event]
    #: The number of events that the controller keeps.
    kept: int


class MetricsText(RequestAnswer, frozen=True):
    """Metrics in the text format of Prometheus."""

    text: str


class OutputPlace(RequestAnswer, frozen=True):
    """The output of a stage, and the way to the workers that have it."""

    #: That of the query.
    id: str
    name: str | None
    stage: Natural
    stage_name: str
    partitions: Natural
    #: As an Arrow IPC message.
    schema: bytes
    endpoint: str
    nonce: bytes
    #: The secret of the query, masked as ``output_place.masked`` does it.
    masked: bytes
    public_key: bytes
    private_key: bytes
    #: Time for which the controller may be silent.
    silence_max_s: float

    def __repr__(self) -> str:
        return f"<output of stage {self.stage_name} of query {self.id} at {self.endpoint}>"


class Suggested(RequestAnswer, frozen=True):
    """The moves that a policy suggests."""

    policy: str
    moves: list[MoveStatus]
    #: For people.
    notes: list[str]


class Accepted(RequestAnswer, frozen=True):
    """Notice that a request is carried out."""

    #: Its number.
    request: Natural = 0
    #: Its moves, each with its source.
    moves: list[MoveStatus] = []


class Followed(RequestAnswer, frozen=True):
    """State of a request and of the query."""

    asked: RequestStatus
    #: The moves of the request, in its order.
    moves: list[Carried]
    #: That of the query.
    phase: str
    #: That of the query.
    error: str | None


class Refusal(RequestAnswer, frozen=True):
    """Notice that a request is refused and nothing was changed."""

    #: "request" (it could not be read), "usage" (it cannot be carried out) or "failed".
    kind: str
    reason: str


AnyAnswer = (
    PlanStatus | Status | Partitions | History | MetricsText | OutputPlace | Suggested | Accepted | Followed | Refusal
)

_requests: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(AnyRequest)
_answers: msgspec.msgpack.Decoder[AnyAnswer] = msgspec.msgpack.Decoder(AnyAnswer)


def all_partitions(ask: Callable[[GetPartitions], Partitions], stage: str | None = None) -> Partitions:
    """Join all pages. The placement may change between two of them; each partition is shown as it was at one time."""
    page = answer = ask(GetPartitions(stage=stage))
    replicas = list(page.replicas)
    while page.following is not None:
        page = ask(GetPartitions(stage=stage, first=page.following))
        replicas += page.replicas
    return msgspec.structs.replace(answer, replicas=replicas, following=None)


def encode_request(request: Request) -> list[bytes]:
    return [encode(request)]


def decode_request(frames: Sequence[Any]) -> AnyRequest:
    if len(frames) != 1:
        raise ProtocolError(f"a request has one frame, {len(frames)} came")
    return decode(_requests, frames[0], REQUEST_BYTES_MAX)


def decode_answer(frames: Sequence[Any]) -> AnyAnswer:
    if len(frames) != 1:
        raise ProtocolError(f"an answer has one frame, {len(frames)} came")
    return decode(_answers, frames[0], ANSWER_BYTES_MAX)
