"""pass@k and avg@n of a verified reward on completions of prompts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybrid_rlhf.cli.saved_models.evaluation.completing import complete, read_prompts
from hybrid_rlhf.cli.saved_models.evaluation.results import Measurement, bootstrap, pass_at_k, wilson
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.inference import EvaluateConfig
from hybrid_rlhf.configs.sections.rewards import VERIFIERS, RewardComponentConfig
from hybrid_rlhf.data.images.expansion import ImageRules
from hybrid_rlhf.data.images.references import ImageReference
from hybrid_rlhf.data.rows.formats import PromptRow
from hybrid_rlhf.data.rows.placing import with_written_images
from hybrid_rlhf.rl.rewards import CompletionTexts
from hybrid_rlhf.rl.rewards.functions import FunctionReward
from hybrid_rlhf.rl.rewards.verifiers.component import VerifierReward
from hybrid_rlhf.runtime.observability.logs import logger


def pass_rate(config: EvaluateConfig) -> Measurement:
    """Sample n completions of each prompt and reward them; intervals are over prompts.

    Raises:
        UserError: when the function cannot be imported, or the reward fails for a completion.
    """
    reward = _verified_reward(config)
    prompts = read_prompts(config)
    reward.require_columns(row.columns | ({"images": row.images} if row.images else {}) for _, row in prompts)
    samples = complete(config, prompts)
    asked = [with_written_images(row.messages) for _, row in prompts]
    count = config.sampling.n
    columns = dict.fromkeys(name for _, row in prompts for name in row.columns)
    texts = CompletionTexts(
        [messages for messages in asked for _ in range(count)],
        [text for of_prompt in samples for text in of_prompt],
        {name: [row.columns.get(name) for _, row in prompts for _ in range(count)] for name in columns},
        _images(config, prompts) if reward.reads_images else None,
    )
    logger.info("scoring %d completions by %s", len(texts), config.reward)
    component_scores = reward.score(texts)
    if None in component_scores.values:
        place = component_scores.values.index(None)
        where = prompts[place // count][0]
        reason = component_scores.failures.get(place, "it gave None")
        raise UserError(f"{where}: {config.reward} must give a number per completion, it did not: {reason}; fix it")
    scores = [float(value or 0.0) for value in component_scores.values]
    verdicts = component_scores.verdicts
    reasons = [f"{verdicts[place].outcome}: {verdicts[place].detail}" for place in sorted(verdicts)]
    by_prompt = [scores[start : start + count] for start in range(0, len(scores), count)]
    passed = [sum(score >= config.pass_score for score in of_prompt) for of_prompt in by_prompt]
    return Measurement(
        f"Verified reward {config.reward}",
        {
            **{f"pass@{k}": wilson([pass_at_k(count, right, k) for right in passed]) for k in sorted(set(config.k))},
            f"avg@{count}": bootstrap([sum(s) for s in by_prompt], [count] * len(prompts), seed=config.seed),
            "prompts": len(prompts),
            "completions": len(scores),
        },
        [
            {"prompt": messages, "completions": of_prompt, "rewards": rewards}
            | ({"reasons": reasons[start : start + count]} if reasons else {})
            for start, messages, of_prompt, rewards in zip(
                range(0, len(scores), count), asked, samples, by_prompt, strict=True
            )
        ],
    )


def _images(config: EvaluateConfig, prompts: Sequence[tuple[str, PromptRow]]) -> list[list[ImageReference]]:
    """The images of each completion."""
    rules = ImageRules(max_pixels=config.max_image_pixels)
    of_prompts = [rules.references(where, row.images) for where, row in prompts]
    return [images for images in of_prompts for _ in range(config.sampling.n)]


def _verified_reward(config: EvaluateConfig) -> FunctionReward | VerifierReward:
    device = torch.device("cpu")
    if config.reward in VERIFIERS:
        return VerifierReward(RewardComponentConfig(verifier=config.reward, sandbox=config.sandbox), device=device)
    return FunctionReward(RewardComponentConfig(function=config.reward), device=device)
