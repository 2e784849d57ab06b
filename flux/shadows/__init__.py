"""Shadows: tentative results beside the replicas of a partition, within a bound, while something is missing (design: shadow).

tentative_operator  The contract of an operator's results for rows that are not stable
peeked_operator     Results that the stable operator gives, without a change of its state
forked_operator     Results of a copy of the operator, which is given the steps that follow
calendar            Marks of event time that were heard of, with their dates
overlay             Tentative rows of upstream shadows, by stream and mark
shown_rows          Tentative rows that a sink was shown, and those that the correction has changed
shadow              The shadow of one replica: deadlines, policies, marks and their corrections
lane                Rows of tentative messages, by partition of their consumer
shadow_hosts        The shadows of one worker: their places, their turns and their lane
"""
