"""Policies of load balance, one module each. Every module of this package is loaded, so that a new policy needs no
registration.

base           The contract of a policy: it looks at loads and suggests moves, and never acts
planned_moves  Limits of every policy: holders of partitions, budget of bytes, moves under way
pair_extremes  ``pairing``: the busiest worker with the idlest, the second busiest with the second idlest
even           ``even``: equal numbers of replicas, for workers that have joined
drain          ``drain``: replicas of leaving workers go to the least loaded of the others
demand         The share of its worker's time that a replica needs
"""

from __future__ import annotations

import importlib
import pkgutil

from controller.balance.policies.base import REGISTRY, Policy, PolicySettings, make

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["REGISTRY", "Policy", "PolicySettings", "make"]
