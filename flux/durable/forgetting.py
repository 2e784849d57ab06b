"""Forgotten output: a sink begins anew behind the output that a checkpoint location knows to be outside (design:
forgotten-output)."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from flux.durable.journal import Journal
from flux.durable.place import Place
from flux.errors import UsageError
from flux.replicas.copy_state import decode_state
from partitioning.ids import PartitionKey


def read_journal(place: Place) -> tuple[Journal, int]:
    """Read a journal, and the number of times it was opened for writing. SnapshotError: it is damaged, or
    another release has written it."""
    store = place.store(writes=False)
    try:
        return Journal(store, f"the journal in {place}"), store.starts()
    finally:
        store.close()


def forget(place: Place, about: dict[str, Any], stages: Iterable[str]) -> dict[str, Any]:
    """Return the description of a location with new names for the output of these stages. UsageError: a query uses it."""
    if place.is_held():
        raise UsageError(f"a query is using {place}: stop it first")
    journal, _ = read_journal(place)
    forgotten, sinks = dict(about.get("forgotten", {})), dict(about.get("kept", {}).get("sinks", {}))
    for name in stages:
        stage = about["plan"]["stages"][name]
        keys = [PartitionKey(stage["number"], partition) for partition in range(stage["partitions"])]
        forgotten[name] = {"query": str(uuid.uuid4()), "first": [_left(journal, key) for key in keys]}
        # The things that a sink has settled, such as the ids of Kafka's producers, belong to the output that is forgotten.
        sinks.pop(name, None)
    return {**about, "kept": {**about.get("kept", {}), "sinks": sinks}, "forgotten": forgotten}


def _left(journal: Journal, key: PartitionKey) -> int:
    """Return the position below which the location knows all output of a partition to be outside."""
    kept = journal.standbys.get(key)
    if kept is None:
        return 0
    pieces = kept.checkpoint.pieces
    exit_: Any = decode_state(pieces[-1]).replica["exit"] if pieces else None
    return max(kept.left, 0 if exit_ is None else exit_[1])
