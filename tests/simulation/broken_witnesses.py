"""Variants in which a witness is taken for more or for less than it is: each answer of a kind is asked for somewhere."""

from __future__ import annotations

import pytest

from flux.replica.kinds import AckMeaning
from tests.simulation.witness import WITNESS, Witness, WitnessPlaces

Patch = pytest.MonkeyPatch


def witnesses_may_lead(patch: Patch) -> None:
    """They take over like active replicas."""
    patch.setattr(WitnessPlaces, "leads_as", WITNESS)
    patch.setattr(WitnessPlaces, "safe", True)


def witnesses_count_as_safe(patch: Patch) -> None:
    """A partition of which nothing else is left counts as saved."""
    patch.setattr(WitnessPlaces, "safe", True)


def commits_without_its_witness(patch: Patch) -> None:
    """The primary does not wait for what it has promised to wait for."""
    patch.setattr(Witness, "commits", False)


def waits_for_acks_of_a_witness(patch: Patch) -> None:
    """Producers keep rows for a replica that reads none."""
    patch.setattr(Witness, "acks", AckMeaning.APPLIED)


def waits_for_a_witness_to_be_copied(patch: Patch) -> None:
    """A new witness gets no orders before it has a copy of a state, which it never asks for."""
    patch.setattr(Witness, "copies", True)
