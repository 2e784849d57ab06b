"""A checkpoint location that was written before classes of Flux were moved: today's code reads all of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flux.connectors.files.parquet_sink import ParquetFolder
from flux.connectors.kafka.write.sequence_operator import SequenceOperator
from flux.dataflow.flow import FunctionOperator
from flux.joins.as_of import AsOfJoin
from flux.joins.join import Join
from flux.joins.refreshed_lookup import RefreshedLookup
from flux.operators.collect import Collect
from flux.operators.operator import Operator
from flux.operators.tentative import ReadableOperator
from flux.operators.windowed_rows import WindowFunction
from flux.ranks.dedup import Dedup
from flux.ranks.top import Top, TopOfWindow
from flux.state.state_copy import OutputLog, ReplicaState, StreamPosition, decode_state
from flux.vault.journal import Ordered, Taken, frames
from flux.wire.safe_pickle import Anchored, Plain, names_of

LOCATION = Path(__file__).parent / "data" / "location"
#: Names of Flux's classes in locations. A class that moves has its name here among its ``__former_names__``.
STORED = {
    ReplicaState: "flux.replicas.copy_state.ReplicaState",
    StreamPosition: "flux.replicas.copy_state.Position",
    OutputLog: "flux.replicas.copy_state.OutputLog",
    Collect: "flux.dataflow.collect.Collect",
    ParquetFolder: "flux.dataflow.files.Files",
    FunctionOperator: "flux.dataflow.api.FunctionOperator",
    SequenceOperator: "flux.kafka.numbering.Numbering",
    WindowFunction: "flux.operators.windowed_rows.WindowFunction",
    TopOfWindow: "flux.ranks.top.TopOfWindow",
    Top: "flux.ranks.top.Top",
    Dedup: "flux.ranks.dedup.Dedup",
    Join: "flux.joins.join.Join",
    AsOfJoin: "flux.joins.as_of.AsOfJoin",
    RefreshedLookup: "flux.joins.refreshed_lookup.RefreshedLookup",
}


def test_its_checkpoints_and_orders_are_read() -> None:
    (journal,) = LOCATION.glob("journal-*")
    records = [record for some in frames(memoryview(journal.read_bytes()), str(journal)) for record in some]
    states = [decode_state(record.kept.data) for record in records if isinstance(record, Taken)]
    assert all(position.next >= 0 for state in states for position in state.positions)
    assert sum(len(output.entries) for state in states for output in state.outputs) > 0
    assert {record.item.stage for record in records if isinstance(record, Ordered) and record.item.entries} == {0, 1}


@pytest.mark.parametrize("kind", STORED)
def test_a_class_of_flux_keeps_the_name_by_which_locations_know_it(kind: type) -> None:
    assert ".".join(names_of(kind)[-1]) == STORED[kind]


def test_every_operator_of_flux_that_a_plan_can_name_is_listed() -> None:
    """Compare the list with all operators: a plan names the operators of a chain one by one, and aggregates and keyed
    operators by their users' classes."""
    bases = [Operator, ReadableOperator]
    bases += [kind for kind in ReadableOperator.__subclasses__() if kind.__name__ == "_Ranks"]
    named = {kind for base in bases for kind in base.__subclasses__() if kind.__module__.startswith("flux.")}
    # A stage has _Unmade before its plan is compiled; _Ranks is the base of both kinds of ranks.
    others = {"Chained", "Aggregate", "KeyedOperator", "_Unmade", "_Ranks", "ReadableOperator"}
    assert {kind.__name__ for kind in named} - others == {
        kind.__name__ for kind in STORED if issubclass(kind, Operator)
    }


def test_pickles_name_functions_of_the_unpickler_by_its_former_module() -> None:
    thing = object()
    for reader in (Plain(b"", (Last,), anchors=(thing,)), Anchored(b"", None, (thing,))):
        assert reader.find_class("flux.wire.unpickle", "anchor")(0) is thing
    assert Plain(b"", (Last,)).find_class("flux.wire.unpickle", "listed")(0) is Last


def test_the_query_of_the_location_is_described_by_stored_names() -> None:
    about = json.loads((LOCATION / "flux.json").read_text())
    assert about["plan"]["stages"]["Totals.files"]["operator"] == STORED[ParquetFolder]


class Last:
    """A class that a user lists."""
