"""The loops of readers of output, with their sockets and clocks.

``Egress`` fetches the output that a query has kept to its end, in a Spark task. ``Puller`` reads output while the query runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from flux.errors import ProtocolError, QueryFailed, QueryTimeout
from flux.shell.process import (
    REGISTER_EVERY_S,
    ControllerLink,
    Rendezvous,
    Stopped,
    port_closed,
    refuse_rejected,
    register,
)
from flux.shell.transport import Link, Sockets
from flux.tasks.output_fetch import ASK_EVERY_S, OutputFetch
from flux.tasks.output_pull import OutputPull, PullQuestion
from flux.wire.codec import decode_answer
from flux.wire.control import NewTable, Register, RegisterAgain, Welcome
from flux.wire.frames import encode
from flux.wire.messages import Chunk, Fetch, Pulled
from partitioning.table import Table


class Egress:
    """The loop of one egress task (design: egress). Its questions come from ``flux.tasks.output_fetch``.

    It reads the output of ``partition`` of the collecting stage ``stage``. To be used once, by one thread."""

    def __init__(
        self, rendezvous: Rendezvous, stage: int, partition: int, controller_timeout: float, ordered: bool = True
    ) -> None:
        self._rendezvous = rendezvous
        self._partition = partition
        self._fetching = OutputFetch(self, stage, partition, ordered)
        self._sockets = Sockets(rendezvous.keys, rendezvous.secret)
        self._control = ControllerLink(self._sockets, rendezvous, controller_timeout)
        self._attempt = 0
        self._link: Link | None = None

    def batches(self, attempt: int) -> Iterator[pa.RecordBatch]:
        """Yield all batches, each once. Raises QueryTimeout, QueryFailed, or Stopped if the query has ended."""
        self._attempt = attempt
        try:
            yield from self._fetching.batches()
        finally:
            self._sockets.close()

    # ---- as ``OutputFetch`` wants its transport

    def now(self) -> float:
        return time.monotonic()

    def newest_table(self) -> Table:
        _, commands = register(
            self._sockets, self._control, self._rendezvous, role="egress", index=self._partition, attempt=self._attempt
        )
        known = None
        while known is None:
            for command in commands:
                refuse_rejected(command)
                if isinstance(command, NewTable):
                    known = command.table
                elif not isinstance(command, Welcome | RegisterAgain):
                    raise QueryFailed(f"the controller told an egress task to {type(command).__name__}")
            self._control.check(time.monotonic())
            if known is None and self._control.link in self._sockets.wait(ASK_EVERY_S):
                commands = list(self._control.commands())
        return known

    def connect(self, endpoint: str) -> None:
        if self._link is not None:
            self._sockets.close_link(self._link)
        self._link = self._sockets.link(endpoint)

    def ask(self, request: Fetch, seconds: float) -> tuple[Chunk, bytes] | None:
        assert self._link is not None
        self._link.send([encode(request)])
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            ready = self._sockets.wait(left)
            if self._control.link in ready:
                # An answer that came twice; if it stayed unread, it would end every wait at once.
                for command in self._control.commands():
                    refuse_rejected(command)
            if self._link not in ready:
                continue
            for frames in self._link.receive():
                try:
                    answer = decode_answer(frames[0])
                except ProtocolError:
                    continue
                if isinstance(answer, Chunk) and answer.offset == request.offset and len(frames) == 2:
                    return answer, bytes(frames[1])
        return None


#: Seconds between two looks whether a silent controller still listens.
LOOK_S = 2 * REGISTER_EVERY_S
#: The most unreadable answers one after the other: after these no further question will be answered better.
MALFORMED_MAX = 10


class Puller:
    """The sockets and clock of one reader of output (design: readers). Its questions come from ``flux.tasks.output_pull``.

    For one thread. ``schema`` is that of the output."""

    def __init__(self, rendezvous: Rendezvous, schema: pa.Schema, silence_max_s: float) -> None:
        self._rendezvous = rendezvous
        self._schema = schema
        self._silence_max_s = silence_max_s
        self._sockets = Sockets(rendezvous.keys, rendezvous.secret)
        self._control: ControllerLink | None = None  # made when a table is needed: other readers spare the controller
        self._links: dict[str, Link] = {}
        self._asked_since: float | None = None  # since when the controller has not answered
        self._look_at = 0.0
        self.malformed = 0

    def close(self) -> None:
        self._sockets.close()

    def say(self, asks: Iterable[PullQuestion]) -> None:
        """Send questions, without waiting for their answers."""
        for ask in asks:
            link = self._links.get(ask.endpoint)
            if link is None:
                link = self._links[ask.endpoint] = self._sockets.link(ask.endpoint)
            link.send([encode(ask.pull)])

    def turn(self, pulling: OutputPull, seconds: float) -> None:
        """Ask the due questions, and take in messages that come within ``seconds``. Raises Stopped if the query has ended, and
        the errors of ``OutputPull.on_pulled``."""
        now = time.monotonic()
        self.say(pulling.asks(now))
        if pulling.wants_table(now):
            self._ask_for_table(now)
        for ready in self._sockets.wait(max(min(seconds, pulling.due(now) - now), 0.0)):
            if self._control is not None and ready is self._control.link:
                self._hear_controller(self._control, pulling)
            else:
                self._hear_worker(ready, pulling)

    def until_over(self, pulling: OutputPull, seconds: float) -> None:
        """Turn until a reader has finished that reads nothing, or all at once. Raises QueryTimeout if it has not in time."""
        end = time.monotonic() + seconds
        while not pulling.over:
            if (left := end - time.monotonic()) <= 0:
                raise QueryTimeout(f"the workers have not said within {seconds:g} s how far their output is")
            self.turn(pulling, left)

    # ---- the controller

    def _ask_for_table(self, now: float) -> None:
        if self._control is None:
            self._control = ControllerLink(self._sockets, self._rendezvous, self._silence_max_s)
        if self._asked_since is None:
            self._asked_since, self._look_at = now, now + LOOK_S
        elif now - self._asked_since > self._silence_max_s:
            raise QueryTimeout(
                f"the controller at {self._rendezvous.endpoint} has shown no table for {self._silence_max_s:g} s "
                "(spark.flux.controller.timeout): the driver of the query cannot be reached, or the query has not started"
            )
        elif now >= self._look_at:
            self._look_at = now + LOOK_S
            if port_closed(self._rendezvous.endpoint):
                raise Stopped("the query has ended")
        self._control.report(
            Register(role="egress", index=0, attempt=0, host="", pid=0, executor="", endpoint="", edges=[])
        )

    def _hear_controller(self, control: ControllerLink, pulling: OutputPull) -> None:
        for command in control.commands():
            refuse_rejected(command)
            if isinstance(command, NewTable):
                self._asked_since = None
                pulling.on_table(command.table)

    # ---- the workers

    def _hear_worker(self, link: Link, pulling: OutputPull) -> None:
        for frames in link.receive():
            try:
                answer = decode_answer(frames[0])
                if isinstance(answer, Pulled):
                    pulling.on_pulled(answer, decoded(frames[1:], self._schema), time.monotonic())
                    self.malformed = 0
            except ProtocolError as error:
                self.malformed += 1  # as if the answer had not come: it is asked for again
                if self.malformed >= MALFORMED_MAX:
                    raise QueryFailed(f"answers of the worker at {link.endpoint} cannot be read: {error}") from error


def decoded(frames: Sequence[Any], schema: pa.Schema) -> list[pa.RecordBatch]:
    """Return the batches of an answer. Raises ProtocolError if they are not batches of this output."""
    if not frames:
        return []
    if len(frames) != 1:
        raise ProtocolError(f"output has one payload frame, {len(frames)} came")
    try:
        with pa.ipc.open_stream(pa.py_buffer(frames[0])) as reader:
            found = reader.schema
            batches = list(reader)
        for batch in batches:
            batch.validate()
    except Exception as error:
        raise ProtocolError(f"payload is not a stream of record batches: {error}") from None
    if not found.equals(schema):
        raise ProtocolError(f"output has the columns {found.names}, expected are {schema.names} with their types")
    return batches
