"""Results as server-sent events (design: result-events).

The form is that of browsers: ``data`` has a JSON array of rows, and ``id`` the cursor behind them, which a browser sends in
``Last-Event-ID`` when it comes back. Events of other kinds have names: "missed" with positions, and "end" with an error. The
kinds "tentative", "undo" and "corrected" are about tentative rows and have no id: a cursor counts stable rows alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor

import msgspec
from starlette.types import Message, Receive, Scope, Send

from flux.errors import FluxError
from flux.gateway.problems import Problem
from flux.gateway.reads.follower import ResultFollower
from flux.gateway.reads.ring import ENTRY_ROWS, Positions
from flux.outputs.cursor import OutputCursor

logger = logging.getLogger("flux.gateway")
#: Seconds of silence after which a comment is sent: proxies end connections that are silent for a minute.
HEARTBEAT_S = 15.0
#: Seconds that one event may take to go out. A reader that does not read is let go then; it comes back by its cursor.
SEND_S = 60.0
#: Seconds for the end of an answer when the gateway ends.
LAST_S = 0.1
_LAST: Message = {"type": "http.response.body", "body": b"", "more_body": False}
#: Seconds after which a browser comes back.
_RETRY = b"retry: 1000\n\n"


def event(data: bytes, cursor: OutputCursor | None = None, kind: str = "") -> bytes:
    """Return one event. ``data`` is JSON on one line."""
    named = b"event: " + kind.encode() + b"\n" if kind else b""
    placed = b"id: " + str(cursor).encode() + b"\n" if cursor is not None else b""
    return named + placed + b"data: " + data + b"\n\n"


async def events_of(
    follower: ResultFollower, pool: Executor, check: Callable[[], object], told: Callable[[Exception], bytes]
) -> AsyncIterator[bytes]:
    """Yield events until the output ends. ``check`` is called every ``HEARTBEAT_S``, in a thread, and raises a Problem if the
    reader may not go on; ``told`` makes the content of the last event from an error."""
    loop = asyncio.get_running_loop()
    checked_at = loop.time()
    yield _RETRY
    try:
        while True:
            found = await follower.read(ENTRY_ROWS, HEARTBEAT_S)
            start = found.entries[0].before if found.entries else follower.positions
            for missed in found.missed:
                yield event(msgspec.json.encode(missed), follower.cursor_at(start), "missed")
            for entry in found.entries:
                for data in _tentative(follower, entry.before):
                    yield data
                if not entry.has_json:
                    await loop.run_in_executor(pool, entry.make_json)
                yield event(entry.json, follower.cursor_at(entry.after))
            news = list(_tentative(follower, follower.positions))
            for data in news:
                yield data
            if loop.time() - checked_at >= HEARTBEAT_S:
                checked_at = loop.time()
                await loop.run_in_executor(pool, check)
            if not found.entries and not found.missed and not news:
                yield b":\n\n"
    except (FluxError, OSError, Problem) as error:
        yield event(told(error), kind="end")


def _tentative(follower: ResultFollower, positions: Positions) -> Iterator[bytes]:
    """Yield the events about tentative rows that are due at a place."""
    if follower.tentative is not None:
        for change in follower.tentative.take(positions):
            yield event(change.data, kind=change.kind)


class EventStream:
    """A response that goes on until its reader leaves, does not read, or the output ends (ASGI)."""

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        self._events, self._close = events, close
        #: Whether the head of the answer was sent.
        self._began = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events. The reader that leaves is noticed while nothing is sent."""
        writes, leaves = asyncio.create_task(self._write(send)), asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({writes, leaves}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the gateway ends: its readers go on at another one, by their cursors
            if not self._began:
                raise
            writes.cancel()
            await asyncio.gather(writes, return_exceptions=True)
            with contextlib.suppress(TimeoutError, OSError):
                await _sent(send, _LAST, LAST_S)
        finally:
            for task in (writes, leaves):
                task.cancel()
            await asyncio.gather(writes, leaves, return_exceptions=True)
            self._close()

    async def _write(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),  # a proxy would keep events back
        ]
        try:
            await _sent(send, {"type": "http.response.start", "status": 200, "headers": headers})
            self._began = True
            async for data in self._events:
                await _sent(send, {"type": "http.response.body", "body": data, "more_body": True})
            await _sent(send, _LAST)
        except TimeoutError:
            logger.info("a reader of events has not read for %g s, and is let go", SEND_S)
        except OSError:  # it has left
            return


async def _sent(send: Send, message: Message, seconds: float | None = None) -> None:
    async with asyncio.timeout(SEND_S if seconds is None else seconds):
        await send(message)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
