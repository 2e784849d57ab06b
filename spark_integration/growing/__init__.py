"""Changes of the plan of a running query, from its own program (design: additions).

running_plan  The newest plan of a running query, with the declarations of its parts
"""
