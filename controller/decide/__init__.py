"""The decisions of the controller, as one state machine without I/O.

controller     The controller's decisions as a state machine without I/O
board          The board, which all parts of the controller read and write
query_phases   The phases of a query
registration   Attendance
losses         Losses
sweep          The sweep of a running query
protection     Changes of the protection of a running stage
balancer       The balancer, which shows the load to policies and puts the moves that they suggest into the queue
departures     Departures
user_requests  Changes of a running query that people ask for
request_book   The requests of people, by number, with their states
"""
