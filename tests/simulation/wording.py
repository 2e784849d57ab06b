"""Messages in plain words, for the story of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flux.dataflow.plan import EdgePlan, Plan
from flux.wire import control, messages
from tests.simulation.violation import Key

#: Messages that come all the time and change nothing.
QUIET = (control.Heartbeat, control.HeartbeatSeen)
#: The subject of messages that carry a table or confirm one.
TABLES = "tables"
#: The lines of a message, each with its subjects. A message has one line for each partition in it.
Lines = list[tuple[str, list[str]]]


def key_tag(key: Key) -> str:
    """Name a partition of a stage, unlike ``str(StreamId)``, which names a stream."""
    return f"{key[0]}/{key[1]}"


def numbers(what: str, which: Sequence[int]) -> str:
    """Return ``batch 3``, ``batches 3-5`` or ``batches 3, 5``."""
    if len(which) == 1:
        return f"{what} {which[0]}"
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    if not which:
        return f"no {plural}"
    if list(which) == list(range(which[0], which[-1] + 1)):
        return f"{plural} {which[0]}-{which[-1]}"
    return f"{plural} {', '.join(map(str, which))}"


def number_of(what: str, count: int) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


class Wording:
    """The words for messages. ``said`` puts the product's own text, such as the reason of a refusal, into words."""

    def __init__(self, plan: Plan, said: Callable[[str], str] = str) -> None:
        self.said = said
        #: By id: the names of stages and sources of any version of the plan, and its edges.
        self.stages: dict[int, str] = {}
        self.sources: dict[int, str] = {}
        self.edges: dict[int, EdgePlan] = {}
        self.know(plan)

    def know(self, plan: Plan) -> None:
        """Take the parts of another version of the plan as known."""
        self.stages |= {stage.id: stage.name for stage in plan.stages}
        self.sources |= {source.id: source.name for source in plan.sources}
        self.edges |= {edge.id: edge for edge in plan.edges}

    def key(self, key: Key) -> str:
        return f"{self.stages[key[0]]}/{key[1]}"

    def of(self, message: Any, payload: Any) -> Lines:
        """Put a message into words. ``payload``: the data that travels with the message."""
        name = type(message).__name__
        told = getattr(self, f"_{name}", None)
        if message is None:
            return [("bytes that are no message", [])]
        if told is None:
            return [(name, [])]
        name = "Ack" if isinstance(message, messages.Acks) else name
        return [(f"{name:<12} {text}", about) for text, about in told(message, payload)]

    # ---- streams

    def _Hello(self, m: messages.Hello, _: Any) -> Lines:  # noqa: N802
        at = f"{m.edge}.{m.producer}"
        return [(f"stream {at}, incarnation {m.incarnation}, epoch {m.epoch}: where shall I go on?", [at])]

    def _Resume(self, m: messages.Resume, _: Any) -> Lines:  # noqa: N802
        at = f"{m.edge}.{m.producer}"
        wanted = (
            ", ".join(f"batch {sequence} for partition {partition}" for partition, sequence in m.next) or "nothing yet"
        )
        shown = (
            f"; remembers the checksum of {numbers('batch', [mark.sequence for mark in m.shown])}" if m.shown else ""
        )
        return [(f"stream {at} from {wanted}; credit up to byte {m.granted:,}{shown}", [at])]

    def _Bound(self, m: messages.Bound, _: Any) -> Lines:  # noqa: N802
        at = f"{m.edge}.{m.producer}"
        idle = ", which is idle" if m.idle else ""
        return [(f"no row below {m.watermark} behind batch {m.sequence - 1} of stream {at}{idle}", [at])]

    def _Data(self, m: messages.Data, _: Any) -> Lines:  # noqa: N802
        at = f"{m.edge}.{m.producer}"
        consumer = self.edges[m.edge].consumer
        rows = ", ".join(f"{number_of('row', n)} for partition {p}" for p, n in zip(m.partitions, m.rows, strict=True))
        what = f"the end of the stream{', ' + rows if rows else ''}" if m.element is messages.ElementKind.END else rows
        return [
            (
                f"{numbers('batch', m.batches or [m.sequence])} of stream {at}: {what}",
                [at, *(key_tag((consumer, p)) for p in m.partitions)],
            )
        ]

    def _applied(self, m: messages.Ack | messages.ReadsElsewhere) -> str:
        through = f"applied through batch {m.through}" if m.through >= 0 else "nothing applied"
        behind = (f"partition {p} " + (f"through {n}" if n >= 0 else "nothing") for p, n in m.behind)
        return ", ".join([through, *behind])

    def _Ack(self, m: messages.Ack, _: Any) -> Lines:  # noqa: N802
        at = f"{m.edge}.{m.producer}"
        return [(f"stream {at}: {self._applied(m)}; credit up to byte {m.granted:,}", [at])]

    def _Acks(self, m: messages.Acks, _: Any) -> Lines:  # noqa: N802
        return [line for ack in m.items for line in self._Ack(ack, None)]

    def _ReadsElsewhere(self, m: messages.ReadsElsewhere, _: Any) -> Lines:  # noqa: N802
        at = f"{m.edge}.{m.producer}"
        return [(f"stream {at}: I read it from another replica; {self._applied(m)}", [at])]

    def _Unread(self, m: messages.Unread, _: Any) -> Lines:  # noqa: N802
        at = f"{m.edge}.{m.producer}"
        return [(f"stream {at}: below batch {m.end} there are batches here of which you ack none", [at])]

    def _Unordered(self, m: messages.Unordered, _: Any) -> Lines:  # noqa: N802
        return [
            (
                f"{self.key((r.stage, r.partition))}: batches of stream {r.edge}.{r.producer} below {r.end} are in no order",
                [f"{r.edge}.{r.producer}", key_tag((r.stage, r.partition))],
            )
            for r in m.items
        ]

    def _Unacked(self, m: messages.Unacked, _: Any) -> Lines:  # noqa: N802
        return [
            (
                f"{self.key((e.stage, e.partition))}: is batch {e.sequence} of stream {e.edge}.{e.partition} acked at yours?",
                [f"{e.edge}.{e.partition}", key_tag((e.stage, e.partition))],
            )
            for e in m.items
        ]

    def _WantAck(self, m: messages.WantAck, _: Any) -> Lines:  # noqa: N802
        at = f"{m.edge}.{m.producer}"
        return [(f"stream {at}: what have you applied? Your acks do not come", [at])]

    def _Relayed(self, m: messages.Relayed, _: Any) -> Lines:  # noqa: N802
        way = f"from worker {m.origin} over worker {m.over} to worker {m.to}: "
        return [(way + text, tags) for text, tags in getattr(self, f"_{type(m.message).__name__}")(m.message, None)]

    def _Borrow(self, m: messages.Borrow, _: Any) -> Lines:  # noqa: N802
        at, key = f"{m.edge}.{m.producer}", (m.stage, m.partition)
        return [
            (
                f"{self.key(key)}: lend me stream {at} from batch {m.next}{' of your log' * m.of_log}, {m.room:,} bytes at most",
                [at, key_tag(key)],
            )
        ]

    def _Reset(self, m: messages.Reset, _: Any) -> Lines:  # noqa: N802
        at = f"{m.edge}.{m.producer}"
        return [(f"stream {at}: {self.said(m.reason)}; greet me again", [at])]

    def _Refuse(self, m: messages.Refuse, _: Any) -> Lines:  # noqa: N802
        at = f"{m.edge}.{m.producer}"
        return [(f"stream {at}: {self.said(m.reason)}", [at])]

    # ---- output

    def _Fetch(self, m: messages.Fetch, _: Any) -> Lines:  # noqa: N802
        key = m.stage, m.partition
        return [(f"{self.key(key)}: output from byte {m.offset:,} on", [key_tag(key)])]

    def _Chunk(self, m: messages.Chunk, payload: Any) -> Lines:  # noqa: N802
        key, length = (m.stage, m.partition), len(payload or b"")
        part = f"bytes {m.offset:,}-{m.offset + length - 1:,}" if length else f"nothing from byte {m.offset:,} on"
        return [(f"{self.key(key)}: {part} of {m.total:,}", [key_tag(key)])]

    # ---- replicas

    def _Orders(self, m: messages.Orders, _: Any) -> Lines:  # noqa: N802
        lines = []
        for item in m.items:
            steps = numbers("step", range(item.first, item.first + len(item.entries)))
            what = f"{steps} of term {item.term}" if item.entries else "no new steps"
            key = item.stage, item.partition
            committed = f"; committed below step {item.committed} as soon as you have that" if item.committed else ""
            lines.append((f"{self.key(key)}: {what}{committed}", [key_tag(key)]))
        return lines

    def _OrdersSeen(self, m: messages.OrdersSeen, _: Any) -> Lines:  # noqa: N802
        return [
            (
                f"{self.key((i.stage, i.partition))}: I have the order below step {i.received_below}, applied below {i.applied}",
                [key_tag((i.stage, i.partition))],
            )
            for i in m.items
        ]

    def _Install(self, m: messages.Install, payload: Any) -> Lines:  # noqa: N802
        key, length = (m.stage, m.partition), len(payload or b"")
        part = (
            f"bytes {m.offset}-{m.offset + length - 1} of {m.total}"
            if length
            else f"how far are you of {m.total} bytes?"
        )
        return [(f"{self.key(key)}: state, {part}", [key_tag(key)])]

    def _Installed(self, m: messages.Installed, _: Any) -> Lines:  # noqa: N802
        key = m.stage, m.partition
        done = "; the replica lives and follows" if m.done else ""
        return [(f"{self.key(key)}: I have {m.received_bytes} bytes of the state{done}", [key_tag(key)])]

    # ---- reports

    def _Register(self, m: control.Register, _: Any) -> Lines:  # noqa: N802
        again = f", as {m.node} on a new connection" if m.node >= 0 else ""
        return [(f"{m.role}, slot {m.index}, attempt {m.attempt}{again}", [])]

    def _TableSeen(self, m: control.TableSeen, _: Any) -> Lines:  # noqa: N802
        return [(f"epoch {m.epoch}", [TABLES])]

    def _ReplicaCaughtUp(self, m: control.ReplicaCaughtUp, _: Any) -> Lines:  # noqa: N802
        key, safe = (m.stage, m.partition), ", and is safe" if m.safe else ", and is not safe yet"
        return [(f"{self.key(key)}: worker {m.worker} follows the order{safe}", [key_tag(key)])]

    def _ReplicaDiverged(self, m: control.ReplicaDiverged, _: Any) -> Lines:  # noqa: N802
        key = m.stage, m.partition
        return [(f"{self.key(key)}: worker {m.worker} gave other output below step {m.step}", [key_tag(key)])]

    def _Unreached(self, m: control.Unreached, _: Any) -> Lines:  # noqa: N802
        key, at = (m.stage, m.partition), f"{m.edge}.{m.producer}"
        what = f"{'acks' if m.acks else 'rows'} of stream {at} do not come to worker {m.primary}"
        return [(f"{self.key(key)}: {what}, and worker {m.worker} has them", [key_tag(key), at])]

    def _PartitionFinished(self, m: control.PartitionFinished, _: Any) -> Lines:  # noqa: N802
        key = m.stage, m.partition
        return [(f"{self.key(key)}", [key_tag(key)])]

    def _TableMissed(self, m: control.TableMissed, _: Any) -> Lines:  # noqa: N802
        return [(f"I go by epoch {m.epoch} and need the whole table", [TABLES])]

    def _Failure(self, m: control.Failure, _: Any) -> list[tuple[str, None]]:  # noqa: N802
        return [(f"{m.kind}: {self.said(m.message)}", None)]

    # ---- orders

    def _Welcome(self, m: control.Welcome, _: Any) -> Lines:  # noqa: N802
        return [(f"you are number {m.node}, incarnation {m.incarnation}", [])]

    def _NewTable(self, m: control.NewTable, _: Any) -> Lines:  # noqa: N802
        return [(f"epoch {m.table.epoch}", [TABLES])]

    def _TableChanged(self, m: control.TableChanged, _: Any) -> Lines:  # noqa: N802
        rows = ", ".join(self.key((row.stage, row.partition)) for row in m.change.rows)
        return [(f"epoch {m.change.epoch} after {m.change.base}" + (f": {rows}" if rows else ""), [TABLES])]

    def _EdgeWatermark(self, m: control.EdgeWatermark, _: Any) -> Lines:  # noqa: N802
        return [(f"no row below {m.watermark} comes over edge {m.edge}", [f"{m.edge}"])]

    def _EdgeComplete(self, m: control.EdgeComplete, _: Any) -> Lines:  # noqa: N802
        streams = [f"{m.edge}.{producer}" for producer in m.producers]
        return [(f"streams {', '.join(streams)} are all of this edge", [])]

    def _CopyState(self, m: control.CopyState, _: Any) -> Lines:  # noqa: N802
        key = m.stage, m.partition
        return [(f"{self.key(key)}: to worker {m.worker}, incarnation {m.incarnation}", [key_tag(key)])]

    def _Rejected(self, m: control.Rejected, _: Any) -> list[tuple[str, None]]:  # noqa: N802
        return [(self.said(m.reason), None)]

    def _Stop(self, m: control.Stop, _: Any) -> list[tuple[str, None]]:  # noqa: N802
        return [(self.said(m.reason), None)]
