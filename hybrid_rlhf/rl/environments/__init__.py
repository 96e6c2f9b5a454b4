"""Environments of multi-turn rollouts: games, tools, verifiers, and programs that speak OpenAI's API.

Read `environment.py` (the interface), `episodes.py` (what runs episodes), `runner.py` (of a class), `observations.py`
(tokens of an observation) and `calls.py` (concurrency and time-outs); for programs `programs.py` and `recording.py`.
`building.py` chooses between the two. `calculator.py` and `reasoning_gym.py` are environments.
"""

from hybrid_rlhf.rl.environments.building import build_runner
from hybrid_rlhf.rl.environments.environment import Environment, StepResult
from hybrid_rlhf.rl.environments.episodes import EpisodeRunner

__all__ = ["Environment", "EpisodeRunner", "StepResult", "build_runner"]
