"""The requests of people to the controller of a running query, and its answers (design: people).

A request or an answer is one frame in the encoding of all Flux messages (version, length and types are checked). An
answer carries the number of its request. Both travel on a sealed connection whose ends have proved the secret of the
connection file to each other (``flux.wire.handshake``), so nothing from strangers arrives here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec

from controller.report.events import Event
from flux.errors import ProtocolError
from flux.wire.frames import decode, encode
from flux.wire.numbers import Natural
from partitioning.ids import ACTIVE

#: Enough for moves of 10,000 partitions.
REQUEST_BYTES_MAX = 1 << 20
#: Enough for the placement of 100,000 partitions with three replicas each.
ANSWER_BYTES_MAX = 128 << 20
#: Moves of one request.
MOVES_MAX = 10_000

Name = Annotated[str, msgspec.Meta(max_length=256)]


class Request(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of the requests; ``number`` comes back with the answer."""

    number: Natural = 0


class GetStatus(Request, frozen=True):
    """Answered by ``Status``."""


class GetPartitions(Request, frozen=True):
    """Placement and load, of one stage or of all; answered by ``Partitions``: one page, from the partition of number
    ``first`` on, counted through all that are asked for. With ``heaviest``, only so many replicas, by load."""

    stage: Name | None = None
    first: Natural = 0
    heaviest: Annotated[int, msgspec.Meta(ge=1, le=1000)] | None = None


class GetHistory(Request, frozen=True):
    """Take-overs, repairs and moves, of one stage or of all; answered by ``History``."""

    stage: Name | None = None


class GetMetrics(Request, frozen=True):
    """Answered by ``MetricsText``."""


class Suggest(Request, frozen=True):
    """The moves that a policy would make now, by default the configured one; answered by ``Suggested``. Nothing is
    moved."""

    policy: Name = ""


class GetOutput(Request, frozen=True):
    """How to read the output that is kept for readers: of a stage, or of the only one that keeps it; answered by
    ``OutputPlace``."""

    stage: Name | None = None


class WantedMove(msgspec.Struct, frozen=True, kw_only=True):
    """Move the replica on worker ``source`` to ``target``; without a source, the primary."""

    stage: Name
    partition: Natural
    target: Natural
    source: Natural | None = None


class StartMoves(Request, frozen=True):
    """All of them or none; answered by ``Accepted`` when they are planned, not when they are done."""

    moves: Annotated[list[WantedMove], msgspec.Meta(min_length=1, max_length=MOVES_MAX)]
    why: Name


class DrainWorker(Request, frozen=True):
    """Move everything away from a worker; answered by ``Accepted`` at once."""

    worker: Natural


class FailWorker(Request, frozen=True):
    """Treat a worker as lost, for rehearsals; answered by ``Accepted`` at once."""

    worker: Natural


class SetWorkers(Request, frozen=True):
    """Run with this number of workers from now on; answered by ``Accepted`` at once."""

    workers: Annotated[int, msgspec.Meta(ge=1, le=4096)]


class ProtectStage(Request, frozen=True):
    """Have the partitions of a stage with so many replicas, of other kinds, from now on; None: as it is. Answered by
    ``Accepted`` at once."""

    stage: Name
    replicas: Natural | None = None
    recovery: Name | None = None


class Follow(Request, frozen=True):
    """How the request with this number stands; answered by ``Followed``."""

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
    | Follow
)


