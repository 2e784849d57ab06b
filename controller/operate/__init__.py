"""Requests of people to a running query, and the answers.

requests         Requests of people to the controller of a running query, and its answers
request_handler  The answers to people's requests from the controller's state
plan_answers     Answers about versions of the plan and failed stages, and flows that the program adds
service          The service for people around the controller of a query
connection_file  The connection file, by which the command line finds a running query
client           Running queries, found by their connection files, and requests to their controllers
all_available    Waiting until all available rows have passed all stages, for ``query.processAllAvailable()``
"""
