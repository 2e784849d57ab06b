"""Workers with real sockets: a link between two of them is cut in one direction, and its rows come another way (design:
reachability)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import ClassVar

import pyarrow as pa
import pytest
from cut_links import CutLinks
from harness import LIMIT_S, ThreadQuery, dataframe
from outside_store import ALONE, SCHEMA, until

import flux

#: The cut lasts for this long at least, and until the rows of its first second are there.
CUT_S, FIRST_S = 2.0, 1.0
#: The law in virtual time is 0.4 s (``tests/simulation/reach_laws.py``); a machine under load takes its time.
LATE_S = 10 * 0.4


@flux.stage(key="x", partitions=1, replicas=2, schema=SCHEMA)
def first(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def second(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


class Arrivals(flux.Sink):
    """A sink that notes each row with the time at which it came."""

    came: ClassVar[list[tuple[int, float]]] = []

    def write(self, batch: pa.RecordBatch, position: flux.Position) -> None:
        now = time.monotonic()
        self.came.extend((x, now) for x in batch.column("x").to_pylist())


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Iterator[CutLinks]:
    links = CutLinks()
    links.install(monkeypatch)
    Arrivals.came.clear()
    yield links
    links.close()


class Paced:
    """Rows that are made one after another until ``enough``, each with its time."""

    def __init__(self) -> None:
        self.made: list[float] = []
        self.enough = threading.Event()

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        end = time.monotonic() + LIMIT_S
        while not self.enough.is_set() and time.monotonic() < end:
            self.made.append(time.monotonic())
            yield pa.record_batch([pa.array([len(self.made) - 1], pa.int64())], schema=SCHEMA)
            time.sleep(0.02)


def read_by_primary(query: ThreadQuery, links: CutLinks) -> tuple[int, int]:
    """Return the worker from which the primary of partition 1 of ``second`` reads ``first``, and the worker of this
    primary."""
    table = query.server.core.table
    assert table is not None
    stage = next(stage.id for stage in query.plan.stages if stage.name == "second")
    reader = table.replicas(stage, 1)[0].worker
    core = links.loops[links.ports[table.endpoints[reader]]].core
    assert core is not None
    (inbound,) = core.subscriptions.streams.values()
    return inbound.feed.worker, reader


@pytest.mark.parametrize("replicas", [1, 2])
def test_rows_come_another_way_while_a_link_is_cut_in_one_direction(links: CutLinks, replicas: int) -> None:
    """Read rows from the other replica of their producer, if there is no secondary that could lend them."""
    rows = Paced()
    # Four workers are dealt the replicas one after another, so the primary of partition 1 is where no replica of ``first`` is.
    behind = flux.stage(key="x", partitions=2, replicas=replicas, schema=SCHEMA)(second)
    flow = behind(first(dataframe(SCHEMA))).to(Arrivals())
    with ThreadQuery(flow, workers=4, progress_interval="100ms", resend_timeout="300ms", **ALONE) as query:
        query.started()
        query.feed([rows])
        until(lambda: len(Arrivals.came) > 10, "rows flow")
        cut = read_by_primary(query, links)
        names = {worker: links.ports[endpoint] for worker, endpoint in query.server.core.table.endpoints.items()}
        began = time.monotonic()
        links.cut.add((names[cut[0]], names[cut[1]]))
        until(lambda: time.monotonic() > began + CUT_S, "time passes")
        early = sum(made < began + FIRST_S for made in list(rows.made))
        until(lambda: len(Arrivals.came) >= early, "rows of the first second come while the link is cut")
        down: list[tuple[int, int]] = []
        borrowers: list[int] = []

        def is_told() -> bool:
            report = query.server.progress[-1]
            down.extend((link["nothingFrom"], link["worker"]) for link in report.get("links", ()))
            borrowers.extend(loan["worker"] for loan in report.get("loans", ()))
            return bool(down or borrowers)

        # Whichever is the first: the worker goes over to the other replica, or the secondary lends the rows.
        until(is_told, "the status names the link or the loan")
        links.cut.clear()
        until(lambda: "links" not in query.server.progress[-1], "the status forgets the link")
        rows.enough.set()
        query.wait()
    assert sorted(x for x, _ in Arrivals.came) == list(range(len(rows.made)))
    assert set(down) <= {cut}
    assert set(borrowers) <= ({cut[1]} if replicas > 1 else set())
    assert down or replicas > 1
    during = [came - rows.made[x] for x, came in Arrivals.came if began <= rows.made[x] < began + FIRST_S]
    assert max(during) < LATE_S, sorted(during)[-5:]
    assert min(rows.made) < began < max(rows.made)


@pytest.mark.long
@pytest.mark.parametrize("answers", [False, True], ids=["orders", "answers"])
def test_results_go_on_while_a_primary_and_its_secondary_do_not_reach_each_other(
    links: CutLinks, answers: bool
) -> None:
    """Send orders and answers over the third worker, because no step is committed without the secondary."""
    rows = Paced()
    flow = first(dataframe(SCHEMA)).to(Arrivals())
    with ThreadQuery(flow, workers=3, progress_interval="100ms", **ALONE) as query:
        query.started()
        query.feed([rows])
        until(lambda: len(Arrivals.came) > 10, "rows flow")
        table = query.server.core.table
        assert table is not None
        primary, secondary = [replica.worker for replica in table.replicas(0, 0)]
        ends = [links.ports[table.endpoints[worker]] for worker in (primary, secondary)]
        began = time.monotonic()
        links.cut.add((ends[1], ends[0]) if answers else (ends[0], ends[1]))
        until(lambda: time.monotonic() > began + CUT_S, "time passes")
        early = sum(made < began + FIRST_S for made in list(rows.made))
        until(lambda: len(Arrivals.came) >= early, "rows of the first second come while the link is cut")
        until(lambda: "relays" in query.server.progress[-1], "the status names the third worker")
        (relay,) = query.server.progress[-1]["relays"]
        links.cut.clear()
        until(lambda: "relays" not in query.server.progress[-1], "answers come directly again")
        rows.enough.set()
        query.wait()
    assert (relay["worker"], relay["nothingFrom"]) == (primary, secondary)
    assert relay["over"] not in (primary, secondary)
    assert sorted(x for x, _ in Arrivals.came) == list(range(len(rows.made)))
    during = [came - rows.made[x] for x, came in Arrivals.came if began <= rows.made[x] < began + FIRST_S]
    assert max(during) < LATE_S, sorted(during)[-5:]
