"""``flux bench``: the benchmarks, run inside Spark executors on this machine."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from controller.operate.cli.output import WIDE

if TYPE_CHECKING:
    from benchmarks.timeline import Report

bench = typer.Typer(help="Benchmarks, run inside Spark executors on this machine.", no_args_is_help=True)


class SourceKind(StrEnum):
    worker = "worker"
    spark = "spark"


class BodyName(StrEnum):
    rows = "rows"
    arrow = "arrow"


class ServeFault(StrEnum):
    kill_gateway = "kill-gateway"
    kill_worker = "kill-worker"


class ShapeName(StrEnum):
    narrow = "narrow"
    wide = "wide"


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Out = Annotated[
    Path | None,
    typer.Option(
        file_okay=False,
        help="Folder for <benchmark>.json and <benchmark>.png: throughput and latency over time, with faults and moves.",
    ),
]
Workers = Annotated[int, typer.Option(min=1, max=64, help="Workers, each in an executor of its own.")]
Replicas = Annotated[int, typer.Option(min=1, max=3, help="Replicas of each partition.")]
Seconds = Annotated[float, typer.Option(min=1, max=3600, help="Time of measurement.")]
Partitions = Annotated[int, typer.Option(min=1, max=4096, help="Partitions of the keyed stage.")]


@bench.command()
def throughput(
    rows: Annotated[int, typer.Option(min=1, help="Rows to read.")] = 60_000_000,
    source: Annotated[SourceKind, typer.Option(help="Reader of the rows: the workers, or Spark.")] = SourceKind.worker,
    workers: Workers = 2,
    partitions: Partitions = 32,
    shape: Annotated[
        ShapeName, typer.Option(help="narrow: 32-byte rows; wide: 8 columns with a string key.")
    ] = ShapeName.narrow,
    replicas: Annotated[
        int,
        typer.Option(
            min=1, max=3, help="Replicas; above 1, runs with 1 replica and with unordered replicas are compared."
        ),
    ] = 1,
    peer: Annotated[
        bool, typer.Option("--peer", help="Also run Spark Structured Streaming over the same files.")
    ] = False,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=100,
            help="Runs, also of the peer; the median counts, of two runs the lower one. (default: 1; 10 with --replicas)",
        ),
    ] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Keyed count and sum over one million keys: rows per second, against Spark's own streaming."""
    from benchmarks import throughput as benchmark

    console = _prepare(as_json, out)
    report = benchmark.run(rows, source.value, workers, peer, shape.value, partitions, console, replicas, rounds)
    _finish(report, console, as_json, out)


