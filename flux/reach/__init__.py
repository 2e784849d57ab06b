"""Reachability: rows that do not come over one link, and other ways to them (design: reachability).

starvation           Rows that do not come although some process has them
hedging              Second feeds of streams whose first one stands still
loans                Rows that a primary cannot get, lent by a secondary that has them
relays               Ways over a third worker, for messages of two workers that cannot reach each other
unreached_primaries  Primaries to which rows or acks do not come, while another replica of their partition has them
"""
