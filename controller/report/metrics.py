"""The metrics of one query for Prometheus: counters, gauges, and a histogram of stalls.

The metrics are served over HTTP: one server for all queries of this process with the same address.
"""

from __future__ import annotations

import bisect
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from controller.replicas.addition_tracker import Event
from controller.report.progress import Level
from flux.dataflow.plan import Plan
from flux.errors import UsageError
from partitioning.ids import ACTIVE, STANDBY


class Address(NamedTuple):
    """An address of the settings. Port 0 stands for any free port."""

    host: str
    port: int


#: The servers of this process, by the address of the settings.
_served: dict[Address, MetricsServer] = {}
#: Held while a query is added to ``_served`` or removed: queries start and end in threads of their own.
_lock = threading.Lock()


class MetricsServer(Collector):
    """Server of GET /metrics for the queries that are running.

    It is off by default, and listens on this machine only, unless the settings say otherwise: the metrics show names of
    stages and hosts, and there is no password."""

    def __init__(self, host: str, port: int) -> None:
        self._queries: tuple[Metrics, ...] = ()
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(port, host, registry)
        self._thread.name = "flux-metrics"
        bracketed = f"[{host}]" if ":" in host else host
        self.address = f"http://{bracketed}:{self._server.server_port}/metrics"

    def collect(self) -> list[Metric]:
        return merged(query.collect() for query in self._queries)

    def add(self, query: Metrics) -> None:
        self._queries = (*self._queries, query)

    def remove(self, query: Metrics) -> bool:
        """Remove a query, and tell whether any query is left."""
        self._queries = tuple(other for other in self._queries if other is not query)
        return bool(self._queries)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(host: str, port: int, query: Metrics) -> str:
    """Serve the query's metrics, and return their address. Port 0 is any free port, the same for all queries of this
    process. UsageError: this process cannot listen there."""
    with _lock:
        asked_for = Address(host, port)
        server = _served.get(asked_for)
        if server is None:
            try:
                server = _served[asked_for] = MetricsServer(host, port)
            except OSError as error:
                raise UsageError(
                    f"metrics cannot be served at {host}:{port} ({error.strerror or error}): choose another "
                    "spark.flux.metrics.port (0: any free one, -1: off), or another spark.flux.metrics.host"
                ) from error
        server.add(query)
        return server.address


def withdraw(query: Metrics) -> None:
    """Stop serving a query that has ended. A server ends with its last query."""
    closing: list[Any] = []
    with _lock:
        for where, server in list(_served.items()):
            if not server.remove(query):
                closing.append(_served.pop(where))
        for server in closing:
            server.close()


#: Upper bounds in seconds: from stalls that no person notices to stalls that every person notices.
STALL_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
PHASES = ("starting", "running", "finished", "ended")
#: Kinds of events that have a counter of their own.
COUNTED = {
    "take-over": ("flux_take_overs", "Partitions taken over by another replica"),
    "repair": ("flux_repairs", "Replicas added because there were too few"),
    "move": ("flux_moves", "Replicas moved to another worker"),
    "divergence": ("flux_divergences", "Replicas that gave other output than their primary"),
    "protected": ("flux_protections_changed", "Changes of the number or the kinds of replicas that are done"),
}
#: The worker's counter of a refusal -> name and meaning of the metric.
REFUSALS = {
    "duplicate": ("flux_duplicates_refused", "Slices of batches that had been taken before"),
    "stale": ("flux_stale_dropped", "Messages of an earlier handshake, life or epoch"),
    "gap": ("flux_gaps", "Messages that came after one that was lost"),
    "malformed": ("flux_malformed_refused", "Messages that could not be read"),
    "refused": (
        "flux_unauthenticated_refused",
        "Messages without proof of the secret, or that no process of the query sends",
    ),
}


