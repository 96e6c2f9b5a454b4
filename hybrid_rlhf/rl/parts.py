"""The parts of an RL step, wired together, for RLTrainer and for custom training loops.

rollout = parts.sampler.sample(prompts, step=step)
rollout = parts.scorer.score(prompts, rollout)
plan = parts.plan(rollout, step=step)
rollout = parts.scorer.compute_logprobs(rollout, plan)
batch = parts.estimate(rollout, kl_coef=kl_coef, step=step)
plan = parts.plan(batch.rollout, step=step)
report = parts.updater.update(batch, [plan], kl_coef=kl_coef)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.rl import RLConfig, TeacherConfig
from hybrid_rlhf.configs.sections.training import MicroBatches
from hybrid_rlhf.engines.averaging import WeightAverage
from hybrid_rlhf.loop.saving import finish, save_engine
from hybrid_rlhf.rl.algorithms import Algorithm
from hybrid_rlhf.rl.mini_batches import MiniBatchPlan, MiniBatchPlanner
from hybrid_rlhf.rl.roles import Roles
from hybrid_rlhf.rl.rollouts.advantages import ScoreScaling, estimate_advantages
from hybrid_rlhf.rl.rollouts.collector import Collector
from hybrid_rlhf.rl.rollouts.entropy import select_tokens
from hybrid_rlhf.rl.rollouts.sampler import RolloutSampler
from hybrid_rlhf.rl.rollouts.scoring import RolloutScorer
from hybrid_rlhf.rl.rollouts.teaching import Teaching
from hybrid_rlhf.rl.types import Batch, Rollout
from hybrid_rlhf.rl.updates.ptx import PtxBatches
from hybrid_rlhf.rl.updates.updater import Updater
from hybrid_rlhf.runtime.run import Run


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
    teacher: TeacherConfig | None = None
    """Settings of on-policy distillation."""

    @classmethod
    def of(
        cls,
        roles: Roles,
        algorithm: Algorithm,
        sampler: RolloutSampler,
        *,
        micro_batches: MicroBatches,
        average: WeightAverage | None = None,
        ptx_batches: PtxBatches | None = None,
        ptx_coef: float = 0.0,
        teacher: TeacherConfig | None = None,
    ) -> Self:
        """Wire the parts.

        Args:
            roles: the models.
            algorithm: selects completions, estimates advantages, computes the actor's loss.
            sampler: samples completions; its settings, seed, tokenizer and timers are those of the other parts too.
            micro_batches: the micro-batch limits.
            average: moving average of the actor's weights.
            ptx_batches: pretraining text mixed into the updates.
            ptx_coef: weight of the pretraining loss.
            teacher: settings of on-policy distillation.
        """
        scaling = ScoreScaling(algorithm.config.score_scaling)
        size = replace(micro_batches, padded=not roles.packs, shares_prefixes=roles.shares_prefixes)
        planner = MiniBatchPlanner(size, seed=sampler.seed, world=roles.world)
        teaching = None if teacher is None else Teaching(teacher, roles, sampler.tokenizer)
        scorer = RolloutScorer(
            roles, sampler, algorithm=algorithm.config, planner=planner, scaling=scaling, teaching=teaching
        )
        updater = Updater(
            roles,
            algorithm,
            rollout=sampler.config,
            average=average,
            ptx_batches=ptx_batches,
            ptx_coef=ptx_coef,
            teacher=teacher,
        )
        return cls(roles, algorithm, sampler, scorer, updater, scaling, planner, teacher)

    def plan(self, rollout: Rollout, *, step: int, epoch: int = 0) -> MiniBatchPlan:
        """The mini-batches of an epoch of a step. Every rank calls."""
        return self.planner.plan(
            rollout,
            step=step,
            epoch=epoch,
            mini_batches=self.algorithm.config.mini_batches,
            together=self.algorithm.together,
        )

    def estimate(self, rollout: Rollout, *, kl_coef: float, step: int = 0) -> Batch:
        """Estimate advantages of a scored rollout, and select the tokens on which algorithm.entropy acts; see
        estimate_advantages and select_tokens. Every rank calls."""
        world = self.roles.world
        batch = estimate_advantages(
            rollout,
            self.algorithm,
            scaling=self.scaling,
            kl_coef=kl_coef,
            world=world,
            teacher=self.teacher,
        )
        entropy = self.algorithm.entropy
        if entropy is None or entropy.selected_share is None:
            return batch
        return select_tokens(batch, entropy, seed=self.sampler.seed, step=step, world=world)


@dataclass(frozen=True)
class RLSession:
    """Models, data and parts of an RL run, for RLTrainer or a custom training loop."""

    config: RLConfig
    run: Run
    tokenizer: PreTrainedTokenizerBase
    parts: RLParts
    prompts: Dataset
    held_out: Dataset
    collector: Collector
    """Takes the prompts of each step in their order over all epochs."""

    @property
    def total_steps(self) -> int:
        """Steps of the run, at most."""
        return self.collector.stream.total_steps

    def take_prompts(self) -> list[Mapping[str, Any]]:
        """The prompts of the next step; empty at the end of the data."""
        stream = self.collector.stream
        return stream.prompts(stream.row_stream.take(stream.per_step))

    def save(self) -> None:
        """Save the trained models and mark the run as finished; every rank calls."""
        if self.config.actor.ema_decay:
            with self.parts.updater.averaged():
                save_engine(self.run, "actor_ema", self.parts.roles.actor, self.tokenizer)
        finish(self.run, self.parts.roles.learners, self.tokenizer)