@bench.command()
def latency(
    rate: Annotated[int, typer.Option(min=1, help="Rows per second over all sources.")] = 100_000,
    seconds: Seconds = 20,
    workers: Workers = 2,
    partitions: Partitions = 8,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Latency from ingress to egress at a steady rate, through a keyed stage and a sink."""
    from benchmarks import latency as benchmark

    console = _prepare(as_json, out)
    _finish(benchmark.run(rate, seconds, workers, partitions, console), console, as_json, out)


class StageOrder(StrEnum):
    steps = "steps"
    marks = "marks"


class FaultKind(StrEnum):
    kill_executor = "kill-executor"
    kill_worker = "kill-worker"
    pause = "pause"


@bench.command()
def failover(
    fault: Annotated[FaultKind, typer.Option(help="Fault of a worker.")] = FaultKind.kill_executor,
    rate: Annotated[int, typer.Option(min=100, help="Rows per second over all sources.")] = 50_000,
    times: Annotated[int, typer.Option(min=1, max=1000, help="Number of faults, one after the other.")] = 5,
    replicas: Replicas = 2,
    partitions: Partitions = 3,
    peer: Annotated[
        bool, typer.Option("--peer", help="Also kill an executor under Spark Structured Streaming.")
    ] = False,
    oldest_ms: Annotated[
        float | None,
        typer.Option(
            min=1, help="Exit with 1 if a row gets older than this. (default: depends on the fault; kill-worker 400)"
        ),
    ] = None,
    order: Annotated[
        StageOrder | None,
        typer.Option(help="Count windows of 50 ms in replicas with this order, and print the gaps beyond their pace."),
    ] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Faults at a steady rate: gap between outputs, latency, lost and duplicated rows, time to full replication."""
    console = _prepare(as_json, out)
    if order is not None:
        from benchmarks import window_gaps

        report = window_gaps.run(order.value, fault.value, rate, times, replicas, partitions, console)
        _finish(report, console, as_json, out)
        return
    from benchmarks import failover as benchmark

    report = benchmark.run(fault.value, rate, times, replicas, partitions, peer, console, oldest_ms)
    _finish(report, console, as_json, out)


@bench.command()
def move(
    state_mb: Annotated[float, typer.Option(min=0.01, max=4096, help="MiB of state in each partition.")] = 64,
    partitions: Partitions = 8,
    rate: Annotated[int, typer.Option(min=100, help="Rows per second over all sources, in the first part.")] = 20_000,
    workers: Annotated[int, typer.Option(min=2, max=64, help="Workers, each in an executor of its own.")] = 3,
    replicas: Annotated[int, typer.Option(min=1, max=3, help="Replicas of each partition; fewer than workers.")] = 1,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Moves of every partition while rows flow: stall, latency of the others, throughput, lost and duplicated rows."""
    if replicas >= workers:
        raise typer.BadParameter(
            f"{replicas} replicas need more than {workers} workers: one must be free of each partition"
        )
    console = _prepare(as_json, out)
    from benchmarks import move as benchmark

    _finish(benchmark.run(state_mb, partitions, rate, workers, replicas, console), console, as_json, out)


@bench.command()
def skew(
    slow: Annotated[
        float | None,
        typer.Option(min=1.1, max=100, help="Factor by which one of three workers slows down. (default: 4)"),
    ] = None,
    zipf: Annotated[float | None, typer.Option(min=0.1, max=5, help="Draw keys with this Zipf exponent.")] = None,
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="Length of each run; rows count from 15 s on.")] = 40,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Uneven load on three workers, with and without load balance: throughput, latency, moves."""
    if slow is not None and zipf is not None:
        raise typer.BadParameter("give --slow or --zipf: they are two benchmarks")
    console = _prepare(as_json, out)
    from benchmarks import skew as benchmark

    _finish(benchmark.run(slow or 4.0, zipf, seconds, console), console, as_json, out)


@bench.command()
def small(
    batch_rows: Annotated[
        int, typer.Option(min=1, max=65_536, help="Rows of each batch; no source joins batches.")
    ] = 64,
    batches_per_s: Annotated[
        float | None,
        typer.Option(min=1, help="Batches per second over all sources. (default: the most that --p99-ms allows)"),
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="Time of measurement at each rate.")] = 6,
    sources: Annotated[int, typer.Option(min=1, max=4096, help="Partitions of the source.")] = 8,
    partitions: Partitions = 8,
    replicas: Replicas = 2,
    hold: Annotated[
        float,
        typer.Option(min=0, max=600, help="Keep all rows back for this number of seconds, then give them at once."),
    ] = 0,
    p99_ms: Annotated[float, typer.Option(min=1, help="Age that one row in a hundred may exceed.")] = 50,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Small batches that no source joins: age of rows and CPU at a rate, the highest rate, or the reduction of a backlog."""
    if hold and batches_per_s is None:
        raise typer.BadParameter("--hold needs a rate: give --batches-per-s, too")
    from benchmarks import small as benchmark

    console = _prepare(as_json, out)
    report = benchmark.run(batch_rows, batches_per_s, seconds, sources, partitions, replicas, hold, p99_ms, console)
    _finish(report, console, as_json, out)


@bench.command()
def techniques(
    rows: Annotated[int, typer.Option(min=1_000_000, help="Rows of each run at full speed.")] = 40_000_000,
    rate: Annotated[int, typer.Option(min=1000, help="Rows per second of the steady runs.")] = 50_000,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Runs at full speed of each technique.")] = 5,
    times: Annotated[int, typer.Option(min=1, max=1000, help="Executors killed for each technique.")] = 2,
    interval: Annotated[
        list[float] | None,
        typer.Option(min=0.01, help="Seconds between checkpoints; may be repeated. (default: 0.5, 2, 10)"),
    ] = None,
    peer: Annotated[bool, typer.Option("--peer", help="Also run Spark Structured Streaming.")] = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Cost of each recovery technique, and its gain when an executor is killed: one table."""
    from benchmarks import techniques as benchmark

    console = _prepare(as_json, out)
    report = benchmark.run(rows, rate, rounds, times, interval or [0.5, 2.0, 10.0], peer, console)
    _finish(report, console, as_json, out)


@bench.command()
def restart(
    state_mb: Annotated[int, typer.Option(min=1, max=4096, help="State of all partitions together, in MiB.")] = 64,
    times: Annotated[int, typer.Option(min=1, max=1000, help="Kills of everything at once.")] = 3,
    peer: Annotated[
        bool, typer.Option("--peer", help="Also kill Spark Structured Streaming with its RocksDB state store.")
    ] = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Time until a query with a checkpoint location goes on after driver, executors and workers were killed at once."""
    from benchmarks import restart as benchmark

    console = _prepare(as_json, out)
    _finish(benchmark.run(state_mb, times, console, peer), console, as_json, out)


@bench.command()
def schedule(
    times: Annotated[int, typer.Option(min=1, max=1000, help="Workers killed for each schedule.")] = 20,
    rate: Annotated[int, typer.Option(min=30, help="Rows per second over all sources.")] = 300,
    mb_per_s: Annotated[
        float, typer.Option(min=0.1, max=1024, help="MiB of checkpoints that a worker may send per second.")
    ] = 4,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Order of checkpoints, round-robin against min-max: time to recover with unequal rates and states."""
    console = _prepare(as_json, out)
    from benchmarks import schedule as benchmark

    _finish(benchmark.run(times, rate, mb_per_s, console), console, as_json, out)


class PeerKind(StrEnum):
    rtm = "rtm"
    micro = "micro"
    kstreams = "kstreams"


class KafkaFault(StrEnum):
    kill_executor = "kill-executor"


@bench.command()
def kafka(
    rate: Annotated[int, typer.Option(min=1, max=5_000_000, help="Rows per second over all partitions.")] = 1_000,
    partitions: Annotated[int, typer.Option(min=1, max=1024, help="Partitions of topics and the keyed stage.")] = 5,
    seconds: Seconds = 20,
    replicas: Annotated[int, typer.Option(min=1, max=3, help="Replicas of each partition of the query.")] = 2,
    peer: Annotated[
        list[PeerKind] | None,
        typer.Option(
            help="Also run Spark's real-time mode, its micro-batches or Kafka Streams (at least once, then exactly once with a "
            "standby), same load and broker; may be repeated."
        ),
    ] = None,
    fault: Annotated[KafkaFault | None, typer.Option(help="Fault half-way.")] = None,
    rows: Annotated[
        int, typer.Option(min=0, max=1_000_000_000, help="Rows of the backlog that is worked off; 0: none.")
    ] = 10_000_000,
    bootstrap: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="A running broker; its topics stay as they are. (default: a new broker)"
        ),
    ] = None,
    p99_ms: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Search the highest rate of each system at which at most one row in a hundred gets older than this.",
        ),
    ] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Count per key from a topic to a topic: latency at a rate, a killed executor, and the rate of working off a backlog."""
    if fault is not None and replicas < 2:
        raise typer.BadParameter("a query survives a killed executor with --replicas 2 or more")
    if fault is not None and p99_ms is not None:
        raise typer.BadParameter("--p99-ms searches a rate, which it cannot do with a --fault")
    console = _prepare(as_json, out)
    from benchmarks.kafka import bench as benchmark

    chosen = [each.value for each in dict.fromkeys(peer or [])]
    report = benchmark.run(
        rate, partitions, chosen, fault is not None, console, seconds, replicas, rows, bootstrap, p99_ms
    )
    _finish(report, console, as_json, out)


@bench.command()
def scale(
    workers: Annotated[
        list[int] | None,
        typer.Option(min=4, max=4096, help="Workers of a simulated cluster; may be repeated. (default: 10, 100, 1000)"),
    ] = None,
    real: Annotated[
        list[int] | None,
        typer.Option(min=1, max=64, help="Workers that share one load here; may be repeated. (default: 2, 4, 8)"),
    ] = None,
    rate: Annotated[
        int, typer.Option(min=1, help="Rows per second over all sources, for the real workers.")
    ] = 2_000_000,
    seconds: Annotated[
        float, typer.Option(min=1, max=3600, help="Time of measurement for each number of real workers.")
    ] = 10,
    simulated_only: Annotated[bool, typer.Option("--simulated-only", help="Start no real workers.")] = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Costs that grow with the cluster: bytes and CPU of an epoch, an ack, a heartbeat and a repair, in simulated clusters; and
    CPU per row of real workers that share one load."""
    console = _prepare(as_json, out)
    from benchmarks import scale as benchmark

    sizes = [] if simulated_only else real or benchmark.REAL_SIZES
    report = benchmark.run(workers or benchmark.SIZES, sizes, console, rate=rate, seconds=seconds)
    _finish(report, console, as_json, out)


