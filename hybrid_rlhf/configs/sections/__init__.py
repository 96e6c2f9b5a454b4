"""Config sections: one dataclass each, shared by several steps.

Read `rules.py` (what a field says about itself, and bounds), `run.py`, `model.py`, `data.py` and `training.py` (what
every step has), then `sampling.py`, `algorithm.py`, `rollout.py`, `rewards.py`, `environment.py` and `placement.py`
(RL).
"""
