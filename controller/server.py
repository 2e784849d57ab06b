"""The controller's thread: socket and clock around the state machine (design: controller-thread)."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from controller.course.plan_phases import PlanPhase
from controller.course.plan_requests import LocationOrder, PlanRequest, WorkersAreMissing
from controller.course.query_phases import QueryPhase
from controller.decide.controller import Controller, Tell
from controller.operate.request_handler import About
from controller.operate.requests import AnyAnswer, AnyRequest, Refusal
from controller.operate.service import Service
from controller.report.progress import Progress, QueryProgress, unread_files
from controller.text import duration
from flux.dataflow.plan import Plan
from flux.dataflow.plan_change import PlanChange, encode_change
from flux.errors import FluxError, ProtocolError, QueryFailed, QueryTimeout, UsageError
from flux.operators.user_code import described
from flux.shell.lifeline import Lifelines
from flux.shell.process import Rendezvous
from flux.shell.threads import Bell
from flux.shell.transport import Keys, Port, Sockets
from flux.wire.codec import decode_report
from flux.wire.control import EdgeStored
from flux.wire.frames import HEADER_BYTES_MAX, encode
from partitioning.table import FIRST_EPOCH

log = logging.getLogger("flux")

#: The longest report, with its seal.
REPORT_BYTES_MAX = HEADER_BYTES_MAX + 1024
#: The longest time between two looks of the controller's thread at lifelines and clocks.
COMMAND_S = 0.01
#: Progress reports that are kept, as many as a StreamingQuery keeps by default.
PROGRESS_KEPT = 100
#: Longest wait of another thread's call for the controller's thread: longer than usual pauses of a machine, and not longer than
#: a person's patience.
ANSWER_S = 30.0
#: Time between two checks of such a call that the controller's thread still lives.
ALIVE_EVERY_S = 0.1
#: Longest wait of a query that has come to its end for the workers' reports about it. They are on their way by then; only that
#: of a worker that is lost at this moment never comes.
LAST_REPORTS_S = 1.0

#: Time between two looks of a call that waits for a change of the plan.
LOOK_S = 0.002
#: Seconds between looks whether missing workers are there.
MISSING_LOOK_S = 0.1

T = TypeVar("T")


class Server:
    """The thread of the controller. Start it, look at ``phase`` and ``progress``, wait on ``done``; all methods may be called
    from any thread."""

    def __init__(
        self,
        plan: Plan,
        slots: int,
        host: str,
        keys: Keys | None,
        query_id: str,
        name: str | None,
        application: str = "",
        run_id: str = "",
    ) -> None:
        began, started = time.monotonic(), time.time()
        self.core = Controller(plan, slots, began)
        # Events show the wall clock's time of the start plus the time that has passed since: the wall clock may be set
        # back.
        self.core.board.events.wall_ahead = started - began
        self.progress: deque[QueryProgress] = deque(maxlen=PROGRESS_KEPT)
        self.started = threading.Event()
        self.finished = threading.Event()
        self.ended = threading.Event()
        #: The longest wait for the workers' reports about the end.
        self.last_reports_s = LAST_REPORTS_S
        #: Latest time for announcing the end; None: no end is to be announced.
        self._announce_by: float | None = None
        self._awaiting: list[bool] = []  #: One entry for each call that waits and raises the error that ends the query.
        self._plan = plan
        self._host = host
        self._keys = keys
        self._title = name or query_id
        self._not_read: Mapping[int, Sequence[str]] = {}
        self._unread_files: Mapping[int, Mapping[str, Mapping[str, str]]] = {}
        self._report = Progress(plan, query_id, name, run_id)
        about = About(query_id, name, application, os.getpid(), started, began=began)
        #: Called in the controller's thread with an error that ends the query. It returns the same error, or its cause.
        self.explain: Callable[[FluxError], FluxError] = lambda error: error
        self._service = Service(self.core, about, lambda: self.progress[-1] if self.progress else None)
        self._commands: queue.SimpleQueue[Callable[[], list[Tell]]] = queue.SimpleQueue()
        self._bell = Bell()  # rings for each command
        self._bound: queue.SimpleQueue[Rendezvous | Exception] = queue.SimpleQueue()
        self._keep: Callable[[LocationOrder], None] | None = None
        self._close = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"flux-controller-{query_id[:8]}", daemon=True)

    def start(self) -> Rendezvous:
        self._thread.start()
        bound = self._bound.get(timeout=30)
        if isinstance(bound, FluxError):
            raise bound
        if isinstance(bound, Exception):
            raise QueryFailed(f"the controller cannot listen on {self._host}: {bound}") from bound
        return bound

    def note_unread(self, not_read: Mapping[int, Sequence[str]]) -> None:
        """Take, by the number of a source, the names of partitions that it has got since the start, for reports."""
        self._not_read = not_read

    def note_unread_files(self, files: Mapping[int, Mapping[str, Mapping[str, str]]]) -> None:
        """Take files whose rows are not read, by the number of a source and the kind of problem, each with the reason."""
        self._unread_files = files

    @property
    def phase(self) -> str:
        """ "starting", "running", "finished" (all output is there) or "ended"."""
        return str(self.core.phase)

    @property
    def error(self) -> FluxError | None:
        return self.core.error

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Note that a call waits which raises the error of the query."""
        self._awaiting.append(True)
        try:
            yield
        finally:
            self._awaiting.pop()

    def micro_batches_applied(self, source: int, watermark: int, late: int) -> None:
        """Take the watermark behind the applied micro-batches of a source, and the number of late rows in all of them."""

        def note() -> list[Tell]:
            self._report.micro_batches_applied(source, watermark, late)
            return []

        self._post(note)

    def edge_watermark(self, edge: int, watermark: int) -> None:
        """Note the watermark of an edge from micro-batches."""
        self._post(lambda: self.core.driver.on_edge_watermark(edge, watermark))

    def warn(self, text: str) -> None:
        """Note a warning of the driver, for the history and reports."""

        def note() -> list[Tell]:
            self.core.board.note(text, time.monotonic())
            return []

        self._post(note)

    def edge_complete(self, edge: int, producers: list[int]) -> None:
        self._post(lambda: self.core.driver.on_edge_complete(edge, producers))

    def job_failed(self, what: str, reason: str, edges: Collection[int] = ()) -> None:
        """Note that a Spark job, or another part of the driver, has failed. ``edges``: those that the job feeds."""
        self._post(lambda: self.core.driver.on_job_failed(what, reason, edges))

    def tasks_ended(self, slots: Sequence[int], what: str, reason: str) -> None:
        self._post(lambda: self.core.driver.on_tasks_ended(slots, what, reason))

    def stop(self) -> None:
        self._post(lambda: self.core.driver.on_pause(time.monotonic()))

    def _post(self, command: Callable[[], list[Tell]]) -> None:
        """Have the controller's thread make a call, at once if it waits."""
        self._commands.put(command)
        self._bell.ring()

    def look(self, at: Callable[[], T]) -> T:
        """Make a call in the controller's thread, and return its result or raise its error, which changes nothing there. No other
        thread may use the core while this one lives.

        QueryTimeout: that thread does not make the call in time."""

        def looked() -> tuple[T, None] | tuple[None, Exception]:
            try:
                return at(), None
            except Exception as error:
                return None, error

        result, error = self._call(lambda _: (looked(), []))
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def command(self, act: Callable[[float], list[Tell]]) -> None:
        """Make a change in the controller's thread: ``act(now)`` returns the commands that the change leads to."""
        self._call(lambda now: (None, act(now)))

    def _call(self, act: Callable[[float], tuple[T, list[Tell]]]) -> T:
        done: Future[T] = Future()

        def command() -> list[Tell]:
            try:
                result, effects = act(time.monotonic())
            except FluxError as error:
                done.set_exception(error)  # refused: nothing has changed
                return []
            except Exception as error:
                done.set_exception(QueryFailed(f"the controller failed: {described(error)}"))
                raise
            done.set_result(result)
            return effects

        self._post(command)
        end = time.monotonic() + ANSWER_S
        while not wait([done], ALIVE_EVERY_S).done:
            if not self._thread.is_alive() and not done.done():
                return act(time.monotonic())[0]  # no other thread uses the core any more
            if time.monotonic() > end:
                raise QueryTimeout(f"the controller's thread has not answered within {ANSWER_S:g} s")
        return done.result()

    def ask(self, request: AnyRequest) -> AnyAnswer:
        """Return the answer to a person's request, the same as for the command line. UsageError or QueryFailed: it is refused."""
        answer: AnyAnswer = self._call(lambda now: self._service.ask(request, now))
        if isinstance(answer, Refusal):
            raise UsageError(answer.reason) if answer.kind == "usage" else QueryFailed(answer.reason)
        return answer

    # ---- changes of the plan

    @property
    def plan(self) -> Plan:
        """The newest version of the plan that a table goes by. Compile additions by this one."""
        return self.core.plan

    def add(self, change: PlanChange, encoded: bytes, timeout: float) -> Plan:
        """Add stages and sources to the running query, all or none, and return the plan with them. The change may get another
        number than that of the next version, where a version was taken back before. Workers that are expected, such as one in
        place of a lost one, are waited for within the limit, if those of the moment cannot hold the replicas.

        UsageError: it does not fit; PlanHasChanged: compile it by the newest plan; QueryTimeout: not every process has confirmed
        in time. In all three cases nothing has changed. QueryFailed: the query failed meanwhile."""
        end = time.monotonic() + timeout
        while True:
            try:
                return self._add(change, encoded, max(end - time.monotonic(), 0.0))
            except WorkersAreMissing as error:
                if time.monotonic() > end:
                    raise WorkersAreMissing(f"after {duration(timeout)}: {error}") from None
            time.sleep(MISSING_LOOK_S)

    def _add(self, change: PlanChange, encoded: bytes, timeout: float) -> Plan:
        plan, version = self.look(self.core.plans.newest)
        if change.changes == plan.version and change.version != version:
            change = replace(change, version=version, base=plan.version)
            encoded = encode_change(change, self._plan.secret)
        return self._wait_for(self._call(lambda now: self._asked(self.core.plans.add(change, encoded, now))), timeout)

    def remove(self, name: str, cascade: bool, timeout: float) -> Plan:
        """Remove a stage or source from the running query, with all that depends on it if ``cascade``, and return the plan
        without it. The errors are those of ``add``."""
        asked = self._call(lambda now: self._asked(self.core.plans.remove(name, cascade, now)))
        return self._wait_for(asked, timeout)

    def add_flows_by(self, add: Callable[[str], None], restart: Callable[[str], None] | None = None) -> None:
        """Have ``add`` add a flow of the program, given as MODULE:FLOW, for ``flux add``. It is called in a thread of its own,
        and returns when the flow is added."""
        self._service.add_flow, self._service.restart_stage = add, restart

    def seal(self) -> None:
        """Take no more additions, so that the query finishes when all its stages have."""
        self.look(self.core.plans.seal)

    def _asked(self, asked: PlanRequest | None) -> tuple[PlanRequest | None, list[Tell]]:
        return asked, self.core.board.take()

    def _wait_for(self, asked: PlanRequest | None, timeout: float) -> Plan:
        """Wait for the end of a change; None: there was nothing to change."""
        end = time.monotonic() + timeout
        while asked is not None and not asked.phase.over:
            if self.core.phase == QueryPhase.ENDED or not self._thread.is_alive():
                begun = "while it began" if asked.phase == PlanPhase.LISTED else "nothing was changed"
                raise self.core.error or QueryFailed(f"{asked.what}: the query has ended meanwhile, {begun}")
            if time.monotonic() > end and self._call(partial(self._give_up, asked, timeout)):
                raise QueryTimeout(f"{asked.what}: {asked.why}. Nothing was changed")
            time.sleep(LOOK_S)
        if asked is not None and asked.phase == PlanPhase.REFUSED:
            raise asked.refusal(f"{asked.what}: {asked.why}. Nothing was changed")
        return self.core.plan

    def _give_up(self, asked: PlanRequest, timeout: float, now: float) -> tuple[bool, list[Tell]]:
        return self.core.plans.give_up(asked, timeout, now), self.core.board.take()

    def keep_versions(self, keep: Callable[[LocationOrder], None], births: Iterable[EdgeStored] = ()) -> None:
        """Keep versions and births in a checkpoint location before any process hears of them. ``keep`` is called in the
        controller's thread, begins the work in another one, and has ``kept`` called at its end. ``births``: those that the
        location has."""
        self._keep = keep
        self.core.plans.keep_versions(births)

    def kept(self, order: LocationOrder, error: str = "") -> None:
        """Note that an order of ``keep_versions`` is carried out, or why that is impossible."""

        def note() -> list[Tell]:
            self.core.plans.kept(order, time.monotonic(), error)
            return self.core.board.take()

        self._post(note)

    def close(self, timeout: float) -> bool:
        """End the thread and its sockets. Return True if it has ended in time."""
        self._close.set()
        self._bell.ring()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        sockets = Sockets(self._keys, self._plan.secret, self._plan.settings.message_max_bytes)
        lifelines: Lifelines | None = None
        try:
            try:
                port = sockets.port(self._host, REPORT_BYTES_MAX, sealed=True)
                lifelines = Lifelines(self._host, self._plan.secret)
                self._service.open(sockets, self._keys, port.endpoint)
                sockets.add(self._bell)
            except Exception as error:
                self._bound.put(error)
                return
            self._bound.put(Rendezvous(port.endpoint, self._keys, self._plan.secret, lifelines.endpoint))
            progress_at = time.monotonic() + self._plan.settings.progress_interval
            while not self._close.is_set():
                try:
                    self._turn(sockets, port, lifelines)
                    if time.monotonic() >= progress_at and self.core.phase == QueryPhase.RUNNING:
                        progress_at = time.monotonic() + self._plan.settings.progress_interval
                        self._note_progress()
                except Exception as error:
                    self._failed(port, error)
            self._announce_by = None if self._announce_by is None else 0.0
            self._turn(sockets, port, lifelines)
        finally:
            self._service.close()
            for event in (self.started, self.finished, self.ended):
                event.set()
            if lifelines is not None:
                lifelines.close()
            sockets.close()
            self._bell.close()

    def _failed(self, port: Port, error: Exception) -> None:
        """End the query with a defect of Flux or of a policy. Without a controller the query would seem to run well until a
        worker is lost."""
        if self.core.phase == QueryPhase.ENDED:
            raise error  # not even telling all processes to stop works
        log.exception("the controller failed", exc_info=error)
        self._tell(port, self.core.driver.on_job_failed("the controller", described(error)))
        self._announce()

    def _turn(self, sockets: Sockets, port: Port, lifelines: Lifelines) -> None:
        before = self.core.phase
        ready = sockets.wait(COMMAND_S)
        if port in ready:
            for connection, frames in port.receive():
                try:
                    if len(frames) != 1:
                        raise ProtocolError(f"a report has one frame, {len(frames)} came")
                    self._tell(port, self.core.on_report(connection, decode_report(frames[0]), time.monotonic()))
                except ProtocolError:
                    self.core.refused += 1
        self.core.refused += port.newly_refused() + lifelines.newly_refused()
        if self._service.port in ready:
            self._tell(port, self._service.answer(time.monotonic()))
        for worker in lifelines.poll():
            self._tell(port, self.core.on_closed(worker, time.monotonic()))
        for worker in lifelines.reset():
            self._tell(port, self.core.on_reset(worker))
        for worker, pulse in lifelines.pulses():
            self._tell(port, self.core.on_pulse(worker, pulse, time.monotonic()))
        self._bell.clear()
        while not self._commands.empty():
            self._tell(port, self._commands.get()())
        self._tell(port, self.core.on_tick(time.monotonic()))
        if self._keep is not None:
            for order in self.core.plans.to_keep():
                self._keep(order)
        self._log_events()
        if self.core.phase != before:
            self._note_phase(time.monotonic())
        if self._announce_by is not None and (time.monotonic() >= self._announce_by or self._end_is_told()):
            self._announce_by = None
            self._note_progress()
            self._announce()

    def _note_phase(self, now: float) -> None:
        """Announce a new phase. The end of a query is announced with its last progress report, and that report has to wait for
        the workers. A worker reports its counts before another one can hear of its end, but on a connection of its own: the
        report of the other one, which ends the query, may be faster."""
        if self.core.error is not None:
            self.core.board.error = self.explain(self.core.error)
        if self.core.phase not in (QueryPhase.FINISHED, QueryPhase.ENDED):
            self._announce()
        elif self._announce_by is None:
            self._announce_by = now + self.last_reports_s if self._is_through else now

    @property
    def _is_through(self) -> bool:
        """All output is there."""
        return self.core.phase in (QueryPhase.FINISHED, QueryPhase.ENDED) and not self.core.unfinished

    @property
    def _counts_from_the_first_row(self) -> bool:
        """A query that goes on from a location has states with the counts of earlier lives."""
        return self.core.board.disks.first_epoch == FIRST_EPOCH

    def _end_is_told(self) -> bool:
        """Tell whether workers have reported the ends of all partitions, and so their last counts."""
        read = not self._counts_from_the_first_row or self.core.inputs.have_ended(self.core.plan.sources)
        self._report.follow(self.core.wished)
        return read and self._report.ends_are_told(self.core.members)

    def _announce(self) -> None:
        self.started.set()
        if self.core.phase in (QueryPhase.FINISHED, QueryPhase.ENDED):
            self.finished.set()
        if self.core.phase == QueryPhase.ENDED and not self.ended.is_set():
            if self.core.error is not None:
                # A waiting call raises the error, so its caller need not see it in the log as well.
                level = logging.INFO if self._awaiting else logging.ERROR
                log.log(level, "query %s failed: %s: %s", self._title, type(self.core.error).__name__, self.core.error)
            self.ended.set()

    def _log_events(self) -> None:
        """Log take-overs, repairs and moves, one line each."""
        news = self.core.repairs.news()
        self._service.note(news)
        for event in news:
            log.info("%s", event)

    def _note_progress(self) -> None:
        core = self.core
        epoch = core.table.epoch if core.table else -1
        read = core.inputs.of_sources() if self._counts_from_the_first_row else {}
        report = self._report.make(
            core.members, core.inputs.total, epoch, time.monotonic(), time.time(), core.wished, read, self._is_through
        )
        loads = core.load_table()
        state = {} if loads is None else loads.state_of_stages()
        for wished, entry in zip(core.wished.stages, report["stages"], strict=True):
            if wished.id in state:
                entry["stateBytes"] = state[wished.id]
            entry |= core.losses.beginnings.of_stage(wished.id)
        for stage, text in self._report.warnings(report, time.monotonic()):
            core.board.note(text, time.monotonic(), stage=stage)
        for text, seconds in self._report.failures():
            core.board.note(text, time.monotonic(), kind="tentative", seconds=seconds)
        for text, seconds in self._report.links_up(time.time()):
            core.board.note(text, time.monotonic(), kind="link", seconds=seconds)
        of_source = {source.id: entry for source, entry in zip(core.plan.sources, report["sources"], strict=True)}
        for source, names in self._not_read.items():
            if source in of_source:
                of_source[source]["notRead"] = list(names)
        for source, files in self._unread_files.items():
            if source in of_source and (shown := unread_files(files)):
                of_source[source]["unreadFiles"] = shown
        self.progress.append(QueryProgress(report | core.report()))
        self._service.on_report()

    @staticmethod
    def _tell(port: Port, effects: list[Tell]) -> None:
        encoded: dict[int, bytes] = {}  # a command to all processes is encoded once
        for effect in effects:
            assert isinstance(effect.connection, bytes)
            frame = encoded.get(id(effect.command))
            if frame is None:
                frame = encoded[id(effect.command)] = encode(effect.command)
            port.send(effect.connection, [frame])
