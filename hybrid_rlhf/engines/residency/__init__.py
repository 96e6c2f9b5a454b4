"""Where the memory of each role lies in each phase of an RL step.

Read `rules.py` (what the settings and the placement decide), then `offload.py` (what moves between device and host).
"""
