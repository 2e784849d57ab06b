"""The decisions of the controller, as one state machine without I/O.

controller     The controller's decisions as a state machine without I/O
board          The board, which all parts of the controller read and write
registration   Processes that register, and are admitted, turned away or left waiting
losses         Workers that are given up, take-overs, and the end of a query without replicas
sweep          The sweep of a running query: repairs before moves, step by step
protection     Changes of the protection of a running stage: number and kinds of its replicas
balancer       The balancer, which shows the load to policies and puts the moves that they suggest into the queue
slots          Slots, which tasks fill with workers, and drains of workers before they leave
departures     Workers that are emptied and leave, and workers that were given up and may still live
driver_events  Events of Spark's driver: jobs and tasks that end, room for workers, executors that go
plan_changes   Changes of the plan: additions, removals, and stages that fail
user_requests  Changes that people ask for: moves, more workers and fewer
request_book   The requests of people, by number, with their states
"""
