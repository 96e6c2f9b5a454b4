"""Seconds of each piece of an RL step on one rank.

Read `passes.py` (a model's passes on one rank, which calibration fits), `decoding.py` (rows that join and leave while
they are sampled), then `step.py` (the pieces of a step, with communication).
"""

from hybrid_rlhf.planning.costs.decoding import decode_segments
from hybrid_rlhf.planning.costs.step import Costs, Work

__all__ = ["Costs", "Work", "decode_segments"]
