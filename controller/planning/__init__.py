"""Plans: a user's flow, checked and frozen for all processes of a query.

compiler          A user's flow to a checked plan: names, schemas, keys, edges, topological order
additions         Flows that are added to a running query: a change of its plan
compiled_plan     A plan together with facts about its declarations, which additions need
parts             Parts of a plan that is being compiled, those of a running plan in front of new ones
steps             Conditions and columns as steps
inputs            Flows in the order of a plan, and the inputs of a stage that is being compiled
names             Names of columns in a plan, and of its stages and sources
checks            Checks of whole plans: output that would never come, or that nothing takes
replica_kinds     Kinds of replicas in a plan, and the stages that may have replicas without an order
availability      Availability in a plan: the stages and sources that a bound reaches, and refusals
event_time_edges  Event time in a plan: which edges state watermarks, and whether windows ever close
columns           Columns at which something looks, from the last stage to the sources
explain           A plan as text for people
"""
