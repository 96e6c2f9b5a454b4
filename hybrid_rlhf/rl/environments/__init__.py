"""Environments of multi-turn rollouts: games, tools, verifiers, and programs that speak OpenAI's API.

Read `environment.py` (the interface), `episodes.py` (the interface of runners), `runner.py` (the runner of a class, and
which runner a config asks for), `observations.py` (tokens of an observation) and `calls.py` (concurrency and
time-outs); for programs `programs.py` and `recording.py`; for tools `tools.py`. Environments are `calculator.py`,
`python_tool.py`, `shell.py`, `mcp_tools.py` and `reasoning_gym.py`.
"""

from hybrid_rlhf.rl.environments.environment import Environment, StepResult
from hybrid_rlhf.rl.environments.episodes import EpisodeRunner
from hybrid_rlhf.rl.environments.runner import build_runner

__all__ = ["Environment", "EpisodeRunner", "StepResult", "build_runner"]
