"""Deterministic simulation: the real state machines under virtual time and seeded faults (design: simulator).

One seed decides the plan, the data, the settings, every delay and every fault, so that a failing run is repeated by
``make sim SEED=n``. Start reading at ``run``; the laws are in ``checkers``, the world's wickedness in ``faults``
and ``mixes``. ``stalls`` is the law that no stream stands still;
``variants`` are deliberately broken, to see that the laws can be broken.
``operators`` ask for moves, drains and more or fewer workers meanwhile, with the laws of that in ``moves`` and, that each
request ends, in ``outcomes``; ``busy`` makes
up the load that policies go by. ``divergence``, ``hearts`` (pulses and long steps), ``rivals`` (second attempts of workers) and
``fetches`` (of output) each bring a kind of fault and its laws. ``kills`` lets executors with several workers die one
after the other. ``story`` tells a run line by line, in the words of ``wording``. ``orders`` is a
smaller model, of the order logs of one partition alone.
"""
