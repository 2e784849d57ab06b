"""Webhooks: results of queries, posted to a receiver outside in numbered and signed batches (design: webhooks).

catalogue     Registered webhooks
target        The address of a receiver: public unless allowed, and resolved once
deliveries    Deliveries as they are planned, sent and confirmed, without I/O
delivery_log  Planned and confirmed deliveries, on disk
message       The content of a delivery, and its signature
pusher        One webhook of this gateway
runner        All webhooks that this gateway owns
actions       Requests about webhooks
"""
