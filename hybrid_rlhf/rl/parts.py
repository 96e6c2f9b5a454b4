"""The parts of an RL step, wired together, for RLTrainer and for custom training loops.

rollout = parts.sampler.sample(prompts, step=step)
rollout = parts.scorer.score(prompts, rollout)
plan = parts.plan(rollout, step=step)
rollout = parts.scorer.compute_logprobs(rollout, plan)
batch = parts.estimate(rollout, kl_coef=kl_coef)
report = parts.updater.update(batch, [plan], kl_coef=kl_coef)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.training import MicroBatches
from hybrid_rlhf.engines.averaging import WeightAverage
from hybrid_rlhf.rl.algorithms import Algorithm
from hybrid_rlhf.rl.batch import Batch, MiniBatchPlan, MiniBatchPlanner, Rollout
from hybrid_rlhf.rl.environments import EpisodeRunner
from hybrid_rlhf.rl.roles import Roles
from hybrid_rlhf.rl.rollouts.advantages import estimate_advantages
from hybrid_rlhf.rl.rollouts.sampler import RolloutSampler
from hybrid_rlhf.rl.rollouts.score_scaling import ScoreScaling
from hybrid_rlhf.rl.rollouts.scoring import RolloutScorer
from hybrid_rlhf.rl.updates.ptx import PtxBatches
from hybrid_rlhf.rl.updates.updater import Updater
from hybrid_rlhf.runtime.observability.timers import Timers


@dataclass(frozen=True)
class RLParts:
    """Sampler, scorer, algorithm and updater over the same roles."""

    roles: Roles
    algorithm: Algorithm
    sampler: RolloutSampler
    scorer: RolloutScorer
    updater: Updater
    scaling: ScoreScaling
    planner: MiniBatchPlanner

    @classmethod
    def of(
        cls,
        roles: Roles,
        algorithm: Algorithm,
        *,
        sampling: RolloutConfig,
        micro_batches: MicroBatches,
        seed: int,
        timers: Timers,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: tuple[int, ...],
        environments: EpisodeRunner | None = None,
        average: WeightAverage | None = None,
        ptx_batches: PtxBatches | None = None,
        ptx_coef: float = 0.0,
    ) -> Self:
        """Wire the parts.

        Args:
            roles: the models.
            algorithm: selects completions, estimates advantages, computes the actor's loss.
            sampling: how completions are sampled.
            micro_batches: the micro-batch limits.
            seed: of sampling and mini-batches.
            timers: of generation, scoring and training.
            tokenizer: the actor's.
            stop_token_ids: tokens that end a completion.
            environments: run multi-turn episodes; none: a completion is one turn.
            average: moving average of the actor's weights.
            ptx_batches: pretraining text mixed into the updates.
            ptx_coef: weight of its loss.
        """
        scaling = ScoreScaling(algorithm.config.score_scaling)
        planner = MiniBatchPlanner(replace(micro_batches, padded=not roles.packs), seed=seed)
        sampler = RolloutSampler(
            roles.sampler,
            sampling,
            world=roles.world,
            stop_token_ids=stop_token_ids,
            seed=seed,
            timers=timers,
            tokenizer=tokenizer,
            environments=environments,
        )
        scorer = RolloutScorer(
            roles,
            algorithm=algorithm.config,
            sampling=sampling,
            planner=planner,
            scaling=scaling,
            tokenizer=tokenizer,
            timers=timers,
        )
        updater = Updater(
            roles, algorithm, rollout=sampling, average=average, ptx_batches=ptx_batches, ptx_coef=ptx_coef
        )
        return cls(roles, algorithm, sampler, scorer, updater, scaling, planner)

    def plan(self, rollout: Rollout, *, step: int, epoch: int = 0) -> MiniBatchPlan:
        """The mini-batches of an epoch of a step."""
        return self.planner.plan(
            rollout,
            step=step,
            epoch=epoch,
            mini_batches=self.algorithm.config.mini_batches,
            together=self.algorithm.together,
        )

    def estimate(self, rollout: Rollout, *, kl_coef: float) -> Batch:
        """See estimate_advantages."""
        return estimate_advantages(rollout, self.algorithm, scaling=self.scaling, kl_coef=kl_coef)
