"""Marks: points of event time at which copies of a partition give the same rows in the same order (design: independent).

canonical  Results of one mark, in an order that follows from the rows alone
"""
