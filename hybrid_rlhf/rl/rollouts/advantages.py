"""From scores to advantages: scaled scores, KL-shaped rewards, the algorithm's advantages and returns, whitening, the
teacher's part.

Rewards are InstructGPT's: the score at the last response token, less a KL penalty per token (arXiv 2203.02155, section
3.5). Scores may be scaled to mean 0 and standard deviation 1, so that kl_coef and score_clip mean the same for any
reward: by running statistics (OpenRLHF), or by those of the initial actor's completions (Ziegler et al. 2019, arXiv
1909.08593, section 2.2; InstructGPT, whose reward has mean 0 on demonstrations). The KL coefficient is fixed, or
adapted to a target (Ziegler et al., section 2.2; N details, no. 20). Deviation: the number of completions is clamped to
the horizon, so that the coefficient never changes its sign.

On-policy distillation adds coef * (log p_teacher - log p_actor) of the sampled token to its advantage, after whitening,
so that coef means the same for every algorithm, and no critic learns it (thinkingmachines.ai/blog/
on-policy-distillation; kl_penalty_coef 1 and kl_discount_factor 0 of tinker-cookbook). A token answers for its own
log-ratio alone: with the prefixes that the actor samples held fixed, the expected gradient is that of the sum over t of
KL(actor || teacher) at t. MiniLLM (arXiv 2306.08543) also credits a token with the log-ratios after it, which gives the
gradient of the KL of whole completions at a higher variance; GKD (arXiv 2306.13649) computes the KL over the
vocabulary, as step 1's `distill` does. Both models have the temperature of the rollout.

Every rank computes its own rows; statistics of scores and whitening are those of all rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from hybrid_rlhf.configs.rl import TeacherConfig
from hybrid_rlhf.configs.sections.algorithm import KLConfig
from hybrid_rlhf.functional.advantages import shaped_rewards
from hybrid_rlhf.functional.losses import KL_ESTIMATORS
from hybrid_rlhf.functional.masking import keep, masked_mean, spread
from hybrid_rlhf.rl.algorithms import Algorithm
from hybrid_rlhf.rl.algorithms.algorithm import per_token
from hybrid_rlhf.rl.types import Batch, Rollout
from hybrid_rlhf.runtime.world import World


class ScoreScaling:
    """Scales scores by their statistics, which are the same on every rank because scores are."""

    def __init__(self, how: Literal["none", "running", "initial"]) -> None:
        self._how = how
        self._count = 0.0
        self._mean = 0.0
        self._squares = 0.0

    @property
    def needs_initial_scores(self) -> bool:
        """True if `observe` must be called with scores of the initial actor before any scores are scaled."""
        return self._how == "initial" and self._count == 0

    def observe(self, scores: Tensor) -> None:
        """Add scores [N] to the statistics (Chan et al.'s parallel variance), without those that are not finite."""
        values = scores[scores.isfinite()].double()
        if not len(values):
            return
        low = values.min()
        count = len(values)
        mean = float(low + (values - low).mean())  # equal scores have a deviation of exactly 0
        squares = float((values - mean).square().sum())
        shift = mean - self._mean
        total = self._count + count
        self._mean += shift * (count / total)
        self._squares += squares + shift**2 * self._count * count / total
        self._count = total

    @property
    def follows_scores(self) -> bool:
        """True if `observe` must be called with all scores of each step before they are scaled."""
        return self._how == "running"

    @property
    def unit(self) -> float:
        """The difference of two scores whose scaled scores differ by 1."""
        return 1.0 if self._how == "none" or not self._std else self._std

    def scaled(self, scores: Tensor) -> Tensor:
        """Scores [N] scaled by the current statistics."""
        return scores if self._how == "none" else (scores - self._mean) / self.unit

    def scaled_std(self, scores: Tensor) -> float:
        """Standard deviation of scores [N] after scaling: 1 with scaling; 0 without scores."""
        if self._how != "none":
            return 1.0
        return spread(scores) if len(scores) else 0.0

    def metrics(self) -> dict[str, float]:
        """Mean and standard deviation that scale the scores; {} without scaling."""
        if self._how == "none":
            return {}
        return {"objective/scaling_mean": self._mean, "objective/scaling_std": self._std}

    @property
    def _std(self) -> float:
        return float(torch.tensor(self._squares / max(self._count - 1, 1)).sqrt())

    def state_dict(self) -> dict[str, float]:
        """The statistics, for a checkpoint."""
        return {"count": self._count, "mean": self._mean, "squares": self._squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the state of a checkpoint."""
        self._count = state["count"]
        self._mean = state["mean"]
        self._squares = state["squares"]


class NothingToLearn(Exception):
    """A step without a completion to learn from; the same on every rank."""

    def __init__(self, reason: str, metrics: dict[str, float]) -> None:
        super().__init__(reason)
        self.metrics = metrics


def estimate_advantages(
    rollout: Rollout,
    algorithm: Algorithm,
    *,
    scaling: ScoreScaling,
    kl_coef: float,
    world: World,
    teacher: TeacherConfig | None = None,
) -> Batch:
    """Scale the scores, shape the rewards, and let the algorithm estimate advantages and returns; with
    algorithm.mask_truncated, completions that were truncated are not learned from. Every rank calls.

    Args:
        rollout: this rank's rows with scores, and the log-probs and values of the roles.
        algorithm: turns rewards into advantages.
        scaling: scaling of the scores; `RolloutScorer.score` has counted them in running statistics.
        kl_coef: coefficient of the KL penalty where it is in the reward.
        world: the ranks that hold rows.
        teacher: weighs the teacher's part of the advantages, where the rollout has the teacher's log-probs and the
            loss has no divergence from the teacher.
    """
    config = algorithm.config
    mask = rollout.response_mask
    rollout = replace(rollout, index=rollout.numbered(world))
    assert rollout.old_logprobs is not None
    kl = torch.zeros_like(rollout.old_logprobs)
    if rollout.ref_logprobs is not None and config.kl is not None and config.kl.where == "reward":
        kl = KL_ESTIMATORS[config.kl.estimator](rollout.old_logprobs, ref_logprobs=rollout.ref_logprobs)
    scores = scaling.scaled(rollout.penalized_scores)
    score_clip = algorithm.score_clip
    turn_rewards = rollout.turn_rewards
    rewards = shaped_rewards(
        scores=scores,
        kl=kl,
        mask=mask,
        kl_coef=kl_coef,
        score_clip=score_clip,
        earned=None if turn_rewards is None else turn_rewards / scaling.unit,
    )
    rewards = algorithm.shaped(rewards, mask=mask, total=world.total)
    rollout = _with_scaled_greedy_scores(rollout, scaling, score_clip=score_clip)
    advantages = _advantages(rewards, rollout, algorithm)
    returns = algorithm.returns(rewards, rollout)
    advantages = algorithm.whitened(advantages, rollout, total=world.total)
    if rollout.teacher_logprobs is not None and teacher is not None and teacher.loss == "sampled":
        assert rollout.old_logprobs is not None
        to_teacher = KL_ESTIMATORS["k1"](rollout.old_logprobs, ref_logprobs=rollout.teacher_logprobs)
        kept = keep(to_teacher, mask)
        if teacher.position_gamma:
            kept = position_weights(kept, gamma=teacher.position_gamma) * kept
        advantages = advantages - teacher.coef * kept
    metrics = {**scaling.metrics(), **rollout.metrics}
    if rollout.ref_logprobs is not None:
        metrics["objective/kl_coef"] = kl_coef
    clipped = None if score_clip is None else scores.abs() > score_clip
    if not algorithm.learns_truncated:
        rollout = replace(rollout, learned=rollout.stopped)
    return Batch(rollout, rewards, advantages, returns, clipped, metrics=metrics)


def position_weights(to_teacher: Tensor, *, gamma: float) -> Tensor:
    """Weights [N, T] of log-ratios [N, T]: 1 + gamma * (1 - a sum of their magnitudes before the token / that of the
    whole row); a row of zeros has 1 + gamma. Source: IW-OPD (arXiv 2606.22600), algorithm 1."""
    size = to_teacher.abs()
    before = size.cumsum(dim=1) - size
    return 1 + gamma * (1 - before / size.sum(dim=1, keepdim=True).clamp(min=1e-8))


def _advantages(rewards: Tensor, rollout: Rollout, algorithm: Algorithm) -> Tensor:
    """[N, T] the algorithm's advantages. Where it compares completions, all sequences of an episode have the advantage
    of the first one, so that an episode counts once, and completions without a score are not compared and have none.
    """
    first, member = rollout.episodes()
    compared = first[rollout.has_score[first]]
    if algorithm.config.fewest_completions == 1 or len(compared) == len(rollout):
        return algorithm.advantages(rewards, rollout)
    chosen = rollout.rows(compared.tolist())
    width = chosen.input_ids.shape[1]
    of_chosen = algorithm.advantages(rewards[compared, :width], chosen)
    advantages = torch.zeros_like(rewards)
    advantages[compared, :width] = of_chosen
    if len(first) == len(rollout):
        return advantages
    of_rows = masked_mean(advantages, mask=rollout.response_mask, dim=1)
    return per_token(of_rows[first][member], rollout)


def _with_scaled_greedy_scores(rollout: Rollout, scaling: ScoreScaling, *, score_clip: float | None) -> Rollout:
    """Greedy scores, scaled, penalized and clipped like the scores of the completions."""
    if rollout.greedy_scores is None or rollout.greedy_penalties is None:
        return rollout
    scores = scaling.scaled(rollout.greedy_scores - rollout.greedy_penalties)
    return replace(rollout, greedy_scores=scores if score_clip is None else scores.clamp(-score_clip, score_clip))


class KLController:
    """Holds kl_coef; with a target, raises it if the KL is above the target and lowers it if below."""

    def __init__(self, config: KLConfig | None) -> None:
        """Take the settings of the penalty; None: its coefficient is 0."""
        self.kl_coef = 0.0 if config is None else config.coef
        self._target, self._horizon = (None, 1) if config is None else (config.target, config.horizon)

    def update(self, kl: float, *, completions: int) -> None:
        """Move the coefficient after a rollout.

        Args:
            kl: mean KL per completion, in nats.
            completions: number of completions in the rollout.
        """
        if self._target is None:
            return
        error = min(max(kl / self._target - 1, -0.2), 0.2)
        self.kl_coef *= 1 + error * min(completions / self._horizon, 1.0)

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the state of a checkpoint; a coefficient without a target is that of the settings."""
        if self._target is not None:
            self.kl_coef = state["kl_coef"]
