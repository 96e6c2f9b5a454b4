"""Settings of evaluation by generation in SFT and preference learning."""

from __future__ import annotations

from hybrid_rlhf.configs.sections.data import DataSource
from hybrid_rlhf.configs.sections.rewards import RewardComponentConfig, require_distinct_names
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.rules import Count, Settings, require, setting
from hybrid_rlhf.configs.sections.sampling import SamplingParams, require_sampled
from hybrid_rlhf.configs.sections.training import TrainConfig

_SAMPLING_KEYS = ("n", "max_new_tokens", "temperature", "top_p", "top_k", "min_p")


class GeneratedEvaluationConfig(Settings):
    """Prompts that the model completes at each evaluation, and the reward of the completions."""

    sources: list[str | DataSource] = []
    """Rows with `prompt`: paths, or {path, split_name, columns}; at most data.max_eval_rows, in equal shares."""
    components: list[RewardComponentConfig] = []
    """What scores the completions: {function | urls | verifier | judge, weight, ...}, as in reward.components of RL."""
    max_prompt_tokens: Count = 512
    """Longest prompt, in tokens; data.too_long determines what happens to longer prompts."""
    sampling: SamplingParams = setting({"max_new_tokens": 512}, keys=_SAMPLING_KEYS)

    def _check(self) -> None:
        key = "train.evaluate_by_generation"
        require(self.sources, f"{key}.sources must name prompts, got none: give a file with the column prompt")
        require(self.components, f"{key}.components must have a reward, got none: give for example {{verifier: math}}")
        require_distinct_names(self.components)
        models = [path for component in self.components if (path := component.model or component.judge_path)]
        require(
            not models,
            f"{key}.components are functions, urls, verifiers and judges, got the model {models[:1]}: serve it, and "
            "give its URL",
        )
        require_sampled(self.sampling, _SAMPLING_KEYS, section=f"{key}.sampling")

    @property
    def rollout(self) -> RolloutConfig:
        """The same sampling as a section of RL."""
        return RolloutConfig(sampling=self.sampling, max_prompt_tokens=self.max_prompt_tokens)


class GeneratingTrainConfig(TrainConfig):
    """Length and batch sizes of a supervised step whose model generates."""

    evaluate_by_generation: GeneratedEvaluationConfig | None = None
