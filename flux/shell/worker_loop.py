"""The loop of one worker: sockets and clock around the state machine (design: worker, one-thread).

One thread does everything, so that nothing needs a lock; ZeroMQ's own thread moves the bytes meanwhile. Two other threads report
during a long step, when the loop cannot: that the process lives (``liveness_thread``), and which step it is in (``step_watch``).
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import psutil
import pyarrow as pa

from flux import failure_domain
from flux.dataflow.plan import Plan
from flux.errors import Fenced, ProtocolError
from flux.exchange.producer import ToWorker
from flux.shell import liveness_thread
from flux.shell import process as memory
from flux.shell.lifeline import CONNECT_S, Lifeline
from flux.shell.liveness_thread import LivenessThread
from flux.shell.process import (
    GARBAGE_EVERY_S,
    ControllerLink,
    Rendezvous,
    Stopped,
    look_for_garbage,
    refuse_rejected,
    register,
    short_collections,
    usual_collections,
)
from flux.shell.sink_threads import SinkThreads
from flux.shell.step_watch import StepWatch
from flux.shell.threads import BackgroundJobs
from flux.shell.transport import Frames, Port, Sockets, own_address
from flux.shell.worker_links import WorkerLinks
from flux.state.sender import Aside
from flux.wire.codec import decode_asked, decode_batches, decode_tentative
from flux.wire.control import (
    CopyState,
    EdgeComplete,
    EdgeStored,
    EdgeWatermark,
    FromController,
    Goodbye,
    Heartbeat,
    HeartbeatSeen,
    LastCheckpoints,
    NewTable,
    PartitionFinished,
    PlanChanged,
    RegisterAgain,
    TableChanged,
    TableMissed,
    Welcome,
)
from flux.wire.frames import encode
from flux.wire.messages import Install, Relayed, Tentative
from flux.wire.pulse import KIND, TURN, TURNS, WAITS
from flux.wire.statistics import Statistics
from flux.worker.core import WorkerCore
from flux.worker.effects import ToConnection, ToController, failure_of, needed_workers
from flux.worker.pacing import GatherRest, Pacing
from flux.worker.report import StageTurns
from flux.worker.report import load as load_of
from flux.worker.report import stats as stats_of
from flux.worker.table_follower import TableFollower
from partitioning.warm_up import warm_up

log = logging.getLogger("flux")

#: Seconds for which steps are applied before sockets are looked at again: long against a poll, short against an ack interval.
WORK_S = 0.002
#: Seconds to wait for the controller's Stop after a failure was reported.
FAREWELL_S = 10.0
#: The longest wait, at the end, for code that is being loaded: an import may never end.
LOADER_S = 10.0
#: Seconds between two heartbeats that tell the load of each replica: with thousands of partitions that is no small message.
LOAD_EVERY_S = 1.0
#: Seconds from one opening of a lifeline to the next, at first and at most; twice as many after each attempt that fails.
LIFELINE_EVERY_S, LIFELINE_EVERY_MAX_S = 1.0, 30.0
#: The time for which the worker stands still in an attempt to open a lifeline, as a share of the time that it may be silent:
#: when it joins, with nothing else to do yet, and later.
JOINING_SHARE, LATER_SHARE = 0.5, 0.2


class WorkerLoop:
    """The loop of one worker process, with its port, its links and its threads. ``core`` is the state machine."""

    role = "worker"

    def __init__(self, plan: Plan, rendezvous: Rendezvous) -> None:
        self.plan = plan
        self._travels = {edge.id: plan.travels(edge) for edge in plan.edges}
        self.rendezvous = rendezvous
        self.sockets = Sockets(rendezvous.keys, rendezvous.secret, plan.settings.message_max_bytes)
        self.port: Port = self.sockets.port(own_address(rendezvous.endpoint))
        self.control = ControllerLink(self.sockets, rendezvous, plan.settings.controller_timeout)
        self.links = WorkerLinks(self.sockets, plan.settings.message_max_bytes)
        self._bell = self.sockets.bell()
        self._background = BackgroundJobs(self._bell)
        #: Loads changes of the plan, one at a time and in order: an import may take long, and copies of state do not wait for it.
        self._loader = BackgroundJobs(self._bell)
        self._loading: dict[int, PlanChanged] = {}
        self.core: WorkerCore | None = None
        self._sinks = SinkThreads(plan, self._bell.ring)
        self._newest = TableFollower(plan.settings.resend_timeout)
        self._gathering = GatherRest()
        self._pace = Pacing()
        self._rested_s = 0.0
        self._ends = 0  # replicas and sources here that had ended at the last look
        self._lifeline: Lifeline | None = None
        self._heart = LivenessThread(plan.settings.heartbeat_interval)
        self._lifeline_at = 0.0
        self._lifeline_every_s = LIFELINE_EVERY_S
        self._watch: StepWatch | None = None
        self._turns = 0
        self._stage_turns = StageTurns()
        self._beat_at = 0.0
        self._garbage_at = 0.0
        self._load_at = 0.0
        self._load_every_s = min(LOAD_EVERY_S, getattr(plan.settings, "balance_round", LOAD_EVERY_S))
        self._process = psutil.Process()

    def run(self, index: int, attempt: int, executor: str) -> Statistics:
        """Run until the controller sends Stop. Return the last statistics."""
        try:
            memory.keep(self.plan.settings.memory_keep_bytes)
            self._warm_up()  # compiling holds the interpreter for seconds: not while others wait for heartbeats
            liveness_thread.warm_up()
            short_collections()
            self._join(index, attempt, executor)
        except (Stopped, Fenced):  # Spark would count it as a failure, also for each worker that was only slow
            if self.core is not None:
                self.control.report(Goodbye(node=self.core.worker))
        finally:
            stats: Statistics = stats_of(self.core) if self.core is not None else {}
            self._close()
        return stats

    def _join(self, index: int, attempt: int, executor: str) -> None:
        welcome, early = register(
            self.sockets, self.control, self.rendezvous,
            role=self.role, index=index, attempt=attempt, executor=executor, endpoint=self.port.endpoint,
            domain=failure_domain.label(self.plan.settings.domain, socket.gethostname(), os.environ),
            first_epoch=self.first_epoch,
        )  # fmt: skip
        self.core = self._made(welcome)
        self.core.leaving.outside = self._sinks
        self.core.reading.bell = self._bell.ring
        self.core.note = self._heart.note
        self.core.note[KIND] = TURN  # commands that came with the welcome may open operators before the first turn
        self._open_lifeline(self.core, time.monotonic(), JOINING_SHARE)
        if self._lifeline is not None:
            self._lifeline.hear_soon()
        self._watch = StepWatch(self.core, self.control.report, self.plan.settings.step_timeout)
        self._watch.start()
        self._loop(self.core, early)

    def _warm_up(self) -> None:
        warm_up()

    @property
    def first_epoch(self) -> int:
        return 0

    def _made(self, welcome: Welcome) -> WorkerCore:
        return WorkerCore(self.plan, welcome.node, time.perf_counter, welcome.workers)

    def _open_lifeline(self, core: WorkerCore, now: float, share: float = LATER_SHARE) -> None:
        """Open a lifeline, also after one that broke while both ends live: something between the hosts may have broken it."""
        if self._lifeline is None and self.rendezvous.lifeline and now >= self._lifeline_at:
            self._lifeline_at = now + self._lifeline_every_s
            where, secret = self.rendezvous.lifeline, self.rendezvous.secret
            connect_s = min(CONNECT_S, share * self.plan.settings.heartbeat_timeout)
            try:
                self._lifeline = Lifeline(where, secret, core.worker, self._heart, connect_s)
                self._lifeline_every_s, self._lifeline_at = LIFELINE_EVERY_S, now + LIFELINE_EVERY_S
                self.sockets.add(self._lifeline)
            except OSError as error:
                self._lifeline_every_s = min(2 * self._lifeline_every_s, LIFELINE_EVERY_MAX_S)
                log.warning("worker %s has no lifeline to the controller: %s", core.worker, error)

    def _close_lifeline(self) -> None:
        assert self._lifeline is not None
        self.sockets.remove(self._lifeline)
        self._lifeline.close()
        self._lifeline = None

    def _loop(self, core: WorkerCore, early: list[FromController]) -> None:
        try:
            for command in early:
                self._on_command(core, command, time.monotonic())
            while True:
                self._turn(core)
        except (Stopped, Fenced, SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            self._report_failure(core, error)

    def _turn(self, core: WorkerCore) -> None:
        """Take one turn: apply steps for a while, read from sources, send, beat. Then take messages, after a wait for them if
        there is nothing to do, and send the answers at once, before the next steps."""
        self._turns += 1
        now = began = time.monotonic()
        for stage, error in self._sinks.failures():
            core.failures.take(core.plan, stage, error)
        rows, steps, aged_s = core.rows_in, core.steps, core.aged_s
        core.wall_ahead = time.time() - now
        note = core.note
        note[TURNS], note[KIND] = self._turns, TURN
        busy, through = self._work(core, now)
        busy |= self._read(core, idle=through)
        self._flush(core, now)
        self._heartbeat(core, now)
        busy |= core.has_work  # from messages that this worker has just sent to itself
        wait, rest = 0.0, 0.0
        if not busy:
            rest = self._gathering.rest(self._pace.rest_max_s)
            wait = max(min(core.due(), core.reading.due(now), self._beat_at) - now, rest)
        began_to_wait = time.monotonic()
        note[KIND] = WAITS
        if rest:
            time.sleep(rest)
        received = self.sockets.wait(wait - rest)
        note[KIND] = TURN
        waited_s = time.monotonic() - began_to_wait
        self._rested_s += waited_s if wait > 0 else 0.0
        for ready in received:
            self._receive(core, ready)
        if received:  # messages for which others wait do not wait for the steps that can be applied by now
            self._flush(core, time.monotonic())
        worked_s, rows, steps = time.monotonic() - began - waited_s, core.rows_in - rows, core.steps - steps
        self._gathering.worked(worked_s, rows, steps)
        if self._pace.turn(worked_s, waited_s, rows, steps, core.aged_s - aged_s):
            core.set_pace(self._pace)

    # ---- in

    def _receive(self, core: WorkerCore, ready: Any) -> None:
        now = time.monotonic()
        if ready is self.port:
            for connection, frames in self.port.receive():
                self._on_frames(core, connection, frames, now)
        elif ready is self.control.link:
            for command in self.control.commands():
                self._on_command(core, command, now)
        elif ready is self._lifeline:
            if not self._lifeline.hear():
                self._close_lifeline()
        elif ready is self._bell:
            for token, result in self._background.done():
                core.on_done(token, result, now)
            for version, loaded in self._loader.done():
                core.on_plan_changed(self._loading.pop(version), now, loaded)
                self._report(core, core.reports(), now)
                self._go_by(core)
        elif ready in self.links:
            for worker, message in self.links.answers(ready):
                core.on_answer(worker, message, now)

    def _on_frames(self, core: WorkerCore, connection: bytes, frames: Any, now: float) -> None:
        try:
            if not frames:
                raise ProtocolError("an empty message")
            message = decode_asked(frames[0])
            if isinstance(message, Install):
                core.on_install(connection, message, _only(frames[1:]), now)
                return
            batches: list[pa.RecordBatch] = []
            if (data := core.rows_of(connection, message)) is not None:
                try:
                    batches = decode_batches(data, frames[1:], self._travels[data.edge])
                except ProtocolError as error:
                    if isinstance(message, Relayed):
                        raise
                    core.on_undecodable(connection, data, str(error))
                    return
            elif isinstance(message, Tentative) and core.shadows.knows(message):
                batches = decode_tentative(message, frames[1:], self._travels[message.edge])
            core.on_data_plane(connection, message, batches, now)
        except ProtocolError:
            core.counters.malformed += 1

    def _on_command(self, core: WorkerCore, command: FromController, now: float) -> None:
        refuse_rejected(command)
        if isinstance(command, NewTable | TableChanged):
            self._on_table(core, command, now)
        elif isinstance(command, HeartbeatSeen):
            self._newest.heard_of(command.epoch)
            core.reading.align(command.others_at)
            core.reading.stand(command.stands_at)
            self._ask_for_table(core, now)
        elif isinstance(command, PlanChanged):
            self._on_plan_changed(core, command, now)
        elif isinstance(command, EdgeStored):
            core.on_edge_stored(command, now)
        elif isinstance(command, EdgeComplete):
            core.on_edge_complete(command.edge, command.producers)
        elif isinstance(command, EdgeWatermark):
            core.on_edge_watermark(command.edge, command.watermark, now)
        elif isinstance(command, CopyState):
            core.on_copy_state(command)
        elif isinstance(command, LastCheckpoints):
            core.on_last_checkpoints(now, command.epoch)
        elif isinstance(command, RegisterAgain):
            self.control.register_again(core.worker)
        elif isinstance(command, Welcome):
            core.report_again()

    def _on_table(self, core: WorkerCore, command: NewTable | TableChanged, now: float) -> None:
        table = self._newest.take(command)
        if table is not None:
            self.links.follow(table)
            core.on_table(table, now)
            self._report(core, core.reports(), now)
            self._go_by(core)
        if isinstance(command, NewTable):
            for edge, producers in command.complete.items():
                core.on_edge_complete(edge, producers)
            for edge, watermark in command.watermarks.items():
                core.on_edge_watermark(edge, watermark, now)
        self._ask_for_table(core, now)

    def _on_plan_changed(self, core: WorkerCore, command: PlanChanged, now: float) -> None:
        """Have a change loaded in another thread, if it is new: rows go on meanwhile."""
        if command.version <= core.plans.newest.version:
            core.on_plan_changed(command, now)
        elif command.version not in self._loading:  # it is repeated until it is confirmed
            self._loading[command.version] = command
            self._loader.give(command.version, partial(core.plans.load, command))

    def _go_by(self, core: WorkerCore) -> None:
        """Go by the version of the plan that the newest table names."""
        if self.plan is not core.plan:
            self.plan = core.plan
            self._travels = {edge.id: core.plan.travels(edge) for edge in core.plan.edges}
            self._sinks.go_by(core.plan)

    def _ask_for_table(self, core: WorkerCore, now: float) -> None:
        if self._newest.ask(now):
            self.control.report(TableMissed(node=core.worker, epoch=self._newest.epoch))

    # ---- work and out

    def _work(self, core: WorkerCore, now: float) -> tuple[bool, bool]:
        """Apply steps for a while. Return whether any was applied, and whether none is left."""
        end = time.perf_counter() + WORK_S
        worked, through = False, True
        assert self._watch is not None
        self._watch.quiet.release()  # a step may be long: the watch reports it beside this loop
        try:
            while core.work(now):
                worked = True
                if time.perf_counter() >= end:
                    through = not core.has_work
                    break
        finally:
            self._watch.quiet.acquire()
        return worked, through

    @staticmethod
    def _read(core: WorkerCore, idle: bool) -> bool:
        """Read from sources. Return whether anything was read."""
        batches = 0
        while core.read(idle, time.monotonic()):
            batches += 1
        return batches > 0

    def _flush(self, core: WorkerCore, now: float) -> None:
        to_workers: list[ToWorker] = []
        answers: dict[bytes, list[Frames]] = {}
        reports: list[ToController] = []
        for effect in list(core.poll(now)):
            if isinstance(effect, ToWorker):
                to_workers.append(effect)
            elif isinstance(effect, Aside):
                self._background.give(effect.token, effect.job)
            elif isinstance(effect, ToConnection):
                frames = [encode(effect.message)]
                if effect.payload is not None:
                    frames.append(effect.payload)
                assert isinstance(effect.connection, bytes)
                answers.setdefault(effect.connection, []).append(frames)
            else:
                reports.append(effect)
        ends = core.leaving.ends + core.reading.ends
        if ends != self._ends:
            # Before others hear of the end: the controller has the last counts by the time the last stage has ended.
            self._ends = ends
            self._beat(core, now, all_stages=True)
        self.links.send(to_workers)
        for connection, messages in answers.items():
            self.port.send_all(connection, messages)
        self._report(core, reports, now)

    def _report(self, core: WorkerCore, reports: Sequence[ToController], now: float) -> None:
        """Send reports to the controller."""
        if any(isinstance(report.message, PartitionFinished) for report in reports):
            self._beat(core, now, all_stages=True)  # so that the last progress report has the last counts
        for report in reports:
            self.control.report(report.message)

    def _heartbeat(self, core: WorkerCore, now: float) -> None:
        if now >= self._beat_at:
            self._beat(core, now)
            self._open_lifeline(core, now)
            self.control.check(now)
            if now >= self._garbage_at:  # by itself Python looks too rarely, see ``short_collections``
                self._garbage_at = now + GARBAGE_EVERY_S
                look_for_garbage()

    def _beat(self, core: WorkerCore, now: float, all_stages: bool = False) -> None:
        """Send a heartbeat. ``all_stages``: with the figures of all stages, and not only of those whose turn it is."""
        self._beat_at = now + self.plan.settings.heartbeat_interval
        self._ask_for_table(core, now)
        core.counters.refused += self.port.newly_refused()
        core.counters.malformed += self.links.newly_malformed() + self.control.newly_malformed()
        stats = stats_of(core, None if all_stages else self._stage_turns.next(core.plan.stages))
        stats["rss_bytes"] = self._process.memory_info().rss
        stats["cpu_s"] = time.process_time()
        if now >= self._load_at:
            self._load_at = now + self._load_every_s
            stats["load"] = load_of(core, now)
            stats["load"]["rested_s"] = round(self._rested_s, 6)
            self.links.close_unneeded(needed_workers(core), now)
        self.control.report(Heartbeat(node=core.worker, progress=self._turns, stats=stats))

    # ---- end

    def _report_failure(self, core: WorkerCore, error: BaseException) -> None:
        """Tell the controller, which ends the query. The Spark task itself ends well, as a retry could only fail again."""
        failure = failure_of(core.worker, error)
        self.control.report(failure)
        end = time.monotonic() + FAREWELL_S
        while time.monotonic() < end:
            if self.control.link in self.sockets.wait(0.1):
                for command in self.control.commands():
                    refuse_rejected(command)
                    if isinstance(command, RegisterAgain):
                        self.control.register_again(core.worker)
                    elif isinstance(command, Welcome):
                        self.control.report(failure)

    def _close(self) -> None:
        self._heart.note[KIND] = TURN  # closing runs the user's code, too
        self._sinks.close()  # before the bell
        self._background.close()
        if not self._loader.close(LOADER_S):
            log.warning(
                "the code of version %s of the plan was still being loaded %g s after the end of the query: its thread goes on "
                "until the process ends", min(self._loading, default="?"), LOADER_S,
            )  # fmt: skip
        try:
            if self.core is not None:
                self.core.close()
        finally:
            if self._watch is not None:
                self._watch.stop()
            if self._lifeline is not None:
                self._close_lifeline()
            self.sockets.close()
            usual_collections()
            memory.give_back()


def _only(frames: Any) -> Any:
    if len(frames) != 1:
        raise ProtocolError(f"a part of a copy of state has one payload frame, {len(frames)} came")
    return frames[0]
