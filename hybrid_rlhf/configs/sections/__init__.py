"""Config sections: one dataclass each, shared by several steps.

Read `rules.py` (marks and bounds of fields; their types are in `hints.py`), `run.py`, `model.py`, `data.py` and
`training.py` (sections of every step), then `sampling.py`, `algorithm.py`, `rollout.py`, `rewards.py`,
`environment.py` and `placement.py` (RL).
"""
