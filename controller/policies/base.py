"""What a policy is: it looks at loads and suggests moves, and never acts (DESIGN 6).

A module in this package with a subclass of ``Policy`` is all that a new policy needs; the name that the class is given
is the one that ``spark.flux.balance.policy`` and ``flux rebalance --policy`` know it by.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from controller.load import Loads, Suggestion
from flux.errors import UsageError
from flux.settings import Settings


@dataclass(frozen=True)
class PolicySettings:
    """``spark.flux.balance.*`` as policies see it. ``same_executor``: copies of a partition may share an executor where
    they cannot be kept apart. ``max_moves`` and ``max_bytes_per_s`` may be infinite. ``smooth_s``: load is averaged over
    about so long a time. ``steady_rounds``: a difference counts when it has been there in so many rounds on end."""

    threshold: float = 0.1
    cool_down_s: float = 5.0
    max_moves: float = 1
    max_bytes_per_s: float = 64 << 20
    same_executor: bool = False
    smooth_s: float = 2.0
    steady_rounds: int = 3

    @classmethod
    def of(cls, settings: Settings) -> PolicySettings:
        return cls(
            threshold=settings.balance_threshold,
            cool_down_s=settings.balance_cool_down,
            max_moves=settings.balance_max_moves,
            max_bytes_per_s=settings.balance_max_bytes_per_second,
            same_executor=settings.same_executor,
            smooth_s=2 * settings.balance_round,
        )

    def at_once(self) -> PolicySettings:
        """For a whole plan made from one look: nothing to wait for or to smooth, no limit on moves, and none goes back."""
        return replace(
            self,
            cool_down_s=math.inf,
            max_moves=math.inf,
            max_bytes_per_s=math.inf,
            smooth_s=0.0,
            steady_rounds=1,
        )


class Policy(ABC):
    """Asked once a round. It may keep what it has seen from round to round; what became of its suggestions it sees in
    the next loads. Subclasses give their name: ``class Mine(Policy, name="mine")``."""

    name: ClassVar[str]

    def __init__(self, settings: PolicySettings) -> None:
        self.settings = settings

    def __init_subclass__(cls, name: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = name
        REGISTRY[name] = cls

    @abstractmethod
    def suggest(self, loads: Loads, now: float) -> Suggestion:
        """At most one move for each partition; the most useful first. ``now`` never goes back."""


#: Every policy there is, by name.
REGISTRY: dict[str, type[Policy]] = {}


def make(name: str, settings: PolicySettings) -> Policy:
    if name not in REGISTRY:
        raise UsageError(f"there is no balance policy {name!r}; known are {', '.join(sorted(REGISTRY))}")
    return REGISTRY[name](settings)
