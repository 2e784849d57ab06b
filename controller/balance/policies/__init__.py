"""Policies of load balance, one module each. Every module of this package is loaded, so that a new policy needs no
registration.

base           The base of policies
planning       Placement while moves are planned
pair_extremes  Pairing, the policy of Flux
even           Even policy
drain          Drain policy
demand         Demand
"""

from __future__ import annotations

import importlib
import pkgutil

from controller.balance.policies.base import REGISTRY, Policy, PolicySettings, make

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["REGISTRY", "Policy", "PolicySettings", "make"]
