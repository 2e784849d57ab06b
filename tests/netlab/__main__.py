"""``python -m tests.netlab --cut w1:w2 --for 10``: a query on three hosts whose links are cut, delayed or stalled meanwhile.

It prints its actions, and the output of ``flux status`` before, meanwhile and after; at the end it counts lost and doubled rows.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Annotated, Any

import typer
from rich.console import Console

from tests.netlab.forwarder import Weather
from tests.netlab.lab import Lab, links_of
from tests.netlab.namespaces import why_not

RATE, PARTITIONS = 5_000, 6
WARM_UP_S, CALM_S = 4.0, 3.0
LONGEST_S = 600.0


def main(
    cut: Annotated[list[str], typer.Option(help="Links to cut: w1:w2 in both directions, 'w1>w2' in one.")] = [],  # noqa: B006
    stall: Annotated[float, typer.Option(min=0, max=60, help="Seconds for which each link stands still ...")] = 0.0,
    every: Annotated[float, typer.Option(min=0.1, max=600, help="... every so many seconds on average.")] = 5.0,
    delay: Annotated[float, typer.Option(min=0, max=10, help="Delay of each link in one direction, in seconds.")] = 0.0,
    jitter: Annotated[float, typer.Option(min=0, max=10, help="Further delay, up to this, by chance.")] = 0.0,
    loss: Annotated[float, typer.Option(min=0, max=0.9, help="Share of packets that are lost.")] = 0.0,
    seconds: Annotated[
        float, typer.Option("--for", min=0.1, max=LONGEST_S, help="Seconds until all is healed.")
    ] = 10.0,
    feeds: Annotated[str, typer.Option(help="spark.flux.feeds of the query, if it is to be set.")] = "",
) -> None:
    """Run a count of 5,000 rows a second on three hosts, with two replicas, and trouble their links for a while."""
    console = Console()
    if reason := why_not():
        console.print(f"There is no network laboratory here: {reason}")
        raise typer.Exit(2)
    try:
        links = [link for text in cut for link in links_of(text)]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with Lab() as lab:
        unknown = {host for link in links for host in link} - lab.spaces.keys()
        if unknown:
            raise typer.BadParameter(f"there is no host {min(unknown)}; there are {', '.join(lab.spaces)}")
        weather = Weather(delay, jitter, loss, stall, every)
        options = {"feeds": feeds} if feeds else {}
        if not _show(lab, links, weather, seconds, options, console):
            raise typer.Exit(1)


def _show(
    lab: Lab, links: list[tuple[str, str]], weather: Weather, seconds: float, options: dict[str, Any], console: Console
) -> bool:
    from benchmarks.arrivals import collect
    from benchmarks.failover import KEYS, WORKERS, flow
    from benchmarks.paced import END, START, Script
    from spark_integration.query.start import start_query
    from tests.netlab.cluster import Cluster

    console.print("Spark's master and driver start on the hub, workers on w1, w2 and w3 ...")
    with Cluster(lab) as cluster:
        spark = cluster.session()
        script = Script(RATE, WORKERS, KEYS)
        given = [flow(script, replicas=2, partitions=PARTITIONS)]
        query = start_query(given, "netlab", spark, keep_output=True, workers=WORKERS, **options)
        try:
            query.wait_until_running(60)
            script.say(START, time.time() + 1)
            time.sleep(1 + WARM_UP_S)
            _status()
            _trouble(lab, links, weather, console)
            began = time.time()
            time.sleep(seconds / 2)
            _status()
            time.sleep(seconds / 2)
            healed = time.time()
            _heal(lab, links, weather, console)
            time.sleep(CALM_S)
            _status()
            script.say(END, script.batch_due_at(time.time() + 1))
            seen = collect(query, script)
            exact = seen.exactness(script.expected())
        finally:
            query.stop()
            script.clear()
    during = seen.due_between(began, healed)
    oldest = seen.age_ms[during].max(initial=0.0)
    console.print(f"Oldest row that was due meanwhile: {oldest:.0f} ms when it was counted.")
    console.print(f"{exact['rows']} rows, {exact['lost']} lost, {exact['duplicated']} counted twice.")
    return not exact["lost"] and not exact["duplicated"]


def _trouble(lab: Lab, links: list[tuple[str, str]], weather: Weather, console: Console) -> None:
    if weather != Weather(every_s=weather.every_s):
        for a, b in lab.pairs():
            lab.weather(a, b, weather)
        console.print(f"Links among w1, w2 and w3: {weather}")
    for a, b in links:
        lab.cut(a, b)
        console.print(f"Cut: nothing that {a} sends reaches {b}.")


def _heal(lab: Lab, links: list[tuple[str, str]], weather: Weather, console: Console) -> None:
    for a, b in links:
        lab.heal(a, b)
    if weather != Weather(every_s=weather.every_s):
        for a, b in lab.pairs():
            lab.weather(a, b, Weather())
    console.print("All links are healed.")


def _status() -> None:
    wide = os.environ | {"COLUMNS": "150"}
    said = subprocess.run(
        [sys.executable, "-m", "flux", "status"], capture_output=True, text=True, timeout=60, env=wide
    )
    print(said.stdout or said.stderr, flush=True)


if __name__ == "__main__":
    typer.run(main)