class Tally:
    """Sums of counts over workers, each of which only grows. The counts of a lost worker stay in the sum."""

    def __init__(self) -> None:
        self._last: dict[int, dict[str, float]] = {}  # worker -> its counts
        self.total: Counter[str] = Counter()

    def count(self, worker: int, counts: Mapping[str, float]) -> None:
        last = self._last.setdefault(worker, {})
        for name, value in counts.items():
            before = last.get(name, 0)
            if value > before:
                self.total[name] += value - before  # type: ignore[assignment]
                last[name] = value

    def forget_all_but(self, workers: Iterable[int]) -> None:
        """Keep only the sum for workers that are gone. Their ids are never used again."""
        alive = set(workers)
        self._last = {worker: counts for worker, counts in self._last.items() if worker in alive}


class Happened(NamedTuple):
    """A kind of event, and its stage; empty for an event of a worker or the query."""

    kind: str
    stage: str


class Metrics(Collector):
    """The metrics of one query. The controller's thread calls ``note`` for every event and ``observe`` now and then; any
    thread may call ``collect`` and ``text``.

    A snapshot of ``observe`` never changes, so any thread may read the newest one. Law: a counter never falls while the
    query runs, although workers come and go and take their counts with them."""

    def __init__(self, plan: Plan, query_id: str, name: str | None) -> None:
        self.events: Counter[Happened] = Counter()
        self.stall_ms_max = 0.0
        self._plan = plan
        self._names = {"query": name or query_id, "id": query_id}
        self._refusals = Tally()
        self._moved_bytes = 0
        self._stalls: dict[str, list[int]] = {}
        self._stall_sums: Counter[str] = Counter()
        self._snapshot: list[Metric] = []

    # ---- the controller's thread

    def follow(self, plan: Plan) -> None:
        """Go by another version of the plan. Counters of stages that are gone are not shown any more."""
        self._plan = plan

    def note(self, event: Event) -> None:
        self.events[Happened(event.kind, event.stage)] += 1
        if event.kind in ("repair", "move"):
            seconds = event.stall_ms / 1e3
            self.stall_ms_max = max(self.stall_ms_max, event.stall_ms)
            buckets = self._stalls.setdefault(event.kind, [0] * (len(STALL_BUCKETS_S) + 1))
            buckets[bisect.bisect_left(STALL_BUCKETS_S, seconds)] += 1
            self._stall_sums[event.kind] += seconds  # type: ignore[assignment]
        if event.kind == "move":
            self._moved_bytes += getattr(event, "bytes", 0)

    def happened(self, kind: str) -> int:
        return sum(count for known, count in self.events.items() if known.kind == kind)

    def count(self, report: dict[str, Any]) -> None:
        """Count the refusals of the workers in a progress report. Each report is counted, because a lost worker is in none of
        the later ones."""
        workers = report["workers"]
        for worker in workers:
            self._refusals.count(worker["id"], worker["counters"])
        self._refusals.forget_all_but(worker["id"] for worker in workers)

    def observe(
        self,
        phase: str,
        report: dict[str, Any] | None,
        levels: list[Level],
        busy: Mapping[int, float],
        moves_pending: int,
        refused: int,
    ) -> None:
        """Take a snapshot. ``report`` is the newest progress report, None before the first; ``busy`` has, by worker, the
        seconds per second in which it applies rows; ``refused`` is the number of refused requests."""
        if report is None:
            self._snapshot = [self._of_phase(phase)]
            return
        self.count(report)
        workers = report["workers"]
        self._snapshot = [
            self._of_phase(phase),
            *self._of_query(report, moves_pending, refused),
            *self._of_sources(report["sources"]),
            *self._of_stages(report["stages"], levels),
            *self._of_event_time(report["stages"]),
            *self._of_availability(report.get("availability")),
            self._one(
                "flux_links_down", "Links between workers over which nothing comes", float(len(report.get("links", ())))
            ),
            *self._of_feeds(report.get("feeds", ())),
            *self._of_workers(workers, busy),
            *self._of_events(),
        ]

    def _of_phase(self, phase: str) -> Metric:
        phases = self._gauge("flux_query_phase", "1 for the phase that the query is in", "phase")
        for known in PHASES:
            self._add(phases, float(known == phase), known)
        return phases

    def _of_query(self, report: dict[str, Any], moves: int, refused: int) -> list[Metric]:
        backlog, plan = report["backlog"], report.get("plan", {})
        return [
            self._one("flux_epoch", "Number of the newest table of replicas", report["epoch"]),
            self._count("flux_source_rows", "Rows read from sources", report["totalInputRows"]),
            self._one("flux_source_rows_per_second", "Rows read, of the last interval", report["inputRowsPerSecond"]),
            self._one("flux_backlog_slices", "Slices that wait to be applied", backlog["slices"]),
            self._one("flux_backlog_bytes", "Bytes in the logs of producers", backlog["bytes"]),
            self._one("flux_workers", "Workers that take part", len(report["workers"])),
            self._one("flux_moves_pending", "Moves planned or under way", moves),
            self._one(
                "flux_repairs_under_way", "Replicas that are being added", len(report.get("repairsUnderWay", ()))
            ),
            self._one("flux_plan_version", "Number of the newest version of the plan", plan.get("version", 0)),
            self._one("flux_failed_stages", "Stages that have failed", len(plan.get("failedStages", ()))),
            self._count("flux_plan_changes", "Changes of the plan that are running", self.happened("plan")),
            self._count("flux_requests_refused", "Requests of people that were refused", refused),
        ]

    def _of_sources(self, sources: list[dict[str, Any]]) -> list[Metric]:
        lag = self._gauge("flux_source_lag_records", "Records that are still to be read", "source", "partition")
        bad = self._counter("flux_source_bad_records", "Records that did not fit their format", "source")
        files = self._gauge(
            "flux_source_unread_files", "Files that are incomplete, missing or corrupt", "source", "kind"
        )
        for source in sources:
            for kind, unread in source.get("unreadFiles", {}).items():
                self._add(files, unread["count"], source["name"], kind)
            for partition, records in source.get("lag", {}).get("partitions", {}).items():
                self._add(lag, records, source["name"], partition)
            if "badRecords" in source:
                self._add(bad, source["badRecords"], source["name"])
        late = self._counter("flux_source_late_rows", "Rows that came too late", "source")
        for source in sources:
            if "eventTime" in source:
                self._add(late, source["eventTime"]["lateRows"], source["name"])
        return [lag, bad, files, late]

    def _of_stages(self, stages: list[dict[str, Any]], levels: list[Level]) -> list[Metric]:
        rows_in = self._counter("flux_rows_in", "Rows applied by primaries", "stage")
        rows_out = self._counter("flux_rows_out", "Rows handed on by primaries", "stage")
        rate = self._gauge("flux_rows_per_second", "Rows applied, of the last interval", "stage")
        queued = self._gauge("flux_queued_slices", "Slices that wait to be applied", "stage")
        latency = self._gauge(
            "flux_step_latency_seconds", "Latency of steps on the slowest worker", "stage", "quantile"
        )
        wanted = self._gauge("flux_replicas_wanted", "Wanted replicas of each partition", "stage")
        safe = self._gauge("flux_replicas_safe_min", "Safe replicas of the partition that has the fewest", "stage")
        short = self._gauge("flux_under_replicated_partitions", "Partitions short of replicas", "stage")
        replicas = self._gauge("flux_replicas", "Replicas of each kind", "stage", "kind")
        kept = self._gauge("flux_stage_log_bytes", "Rows for the stage that producers keep in their logs", "stage")
        state = self._gauge("flux_state_bytes", "State of primaries", "stage")
        size = self._gauge("flux_checkpoint_bytes", "Newest checkpoints of its standbys", "stage")
        age = self._gauge(
            "flux_checkpoint_age_seconds", "Time by which the oldest checkpoint of its standbys is behind", "stage"
        )
        loss = self._gauge("flux_loss_seconds", "Estimated cost of a loss now", "stage")
        level_of = dict(zip((stage.name for stage in self._plan.stages), levels, strict=True))
        for stage in stages:
            name = stage["name"]
            if (level := level_of.get(name)) is None:
                continue  # the report is older than the plan, which does not have the stage any more
            self._add(rows_in, stage["rowsIn"], name)
            self._add(rows_out, stage["rowsOut"], name)
            self._add(rate, stage["rowsPerSecond"], name)
            self._add(queued, stage["queued"], name)
            for quantile, value in zip(("0.5", "0.99"), stage["latencyMs"] or (), strict=False):
                self._add(latency, value / 1e3, name, quantile)
            self._add(wanted, level.wanted, name)
            self._add(safe, level.safe, name)
            self._add(short, level.short, name)
            for kind, there in ((ACTIVE, level.active), (STANDBY, level.standbys)):
                self._add(replicas, there, name, kind)
            for gauge, key in (
                (kept, "keptBytes"),
                (state, "stateBytes"),
                (size, "checkpointBytes"),
                (age, "checkpointBehindSeconds"),
                (loss, "lossSeconds"),
            ):
                if stage.get(key) is not None:
                    self._add(gauge, stage[key], name)
        return [rows_in, rows_out, rate, queued, latency, wanted, safe, short, replicas, kept, state, size, age, loss]

    def _of_feeds(self, feeds: Iterable[dict[str, Any]]) -> list[Metric]:
        firsts = self._counter("flux_first_arrivals", "Messages that came first over a feed", "worker", "feed")
        twice = self._counter("flux_duplicate_bytes", "Bytes that had come over another feed", "worker", "feed")
        for entry in feeds:
            names = str(entry["worker"]), str(entry["from"])
            self._add(firsts, entry["firsts"], *names)
            self._add(twice, entry["repeatedBytes"], *names)
        return [firsts, twice]

    def _of_event_time(self, stages: list[dict[str, Any]]) -> list[Metric]:
        lag = self._gauge("flux_watermark_lag_seconds", "Time by which the watermark is behind the clock", "stage")
        behind = self._counter("flux_rows_behind_watermark", "Rows below the watermark, which were left out", "stage")
        without = self._counter("flux_rows_without_time", "Rows without a time, which were left out", "stage")
        forfeited = self._counter(
            "flux_forfeited_rows",
            "Rows left out because windows were closed without them while an input was missing",
            "stage",
        )
        begun = self._counter(
            "flux_partitions_begun_empty",
            "Partitions that have begun empty, because their last replica was lost",
            "stage",
        )
        for stage in stages:
            if "begunEmpty" in stage:
                self._add(begun, stage["begunEmpty"], stage["name"])
            if "eventTime" in stage:
                told, name = stage["eventTime"], stage["name"]
                if "forfeitedRows" in told:
                    self._add(forfeited, told["forfeitedRows"], name)
                if told["lagSeconds"] is not None:
                    self._add(lag, told["lagSeconds"], name)
                self._add(behind, told["rowsBehindWatermark"], name)
                self._add(without, told["rowsWithoutTime"], name)
        return [lag, behind, without, forfeited, begun]

    def _of_availability(self, told: dict[str, Any] | None) -> list[Metric]:
        """Make the metrics of a query with availability; None: it has none."""
        if told is None:
            return []
        silent = self._gauge("flux_silent_partitions", "Partitions of a source that get no answer", "source")
        for source in {each.name for each in self._plan.sources}:
            self._add(silent, sum(each["source"] == source for each in told["silent"]), source)
        tentative = float(told["state"] != "stable")
        return [
            silent,
            self._one("flux_tentative", "1 while results are tentative, because an input is missing", tentative),
            self._one(
                "flux_tentative_windows",
                "Windows with results to be corrected",
                told["windowsToCorrect"],
            ),
            self._count("flux_tentative_rows", "Tentative rows given", told["rowsTentative"]),
            self._count("flux_tentative_revised", "Tentative rows that a correction has changed", told["rowsRevised"]),
        ]

    def _of_workers(self, workers: list[dict[str, Any]], busy: Mapping[int, float]) -> list[Metric]:
        cpu = self._counter("flux_worker_cpu_seconds", "CPU time of the worker's process", "worker")
        rss = self._gauge("flux_worker_rss_bytes", "Resident memory of the worker's process", "worker")
        load = self._gauge("flux_worker_load", "Seconds per second spent applying rows", "worker")
        queued = self._gauge("flux_worker_queued_slices", "Slices that wait to be applied", "worker")
        log = self._gauge("flux_worker_log_bytes", "Bytes in the logs of its producers", "worker")
        for worker in workers:
            name = str(worker["id"])
            self._add(cpu, worker.get("cpuSeconds", 0.0), name)
            self._add(rss, worker["rssBytes"], name)
            self._add(load, busy.get(worker["id"], 0.0), name)
            self._add(queued, worker["queued"], name)
            self._add(log, worker["logBytes"], name)
        return [cpu, rss, load, queued, log]

    def _of_events(self) -> list[Metric]:
        made: list[Metric] = []
        for kind, (name, meaning) in COUNTED.items():
            counter = self._counter(name, meaning, "stage")
            for stage in self._plan.stages:
                self._add(counter, self.events[Happened(kind, stage.name)], stage.name)
            made.append(counter)
        made.append(self._count("flux_moved_bytes", "Bytes of state copied by moves", self._moved_bytes))
        made.append(self._count("flux_workers_lost", "Workers that were given up", self.happened("loss")))
        for refusal, (name, meaning) in REFUSALS.items():
            made.append(self._count(name, meaning, self._refusals.total[refusal]))
        stalls = HistogramMetricFamily(
            "flux_stall_seconds",
            "Time for which a partition stood still for a copy of its state",
            labels=[*self._names, "kind"],
        )
        for kind in ("repair", "move"):
            counts = self._stalls.get(kind, [0] * (len(STALL_BUCKETS_S) + 1))
            running = [sum(counts[: number + 1]) for number in range(len(counts))]
            bounds = [*(str(bound) for bound in STALL_BUCKETS_S), "+Inf"]
            stalls.add_metric(
                [*self._names.values(), kind], list(zip(bounds, running, strict=True)), self._stall_sums[kind]
            )
        return [*made, stalls]

    # ---- any thread

    def collect(self) -> list[Metric]:
        """Return the newest snapshot; it is empty before the first."""
        return self._snapshot

    def text(self) -> str:
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry).decode()

    # ---- families with the labels of this query

    def _counter(self, name: str, meaning: str, *labels: str) -> Metric:
        return CounterMetricFamily(name, meaning, labels=[*self._names, *labels])

    def _gauge(self, name: str, meaning: str, *labels: str) -> Metric:
        return GaugeMetricFamily(name, meaning, labels=[*self._names, *labels])

    def _add(self, family: Any, value: float, *labels: str) -> None:
        family.add_metric([*self._names.values(), *labels], value)

    def _one(self, name: str, meaning: str, value: float) -> Metric:
        family = self._gauge(name, meaning)
        self._add(family, value)
        return family

    def _count(self, name: str, meaning: str, value: float) -> Metric:
        family = self._counter(name, meaning)
        self._add(family, value)
        return family


def merged(snapshots: Iterable[list[Metric]]) -> list[Metric]:
    """Merge the metrics of several queries: each family once, with the samples of all."""
    families: dict[str, Metric] = {}
    for snapshot in snapshots:
        for family in snapshot:
            into = families.get(family.name)
            if into is None:
                into = families[family.name] = Metric(family.name, family.documentation, family.type)
            into.samples.extend(family.samples)
    return list(families.values())
