"""A training loop of your own from the parts of the library: two rewards, a judge model beside them, a loss of its own.

    python examples/custom_flow.py --actor.path MODEL --judge REWARD_MODEL --data.sources prompts.jsonl

Its keys are those of step 3 (--help): ZeRO, LoRA, ranks under torchrun, tensor parallelism while generating. A rollout
makes one update; environments, dynamic sampling, a steered KL, an averaged actor, rollouts ahead and checkpoints to
resume from are what training/step3_ppo/main.py adds, and their keys do nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hybrid_rlhf.algorithms import on_policy_wiring as wiring
from hybrid_rlhf.algorithms.on_policy import Tokens
from hybrid_rlhf.algorithms.on_policy.rloo import RLOO
from hybrid_rlhf.algorithms.rewards import Answers, Reward
from hybrid_rlhf.algorithms.rewards.models import ModelPart
from hybrid_rlhf.algorithms.rollout_metrics import evaluation_metrics, rollout_metrics
from hybrid_rlhf.algorithms.scoring import Rated
from hybrid_rlhf.algorithms.starting import resolve, start_step
from hybrid_rlhf.algorithms.supervised import finish
from hybrid_rlhf.algorithms.updater import Updater
from hybrid_rlhf.configs.cli import parse_config, user_errors
from hybrid_rlhf.configs.ppo import PPOConfig, RewardRoleConfig
from hybrid_rlhf.configs.rewards import RewardPartConfig
from hybrid_rlhf.data.loaders import RowStream
from hybrid_rlhf.data.tokenized import load_prompt_data
from hybrid_rlhf.functional.losses import LossSum
from hybrid_rlhf.runtime.run import start_run


def brevity(completions: Sequence[str], **columns: Any) -> list[float]:
    """1 for an empty answer, 0 for one of 200 characters or more."""
    return [1.0 - min(len(text), 200) / 200 for text in completions]


def politeness(completions: Sequence[str], **columns: Any) -> list[float]:
    """1 for an answer that says please or thank you."""
    return [float(any(word in text.lower() for word in ("please", "thank"))) for text in completions]


@dataclass(frozen=True, kw_only=True)
class FlowConfig(PPOConfig):
    """Step 3's keys, and the judge's."""

    output_dir: str = "output/custom_flow"
    algorithm: Literal["rloo"] = "rloo"
    judge: str | None = None
    """A reward model whose opinion is weighed against the two functions."""
    judge_weight: float = 0.5
    reward: RewardRoleConfig = field(
        default_factory=lambda: RewardRoleConfig(
            parts=[RewardPartConfig(function=f"{__file__}:{name}") for name in ("brevity", "politeness")]
        )
    )


class Reinforce(RLOO):
    """RLOO's advantages with the plain policy gradient in place of a clipped ratio."""

    def loss(self, tokens: Tokens) -> LossSum:
        """See OnPolicyAlgorithm."""
        clipped = super().loss(tokens)  # for its count and what it logs
        plain = (-tokens.logprobs * tokens.advantages * tokens.weights)[tokens.mask].sum()
        return LossSum(plain, clipped.count, clipped.stats)


def run_flow(config: FlowConfig) -> None:
    """Sample, score by functions and judge, take advantages and a loss, update; evaluate every few steps."""
    with start_run(config) as run:
        path, tokenizer = start_step(config, run, config.actor.path or config.model.path, key="actor.path")
        data = load_prompt_data(
            config.data, tokenizer=tokenizer, seed=config.seed, world=run.world,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
        )  # fmt: skip
        wiring.plan_step(config, run)
        stream = RowStream(len(data.train), epochs=config.train.epochs, seed=config.seed)
        steps = wiring.total_steps(config, stream)
        roles = wiring.build_roles(config, run, path, tokenizer, updates=steps)
        algorithm = Reinforce(config.ppo)
        rollout = wiring.build_rollout(config, run, roles, algorithm, tokenizer)
        updater = Updater(roles, algorithm, rollout=config.rollout)
        judge = wiring.frozen_engine(config, run, "reward", resolve(config, run, config.judge, key="judge"))
        opinion = Reward([ModelPart(RewardPartConfig(name="judge", model="judge"), judge)], run.world)

        def rate(prompts: Sequence[Mapping[str, Any]], step: int) -> Rated:
            """Completions, scored by the two functions and the judge."""
            rated = rollout.rate(prompts, rollout.sample(prompts, step=step))
            micro_batches = rollout.layout(rated.sequences).mini_batches[0]
            judged = opinion(rated.sequences, micro_batches, lambda: Answers([], [], {})).scores
            scores = rated.scores + config.judge_weight * judged
            return replace(rated, scores=scores, metrics={**rated.metrics, "reward/judge/mean": float(judged.mean())})

        run.open_metrics(None)
        for step in range(1, steps + 1):
            rated = rate([data.train[row] for row in stream.take(config.rollout.prompts_per_step)], step)
            layout = rollout.layout(rated.sequences, step=step)
            experience = rollout.experience(rollout.score(rated, layout), kl_coef=config.ppo.kl_coef)
            report = updater.update(experience, [layout], kl_coef=config.ppo.kl_coef)
            metrics = {**rollout_metrics(report.experience), **rated.metrics, **report.metrics}
            if config.train.eval_every and step % config.train.eval_every == 0 and len(data.held_out):
                held_out = rate(list(data.held_out), 0)
                scored = rollout.score(held_out, rollout.layout(held_out.sequences))
                metrics |= evaluation_metrics(scored, prefix="eval")
            run.log(step, metrics)
            run.say(f"step {step}/{steps}", {name: metrics[name] for name in ("objective/scores", "reward/judge/mean")})
        finish(run, roles.learners, tokenizer)


if __name__ == "__main__":
    with user_errors():
        run_flow(parse_config(FlowConfig))
