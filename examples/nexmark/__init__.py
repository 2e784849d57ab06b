"""The 23 queries of Nexmark, the benchmark of an auction house: each module ``qN`` is one query, a page that stands by itself.

generator  The events: every one follows from its number
flows      The flows of people, auctions and bids
q0         Pass-through: every bid as it is
q1         Currency conversion: prices in euros
q2         Selection: bids for some auctions
q3         Local items: auctions joined with their sellers, without a bound of time
q4         Average price of a category: bids joined with auctions while these are open
q5         Hot items: the most bids of hopping windows
q6         Average price of a seller: an operator of one's own
q7         Highest bids of windows
q8         New users: two windows joined
q9         Winning bids: an interval join and a rank
q10        Log: bids into files, with day and minute
q11        User sessions: bids of each bidder without a pause
q12        Windows of processing time
q13        A join with a small table
q14        Calculation: conditions and functions
q15        Statistics of a day: distinct counts with conditions
q16        Statistics of a channel and day
q17        Statistics of an auction and day
q18        Last bid of each user for each auction
q19        The ten highest bids of each auction
q20        Bids with their auctions, kept for ever
q21        Channel ids out of pages
q22        Folders of pages
ranks      Measures of q15, q16 and q17
sql        Texts for ``flux.sql`` of the queries that it can say

    python -m examples.nexmark q11 --events 1000000

runs one of them on events that are generated in the workers, and prints the first rows of its answer.
"""
