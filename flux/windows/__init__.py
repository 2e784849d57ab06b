"""Windows of event time: groups of rows by their time, which are final when the watermark has passed them (design: windows).

durations      Lengths of time as Spark writes them, in microseconds
times          Times of rows, as numbers
window         Windows as a user declares them, and the panes that they are made of
lateness       Lateness of rows, judged where they are read
timely_rows    Rows of an operator that needs their times: those that count, and how many are left out
statements     Statements about streams, and the watermark that follows from them
open_panes     Open panes of tumbling and hopping windows: pieces of state by stretches of time
pane_spans     Sums of panes, so that a window of many panes is not merged from each of them
pane_state     State of tumbling and hopping windows: one table of groups for each pane
session_state  State of sessions: the open sessions of each key
kept_rows      Rows that are kept until their windows end, and groups of them
row_panes      State of tumbling and hopping windows: the rows of each pane
session_rows   State of sessions: the open sessions of each key, and their rows

Times are integers: microseconds since the epoch. The state of a window does not know where watermarks come from.
"""
