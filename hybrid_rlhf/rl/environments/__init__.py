"""Environments of multi-turn rollouts: games, tools, verifiers.

Read `environment.py` (the interface), `runner.py` (runs episodes), `episodes.py`, `observations.py` (tokens of an
observation) and `calls.py` (concurrency and time-outs). `calculator.py` and `reasoning_gym.py` are environments.
"""

from hybrid_rlhf.rl.environments.environment import Environment, StepResult, load_environment
from hybrid_rlhf.rl.environments.runner import EnvironmentRunner

__all__ = ["Environment", "EnvironmentRunner", "StepResult", "load_environment"]
