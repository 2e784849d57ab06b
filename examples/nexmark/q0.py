"""q0, pass-through: every bid as it is. It shows what an exchange costs by itself."""

from __future__ import annotations

import flux
from examples.nexmark.flows import Nexmark


def query(nexmark: Nexmark) -> flux.Flow:
    return nexmark.bid("auction", "bidder", "price", "dateTime", "extra")
