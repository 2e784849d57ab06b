"""Results of queries on their way from a gateway to any number of readers (design: result-tails).

ring            The newest results of an output in memory, which all its readers share
tentative_tail  Tentative rows of an output, and one reader's way through them
tails           One reader of the disk for each output that is read now
follower        One reader's way through an output: from the disk, then from memory
rows_answer     Answers with rows, as JSON or Arrow
event_stream    Results as server-sent events
endpoint        Requests for results, answered in the loop of a gateway
"""
