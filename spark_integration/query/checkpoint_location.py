"""The driver's side of a checkpoint location: the description of the query that is written there, and the process that writes
(design: vault).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flux.dataflow.plan import Forgotten, Plan, SourcePlan, WorkerSourcePlan
from flux.errors import UsageError
from flux.shell.process import Rendezvous
from flux.shell.vault_process import Task
from flux.vault.location import Place, forget, place_of
from flux.vault.names import ABOUT
from flux.vault.plan_without_code import for_a_vault
from flux.wire.control import EdgeStored
from spark_integration.growing.kept_versions import VERSIONS, PlanRecord
from spark_integration.query.same_plan import dependants, description, difference, missing, other_destinations, without
from spark_integration.query.source_setup import Kept

log = logging.getLogger("flux")

#: Format of the directory. Other formats are not read.
FORMAT = 2
_KEYS = {"format", "query", "workers", "plan"}
#: Time that the vault process may take to end after Stop.
END_S = 10.0


@dataclass(frozen=True)
class CheckpointLocation:
    """A checkpoint location."""

    place: Place
    #: Description of the query that the directory belongs to, as this start goes by it; None: the directory is new.
    about: dict[str, Any] | None
    #: The description as it is in the directory, if ``about`` was changed for this start and is not written yet. None: both
    #: are the same.
    found: dict[str, Any] | None = None

    @classmethod
    def open(cls, location: str | os.PathLike[str]) -> CheckpointLocation:
        """Read a location. UsageError: it cannot be used, or something else is in it."""
        return cls.read(place_of(location))

    @classmethod
    def read(cls, place: Place) -> CheckpointLocation:
        try:
            about = json.loads(place.read(ABOUT))
        except FileNotFoundError:
            if place.used():
                raise UsageError(
                    f"checkpointLocation={str(place)!r} is not empty, and nothing of a Flux query is in it: give a "
                    "directory that is new or empty"
                ) from None
            return cls(place, None)
        except (OSError, ValueError) as error:
            raise UsageError(f"checkpointLocation={str(place)!r}: {ABOUT} cannot be read: {error}") from error
        if not isinstance(about, dict) or about.get("format") != FORMAT or not about.keys() >= _KEYS:
            found = about.get("format") if isinstance(about, dict) else about
            raise UsageError(
                f"checkpointLocation={str(place)!r} has format {found!r}; this release of Flux reads format {FORMAT} only"
            )
        return cls(place, about)

    @property
    def query(self) -> str | None:
        return None if self.about is None else str(self.about["query"])

    def began_with(self, workers: int) -> int:
        return workers if self.about is None else int(self.about["workers"])

    @property
    def partitions(self) -> dict[str, int]:
        """Partitions, by name, of sources with as many as at the first start."""
        sources = [] if self.about is None else self.about["plan"]["sources"]
        return {each["name"]: each["partitions"] for each in sources if isinstance(each["partitions"], int)}

    @property
    def kept(self) -> Kept | None:
        """Facts that sources and sinks have settled; None: there are none yet."""
        return None if self.about is None else self.about.get("kept", {})

    @property
    def versions(self) -> PlanRecord | None:
        """The versions of the plan; None: the directory is new, or an earlier release has written it."""
        return None if self.about is None else PlanRecord.read(self.about)

    @property
    def births(self) -> list[EdgeStored]:
        """The births of streams that have come to running sources."""
        return [] if (versions := self.versions) is None else [birth.stored() for birth in versions.births]

    @property
    def has_grown(self) -> bool:
        """The plan has changed since the first start."""
        return (versions := self.versions) is not None and versions.version > 0

    def given_up(self, names: Sequence[str], program: Sequence[str] = ()) -> CheckpointLocation:
        """Return the location without these stages and all that depends on them, as the next version. Stages that are not in it
        are given up already. ``program``: names of the stages that the program has. UsageError: an earlier release has written
        it, the program still has one of the stages, or nothing would be left."""
        there = [] if self.about is None else [name for name in names if name in self.about["plan"]["stages"]]
        self._check_no_source(names)
        if self.about is None or not there:
            return self
        versions = self.versions
        if versions is None:
            raise UsageError(
                f"removed={there!r}: an earlier release of Flux has written checkpointLocation={str(self.place)!r}. Start the "
                "query once with all of its stages and stop it; then give them up"
            )
        gone = dependants(self.about["plan"], there)
        self._check_gone(gone, there, program)
        plan, sources = without(self.about["plan"], gone)
        if not plan["stages"]:
            raise UsageError(f"removed={there!r}: no stage would be left. Start the query anew in another directory")
        about = _without_facts({**self.about, "plan": plan, VERSIONS: versions.without(gone, sources).told()})
        return CheckpointLocation(self.place, about, self.found or self.about)

    def _check_no_source(self, names: Sequence[str]) -> None:
        plan = {"stages": {}, "sources": []} if self.about is None else self.about["plan"]
        for source in plan["sources"]:
            if source["name"] in names and source["name"] not in plan["stages"]:
                readers = [name for name, stage in plan["stages"].items() if _reads(stage, source["name"])]
                raise UsageError(
                    f"removed={source['name']!r} is a source, which goes with the stages that read it: {', '.join(readers)}. "
                    "Name these"
                )

    def _check_gone(self, gone: Sequence[str], asked: Sequence[str], program: Sequence[str]) -> None:
        """Raise UsageError if the program has as many stages of a name as the location, so that none of them is missing."""
        assert self.about is not None
        kept, has = (Counter(map(_name, names)) for names in (self.about["plan"]["stages"], program))
        if still := [name for name in gone if has[_name(name)] >= kept[_name(name)]]:
            raise UsageError(
                f"removed={list(asked)!r} gives up {', '.join(gone)}, and the program still has {', '.join(still)}: leave the "
                "flow out of the program, too, or leave removed out and remove the stage from the running query (query.remove)"
            )

    def with_new(self, plan: Plan, names: Iterable[str]) -> CheckpointLocation:
        """Return the location with these stages of a plan, which the start itself adds, and the sources that they bring."""
        assert self.about is not None
        was, now = self.about["plan"], description(plan)
        stages = {**was["stages"], **{name: now["stages"][name] for name in names}}
        known = {source["name"] for source in was["sources"]}
        sources = [*was["sources"], *(source for source in now["sources"] if source["name"] not in known)]
        about = {**self.about, "plan": {**was, "stages": stages, "sources": sources}}
        return CheckpointLocation(self.place, about, self.found or self.about)

    def for_sinks_of(self, plan: Plan) -> CheckpointLocation:
        """Return the location for this plan: a sink that goes elsewhere than before begins anew there, behind the output that
        is known to be outside. UsageError: a query uses the location."""
        others = {} if self.about is None else other_destinations(self.about["plan"], plan)
        if self.about is None or not others:
            return self
        for name, (before, after) in others.items():
            log.warning("stage %s: its output went to %s, and goes to %s from here on", name, before, after)
        return CheckpointLocation(self.place, forget(self.place, self.about, others), self.found or self.about)

    def forgotten(self, plan: Plan) -> dict[int, Forgotten]:
        """Return, by stage, the place from which a sink began anew."""
        found = {} if self.about is None else self.about.get("forgotten", {})
        return {
            stage.id: Forgotten(found[stage.name]["query"], tuple(found[stage.name]["first"]))
            for stage in plan.stages
            if stage.name in found
        }

    def check(self, plan: Plan) -> None:
        """Raise UsageError with the difference, if the directory is that of another plan."""
        if self.about is None:
            return
        was, now = _grown(self.about["plan"], plan), description(plan)
        found = difference(was, now)
        if found:
            gone = missing(was, now)
            give_up = f", give up the missing ones (removed={gone!r})" if gone else ""
            raise UsageError(
                f"checkpointLocation={str(self.place)!r} is that of another plan: {found}. Start the flow that it was made by"
                f"{give_up}, or give another directory"
            )

    def take(self, plan: Plan, kept: Kept | None = None) -> CheckpointLocation:
        """Make the directory that of this plan, and write down the facts that its sources and sinks have settled. Return the
        location as it is then. UsageError with the difference: it is that of another plan."""
        described = description(plan)
        try:
            with self.place.locked():
                self._take(plan, described, kept)
                return self.read(self.place)
        except OSError as error:
            raise UsageError(f"checkpointLocation={str(self.place)!r} cannot be written: {error}") from error

    def _take(self, plan: Plan, described: dict[str, Any], kept: Kept | None) -> None:
        """Write the description of a new query, or the changes in that of an old one: sources that may grow replace
        their facts, all others keep those of the first start. UsageError: another program has written meanwhile."""
        if self.about is None:
            about = {
                "format": FORMAT,
                "query": plan.query,
                "workers": plan.began_with,
                "plan": described,
                "kept": kept or {},
                VERSIONS: PlanRecord.of(plan).told(),
            }
            try:
                self.place.write(ABOUT, json.dumps(about, indent=1).encode(), new=True)
            except FileExistsError:
                raise UsageError(
                    f"checkpointLocation={str(self.place)!r} was empty, and is that of a query now that was just started"
                ) from None
            return
        self.check(plan)
        growing = {source.name for source in plan.sources if _may_grow(source)}
        known: Kept = {"sources": {}, "sinks": {}} | (self.kept or {})
        settled = (kept or {}).get("sources", {})
        said = {name: each for name, each in settled.items() if name in growing or name not in known["sources"]}
        versions = PlanRecord.of(plan, self.versions)
        news = {
            "plan": described,
            VERSIONS: json.loads(json.dumps(versions.told())),
            "kept": {
                **known,
                "sources": {**known["sources"], **said},
                "sinks": {**(kept or {}).get("sinks", {}), **known["sinks"]},
            },
        }
        was = {"plan": self.about["plan"], VERSIONS: self.about.get(VERSIONS), "kept": known}
        if self.found is not None or news != was:
            # A source builds on facts that it has settled before: two starts at once would give a number twice.
            if self.read(self.place).about != (self.found or self.about):
                raise UsageError(
                    f"checkpointLocation={str(self.place)!r} is that of a query which another program has just started, too"
                )
            self.place.write(ABOUT, json.dumps({**self.about, **news}, indent=1).encode())

    def keep(
        self, plan: Plan, facts: Kept, failed: Iterable[str] = (), births: Iterable[EdgeStored] = ()
    ) -> CheckpointLocation:
        """Make another version of the plan the newest one, in one document: it is kept as a whole, or not at all. ``facts``:
        those of sources and sinks, of which the present parts' are kept; ``failed``: the stages that have failed; ``births`` of
        streams of running sources. Return the location as it is then. UsageError: another program has written there; OSError: it
        cannot be written."""
        assert self.about is not None, "a query runs on a location that is its own"
        kept = self.about.get("kept", {})
        merged = {kind: {**facts.get(kind, {}), **kept.get(kind, {})} for kind in ("sources", "sinks")}
        versions = PlanRecord.of(plan, self.versions, failed, births)
        about = {**self.about, "plan": description(plan), "kept": merged, VERSIONS: versions.told()}
        return self._written(_without_facts(about))

    def keep_births(self, births: Iterable[EdgeStored]) -> CheckpointLocation:
        """Keep the births of streams of running sources, beside those that are there. Streams that the newest version lacks are
        left out. The rest is that of ``keep``."""
        assert self.about is not None, "a query runs on a location that is its own"
        versions = self.versions
        assert versions is not None, "the start has written them"
        return self._written({**self.about, VERSIONS: versions.with_births(births).told()})

    def _written(self, about: dict[str, Any]) -> CheckpointLocation:
        """Write a description in place of the present one, and return the location as it is then."""
        data = json.dumps(about, indent=1)
        with self.place.locked():
            if self.read(self.place).about != self.about:
                raise UsageError(
                    f"another program has written to checkpointLocation={str(self.place)!r} since the start"
                )
            self.place.write(ABOUT, data.encode())
        return CheckpointLocation(self.place, json.loads(data))

    def put_back(self, began: CheckpointLocation) -> None:
        """Write the description again where it stands as at the start: a vault that finds its location removed writes that
        one."""
        with self.place.locked():
            if self.about != began.about and self.read(self.place).about == began.about:
                self.place.write(ABOUT, json.dumps(self.about, indent=1).encode())


def _reads(stage: dict[str, Any], source: str) -> bool:
    return any(each["from"] == source for each in stage["reads"])


def _name(stage: str) -> str:
    """Return the name that a program gives to a stage: Alarm#2 is the second Alarm."""
    return stage.partition("#")[0]


