"""pass@k and mean@n of a verified reward function on completions of prompts."""

from __future__ import annotations

import torch

from hybrid_rlhf.cli.saved_models.evaluation.completing import complete, read_prompts
from hybrid_rlhf.cli.saved_models.evaluation.results import Measurement, bootstrap, pass_at_k, wilson
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.inference import EvaluateConfig
from hybrid_rlhf.configs.sections.rewards import RewardComponentConfig
from hybrid_rlhf.rl.rewards import CompletionTexts
from hybrid_rlhf.rl.rewards.functions import FunctionReward


def pass_rate(config: EvaluateConfig) -> Measurement:
    """Sample n completions of each prompt and reward them; intervals are over prompts.

    Raises:
        UserError: when the function cannot be imported, or fails for a completion.
    """
    reward = FunctionReward(RewardComponentConfig(function=config.reward), device=torch.device("cpu"))
    prompts = read_prompts(config)
    reward.require_columns(row.columns for _, row in prompts)
    samples = complete(config, prompts)
    count = config.sampling.n
    columns = dict.fromkeys(name for _, row in prompts for name in row.columns)
    texts = CompletionTexts(
        [row.messages for _, row in prompts for _ in range(count)],
        [text for of_prompt in samples for text in of_prompt],
        {name: [row.columns.get(name) for _, row in prompts for _ in range(count)] for name in columns},
    )
    component_scores = reward.score(texts)
    if None in component_scores.values:
        place = component_scores.values.index(None)
        where = prompts[place // count][0]
        reason = component_scores.failures.get(place, "it gave None")
        raise UserError(f"{where}: {config.reward} must give a number per completion, it did not: {reason}; fix it")
    scores = [float(value or 0.0) for value in component_scores.values]
    by_prompt = [scores[start : start + count] for start in range(0, len(scores), count)]
    passed = [sum(score >= config.pass_score for score in of_prompt) for of_prompt in by_prompt]
    return Measurement(
        f"Verified reward {config.reward}",
        {
            **{f"pass@{k}": wilson([pass_at_k(count, right, k) for right in passed]) for k in sorted(set(config.k))},
            f"mean@{count}": wilson([right / count for right in passed]),
            "mean reward": bootstrap([sum(s) for s in by_prompt], [count] * len(prompts), seed=config.seed),
            "prompts": len(prompts),
            "completions": len(scores),
        },
        [
            {"prompt": row.messages, "completions": of_prompt, "rewards": rewards}
            for (_, row), of_prompt, rewards in zip(prompts, samples, by_prompt, strict=True)
        ],
    )
