"""A training loop of your own: RLOO with the plain policy gradient in place of a clipped ratio.

python examples/custom_loop.py [--model MODEL] [--output_dir FOLDER]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hybrid_rlhf import RL, Batch
from hybrid_rlhf.functional.losses import LossSum
from hybrid_rlhf.functional.masking import masked_sum
from hybrid_rlhf.rl.algorithms.rloo import RLOO
from hybrid_rlhf.rl.metrics import evaluation_metrics, rollout_metrics

TOPICS = ("the sea", "a garden", "winter", "music", "the moon", "bread", "a river", "a city")


def brevity(completions: Sequence[str], **columns: Any) -> list[float]:
    """1 for an empty completion, 0 for one of 200 characters or more."""
    return [1.0 - min(len(text), 200) / 200 for text in completions]


class PlainPolicyGradient(RLOO):
    """RLOO's advantages with the loss -A log p."""

    def loss(self, logprobs: Tensor, batch: Batch, *, weights: Tensor, tokens_per_completion: float) -> LossSum:
        """See Algorithm."""
        clipped = super().loss(logprobs, batch, weights=weights, tokens_per_completion=tokens_per_completion)
        plain = masked_sum(-logprobs * batch.advantages * weights, mask=batch.rollout.response_mask)
        return LossSum(plain, clipped.count, clipped.stats)


def main() -> None:
    """Train with a loop of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded", help="folder, hub name, .gguf file, or the embedded model")
    parser.add_argument("--output_dir", default="output/example_custom_loop")
    options = parser.parse_args()
    rl = RL(
        model=options.model,
        data=[{"prompt": f"Write a line about {topic}."} for topic in TOPICS * 4],
        output_dir=options.output_dir,
        algorithm={"name": "rloo", "kl": None},
        algorithm_class=PlainPolicyGradient,
        reward=brevity,
        rollout={"prompts_per_step": 4, "sampling": {"n": 4, "max_new_tokens": 24}},
        train={"max_steps": 2},
    )
    with rl.session() as session:
        parts, run = session.parts, session.run
        run.open_metrics(None)
        for step in range(1, session.total_steps + 1):
            prompts = session.take_prompts()
            rollout = parts.scorer.score(prompts, parts.sampler.sample(prompts, step=step))
            rollout = parts.scorer.compute_logprobs(rollout, parts.plan(rollout, step=step))
            batch = parts.estimate(rollout, kl_coef=0.0, step=step)
            report = parts.updater.update(batch, [parts.plan(batch.rollout, step=step)])
            held_out = list(session.held_out)
            completions = parts.sampler.sample(held_out, step=0)
            evaluated = parts.scorer.score(held_out, completions, evaluates=True)
            metrics = {**rollout_metrics(report.batch, run.world), **report.metrics}
            run.log(step, metrics | evaluation_metrics(evaluated, run.world, prefix="eval", prompts=held_out))
            run.report(f"step {step}", {"objective/scores": metrics["objective/scores"]})
        session.save()


if __name__ == "__main__":
    main()