def _without_facts(about: dict[str, Any]) -> dict[str, Any]:
    """Return a description without facts of sources and sinks that are gone: a later part of the name settles its own."""
    plan, kept = about["plan"], about.get("kept", {})
    names = {"sources": {source["name"] for source in plan["sources"]}, "sinks": set(plan["stages"])}
    left = {kind: {name: said for name, said in kept.get(kind, {}).items() if name in names[kind]} for kind in names}
    found = {**about, "kept": left}
    if "forgotten" in about:
        found["forgotten"] = {name: each for name, each in about["forgotten"].items() if name in plan["stages"]}
    return found


def _may_grow(source: SourcePlan) -> bool:
    return isinstance(source, WorkerSourcePlan) and bool(source.reader.may_grow)


def _grown(was: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """Describe a plan as it would be with the partitions that its sources may have got since."""
    now = {source.name: source.worker_partitions for source in plan.sources if _may_grow(source)}
    sources = []
    for source in was["sources"]:
        known = source["partitions"]
        more = max(known, now.get(source["name"], 0)) if isinstance(known, int) else known
        sources.append({**source, "partitions": more})
    return {**was, "sources": sources}


class VaultProcess:
    """The process that keeps the location. ``failed`` is called, in another thread, with the reason if the process ends before
    ``end``."""

    def __init__(self, plan: Plan, rendezvous: Rendezvous, place: Place, failed: Callable[[str], None]) -> None:
        self._failed = failed
        self._ends = False
        task = pickle.dumps(Task(for_a_vault(plan), rendezvous, place))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
        # The process has a group of its own, so that no Ctrl-C in a terminal ends it before the query. It has no session of
        # its own: Linux shares the processors out by sessions, and a priority that was given to the driver's session would
        # leave the vault behind.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "flux.shell.vault_process"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
            process_group=0,
        )  # fmt: skip
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and says why
            self._process.stdin.write(len(task).to_bytes(8, "little") + task)
            self._process.stdin.flush()
        # Held until the last task has ended: a task may bring rows outside that are in the journal already.
        self._hold = place.hold()
        self._watch = threading.Thread(target=self._watched, name="flux-vault", daemon=True)
        self._watch.start()

    def _watched(self) -> None:
        assert self._process.stdout is not None
        said = self._process.stdout.read().decode(errors="replace").strip()
        code = self._process.wait()
        if not self._ends:
            try:
                error = json.loads(said.splitlines()[-1])
                self._failed(f"{error['kind']}: {error['message']}")
            except (ValueError, LookupError, TypeError):
                self._failed(f"its process (pid {self._process.pid}) has ended with code {code}")

    def end(self) -> None:
        """Wait for the process at the end of the query; the controller has told it to stop."""
        self._ends = True
        self._watch.join(END_S)
        if self._process.poll() is None:
            self._process.kill()
            self._watch.join(END_S)
        self._hold.close()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
