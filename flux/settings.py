"""Every setting in one typed table: key, default with unit, meaning (design: settings).

Settings are read from ``spark.flux.*``. A keyword overrides each of them, and its name follows from the key: dots become
underscores, and a capital becomes an underscore and a small letter. ``spark.flux.log.maxBytes`` is ``log_max_bytes="64m"``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from flux import failure_domain
from flux.arguments import FEEDS, nearest
from flux.errors import UsageError

PREFIX = "spark.flux."
#: A message must have room for this many batches of the largest size, because a batch travels in one message, with lengths, names
#: and padding beside its rows.
BATCHES_IN_MESSAGE = 2
_BYTES = {"": 1, "b": 1, "k": 1 << 10, "kb": 1 << 10, "m": 1 << 20, "mb": 1 << 20, "g": 1 << 30, "gb": 1 << 30}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Setting:
    """One row of the table. ``name`` is the attribute of Settings. ``kind`` is "bytes", "seconds", "int", "number",
    "bool", "labels" or "text"; bounds are inclusive."""

    name: str
    key: str
    kind: str
    default: str
    meaning: str
    at_least: float | None = None
    at_most: float | None = None

    @property
    def keyword(self) -> str:
        """Return the key with dots as underscores and each capital as an underscore and a small letter."""
        return re.sub("[A-Z]", lambda capital: f"_{capital[0].lower()}", self.key.replace(".", "_"))


TABLE = (
    Setting("workers", "workers", "int", "0", "workers to start; 0: one per free task slot, or one per two where Spark tasks read the input or fetch the output", 0, 4096),
    Setting("partitions", "partitions", "int", "32", "partitions of a stage that does not name a number", 1, 4096),
    Setting("replicas", "replicas", "int", "1", "replicas of each partition of a stage that does not name a number, the primary included", 1, 3),
    Setting("workers_timeout", "workers.timeout", "seconds", "60s", "how long to wait for all workers to join", 0.001),
    Setting("log_max_bytes", "log.maxBytes", "bytes", "256m", "bytes of log that one process may hold, shared by its streams", 1 << 10),
    Setting("source_log_bytes", "source.logBytes", "bytes", "24m", "most bytes of log per partition of a source in the workers; more would only push rows out of the CPU caches", 1 << 10),
    Setting("memory_keep_bytes", "memory.keepBytes", "bytes", "256m", "freed memory that a worker keeps for reuse instead of returning it, because fresh memory is slow to touch (glibc only)", 0),
    Setting("credit_max_bytes", "credit.maxBytes", "bytes", "128m", "bytes that all producers together may have under way to one worker", 1 << 10),
    Setting("batch_max_rows", "batch.maxRows", "int", "131072", "most rows of one batch; larger ones are split", 1, 1 << 24),
    Setting("batch_max_bytes", "batch.maxBytes", "bytes", "8m", "most bytes of one batch; larger ones are split; half of message.maxBytes at most", 1 << 10),
    Setting("message_max_bytes", "message.maxBytes", "bytes", "256m", "largest frame accepted on a data port", 1 << 12),
    Setting("step_max_rows", "step.maxRows", "int", "16384", "slices that wait are joined to one step of up to this many rows, fewer where the operator takes long for them", 1),
    Setting("ack_interval", "ack.interval", "seconds", "5ms", "longest delay of an acknowledgement, but for a worker that small batches keep busy", 0),
    Setting("resend_timeout", "resend.timeout", "seconds", "1s", "a stream repeats its handshake after this long without an acknowledgement", 0.001),
    Setting("link_timeout", "link.timeout", "seconds", "300ms", "a worker to which rows or a watermark do not come for this long, though another replica of their producer has them, reads them from that one", 0.01),
    Setting("link_unreached", "link.unreached", "seconds", "5s", "a primary to which rows, or acks of its output, have not come for this long, though another safe replica of its partition has them, leaves the lead to that one", 0.1),
    Setting("watermark_interval", "watermark.interval", "seconds", "50ms", "longest time for which a watermark that ends no window waits before it is passed on", 0.001),
    Setting("watermark_warn_after", "watermark.warnAfter", "seconds", "30s", "a watermark that stands still for this long while rows come is told in history and log, once", 0.001),
    Setting("watermark_drift", "watermark.drift", "seconds", "0s", "event time by which a partition of a source may be ahead of the one that is farthest behind before it waits for it; 0s: it never waits", 0),
    Setting("availability", "availability", "seconds", "0s", "longest time from a row's coming to a result with it, also while an input is missing: results are tentative then, and corrected when it is back; 0s: they wait", 0, 86400),
    Setting("availability_failure", "availability.failure", "process, delay or suspend", "process", "tentative results while an input is missing: process gives them soon, delay as late as the bound allows, suspend gives none but the first"),
    Setting("availability_stabilization", "availability.stabilization", "process, delay or suspend", "process", "the same from the return of the input until all is corrected"),
    Setting("availability_max_bytes", "availability.maxBytes", "bytes", "64m", "bytes of tentative rows that a worker keeps; beyond it the oldest are dropped, and stable results are not touched", 1 << 10),
    Setting("availability_overflow", "availability.overflow", "stop or forfeit", "stop", "state beyond availability.maxState while an input is missing: stop lets the other inputs stand still, forfeit closes windows without it, for good"),
    Setting("availability_max_state", "availability.maxState", "bytes", "0", "bytes of state of one worker while an input is missing; 0: no limit", 0),
    Setting("feeds", "feeds", "one, hedged or all", "one", "the copies of a stage that the stages behind it read: one, a second one while nothing comes from the first (hedged), or all; for stages that do not say it"),
    Setting("heartbeat_interval", "heartbeat.interval", "seconds", "100ms", "how often a worker reports to the controller", 0.001),
    Setting("heartbeat_timeout", "heartbeat.timeout", "seconds", "500ms", "a worker that is silent for this long is given up", 0.01),
    Setting("heartbeat_last_timeout", "heartbeat.lastReplicaTimeout", "seconds", "60s", "the same limit for a worker that holds the last safe replica of a partition; a standby is a safe replica, and so is a checkpoint location", 0.01),
    Setting("on_failure", "onFailure", "query or stage", "query", "an error of your code, a sink that gives up, or the loss of all replicas of a partition ends the query, or only the stage with all that depends on it"),
    Setting("step_timeout", "step.timeout", "seconds", "60s", "a worker that spends this long in one step of your code, or waiting for a source, is given up", 0.01),
    Setting("same_executor", "replicas.allowSameExecutor", "bool", "false", "whether replicas of a partition may share an executor if there are too few executors; unless set, true with local[N], which has only one"),
    Setting("domain", "domain", "labels", "", "racks or zones, to keep replicas of a partition apart: the name of an environment variable on the executors, or host=label,host=label"),
    Setting("ordered", "replicas.ordered", "bool", "true", "false only to measure the cost of the order log: replicas drift apart, and faults lose rows"),
    Setting("replicas_max_steps_behind", "replicas.maxStepsBehind", "int", "1024", "a replica more than this many steps behind its primary is reported and does not count as safe; timers wait for it", 1),
    Setting("replicas_max_replay", "replicas.maxReplay", "seconds", "2s", "the same for a replica that would need longer than this, by estimate, to apply its missing steps after a take-over", 0.001),
    Setting("order_max_steps", "order.maxSteps", "int", "65536", "a primary orders nothing more while another replica has this many steps still to apply", 1),
    Setting("repairs_at_once", "repair.atOnce", "int", "1", "how many partitions of a stage are copied at the same time, for repairs or moves", 1, 1024),
    Setting("checkpoint_interval", "checkpoint.interval", "seconds", "1s", "how often a standby gets a new checkpoint of its partition, unless there is need before", 0.001),
    Setting("checkpoint_max_bytes_per_second", "checkpoint.maxBytesPerSecond", "bytes", "64m", "most bytes of state that a worker sends to standbys per second, on average; where logs are short of room, checkpoints are not held up", 1 << 10),
    Setting("checkpoint_policy", "checkpoint.policy", "round-robin or min-max", "round-robin", "which checkpoint is next if not all can leave at once: round-robin (the oldest is renewed first), or min-max (first where a loss would cost most time per byte to copy)"),
    Setting("journal_timeout", "journal.timeout", "seconds", "30s", "a query with a checkpoint location ends when that has not answered for this long", 0.1),
    Setting("journal_flush", "journal.flush", "seconds", "0s", "how long what goes into a checkpoint location waits for more, so that one flush of the disk is for all of it; output waits as long. Unless set, 500ms in an object store", 0, 1),
    Setting("balance_enabled", "balance.enabled", "bool", "true", "whether partitions move from busy workers to others while the query runs"),
    Setting("balance_policy", "balance.policy", "text", "pairing", "the policy that suggests moves: pairing (by load), even (by number of partitions), or your own"),
    Setting("balance_round", "balance.round", "seconds", "1s", "how often the policy looks at the load; with more than 16,000 replicas less often", 0.01),
    Setting("balance_threshold", "balance.threshold", "number", "0.1", "a pair of workers moves partitions only if that can lower the higher load of the two by more than this fraction", 0, 1),
    Setting("balance_cool_down", "balance.coolDown", "seconds", "5s", "for this long after a move, the partition stays, its old worker receives no partition, and its new worker gives none away", 0),
    Setting("balance_max_moves", "balance.maxMoves", "int", "1", "most moves that one round may begin", 1, 1024),
    Setting("balance_max_bytes_per_second", "balance.maxBytesPerSecond", "bytes", "64m", "most bytes of state that moves copy per second, on average; a worker that leaves is emptied without this limit", 1 << 10),
    Setting("controller_timeout", "controller.timeout", "seconds", "60s", "a worker that has heard nothing from the controller for this long ends", 0.1),
    Setting("progress_interval", "progress.interval", "seconds", "1s", "how often query.lastProgress is renewed", 0.01),
    Setting("change_timeout", "change.timeout", "seconds", "30s", "how long an addition to a running query, or a removal, may take until every process has confirmed it; after that nothing is changed", 0.1),
    Setting("stop_timeout", "stop.timeout", "seconds", "20s", "how long stop() waits for workers before it cancels their tasks", 0),
    Setting("operate", "operate", "bool", "true", "whether the flux command can see and change the query, through a file that only its owner can read"),
    Setting("metrics_port", "metrics.port", "int", "-1", "port on which Prometheus metrics are served over HTTP; 0: any free port, -1: off", -1, 65535),
    Setting("metrics_host", "metrics.host", "text", "127.0.0.1", "address on which metrics are served; the default can be reached from this machine only"),
    Setting("lookup_max_bytes", "lookup.maxBytes", "bytes", "64m", "largest table of a DataFrame that goes into every worker, in a join without ttl", 1),
    Setting("egress_memory", "egress.memoryBytes", "bytes", "64m", "collected output that a worker keeps in memory; the rest goes to a temporary file", 0),
    Setting("sink_max_bytes", "sink.maxBytes", "bytes", "128m", "bytes of output that a partition keeps for its sink; beyond that, its stage waits", 1 << 10),
    Setting("sink_retry_timeout", "sink.retryTimeout", "seconds", "60s", "how long a call of a sink that fails with a transient error is repeated", 0),
    Setting("files_bad_after", "files.badAfter", "seconds", "10m", "a file of `flux.files` that has stayed as it is for this long without being complete, as one with a damaged footer, ends the query, or is left out with `ignoreCorruptFiles`", 0.1),
    Setting("encrypt", "encrypt", "text", "auto", "CURVE encryption of all connections except lifelines: true, false, or auto (on unless the master is local)"),
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Parsed values: bytes as int, durations in seconds. TABLE has the meaning of each."""

    workers: int
    partitions: int
    replicas: int
    workers_timeout: float
    log_max_bytes: int
    source_log_bytes: int
    memory_keep_bytes: int
    credit_max_bytes: int
    batch_max_rows: int
    batch_max_bytes: int
    message_max_bytes: int
    step_max_rows: int
    ack_interval: float
    resend_timeout: float
    link_timeout: float
    link_unreached: float
    watermark_interval: float
    watermark_warn_after: float
    watermark_drift: float
    availability: float
    availability_failure: str
    availability_stabilization: str
    availability_max_bytes: int
    availability_overflow: str
    availability_max_state: int
    feeds: str
    heartbeat_interval: float
    heartbeat_timeout: float
    heartbeat_last_timeout: float
    on_failure: str
    step_timeout: float
    same_executor: bool
    domain: str
    ordered: bool
    replicas_max_steps_behind: int
    replicas_max_replay: float
    order_max_steps: int
    repairs_at_once: int
    checkpoint_interval: float
    checkpoint_max_bytes_per_second: int
    checkpoint_policy: str
    journal_timeout: float
    journal_flush: float
    balance_enabled: bool
    balance_policy: str
    balance_round: float
    balance_threshold: float
    balance_cool_down: float
    balance_max_moves: int
    balance_max_bytes_per_second: int
    controller_timeout: float
    progress_interval: float
    change_timeout: float
    stop_timeout: float
    operate: bool
    metrics_port: int
    metrics_host: str
    lookup_max_bytes: int
    egress_memory: int
    sink_max_bytes: int
    sink_retry_timeout: float
    files_bad_after: float
    encrypt: str

    @classmethod
    def of(cls, conf: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
        """Read settings. ``conf`` has whole keys (``spark.flux.workers``); keys of others are ignored, unknown ``spark.flux.``
        keys are an error. UsageError names the key, the value and the accepted values."""
        given = {key[len(PREFIX) :]: value for key, value in (conf or {}).items() if key.startswith(PREFIX)}
        by_key = {setting.key: setting for setting in TABLE}
        keywords = {setting.keyword for setting in TABLE}
        for key in given:
            if key not in by_key:
                raise UsageError(
                    f"unknown setting {PREFIX}{key}{nearest(key, by_key, PREFIX)}; known are, behind {PREFIX}, "
                    f"{', '.join(sorted(by_key))}"
                )
        for name in overrides:
            if name not in keywords:
                raise UsageError(
                    f"unknown option {name!r}{nearest(name, keywords)}; known are {', '.join(sorted(keywords))}"
                )
        values = {}
        for setting in TABLE:
            raw = overrides.get(setting.keyword)
            values[setting.name] = parse(setting, given.get(setting.key, setting.default) if raw is None else raw)
        said = overrides.get("batch_max_bytes") is not None or "batch.maxBytes" in given
        values["batch_max_bytes"] = _batch_bytes(values["batch_max_bytes"], values["message_max_bytes"], said)
        return cls(**values)


def _batch_bytes(batch: int, message: int, said: bool) -> int:
    """Return the limit of a batch beside that of a message. UsageError if the user has set one that does not fit."""
    most = message // BATCHES_IN_MESSAGE
    if batch > most and said:
        raise UsageError(
            f"{PREFIX}batch.maxBytes: a batch of {batch:,} bytes does not fit into a message of {PREFIX}message.maxBytes "
            f"({message:,}); at most half of it, {most:,}, is accepted"
        )
    return min(batch, most)


def parse(setting: Setting, raw: Any) -> Any:
    key = PREFIX + setting.key
    try:
        value = _PARSERS[setting.kind](raw)
    except (ValueError, TypeError, KeyError):
        raise UsageError(f"{key}: cannot read {raw!r} as {setting.kind}, for example {setting.default!r}") from None
    low, high = setting.at_least, setting.at_most
    if low is not None and value < low:
        raise UsageError(f"{key}: {raw!r} is out of range, at least {low:g} is accepted")
    if high is not None and value > high:
        raise UsageError(f"{key}: {raw!r} is out of range, at most {high:g} is accepted")
    return value


def parse_bytes(what: str, raw: Any) -> int:
    """Read bytes as in a setting: 1024, or "64m". The UsageError for a wrong value names ``what``."""
    return int(_parsed(what, raw, "bytes", "64m"))


def parse_seconds(what: str, raw: Any) -> float:
    """Read seconds as in a setting: 0.5, or "10s". The UsageError for a wrong value names ``what``."""
    return float(_parsed(what, raw, "seconds", "10s"))


def _parsed(what: str, raw: Any, kind: str, example: str) -> Any:
    try:
        return _PARSERS[kind](raw)
    except (ValueError, TypeError, KeyError):
        raise UsageError(f"{what}: cannot read {raw!r} as {kind}, for example {example!r}") from None


def _quantity(raw: Any, units: Mapping[str, float]) -> float:
    if isinstance(raw, int | float) and not isinstance(raw, bool):
        if not math.isfinite(raw):
            raise ValueError(raw)
        return raw
    match = re.fullmatch(r"\s*(-?[0-9.]+)\s*([a-zA-Z]*)\s*", raw)
    if match is None:
        raise ValueError(raw)
    value = float(match[1]) * units[match[2].lower()]
    return value + 0.0  # no -0


def _whole(raw: Any) -> int:
    if isinstance(raw, bool) or (isinstance(raw, float) and not raw.is_integer()):
        raise ValueError(raw)  # int() takes both, and rounds them
    return int(raw)


def _number(raw: Any) -> float:
    value = float(raw)
    if isinstance(raw, bool) or not math.isfinite(value):
        raise ValueError(raw)
    return value


def _labels(raw: Any) -> str:
    if not isinstance(raw, str):
        raise TypeError(raw)
    failure_domain.parse(raw)
    return raw


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "int": _whole,
    "number": _number,
    "text": str,
    "labels": _labels,
    "bool": lambda raw: {"true": True, "false": False}[str(raw).lower()],
    "round-robin or min-max": lambda raw: {"round-robin": "round-robin", "min-max": "min-max"}[str(raw).lower()],
    "process, delay or suspend": lambda raw: {each: each for each in ("process", "delay", "suspend")}[str(raw).lower()],
    "query or stage": lambda raw: {"query": "query", "stage": "stage"}[str(raw).lower()],
    "one, hedged or all": lambda raw: {each: each for each in FEEDS}[str(raw).lower()],
    "stop or forfeit": lambda raw: {"stop": "stop", "forfeit": "forfeit"}[str(raw).lower()],
    "bytes": lambda raw: int(_quantity(raw, _BYTES)),
    "seconds": lambda raw: float(_quantity(raw, {**_SECONDS, "": 1.0})),
}

assert [setting.name for setting in TABLE] == [field.name for field in fields(Settings)]
