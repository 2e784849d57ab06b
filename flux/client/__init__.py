"""A client of gateways: streams, queries and outputs are registered, events pushed each once, and results read (design:
gateway-client).

event_stream  Server-sent events: bytes as events
client        ``flux.client.Client``
"""

from flux.client.client import Client, GatewayClient, GatewayRefused, ResultRows

__all__ = ["Client", "GatewayClient", "GatewayRefused", "ResultRows"]
