"""Preparation of sources and sinks before the start of a query (design: prepare), and questions to sources about input that
they have got since (design: unread)."""

from __future__ import annotations

import copy
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

from controller.text import some
from flux.dataflow.plan import ById, Plan, SourcePlan, StagePlan, WorkerSourcePlan
from flux.dataflow.sink import Sink
from flux.dataflow.source_reader import SourceSettings
from flux.errors import UsageError
from flux.operators.user_code import text_of

T = TypeVar("T")
#: Settled facts, by name of source and of stage.
Kept = dict[str, dict[str, Any]]


def prepared(
    plan: Plan, kept: Kept | None, case_sensitive: bool = False, ignored_files: tuple[bool, bool] = (False, False)
) -> tuple[Plan, Kept]:
    """Return the plan with prepared sources and sinks, and the facts that they want to find again in the checkpoint location.

    ``kept`` is the result of the first start of the query. ``case_sensitive``: the session tells names apart by upper and
    lower case, for sources that find columns by name. ``ignored_files``: the session leaves out missing, and corrupt,
    files.

    Each settles its facts once, in the program that starts a query.

    A topic that is read from its latest offsets must begin at the same offsets in every life of the query, and a sink that
    writes under an id must keep it. Both are known when the query starts for the first time, and not before."""
    found: Kept = {"sources": {}, "sinks": {}}
    known = kept or {}

    settings = SourceSettings(case_sensitive, *ignored_files, plan.settings.files_bad_after)

    def source(given: SourcePlan) -> SourcePlan:
        if not isinstance(given, WorkerSourcePlan) or not given.reader.defines & {"configure", "prepare"}:
            return given
        reader = _copied(given.reader, f"source {given.name}", "read()")
        reader.configure(replace(settings, may_be_silent=given.may_be_silent))
        if "prepare" in reader.defines:
            said = reader.prepare(known.get("sources", {}).get(given.name))
            found["sources"][given.name] = _can_be_kept(said, f"source {given.name}")
        return replace(given, reader=reader)

    def stage(given: StagePlan) -> StagePlan:
        if given.sink is None or type(given.sink).prepare is Sink.prepare:
            return given
        sink = _copied(given.sink, f"the sink of stage {given.name}", "open()")
        said = sink.prepare(given.partitions, known.get("sinks", {}).get(given.name))
        found["sinks"][given.name] = _can_be_kept(said, f"sink {text_of(sink, repr)} of stage {given.name}")
        return replace(given, sink=sink)

    sources, stages = ById(map(source, plan.sources)), ById(map(stage, plan.stages))
    return replace(plan, sources=sources, stages=stages), found


def forget(plan: Plan) -> None:
    """Let sources forget their facts at the end of a query without a checkpoint location, which never goes on."""
    for source in plan.sources:
        if isinstance(source, WorkerSourcePlan):
            source.reader.forget()


def _copied(given: T, whose: str, place: str) -> T:
    """Return a copy: another query may be started with the same flow. UsageError: it cannot be copied, as for the workers."""
    try:
        return copy.deepcopy(given)
    except Exception as error:
        raise UsageError(
            f"{whose} cannot be sent to the executors: {text_of(error)}. Open files and connections in {place}"
        ) from error


def _can_be_kept(said: Any, whose: str) -> Any:
    try:
        return json.loads(json.dumps(said))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{whose}: prepare() must return what JSON can hold, None, numbers, text, lists and dicts; got "
            f"{text_of(said, repr):.100}: {error}"
        ) from None


log = logging.getLogger("flux")

#: Time between two questions to readers. The next start reads later input anyway, so the answer is not urgent.
EVERY_S = 10.0
#: Names that the log and a report show at most.
SHOWN = 100
#: Time for which the end of a query waits for an answer.
_END_S = 6.0


#: Unread files of a source: by kind of fault, the reason for each file.
UnreadFiles: TypeAlias = "Mapping[str, Mapping[str, str]]"


