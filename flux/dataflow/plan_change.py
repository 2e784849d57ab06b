"""Changes of the plan of a running query: stages, sources and edges that come and go (design: plan-version).

Each change makes the next version of the plan. All processes apply the same changes in the same order, so plans of one version
are equal everywhere. ``PlanVersions`` are the versions that one process knows.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
from cloudpickle import cloudpickle as by_value

from flux.dataflow.plan import ById, EdgePlan, FromSource, FromStage, Part, Plan, SourcePlan, StagePlan
from flux.errors import ProtocolError, UsageError
from flux.operators.user_code import described
from flux.wire.frames import HEADER_BYTES_MAX
from flux.wire.handshake import mac, same

#: Bytes of the code in front of an encoded change, and of everything beside the change in its message.
_CODE_BYTES, _BESIDE = 32, 1 << 10
#: The streams of a change get one 64th of the log that is left, and each of them this number of bytes at the least: with
#: less, each batch would wait for an ack.
PART_OF_LOG, STREAM_BYTES_MIN = 64, 64 << 10


@dataclass(frozen=True)
class PlanChange:
    """The difference of two versions of a plan."""

    #: That of the plan which it makes.
    version: int
    sources: tuple[SourcePlan, ...] = ()
    stages: tuple[StagePlan, ...] = ()
    #: All edges that are new: each goes to a new stage.
    edges: tuple[EdgePlan, ...] = ()
    removed_sources: tuple[int, ...] = ()
    removed_stages: tuple[int, ...] = ()
    removed_edges: tuple[int, ...] = ()
    #: The version that it changes; None: the one before. Versions between them were taken back, and no table ever named them.
    base: int | None = None
    #: The least ids of later sources, stages and edges, if parts came and went between the two versions (``in_one``).
    used: tuple[int, int, int] | None = None
    #: The ids of all sources, stages and edges that stay: others of the plan that it changes are removed, too. None: those that
    #: are named are removed.
    there: tuple[frozenset[int], frozenset[int], frozenset[int]] | None = None

    @property
    def changes(self) -> int:
        """The version of the plan that it changes."""
        return self.version - 1 if self.base is None else self.base

    def applied_to(self, plan: Plan) -> Plan:
        """Return the plan of this version. A running stage that gets an edge has its id behind its other ``edges_out``.

        ValueError: the change does not fit the plan."""
        if self.there is not None:
            return self._naming_removed(plan).applied_to(plan)
        self._check_numbers(plan)
        gone = frozenset(self.removed_edges)
        edges_out = {stage.id: [each for each in stage.edges_out if each not in gone] for stage in plan.stages}
        for edge in self.edges:
            if isinstance(edge, FromStage) and edge.stage in edges_out:
                edges_out[edge.stage].append(edge.id)
        kept = ById(
            stage
            if (edges := tuple(edges_out[stage.id])) == stage.edges_out
            else replace(stage, edges_out=edges, first_edges=stage.edges_at_birth)
            for stage in plan.stages
        )
        made = replace(
            plan,
            version=self.version,
            sources=_changed(self._kept_sources(plan), self.removed_sources, self._born(self.sources)),
            stages=_changed(kept, self.removed_stages, self._born(self.stages)),
            edges=_changed(plan.edges, self.removed_edges, self._born(self.edges)),
            first_streams=plan.first_streams or plan.counted_streams(),
            used=self.used or plan.next_ids(),
        )
        made = replace(made, used=made.next_ids())
        self._check_parts(made)
        return made

    def _naming_removed(self, plan: Plan) -> PlanChange:
        """Return the change with the removed parts by name."""
        assert self.there is not None
        sources, stages, edges = self.there
        return replace(
            self,
            removed_sources=tuple(source.id for source in plan.sources if source.id not in sources),
            removed_stages=tuple(stage.id for stage in plan.stages if stage.id not in stages),
            removed_edges=tuple(edge.id for edge in plan.edges if edge.id not in edges),
            there=None,
        )

    def _kept_sources(self, plan: Plan) -> ById[SourcePlan]:
        """Return the sources, each with the edges of its beginning, if it gets others or loses some now."""
        gone = (plan.edges[each] for each in self.removed_edges)
        touched = {edge.source for edge in (*self.edges, *gone) if isinstance(edge, FromSource)}
        return ById(
            replace(source, first_edges=source.first_edges or tuple(plan.edges_of_source(source.id)))
            if source.id in touched
            else source
            for source in plan.sources
        )

    def _born(self, parts: Sequence[Part]) -> list[Part]:
        """Return new parts with the version since which they are there: this one, or an earlier one that is told already."""
        return [replace(part, since=part.since or self.version) for part in parts]  # type: ignore[type-var, attr-defined]

    def _check_numbers(self, plan: Plan) -> None:
        if self.changes != plan.version or self.version <= plan.version:
            raise ValueError(f"a change to version {self.version} does not fit a plan of version {plan.version}")
        least = dict(zip(("source", "stage", "edge"), plan.next_ids(), strict=True))
        for kind, parts, present, removed in (
            ("source", self.sources, plan.sources, self.removed_sources),
            ("stage", self.stages, plan.stages, self.removed_stages),
            ("edge", self.edges, plan.edges, self.removed_edges),
        ):
            ids = [part.id for part in parts]
            if ids != sorted(set(ids)) or (ids and ids[0] < least[kind]):
                raise ValueError(f"ids of a new {kind} must ascend from {least[kind]} on, given are {ids}")
            if absent := [each for each in removed if each not in present]:
                raise ValueError(f"the plan has no {kind} {absent[0]} that could be removed")

    def _check_parts(self, made: Plan) -> None:
        """Check that the plan that was made hangs together: each edge leads from a part of the plan to a later one."""
        for edge in made.edges:
            origin = edge.stage if isinstance(edge, FromStage) else None
            there = edge.consumer in made.stages and (
                edge.source in made.sources if isinstance(edge, FromSource) else origin in made.stages
            )
            if not there or edge.id not in made.stages[edge.consumer].edges_in:
                raise ValueError(f"edge {edge.id} does not lead from a part of the plan to a stage that reads it")
            if origin is not None and (origin >= edge.consumer or edge.id not in made.stages[origin].edges_out):
                raise ValueError(
                    f"edge {edge.id} leads from stage {origin}, which does not feed it or is not before it"
                )
            if edge.since == self.version and made.stages[edge.consumer].since < self.version:
                raise ValueError(f"edge {edge.id} is new, and stage {edge.consumer} runs: a stage keeps its inputs")
        for stage in made.stages:
            absent = [each for each in (*stage.edges_in, *stage.edges_out) if each not in made.edges]
            if absent:
                raise ValueError(f"stage {stage.name} names edge {absent[0]}, which the plan does not have")

    def with_log_shares(self, plan: Plan, workers: int) -> PlanChange:
        """Return the change with the share of the log of each new edge's streams, of the log that is left in ``plan`` (design:
        share-at-birth). ``workers``: the number with which the query began. UsageError: too little is left."""
        made = self.applied_to(plan)
        streams = sum(made.streams_of(edge) for edge in made.edges if edge.since == self.version)
        left = plan.log_left(workers)
        # The streams of a DataFrame are not known before its job runs.
        share = max(left // PART_OF_LOG // max(streams, 1), STREAM_BYTES_MIN)
        if share * streams > left:
            raise UsageError(
                f"{streams} new streams, one for each partition and replica that feeds a new stage, need "
                f"{_kb(STREAM_BYTES_MIN)} of log each, and {_kb(left)} are left: remove other stages, use fewer "
                "partitions, or start the query with a larger spark.flux.log.maxBytes"
            )
        share = min(share, plan.settings.log_max_bytes)
        return replace(self, edges=tuple(replace(edge, log_bytes=share) for edge in self.edges))


def in_one(changes: Sequence[PlanChange], plan: Plan) -> PlanChange | None:
    """Return one change in place of several, up to ``plan``: without the parts that came and went meanwhile, whose code may be
    gone, too. None: there are no such parts."""
    since = changes[0].changes
    came = {part.id for change in changes for part in change.stages}
    stages = _later(plan.stages, since)
    if len(came) == len(stages):
        return None
    new_sources = {part.id for change in changes for part in change.sources}
    new_edges = {edge.id for change in changes for edge in change.edges}
    return PlanChange(
        plan.version,
        _later(plan.sources, since),
        stages,
        _later(plan.edges, since),
        tuple(sorted({each for change in changes for each in change.removed_sources} - new_sources)),
        tuple(sorted({each for change in changes for each in change.removed_stages} - came)),
        tuple(sorted({each for change in changes for each in change.removed_edges} - new_edges)),
        since,
        plan.next_ids(),
    )


def change_since(plan: Plan, first: int, last: int) -> PlanChange:
    """Return the change from version ``first`` to the parts of ``plan`` that are there since ``last`` or earlier, however many
    versions lie between."""
    sources, stages, edges = (
        frozenset(part.id for part in parts if part.since <= last) for parts in (plan.sources, plan.stages, plan.edges)
    )
    new = (
        replace(stage, edges_out=tuple(edge for edge in stage.edges_out if edge in edges))
        for stage in plan.stages
        if first < stage.since <= last
    )
    return PlanChange(
        last,
        tuple(source for source in plan.sources if first < source.since <= last),
        tuple(new),
        tuple(edge for edge in plan.edges if first < edge.since <= last),
        base=first,
        used=plan.next_ids() if last == plan.version else None,
        there=(sources, stages, edges),
    )


def _later(parts: ById[Part], since: int) -> tuple[Part, ...]:
    return tuple(part for part in parts if part.since > since)  # type: ignore[attr-defined]


def _changed(parts: ById[Part], removed: Collection[int], added: Sequence[Part]) -> ById[Part]:
    return ById([*(part for part in parts if part.id not in removed), *added])


def _kb(nbytes: int) -> str:
    return f"{nbytes >> 10} KB"


def encode_change(change: PlanChange, secret: bytes) -> bytes:
    """Encode a change with a code by the secret of the query, for ``decode_change``. It travels with the user's operators.

    UsageError: it cannot be pickled, or is too long for a message."""
    try:
        pickled: bytes = cloudpickle.dumps(change)
    except Exception as error:
        raise UsageError(
            f"stages {', '.join(stage.name for stage in change.stages)} cannot be sent to the workers: {described(error)}. "
            "Operators must be picklable: open connections and files in open() or at the first rows"
        ) from error
    if len(pickled) > HEADER_BYTES_MAX - _BESIDE:
        raise UsageError(
            f"an addition of {_kb(len(pickled))} is too long, at most {_kb(HEADER_BYTES_MAX - _BESIDE)} can be sent: "
            "have the operators read large objects from files, or add fewer stages at a time"
        )
    return mac(secret, b"change of the plan", pickled) + pickled


def decode_change(data: bytes, secret: bytes) -> PlanChange:
    """Decode a change. ProtocolError: it does not come from this query's driver. Any error of the user's modules, which are
    imported."""
    view = memoryview(data)
    if len(view) < _CODE_BYTES or not same(view[:_CODE_BYTES], mac(secret, b"change of the plan", view[_CODE_BYTES:])):
        raise ProtocolError("a change of the plan without the code of this query")
    with _one_load:
        change = _Arrival(view[_CODE_BYTES:]).load()
    assert isinstance(change, PlanChange), f"{type(change).__name__} in place of a change of the plan"
    return change


def texts_of(data: bytes) -> set[str]:
    """Return all texts of an encoded change, without loading it: the modules that it names are among them."""
    return {given for _, given, _ in pickletools.genops(data[_CODE_BYTES:]) if isinstance(given, str)}


#: Two loads would see each other's unfinished classes.
_one_load = threading.Lock()


class _Arrival(pickle.Unpickler):
    """Unpickler of the user's code, which leaves classes alone that this process has already.

    A class of ``__main__`` comes by value with each change, under the same number each time. cloudpickle would set all of its
    attributes anew, and running operators of the class would share other values from the middle of a step on."""

    def __init__(self, data: memoryview) -> None:
        super().__init__(io.BytesIO(data))
        with by_value._DYNAMIC_CLASS_TRACKER_LOCK:
            self._present = list(by_value._DYNAMIC_CLASS_TRACKER_BY_CLASS)
        self._ids = frozenset(map(id, self._present))
        self._made: list[Any] = []

    def load(self) -> Any:
        try:
            return super().load()
        except BaseException:
            with by_value._DYNAMIC_CLASS_TRACKER_LOCK:  # the next load would take unfinished classes for present ones
                for made in self._made:
                    by_value._DYNAMIC_CLASS_TRACKER_BY_ID.pop(
                        by_value._DYNAMIC_CLASS_TRACKER_BY_CLASS.pop(made, None), None
                    )
            raise

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if found is by_value._class_setstate:
            return self._set
        if found is by_value._make_skeleton_class or found is by_value._make_skeleton_enum:
            return lambda *arguments: self._noted(found(*arguments))
        return found

    def _noted(self, made: Any) -> Any:
        if id(made) not in self._ids:
            self._made.append(made)
        return made

    def _set(self, kind: Any, state: Any) -> Any:
        return kind if id(kind) in self._ids else by_value._class_setstate(kind, state)


class PlanVersions:
    """The plans that one process knows, up to the ``newest``. The process goes by one of them, and
    forgets the earlier ones."""

    def __init__(self, plan: Plan) -> None:
        self._plans = {plan.version: plan}
        self.newest = plan

    def take(self, change: PlanChange) -> bool:
        """Take a change. Return False if the version that it changes is missing. Versions behind that one were taken back, and
        are forgotten. ValueError: it does not fit."""
        if change.version <= self.newest.version:
            return True
        plan = self._plans.get(change.changes)
        if plan is None:
            return False
        self.newest = change.applied_to(plan)
        self._plans = {version: known for version, known in self._plans.items() if version <= plan.version}
        self._plans[change.version] = self.newest
        return True

    def edge(self, id_: int) -> EdgePlan | None:
        """Return an edge of the plan that the process goes by, or of a later one; None: it is not known, or removed."""
        for plan in self._plans.values():  # a generator would cost more than the look-up
            if id_ in plan.edges:
                return plan.edges[id_]
        return None

    def may_name(self, edge: int) -> bool:
        """Tell whether a process of another version may speak of an edge that the plan here does not have."""
        return 0 <= edge < self.newest.next_ids()[2] and self.newest.version > 0

    def of(self, version: int) -> Plan | None:
        """Return the plan of a version; None: it is not known yet."""
        return self._plans.get(version)

    def go_by(self, version: int) -> None:
        """Forget the versions before the one that the process goes by from now on."""
        for earlier in [each for each in self._plans if each < version]:
            del self._plans[earlier]
