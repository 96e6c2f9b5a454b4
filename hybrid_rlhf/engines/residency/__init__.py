"""Location of the memory of each role in each phase of an RL step.

Read `rules.py` (decided by settings and placement), then `offload.py` (copies between device and host).
"""
