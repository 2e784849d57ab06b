"""Deterministic simulation: the real state machines under virtual time and seeded faults (DESIGN 7).

One seed decides the plan, the data, the settings, every delay and every fault, so that a failing run is repeated by
``make sim SEED=n``. Start reading at ``run``; the laws are in ``checkers``, the world's wickedness in ``faults``
and ``mixes``. ``stalls`` measures how long streams stand still;
``variants`` are deliberately broken, to see that the laws can be broken.
``operators`` ask for moves, drains and more or fewer workers meanwhile, with the laws of that in ``moves``; ``busy`` makes
up the load that policies go by. ``kills`` lets executors with several workers die one after the other. ``orders`` is a
smaller model, of the order logs of one partition alone.
"""
