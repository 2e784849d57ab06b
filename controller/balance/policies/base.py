"""The base of policies. A policy looks at loads and suggests moves, and never acts (design: balance).

A new policy is a module in this package with a subclass of ``Policy``. ``spark.flux.balance.policy`` and ``flux
rebalance --policy`` accept the name that is given to the class.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from controller.balance.load import Loads, Suggestion
from flux.errors import UsageError
from flux.settings import Settings


@dataclass(frozen=True)
class PolicySettings:
    """``spark.flux.balance.*`` for policies."""

    #: The least gain of a pair of workers, as a share of the higher load.
    threshold: float = 0.1
    #: For this time a partition that has moved stays.
    cool_down_s: float = 5.0
    #: In one round; may be infinite.
    max_moves: float = 1
    #: On average; may be infinite.
    max_bytes_per_s: float = 64 << 20
    #: Replicas of a partition may share an executor if they cannot be kept apart.
    same_executor: bool = False
    #: Loads are averaged over about this time.
    smooth_s: float = 2.0
    #: A difference counts after this number of rounds in a row.
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
        """Return settings for a whole plan from the loads of one moment: no smoothing, no waiting, no limit on moves, and no
        second move of a replica."""
        return replace(
            self,
            cool_down_s=math.inf,
            max_moves=math.inf,
            max_bytes_per_s=math.inf,
            smooth_s=0.0,
            steady_rounds=1,
        )


class Policy(ABC):
    """Base of the policies. A policy is asked once a round.

    It may remember earlier rounds; the next loads show whether its suggestions were carried out. Subclasses give their name:
    ``class Mine(Policy, name="mine")``."""

    name: ClassVar[str]

    def __init__(self, settings: PolicySettings) -> None:
        self.settings = settings

    def __init_subclass__(cls, name: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = name
        REGISTRY[name] = cls

    @abstractmethod
    def suggest(self, loads: Loads, now: float) -> Suggestion:
        """Suggest at most one move for each partition, the most useful first. ``now`` never goes back."""


#: All policies, by name.
REGISTRY: dict[str, type[Policy]] = {}


def make(name: str, settings: PolicySettings) -> Policy:
    if name not in REGISTRY:
        raise UsageError(f"there is no balance policy {name!r}; known are {', '.join(sorted(REGISTRY))}")
    return REGISTRY[name](settings)
