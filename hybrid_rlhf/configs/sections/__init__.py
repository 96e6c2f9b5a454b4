"""Config sections: one dataclass each, shared by several steps.

Read `setting.py` (what a field says about itself), `run.py`, `model.py`, `data.py` and `training.py` (what every step
has), then `sampling.py`, `algorithm.py`, `rollout.py`, `rewards.py` and `environment.py` (RL). `rules.py` has the check
that raises a user's error, `batch_plan.py` derives micro-batches from global sizes.
"""
