"""q2, selection: the bids for one auction in 123. The condition is computed where bids are read, before they travel."""

from __future__ import annotations

import flux
from examples.nexmark.flows import Nexmark


def query(nexmark: Nexmark) -> flux.Flow:
    return nexmark.bid("auction", "price").where("auction % 123 = 0")
