"""Variants in which a witness is taken for more or for less than it is: each answer of a kind is asked for somewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flux.replica.kinds import AckMeaning
from tests.simulation import witness

Patch = pytest.MonkeyPatch


def answers(patch: Patch, **other: Any) -> None:
    patch.setattr(witness, "KIND", replace(witness.KIND, **other))


def witnesses_may_lead(patch: Patch) -> None:
    """Let witnesses take over like active replicas."""
    answers(patch, leads_as=witness.WITNESS, safe=True)


def witnesses_count_as_safe(patch: Patch) -> None:
    """Count a partition of which only a witness is left as saved."""
    answers(patch, safe=True)


def commits_without_its_witness(patch: Patch) -> None:
    """Let the primary commit without its witness, though it has promised to wait for it."""
    answers(patch, commits=False)


def waits_for_acks_of_a_witness(patch: Patch) -> None:
    """Let producers keep rows for a witness, which reads none."""
    answers(patch, acks=AckMeaning.APPLIED)


def waits_for_a_witness_to_be_copied(patch: Patch) -> None:
    """Give a new witness no orders before it has a copy of a state, which it never asks for."""
    answers(patch, copies=True)
