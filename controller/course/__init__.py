"""The course of a query: its phases, and the versions of its plan.

beginnings     Partitions that have begun empty in place of lost ones, and the results that lack rows since
newborns       The table with which a change of the plan begins
plan_phases    The phases of a change of the plan
plan_requests  Requests for changes of the plan, and the records of changes that are done
query_phases   The phases of a query: the next phase for each event, and its message
removals       Stages that go with a stage or source, and the change that takes them out
source_births  Births of streams that come to running sources: the row or batch with which each begins
"""