class UnreadRows:
    """Questions to sources about input that they have got since the query was started, and do not read. ``tell`` is given all
    unread partitions, by the number of the source, each time that they have changed; ``tell_files`` all unread files.

    A partition that a topic gets later would need a number among the streams of the query, which has a fixed number of
    them. So it is only named, in the log and in reports; the next start reads it. Readers are asked here, in the program
    that started the query, in a thread of its own, because the answer may take seconds."""

    def __init__(
        self,
        plan: Plan,
        called: str,
        tell: Callable[[Mapping[int, Sequence[str]]], None],
        tell_files: Callable[[Mapping[int, UnreadFiles]], None] = lambda files: None,
    ) -> None:
        self._called, self._tell, self._tell_files = called, tell, tell_files
        self._ask_files: dict[int, tuple[str, Callable[[], UnreadFiles]]] = {}
        self._ask: dict[int, tuple[str, Callable[[], Any]]] = {}
        self._known: dict[int, Sequence[str]] = {}
        self._known_files: dict[int, UnreadFiles] = {}
        self._failed: set[int] = set()
        self._ended = False
        #: Numbers of looks at files that were asked for, and made.
        self._asked = self._made = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="flux-unread", daemon=True)

        self._begun = False
        self.watch(plan.sources)

    def start(self) -> None:
        self._begun = True
        if self._ask or self._ask_files:
            self._thread.start()

    def watch(self, sources: Iterable[SourcePlan]) -> None:
        """Ask these sources, too, from now on."""
        ask, files = dict(self._ask), dict(self._ask_files)
        for source in sources:
            if isinstance(source, WorkerSourcePlan) and "unread" in source.reader.defines:
                ask[source.id] = source.name, source.reader.unread
            if isinstance(source, WorkerSourcePlan) and "unread_files" in source.reader.defines:
                files[source.id] = source.name, source.reader.unread_files
        self._ask, self._ask_files = ask, files  # replaced, because the thread walks over them
        if self._begun and (ask or files) and self._thread.ident is None:
            self._thread.start()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(_END_S)

    def look_now(self, timeout: float) -> None:
        """Have the files looked at, and wait for the answer, but not for longer than ``timeout``: a file system may be slow."""
        if not self._ask_files or not self._thread.is_alive():
            return
        with self._changed:
            self._asked += 1
            mine = self._asked
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ended or self._made >= mine, timeout)

    def _run(self) -> None:
        look_at = time.monotonic() + EVERY_S
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._ended or self._asked > self._made, max(look_at - time.monotonic(), 0.0)
                )
                if self._ended:
                    return
                asked = self._asked
            if time.monotonic() >= look_at:
                self.look()
                look_at = time.monotonic() + EVERY_S
            self.look_at_files()
            with self._changed:
                self._made = asked
                self._changed.notify_all()

    def look(self) -> None:
        """Ask all sources once."""
        found = dict(self._known)
        for number, (name, ask) in self._ask.items():
            try:
                names = [str(each) for each in ask()]
            except Exception as error:  # it is no reason to end a running query
                if number not in self._failed and not self._ended:
                    log.warning("query %s: cannot see what source %s does not read: %s", self._called, name, error)
                self._failed.add(number)
                continue
            self._failed.discard(number)
            if news := sorted(set(names) - set(self._known.get(number, ()))):
                log.warning(
                    "query %s: source %s does not read %s, which has come since the start. Start the query again on its "
                    "checkpointLocation to read it, from its beginning", self._called, name, some(news, SHOWN),
                )  # fmt: skip
            found.pop(number, None)
            if names:
                found[number] = names
        if found != self._known:
            self._known = found
            self._tell({number: names[:SHOWN] for number, names in found.items()})

    def look_at_files(self) -> None:
        """Ask the sources of files once."""
        found = dict(self._known_files)
        for number, (name, ask) in self._ask_files.items():
            try:
                files = ask()
            except Exception as error:  # if it ends the query, a worker says so
                log.debug("query %s: cannot look at the files of source %s: %s", self._called, name, error)
                continue
            for kind, named in files.items():
                for file in sorted(named.keys() - self._known_files.get(number, {}).get(kind, {}).keys())[:SHOWN]:
                    log.warning("query %s: source %s: %s file %s: %s", self._called, name, kind, file, named[file])
            found[number] = files
        if found != self._known_files:
            self._known_files = found
            self._tell_files(found)
