"""RL as a Python object, and as a command runs it: a session of `rl/build.py` with the planner's choice of a placement.

It is above `rl/`, because training itself needs neither the planner's times nor its search.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.rules import require
from hybrid_rlhf.loop.step import ModelSource, Step
from hybrid_rlhf.loop.user_code import register
from hybrid_rlhf.planning.automatic import choose_placement
from hybrid_rlhf.rl.algorithms import Algorithm
from hybrid_rlhf.rl.build import rl_session
from hybrid_rlhf.rl.environments import Environment
from hybrid_rlhf.rl.parts import RLSession
from hybrid_rlhf.rl.trainer import RLTrainer
from hybrid_rlhf.runtime.run import Callback

RewardSource = Callable[..., Any] | str | os.PathLike[str] | Mapping[str, Any]
"""A Python function, a reward model's path, or the settings of a reward component."""


class RL(Step[RLConfig]):
    """RL of an actor on its own completions: PPO, or `algorithm="grpo"` and others.

        RL(model="embedded", data=[{"prompt": "Hello"}], algorithm="grpo", reward=my_function).train()

    `session` returns the parts for a custom training loop, instead of `train`. See `Step` for the other arguments.
    """

    config_type = RLConfig

    def __init__(
        self,
        config: RLConfig | ModelSource | None = None,
        *,
        reward: RewardSource | Sequence[RewardSource] | None = None,
        environment: type[Environment] | Mapping[str, Any] | None = None,
        algorithm_class: type[Algorithm] | None = None,
        **settings: Any,
    ) -> None:
        """Take the settings.

        Args:
            config: settings that the keywords override, or the model; None: the defaults.
            reward: one or several components: functions `f(prompts, completions, **columns)` that return a score per
                completion, paths of reward models, or settings of a component.
            environment: a class with `reset` and `step`, or the section `environment`; None: a completion is one turn.
            algorithm_class: a custom algorithm; it reads the settings of the section `algorithm`.
            settings: model, data, callbacks, and the other keys and sections of the config.

        Raises:
            UserError: for an unknown key, a wrong value, or a rule of the config.
        """
        if reward is not None:
            rewards = reward if isinstance(reward, Sequence) and not isinstance(reward, str) else [reward]
            settings["reward"] = {"components": [_component(source) for source in rewards]}
        if environment is not None:
            settings["environment"] = {"path": register(environment)} if isinstance(environment, type) else environment
        super().__init__(config, **settings)
        self._algorithm_class = algorithm_class

    def session(self) -> contextlib.AbstractContextManager[RLSession]:
        """The run's models, data and parts; the process group is closed at the end of the context."""
        return rl_session(self.config, self.callbacks, self._algorithm_class, choose_placement)

    def _run(self) -> None:
        run_rl(self.config, self.callbacks, self._algorithm_class)


def _component(source: RewardSource) -> str | Mapping[str, Any]:
    """A reward component as in config files."""
    if callable(source):
        return {"function": register(source)}
    if isinstance(source, (str, os.PathLike)):
        return os.fspath(source)
    require(
        isinstance(source, Mapping),
        f"reward must be a function, a path or a mapping, or a list of them, got {source!r:.40}: give one",
    )
    function = source.get("function")
    return {**source, "function": register(function)} if callable(function) else source


def run_rl(
    config: RLConfig, callbacks: Sequence[Callback] = (), algorithm_class: type[Algorithm] | None = None
) -> None:
    """RL by any algorithm, from config to saved actor and critic."""
    with rl_session(config, callbacks, algorithm_class, choose_placement) as session:
        RLTrainer(session).train()
        session.save()