@bench.command()
def streams(
    case: Annotated[
        list[str] | None,
        typer.Option(
            help="in, out: Structured Streaming into a query, and of its output; files: files that keep coming; datasource, "
            "datasource-rows: a Python data source that gives batches, or rows. May be repeated. (default: all)"
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=1000, help="Rows of each backlog.")] = 20_000_000,
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="Time of measurement of latency.")] = 20,
    rate: Annotated[
        int, typer.Option(min=10, help="Approximate rows per second during the measurement of latency.")
    ] = 5_000,
    as_json: Json = False,
) -> None:
    """Streams in and out of a query: rows per second of a backlog, latency, lost and duplicated rows."""
    from benchmarks import streams as benchmark

    console = _prepare(as_json, None)
    unknown = sorted(set(case or ()) - benchmark.CASES.keys())
    if unknown:
        raise typer.BadParameter(f"--case {unknown[0]}: there are {', '.join(benchmark.CASES)}")
    _finish(benchmark.run(case or [], rows, seconds, rate, console), console, as_json, None)


class EventTimePeer(StrEnum):
    spark = "spark"


@bench.command()
def eventtime(
    case: Annotated[
        list[str] | None,
        typer.Option(
            help="tumble, hop, session, keyed, interval_join or watermark_alone; may be repeated. (default: all)"
        ),
    ] = None,
    rows: Annotated[
        int, typer.Option(min=500_000, help="Rows to read; a quarter of them for keyed, half for interval_join.")
    ] = 16_000_000,
    workers: Workers = 2,
    peer: Annotated[
        EventTimePeer | None, typer.Option(help="Also run Spark Structured Streaming over the same files.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0, max=3600, help="Time of measurement of the age of results; 0: none.")
    ] = 20,
    rate: Annotated[int, typer.Option(min=100, help="Rows per second during this time.")] = 100_000,
    join_rate: Annotated[
        int, typer.Option(min=100, help="Rows per second on each side of a join during as long a time.")
    ] = 20_000,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Runs, also of the peer; the median counts.")] = 1,
    as_json: Json = False,
) -> None:
    """Windows, sessions, joins and state per key: rows per second, against Spark's own streaming; the cost of a watermark; and
    the age of results."""
    console = _prepare(as_json, None)
    from benchmarks import event_time as benchmark

    unknown = sorted(set(case or ()) - set(benchmark.NAMES))
    if unknown:
        raise typer.BadParameter(f"--case {unknown[0]}: there are {', '.join(benchmark.NAMES)}")
    report = benchmark.run(case or [], rows, workers, peer is not None, seconds, rate, console, rounds, join_rate)
    _finish(report, console, as_json, None)


class NexmarkSource(StrEnum):
    generator = "generator"
    parquet = "parquet"
    kafka = "kafka"


class WayToResults(StrEnum):
    peek = "peek"
    fork = "fork"


class AvailabilityPeer(StrEnum):
    idle = "idle"


@bench.command()
def availability(
    seconds: Annotated[float, typer.Option(min=0.1, max=3600, help="Time for which the partition is silent.")] = 10,
    chain: Annotated[int, typer.Option(min=1, max=8, help="Stages from the source to the sink.")] = 1,
    policy: Annotated[
        str, typer.Option(help="Policies of failure and stabilization: process, delay or suspend each.")
    ] = "process,process",
    kind: Annotated[
        WayToResults, typer.Option(help="peek: the state is read; fork: a copy of the operator goes on.")
    ] = WayToResults.peek,
    peer: Annotated[
        AvailabilityPeer | None, typer.Option(help="idle: the same with an idle time-out and without availability.")
    ] = None,
    fast_rows: Annotated[
        int, typer.Option(min=0, help="Rows of each run at full speed with availability on and off; 0: no such runs.")
    ] = 6_000_000,
    healthy: Annotated[
        bool, typer.Option("--healthy", help="Only: rows per second of the other partitions while one is silent.")
    ] = False,
    soak: Annotated[
        float, typer.Option(min=0, max=1440, help="Only: this many minutes without a failure; 0: no soak.")
    ] = 0,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Results while a source partition is silent, and their corrections; the cost while nothing fails."""
    from benchmarks import availability as benchmark
    from benchmarks import healthy as of_healthy
    from flux.dataflow.availability import POLICIES

    policies = policy.split(",")
    if len(policies) != 2 or not set(policies) <= set(POLICIES):
        raise typer.BadParameter(f"--policy takes two of {', '.join(POLICIES)}, as in process,delay; got {policy}")
    if (healthy or soak) and (peer is not None or (healthy and soak)):
        raise typer.BadParameter("--healthy, --soak and --peer are three benchmarks: give one of them")
    console, chosen = _prepare(as_json, out), (policies[0], policies[1])
    if soak:
        report = benchmark.soak(soak, chain, kind.value, console)
    elif healthy:
        report = of_healthy.run(chain, kind.value, chosen, console)
    else:
        report = benchmark.run(seconds, chain, chosen, kind.value, peer is not None, fast_rows, console)
    _finish(report, console, as_json, out)


@bench.command()
def grow(
    rate: Annotated[int, typer.Option(min=100, help="Rows per second over all sources.")] = 100_000,
    stages: Annotated[
        int, typer.Option(min=0, max=5_000, help="Stages of the plan in the second part; 0: no second part.")
    ] = 300,
    seconds: Annotated[
        float, typer.Option(min=1, max=3600, help="Time with an addition each second, and time without before.")
    ] = 60,
    replicas: Replicas = 2,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Additions to a running query: until they are confirmed, until the first row, other stages meanwhile, many stages."""
    from benchmarks import grow as benchmark

    console = _prepare(as_json, out)
    _finish(benchmark.run(rate, stages, seconds, replicas, console), console, as_json, out)


@bench.command()
def paths(
    feeds: Annotated[
        str,
        typer.Option(help="Ways of reading copies of a stage, with commas: one, hedged, all. The first is the base."),
    ] = "one,hedged,all",
    stall: Annotated[str, typer.Option(help="Time for which each direction of each link stands still ...")] = "200ms",
    every: Annotated[str, typer.Option(help="... after this time on average.")] = "5s",
    jitter: Annotated[str, typer.Option(help="Delay of packets by chance, up to this.")] = "0ms",
    seconds: Seconds = 60,
    rate: Annotated[int, typer.Option(min=100, help="Rows per second over all sources.")] = 5_000,
    order: Annotated[
        StageOrder | None, typer.Option(help="Count windows of 20 ms in replicas with this order, beyond their pace.")
    ] = None,
    replicas: Replicas = 2,
    sources: Annotated[int, typer.Option(min=1, max=3, help="Partitions of the source, each on a host.")] = 3,
    calm: Annotated[
        bool, typer.Option("--calm", help="Only, with no link standing still: bytes and rows per second of each way.")
    ] = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Age of rows while links stand still now and then, by the way in which copies are read. It needs the network laboratory."""
    from benchmarks import feed_costs
    from benchmarks import paths as benchmark
    from flux.arguments import FEEDS
    from flux.settings import parse_seconds

    ways = list(dict.fromkeys(way.strip() for way in feeds.split(",")))
    if unknown := set(ways) - set(FEEDS):
        raise typer.BadParameter(f"--feeds takes some of {', '.join(FEEDS)}, with commas between; got {min(unknown)!r}")
    weather = [
        parse_seconds(name, given) for name, given in (("--stall", stall), ("--every", every), ("--jitter", jitter))
    ]
    console = _prepare(as_json, out)
    if calm:
        _finish(feed_costs.run(ways, console), console, as_json, out)
        return
    shape = benchmark.Shape(None if order is None else order.value, replicas, sources)
    report = benchmark.run(ways, weather[0], weather[1], weather[2], seconds, rate, console, shape)
    _finish(report, console, as_json, out)


@bench.command()
def nexmark(
    queries: Annotated[
        str | None, typer.Option(metavar="Q5,Q8,...", help="Queries, with commas between. (default: all)")
    ] = None,
    events: Annotated[
        int | None, typer.Option(min=50_000, help="Events of each query. (default: 10,000,000; 2,000,000 with --chaos)")
    ] = None,
    source: Annotated[
        NexmarkSource, typer.Option(help="The generator inside the workers, files, or a topic of Kafka.")
    ] = NexmarkSource.generator,
    workers: Workers = 2,
    peer: Annotated[
        EventTimePeer | None, typer.Option(help="Also run Spark Structured Streaming, the queries that it can express.")
    ] = None,
    chaos: Annotated[
        bool,
        typer.Option("--chaos", help="Kill workers, stop and start each query, and compare rows; measure nothing."),
    ] = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Measure the queries of Nexmark, and compare each with an oracle. --json: a line for each query, and one of all."""
    from benchmarks.nexmark import bench as benchmark
    from benchmarks.nexmark.checkout import QUERIES

    chosen = [name.strip() for name in (queries or "").lower().split(",") if name.strip()]
    if unknown := [name for name in chosen if name not in QUERIES]:
        raise typer.BadParameter(f"--queries {unknown[0]}: there are {QUERIES[0]} to {QUERIES[-1]}")
    if chaos and (peer is not None or source != NexmarkSource.generator):
        raise typer.BadParameter("--chaos measures nothing: it takes neither --peer nor --source")
    console = _prepare(as_json, out)
    count = events or (2_000_000 if chaos else 10_000_000)
    for found in benchmark.run(chosen, count, source.value, peer is not None, chaos, workers, console):
        if isinstance(found, benchmark.QueryFigures):
            if as_json:
                print(json.dumps(found.shown()), flush=True)
        else:
            _finish(found, console, as_json, out)


@bench.command()
def serve(
    rate: Annotated[float, typer.Option(min=1, help="Requests per second over all clients.")] = 200,
    body: Annotated[BodyName, typer.Option(help="rows: 100 lines of JSON; arrow: 10,000 rows.")] = BodyName.rows,
    seconds: Seconds = 10,
    clients: Annotated[int, typer.Option(min=1, max=256, help="Clients, each with one request at a time.")] = 16,
    fault: Annotated[ServeFault | None, typer.Option(help="Process of the service to kill half-way.")] = None,
    queries: Annotated[int, typer.Option(min=0, help="Queries registered at `flux serve`; 0: a gateway alone.")] = 0,
    readers: Annotated[int, typer.Option(min=1, help="With --queries: readers of a result; one never reads.")] = 1,
    idle_reader: Annotated[bool, typer.Option("--idle-reader", help="Compare times without that one.")] = False,
    master: Annotated[str, typer.Option(help="With --queries: the Spark master of the service.")] = "local[4,1000]",
    restarts: Annotated[int, typer.Option(min=0, help="Stops and starts of a service with --queries.")] = 0,
    state_mb: Annotated[int, typer.Option(min=1, help="With --restarts: MiB of state.")] = 64,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Events pushed over HTTP: until they are on disk; with --queries at a reader, with --restarts after a stop and start."""
    from benchmarks import serve as benchmark
    from benchmarks import serve_queries, serve_readers, serve_restart

    killed = fault and fault.value
    if (queries and body is not BodyName.rows) or (not queries and (readers > 1 or killed == "kill-worker")):
        raise typer.BadParameter("--readers and --fault kill-worker take --queries N, and --queries takes --body rows")
    if (restarts and (queries < 3 or killed)) or (idle_reader and (restarts or killed or readers < 3)):
        raise typer.BadParameter(
            "--restarts takes --queries 3 or more, --idle-reader --readers 3 or more, and no --fault"
        )
    console = _prepare(as_json, out)
    if restarts:
        report = serve_restart.run(queries, state_mb, restarts, master, console)
    elif idle_reader:
        report = serve_readers.run(rate, seconds, clients, queries, readers, master, console)
    elif queries:
        report = serve_queries.run(rate, seconds, clients, queries, readers, killed, master, console)
    else:
        report = benchmark.run(rate, body.value, seconds, clients, killed, console)
    _finish(report, console, as_json, out)


def _prepare(as_json: bool, out: Path | None) -> Console:
    if out is not None:
        from benchmarks.timeline import require_plots

        require_plots()
    from benchmarks import machine

    machine.about()  # first, because it has to be measured without load
    made = Console(stderr=as_json, highlight=False)
    return made if made.is_terminal else Console(stderr=as_json, highlight=False, width=WIDE)


def _finish(report: Report, console: Console, as_json: bool, out: Path | None) -> None:
    from benchmarks import machine

    report.figures |= machine.about()
    result: dict[str, Any] = report.figures
    table = Table(show_header=False, title=f"flux bench {result['benchmark']}")
    for key, value in result.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            console.print(_of_rows(value))
        else:
            table.add_row(key, _shown(value))
    console.print(table)
    if out is not None:
        from benchmarks.timeline import write

        for path in write(report, out):
            console.print(f"written: {path}")
    if as_json:
        print(json.dumps(result))
    if report.failed is not None:
        console.print(f"failed: {report.failed}")
        raise typer.Exit(1)


def _of_rows(rows: list[dict[str, Any]]) -> Table:
    """Make a table with a column for each row, named by its first entry, where there are more figures than compared things; and a
    line for each row otherwise."""
    name, *keys = rows[0]
    if len(rows) > len(keys):
        made = Table(*rows[0])
        for row in rows:
            made.add_row(*map(_shown, row.values()))
        return made
    made = Table(title=name)
    made.add_column("")
    for row in rows:
        made.add_column(str(row[name]), justify="right")
    for key in keys:
        made.add_row(key, *(_shown(row[key]) for row in rows))
    return made


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
