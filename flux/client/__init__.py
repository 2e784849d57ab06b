"""A client of gateways: streams, queries and outputs are registered, events pushed each once, and results read (design:
gateway-client).

event_stream  Server-sent events: bytes as events
result_news   News of a result: stable rows, tentative ones and their end, and a table of them
client        ``flux.client.Client``
"""

from flux.client.client import Client, GatewayClient, GatewayRefused
from flux.client.result_news import (
    CorrectedResults,
    FollowedNews,
    ResultRows,
    ResultView,
    TentativeResults,
    UndoneResults,
)

__all__ = [
    "Client",
    "CorrectedResults",
    "FollowedNews",
    "GatewayClient",
    "GatewayRefused",
    "ResultRows",
    "ResultView",
    "TentativeResults",
    "UndoneResults",
]  # fmt: skip
