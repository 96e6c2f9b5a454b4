"""Seconds of each piece of an RL step on one rank.

Read `work.py` (what prices are of), `passes.py` (a model's passes on one rank, which calibration fits), `engine.py` (a
model that ranks share by ZeRO) and `inference.py` (one that they share by tensor parallelism), `decoding.py` (rows that
join and leave while they are sampled), then `step.py` (the pieces of a step under a plan).
"""

from hybrid_rlhf.planning.costs.step import Costs
from hybrid_rlhf.planning.costs.work import Work

__all__ = ["Costs", "Work"]
