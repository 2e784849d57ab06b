"""Changes of a query while it runs, from its own program: placement, workers, load balance (design: move, drain).

These are the same changes that the ``flux`` command makes from outside, by the same ``RequestHandler``. Every method waits
until its change is done, at most ``timeout`` seconds; QueryTimeout then names the rest, which goes on. A query that has
just been started is waited for. UsageError: the change is impossible, and nothing has changed. MoveFailed: the change was
given up, with the reason; a later request for another change can be the reason. If the query comes to its end in the
meantime, ``scale``, ``drain`` and ``protect`` return, as there is nothing left to do for them, and moves raise MoveFailed.
If the query fails, all raise QueryFailed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from numbers import Real
from typing import Any, TypeVar

import msgspec

from controller.operate.requests import (
    Accepted,
    AnyAnswer,
    AnyRequest,
    DrainWorker,
    Follow,
    Followed,
    GetPartitions,
    Partitions,
    ProtectStage,
    SetWorkers,
    StartMoves,
    Suggest,
    Suggested,
    WantedMove,
    all_partitions,
)
from controller.replicas.addition_tracker import Event
from controller.replicas.additions import under_replicated
from controller.replicas.membership import Member
from controller.server import Server
from controller.text import count
from flux.dataflow.plan import Plan
from flux.errors import MoveFailed, QueryFailed, QueryTimeout, UsageError
from spark_integration.growing.running_plan import RunningPlan
from spark_integration.tasks.worker_tasks import WorkerTasks

log = logging.getLogger("flux")

#: Longest name in a request, in characters (``controller.operate.requests.Name``).
NAME_MAX = 256
#: Time between two looks at the status while waiting, in seconds.
LOOK_S = 0.05

A = TypeVar("A")


class Operations:
    """Changes and views of a running query: the part of ``Query`` besides starting and ending."""

    _running: RunningPlan
    _server: Server
    _elastic: WorkerTasks

    @property
    def _plan(self) -> Plan:
        """The newest plan."""
        return self._running.plan

    # ---- looking

    def partitions(self) -> list[dict[str, Any]]:
        """List every replica of every partition: ``stage``, ``partition``, ``worker``, ``role`` ("primary", "secondary",
        "standby" or "new"), ``kind`` ("active" or "standby"), ``safe``, ``load`` (busy seconds per second), ``queued``,
        ``state_bytes`` (of a standby: its newest checkpoint), ``checkpoint_behind_s`` (seconds that this lacks, None
        without one), ``rows_per_s``, ``movable``, ``behind`` (steps, of a replica that is not safe because it lags). A query that
        has ended has none."""
        if self._server.phase == "ended":
            return []
        return [msgspec.to_builtins(row) for row in all_partitions(self._page).replicas]

    def members(self) -> dict[int, Member]:
        """Return the workers that take part now, by id."""
        return dict(self._server.core.members.workers)

    def events(self) -> list[Event]:
        """Return take-overs, repairs, moves, and workers that came and went until now, the oldest first."""
        return list(self._server.core.repairs.history)

    def is_whole(self) -> bool:
        """Tell whether every partition has all of its replicas, and all of them are safe and keep up."""
        core = self._server.core
        if core.table is None or core.repairs.under_way or core.repairs.safety.lags.all_beyond():
            return False
        return not core.board.wishes.open and not under_replicated(core.wished, core.table)

    # ---- moves

    def move(
        self, stage: str, partition: int, to: int, source: int | None = None, timeout: float = 600.0
    ) -> dict[str, Any]:
        """Move one replica of a partition to worker ``to`` while rows flow, from worker ``source``, by default the primary's.

        Returns the cost: ``seconds``, ``stall_ms`` of this partition, ``bytes`` of state. MoveFailed if the move was given
        up, for example because worker ``to`` was lost."""
        wanted = WantedMove(stage=stage, partition=_whole(partition), target=_whole(to), source=source)
        end = _end(timeout)
        self._wait_until_running(end, timeout)
        return self._carry_out([wanted], "asked for by the program", end, timeout)[0]

    def rebalance(
        self, policy: str | None = None, dry_run: bool = False, timeout: float = 600.0
    ) -> list[dict[str, Any]]:
        """Ask a policy for a plan, by default that of ``spark.flux.balance.policy``, and carry it out.

        Returns its moves, each with ``stage``, ``partition``, ``source``, ``target``, ``gain`` (the fall of the higher load
        of the two workers) and ``cost`` (bytes of state). dry_run: only return them. MoveFailed if some were given up."""
        end = _end(timeout)
        self._wait_until_running(end, timeout)
        plan = self._ask(Suggest(policy=policy or ""), Suggested)
        moves = plan.moves
        if dry_run or not moves:
            return [msgspec.to_builtins(move) for move in moves]
        wanted = [WantedMove(stage=m.stage, partition=m.partition, source=m.source, target=m.target) for m in moves]
        carried = self._carry_out(wanted, f"rebalance, policy {plan.policy}", end, timeout)
        return [msgspec.to_builtins(move) | done for move, done in zip(moves, carried, strict=True)]

    def _carry_out(self, wanted: Sequence[WantedMove], why: str, end: float, timeout: float) -> list[dict[str, Any]]:
        request = self._ask(StartMoves(moves=list(wanted), why=why), Accepted).request
        followed = self._follow(request, end, timeout)
        carried, asked = followed.moves, followed.asked
        undone = [f"{one}: {one.event.why if one.event else asked.why}" for one in carried if not one.done]
        if undone:
            raise MoveFailed(f"{len(undone)} of {len(carried)} moves were not carried out: {'; '.join(undone[:8])}")
        return [
            {"seconds": one.event.seconds, "stall_ms": one.event.stall_ms, "bytes": one.event.bytes}
            if one.event
            else {}
            for one in carried
        ]

    # ---- workers

    def scale(self, workers: int, timeout: float = 600.0) -> None:
        """Run with ``workers`` workers from now on.

        More workers: Spark tasks are started for them; the call is done when they have joined and have their share of the
        partitions (without load balance, ``spark.flux.balance.enabled=false``, when they have joined: ``rebalance("even")``
        then gives them their share). Fewer: those that are too many are drained first.

        UsageError with the arithmetic in it if there are too few task slots, or if fewer workers could not hold all replicas."""
        end = _end(timeout)
        if not 1 <= _whole(workers) <= 4096:
            raise UsageError(f"cannot scale to {count(workers, 'worker')}: 1 to 4096 are accepted")
        self._wait_until_running(end, timeout)
        self._elastic.renew_room()
        self._require_done(self._ask(SetWorkers(workers=workers), Accepted).request, end, timeout)

    def drain(self, worker: int, timeout: float = 600.0) -> None:
        """Move everything away from a worker; then it leaves the query, and its Spark task ends well.

        UsageError if the other workers could not hold all replicas."""
        end, request = _end(timeout), DrainWorker(worker=_whole(worker))
        self._wait_until_running(end, timeout)
        self._require_done(self._ask(request, Accepted).request, end, timeout)

    # ---- stages

    def protect(
        self, stage: str, replicas: int | None = None, recovery: str | None = None, timeout: float = 600.0
    ) -> None:
        """Give a stage another number of replicas of each partition, all counted, and another kind of them, as in
        ``@flux.stage``: ``recovery="active"``, ``"standby"`` or ``"upstream"``. An argument that is left out changes
        nothing.

        Replicas of the new kind are added first, and those that are too many go when the new ones are safe. The newest call
        counts: an earlier one that still waits raises MoveFailed. UsageError with the arithmetic in it if there are too few
        workers. A query that is started again is protected as its decorators say."""
        end = _end(timeout)
        if replicas is None and recovery is None:
            raise UsageError("say what is to change: replicas, recovery, or both")
        request = ProtectStage(
            stage=_name(stage), replicas=None if replicas is None else _whole(replicas),
            recovery=None if recovery is None else _name(recovery),
        )  # fmt: skip
        self._wait_until_running(end, timeout)
        self._require_done(self._ask(request, Accepted).request, end, timeout)

    # ---- asking and waiting

    def _page(self, request: GetPartitions) -> Partitions:
        return self._ask(request, Partitions)

    def _ask(self, request: AnyRequest, expected: type[A]) -> A:
        answer: AnyAnswer = self._server.ask(request)
        assert isinstance(answer, expected), answer
        return answer

    def _wait_until_running(self, end: float, timeout: float) -> None:
        """Wait for the workers: nothing of a query can be changed before they have joined."""
        if not self._server.started.wait(max(end - time.monotonic(), 0)):
            core = self._server.core
            there, wanted = len(core.members.workers), len(core.places.tasked)
            raise QueryTimeout(
                f"after {timeout:g} s the query is not running yet: {there} of {count(wanted, 'worker')} have joined. Nothing "
                "was asked of it"
            )

    def _require_done(self, request: int, end: float, timeout: float) -> None:
        """Wait until the request is done, or until it has no object any more because the query has come to its end."""
        followed = self._follow(request, end, timeout)
        asked = followed.asked
        if asked.state == "given up" and followed.phase != "running":
            log.info("query %s: %s was given up: %s", self._plan.query, asked.what, asked.why)
        elif asked.state == "given up":
            raise MoveFailed(f"{asked.what} was given up: {asked.why}")

    def _follow(self, request: int, end: float, timeout: float) -> Followed:
        """Wait until the request is done or given up. QueryFailed if it is given up because the query has failed."""
        while True:
            followed = self._ask(Follow(request=request), Followed)
            error = self._server.error
            if followed.asked.state == "given up" and error is not None:
                raise QueryFailed(f"{followed.asked.what} was given up: {followed.asked.why}") from error
            if followed.asked.over:
                return followed
            if time.monotonic() >= end:
                raise QueryTimeout(
                    f"after {timeout:g} s this is still to come: {followed.asked.left}. It goes on: see query.events()"
                )
            time.sleep(LOOK_S)


def checked_timeout(timeout: float, least: float | None = None) -> float:
    """Check a time-out in seconds, which must be more than 0, or at least ``least``. UsageError names the accepted values."""
    if not isinstance(timeout, Real) or isinstance(timeout, bool):
        raise UsageError(f"timeout must be a number of seconds, got {timeout!r}")
    if not (timeout > 0 if least is None else timeout >= least):
        raise UsageError(f"timeout must be {'positive' if least is None else f'at least {least:g}'}, got {timeout!r}")
    return min(float(timeout), threading.TIMEOUT_MAX)


def _end(timeout: float) -> float:
    return time.monotonic() + checked_timeout(timeout)


def _name(name: str) -> str:
    """Check a name for a request."""
    if not isinstance(name, str) or len(name) > NAME_MAX:
        raise UsageError(f"expected a name of at most {NAME_MAX} characters, got {name!r}")
    return name


def _whole(number: int) -> int:
    """Check a number for a request."""
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise UsageError(f"expected a number of 0 or more, got {number!r}")
    return number
