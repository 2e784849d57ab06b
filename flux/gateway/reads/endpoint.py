"""Requests for results, answered in the loop of a gateway (design: result-tails)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import msgspec
from starlette.responses import Response

from flux.errors import FluxError, UsageError
from flux.gateway.answers import error_answer
from flux.gateway.problems import Problem, busy
from flux.gateway.reads.event_stream import EventStream, events_of
from flux.gateway.reads.follower import ResultFollower
from flux.gateway.reads.rows_answer import arrow_answer, arrow_headers, json_answer
from flux.gateway.reads.tails import OutputTail, OutputTails
from flux.gateway.reads.tentative_tail import TentativeFollower
from flux.gateway.routes import ARROW, Reading, ReadRows
from flux.outputs.catalogue import NoSuchOutput
from flux.outputs.cursor import CursorGone
from flux.outputs.reader import start_of

#: Readers that may wait or follow at the same time. Each takes some kilobytes, and an event at most while it goes out.
READERS_MAX = 2000
#: Threads that read history and make JSON.
THREADS = 4


class ResultsEndpoint:
    """The readers of a gateway."""

    def __init__(self, tails: OutputTails) -> None:
        self._tails = tails
        self._pool = ThreadPoolExecutor(THREADS, "flux-results")
        self._readers = 0

    async def response(self, action: Reading, check: Callable[[], object]) -> Response | EventStream:
        """Answer a request that is allowed. ``check`` raises a Problem once it is not any more. Problem: it was refused."""
        if self._readers >= READERS_MAX:
            raise busy(f"{self._readers:,} readers are here already", after_s=5)
        loop = asyncio.get_running_loop()
        with ExitStack() as stack:
            self._readers += 1
            stack.callback(self._has_left)
            with failures():
                tail, positions = await loop.run_in_executor(self._pool, self._begun, action, stack)
                way = (
                    TentativeFollower(tail.tentative, tail.of.partitions)
                    if tail.tentative and action.tentative
                    else None
                )
                follower = ResultFollower(tail, positions, self._pool, way)
                stack.callback(follower.close)
                if isinstance(action, ReadRows):
                    return await self._rows(action, tail, follower)
            events = events_of(follower, self._pool, check, _told)
            return EventStream(events, stack.pop_all().close)
        raise AssertionError("a stack swallows no error")

    def _begun(self, action: Reading, stack: ExitStack) -> tuple[OutputTail, tuple[int, ...]]:
        of = self._tails.output(action.stream)
        if action.tentative and not of.tentative:
            raise Problem("no_tentative", f"query {of.name!r} has no availability, so it gives stable rows alone")
        positions = start_of(self._tails.place, of, action.after)
        tail = stack.enter_context(self._tails.reading(of, action.tentative))
        if action.tentative and tail.tentative is not None:
            tail.tentative.poll()
        return tail, positions

    async def _rows(self, action: ReadRows, tail: OutputTail, follower: ResultFollower) -> Response:
        if follower.tentative is not None:
            follower.tentative.skip()
        found = await follower.read(action.limit, action.wait_s)
        cursor = follower.cursor
        loop = asyncio.get_running_loop()
        if action.arrow:
            body = await loop.run_in_executor(self._pool, arrow_answer, tail.of, found)
            return Response(body, 200, arrow_headers(found, cursor), ARROW)
        standing = tail.tentative if follower.tentative is not None else None
        body = await loop.run_in_executor(self._pool, json_answer, tail.of, found, cursor, standing)
        return Response(body, 200, media_type="application/json")

    def _has_left(self) -> None:
        self._readers -= 1

    def close(self) -> None:
        """End the threads, whose readers have left."""
        self._pool.shutdown()


def problem_of(error: Exception) -> Problem:
    """Return a failure of a reader as a problem."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, NoSuchOutput):
        return Problem("no_such_query", str(error))
    if isinstance(error, CursorGone):
        return Problem("cursor_gone", str(error))
    if isinstance(error, UsageError):
        return Problem("malformed", str(error))
    said = f"the location cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
    return Problem("not_readable", said, headers={"Retry-After": "1"})


@contextmanager
def failures() -> Iterator[None]:
    """Turn failures of readers into problems."""
    try:
        yield
    except (FluxError, OSError) as error:
        raise problem_of(error) from error


def _told(error: Exception) -> bytes:
    return msgspec.json.encode(error_answer(problem_of(error)))
