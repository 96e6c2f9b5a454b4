"""Config sections: one dataclass each, shared by several steps.

Read `rules.py` (what a field says about itself, and the check that raises a user's error), `run.py`, `model.py`,
`data.py` and `training.py` (what every step has), then `sampling.py`, `algorithm.py`, `rollout.py`, `rewards.py` and
`environment.py` (RL). `batch_plan.py` derives micro-batches from global sizes.
"""
