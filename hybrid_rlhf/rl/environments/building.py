"""Builds the runner of a config's episodes: for a class with `reset` and `step`, or for programs."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.sections.environment import EnvironmentConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.rl.environments.environment import read_environment
from hybrid_rlhf.rl.environments.episodes import EpisodeRunner
from hybrid_rlhf.rl.environments.runner import EnvironmentRunner
from hybrid_rlhf.runtime.world import World, shared_user_errors
from hybrid_rlhf.serving.packages import require_packages


def build_runner(
    config: EnvironmentConfig | None,
    *,
    rollout: RolloutConfig,
    tokenizer: PreTrainedTokenizerBase,
    world: World,
    samples: bool = True,
) -> EpisodeRunner | None:
    """The runner of the configured environment; None without one (a completion is then one turn). Every rank calls.

    Args:
        config: the environment.
        rollout: how completions are sampled.
        tokenizer: tokenizer of the actor.
        world: all ranks.
        samples: true if this rank runs episodes.

    Raises:
        UserError: when the environment cannot be loaded, the chat template cannot show observations, or the address of
            programs is taken.
    """
    if config is None:
        return None
    if config.path is None:
        require_packages("rollout.endpoint" if config.program is None else "environment.program")
        from hybrid_rlhf.rl.environments.programs import ProgramRunner, read_program  # they import those packages

        with shared_user_errors(world):
            program = None if config.program is None else read_program(config)
        return ProgramRunner(program, config, rollout=rollout, tokenizer=tokenizer, world=world, samples=samples)
    with shared_user_errors(world):
        factory = read_environment(config)
    return EnvironmentRunner(factory, config, rollout=rollout, tokenizer=tokenizer, device=world.device)