class Answer(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of the answers; ``number`` is that of the request."""

    number: Natural = 0


class StageStatus(msgspec.Struct, frozen=True, kw_only=True):
    """``replicas``: wanted; ``safe``: safe replicas of the partition that has the fewest; ``short``: partitions with
    fewer replicas than wanted. Latencies are those of the slowest worker. ``sink``: where the output goes and what that
    guarantees, empty without one; ``sink_bytes``: output that it does not have yet; ``wait_for_sink``: partitions that it
    holds back. ``recovery``: "active" or "standby", as is wished now; ``active``, ``standbys``: replicas that there are, in
    all partitions. Of standbys: bytes of their checkpoints, seconds that the oldest lacks, and seconds that it would take to
    repeat these. ``kept_bytes``: rows for the stage in producers' logs; ``loss_s``: what the loss of a worker would cost now,
    by estimate, None: the query, or nothing is known yet."""

    name: str
    partitions: int
    finished: int
    replicas: int
    safe: int
    short: int
    rows_in: int
    rows_out: int
    rows_per_s: float
    queued: int
    p50_ms: float | None = None
    p99_ms: float | None = None
    sink: str = ""
    sink_bytes: int = 0
    wait_for_sink: int = 0
    recovery: str = ACTIVE
    checkpoint_bytes: int = 0
    checkpoint_behind_s: float = 0.0
    replay_s: float = 0.0
    active: int = 0
    standbys: int = 0
    kept_bytes: int = 0
    loss_s: float | None = None


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """``load``: seconds per second spent applying rows; ``cpu``: seconds per second of its process; ``leaving``: it is
    being emptied."""

    worker: int
    slot: int
    host: str
    pid: int
    executor: str
    primaries: int
    replicas: int
    rows_in: int
    rows_per_s: float
    queued: int
    load: float
    cpu: float
    rss_bytes: int
    log_bytes: int
    leaving: bool = False


class MoveStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A move that is suggested, planned or under way. ``gain``: by how much the higher load of the two workers falls;
    ``cost``: bytes of state to copy; ``phase``: "waiting" before its first step."""

    stage: str
    partition: int
    source: int
    target: int
    gain: float = 0.0
    cost: int = 0
    phase: str = "waiting"


class Carried(msgspec.Struct, frozen=True, kw_only=True):
    """A move of a request. ``event``: with which it ended; None: it has not ended."""

    move: MoveStatus
    done: bool
    event: Event | None = None

    def __str__(self) -> str:
        return f"{self.move.stage}/{self.move.partition} from worker {self.move.source} to worker {self.move.target}"


class RequestStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How the request of number ``request`` stands. ``what``: its name in sentences; ``state``: "waiting", "under way",
    "done" or "given up"; ``why``: reason for giving it up; ``left``: the rest of the work, in words; ``done`` of
    ``total`` moves, replicas or workers."""

    request: int
    what: str
    state: str
    why: str
    left: str
    done: int
    total: int

    @property
    def over(self) -> bool:
        return self.state in ("done", "given up")


class RepairStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that is being added. ``phase``: "retain", "ready", "copy", "follows" or "live" (design: add-replica)."""

    stage: str
    partition: int
    worker: int
    phase: str
    why: str


class KeptStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint location holds: ``bytes`` of checkpoints, the oldest ``behind_s`` behind its partition; ``replay_s``: how
    long the repetition would take of what came after them."""

    bytes: int
    behind_s: float
    replay_s: float


class UnreadFiles(msgspec.Struct, frozen=True):
    """Files of one source that are incomplete, missing or corrupt: how many, and the reasons for some of them by name."""

    count: int
    files: dict[str, str]


class Status(Answer, frozen=True):
    """``started`` in seconds since 1970; ``uptime_s`` since then; ``missing_slots``: of workers that are still to join;
    ``balancing``: partitions move for balance; ``evening_out``: workers have joined that do not have their share of the
    partitions yet; ``requests``: those that are not over; ``metrics``: address of the Prometheus metrics, empty if they
    are not served; ``copies_on``: how far apart the replicas of each partition are, such as "different hosts";
    ``checkpoint``: of a query with a checkpoint location; ``source_lags``: records that are still to be read, of sources that
    know it; ``bad_records``: of sources that have met some, how many did not fit their format; ``not_read``: of sources
    that have got more since the start, names of that; ``unread_files``: by source and what is wrong, files of which rows are not
    read."""

    id: str
    name: str | None
    application: str
    pid: int
    phase: str
    error: str | None
    started: float
    uptime_s: float
    epoch: int
    rows_in: int
    rows_per_s: float
    backlog_slices: int
    backlog_bytes: int
    take_overs: int
    repairs: int
    moves: int
    stall_ms_max: float
    metrics: str
    stages: list[StageStatus]
    workers: list[WorkerStatus]
    moves_pending: list[MoveStatus]
    repairs_under_way: list[RepairStatus]
    missing_slots: list[int]
    balancing: bool
    evening_out: bool
    copies_on: str = ""
    requests: list[RequestStatus] = []
    checkpoint: KeptStatus | None = None
    source_lags: dict[str, int] = {}
    bad_records: dict[str, int] = {}
    not_read: dict[str, list[str]] = {}
    unread_files: dict[str, dict[str, UnreadFiles]] = {}


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """``role``: "primary", "secondary", "standby", "new" (not live yet); ``kind``: "active" or "standby"; ``movable``:
    see ``balance.load``; ``safe``: it could take over; ``behind``: steps that it would have to apply before, if it does not
    count as safe for this reason. Of a standby, ``state_bytes`` is the size of its newest checkpoint, and
    ``checkpoint_behind_s`` are the seconds that this lacks."""

    stage: str
    partition: int
    worker: int
    role: str
    safe: bool
    load: float
    queued: int
    state_bytes: int
    rows_per_s: float
    movable: bool
    behind: int = 0
    kind: str = ACTIVE
    checkpoint_behind_s: float | None = None


class Partitions(Answer, frozen=True):
    """``seconds``: length of the interval that the loads are averages of; 0: no loads are known yet. ``following``:
    ``first`` of the next page, None after the last; ``total``: replicas on all pages."""

    replicas: list[ReplicaStatus]
    seconds: float
    following: int | None = None
    total: int = 0


class History(Answer, frozen=True):
    """The oldest first; only the newest ``kept`` are known."""

    events: list[Event]
    kept: int


class MetricsText(Answer, frozen=True):
    """In the text format of Prometheus."""

    text: str


class OutputPlace(Answer, frozen=True):
    """Output of a stage of the query ``id``, and how to reach those who have it: with the secret of the query, ``masked`` as
    ``output_place`` does it. ``schema``: as an Arrow IPC message; ``silence_max_s``: how long the controller may be silent."""

    id: str
    name: str | None
    stage: Natural
    stage_name: str
    partitions: Natural
    schema: bytes
    endpoint: str
    nonce: bytes
    masked: bytes
    public_key: bytes
    private_key: bytes
    silence_max_s: float

    def __repr__(self) -> str:
        return f"<output of stage {self.stage_name} of query {self.id} at {self.endpoint}>"


class Suggested(Answer, frozen=True):
    policy: str
    moves: list[MoveStatus]
    notes: list[str]


class Accepted(Answer, frozen=True):
    """The request is carried out under the number ``request``. ``moves``: those asked for, each with its source."""

    request: Natural = 0
    moves: list[MoveStatus] = []


class Followed(Answer, frozen=True):
    """``phase`` and ``error`` of the query; ``moves`` of the request, in the order in which they were asked for."""

    asked: RequestStatus
    moves: list[Carried]
    phase: str
    error: str | None


class Refused(Answer, frozen=True):
    """Nothing was changed. ``kind``: "request" (it could not be read), "usage" (it cannot be carried out) or
    "failed"."""

    kind: str
    reason: str


AnyAnswer = Status | Partitions | History | MetricsText | OutputPlace | Suggested | Accepted | Followed | Refused

_requests: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(AnyRequest)
_answers: msgspec.msgpack.Decoder[AnyAnswer] = msgspec.msgpack.Decoder(AnyAnswer)


def all_partitions(ask: Callable[[GetPartitions], Partitions], stage: str | None = None) -> Partitions:
    """All pages as one. The placement may change between two of them; each partition is shown as it was at one time."""
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
