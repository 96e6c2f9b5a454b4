"""Config of what is learned from a rollout, by any on-policy algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybrid_rlhf.configs.sections import require


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """What is learned from a rollout. Defaults are PPO's; other algorithms bring their own (docs/algorithms.md)."""

    epochs: int = 1
    """Passes over each rollout."""
    mini_batches: int = 4
    """Optimizer updates in one pass over a rollout (verl); the default is at most this many, so that they divide it."""
    target_approxkl: float | None = None
    """The passes end once approxkl of a mini-batch is above this; none: they never end early."""
    critic_warmup_steps: int = 0
    """Steps at the beginning in which the critic learns alone; its values start at 0, see critic.path."""
    kl_coef: float = 0.05
    """Weight of the per-token KL penalty against the reference (N+ details)."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """log-ratio, half its square, or r - 1 - log r, at most 10 nats (joschu.net/blog/kl-approx.html); with kl_in loss
    of the value only, the gradient is the KL's in any case."""
    kl_in: Literal["reward", "loss"] = "reward"
    """reward: a penalty on each token's reward (InstructGPT); loss: a term of the actor's loss (GRPO)."""
    kl_target: float | None = None
    """KL a completion, in nats, that kl_coef is steered to; none: kl_coef stays."""
    kl_horizon: int = 10000
    """Completions over which kl_coef adapts (arXiv 1909.08593, section 2.2)."""
    reference_refresh_every: int = 0
    """Steps after which the reference takes the actor's weights; 0: never."""
    group_deviation: bool = True
    """Advantages in a group of completions of one prompt are divided by its deviation (GRPO), or not (Dr. GRPO)."""
    dynamic_sampling: bool = False
    """Groups of equal scores, which teach nothing, are replaced by more prompts (DAPO, arXiv 2503.14476, eq. 11)."""
    max_refills: int = 10
    """Rounds of such prompts in a step; it then learns from what it has."""
    overlong_fraction: float = 0.0
    """Last part of max_new_tokens in which the score falls by overlong_penalty (DAPO, eq. 13: 0.2); 0: none."""
    overlong_penalty: float = 1.0
    """Subtracted from the score of a completion of max_new_tokens, and less of one in the last part."""
    mask_truncated: bool = False
    """Completions that never stop are not learned from (DAPO, section 3.4)."""
    beta: float = 0.1
    """Online DPO: strength of the pull to the reference (arXiv 2305.18290)."""
    selected_per_prompt: int = 1
    """Rejection sampling: the best completions of a prompt that are learned from (RAFT)."""
    select_above: float | None = None
    """Rejection sampling: of these only completions whose score, less penalties, is above this; none: any."""
    gamma: float = 1.0
    """Discount a token (InstructGPT: none)."""
    lam: float = 1.0
    """Lambda of the actor's generalised advantages (arXiv 1506.02438); 1 as verl and OpenRLHF (arXiv 2503.01491)."""
    clip_low: float = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: float | None = None
    """For negative advantages the loss is at most this times their size (arXiv 1912.09729: 3); none: no bound."""
    value_clip: float = 0.0
    """Values may move this far from the old ones in one rollout (verl, OpenRLHF: 0.5); 0 does not clip."""
    score_scaling: Literal["none", "running", "initial"] = "none"
    """Scores get mean 0 and deviation 1: those of all scores so far, or of the first actor's answers (InstructGPT)."""
    score_clip: float | None = None
    """Scores are clipped to +- this (DeepSpeed-Chat: 5); none does not clip (TRL, verl)."""
    missing_eos_penalty: float | Literal["auto"] = "auto"
    """Subtracted from the score of a completion that never stops (the EOS trick of N+ details; TRL's examples: 1);
    auto: the standard deviation of the rollout's scores, 1 where they are scaled."""
    length_penalty: float = 0.0
    """Subtracted from the score for each response token."""
    whiten_rewards: bool = False
    """Rewards of a rollout get variance 1 and keep their mean, over all ranks (N details, no. 18)."""
    whiten_advantages: bool = True
    """Advantages of a rollout get mean 0 and variance 1, over all ranks."""
    whiten_shift_mean: bool = True
    """Whether whitened advantages lose their mean."""
    whiten_unbiased: bool = True
    """Variance by the count less one (TRL, verl), or by the count (OpenAI's code of 2019)."""
    loss_normalisation: Literal["token", "sequence", "fixed"] = "token"
    """The actor's loss is a mean over tokens, over sequences of their means, or over max_new_tokens a sequence."""
    sampler_correction: Literal["none", "truncate", "mask"] = "none"
    """Tokens weigh p(training) / p(sampler): cut off at sampler_correction_clip, or left out where further off."""
    sampler_correction_clip: float = 2.0
    """Largest such weight."""
    sampler_correction_low: float | None = None
    """Smallest such weight of mask; none: 1 / sampler_correction_clip."""
    masked_tokens_count: bool = True
    """Tokens that mask leaves out stay in the denominator of the loss (IcePop), or not (slime, verl)."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    ptx_coef: float = 0.0
    """Weight of the pretraining loss (InstructGPT's PPO-ptx); needs data.ptx_sources."""
    ema_decay: float = 0.0
    """Decay an update of the averaged actor, evaluated beside it and saved as actor_ema; 0 keeps none
    (DeepSpeed-Chat: 0.992)."""

    def __post_init__(self) -> None:
        for name in ("epochs", "mini_batches", "kl_horizon", "selected_per_prompt"):
            require(getattr(self, name) >= 1, f"ppo.{name} must be 1 or more, got {getattr(self, name)}: raise it")
        for name in ("gamma", "lam"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"ppo.{name} must be in [0, 1], got {value}: give for example 0.95")
        for name in (
            "kl_coef", "clip_low", "clip_high", "value_clip", "ptx_coef", "critic_warmup_steps",
            "reference_refresh_every", "max_refills", "overlong_penalty",
        ):  # fmt: skip
            require(getattr(self, name) >= 0, f"ppo.{name} must be 0 or more, got {getattr(self, name)}: raise it")
        require(
            self.missing_eos_penalty == "auto" or self.missing_eos_penalty >= 0,
            f"ppo.missing_eos_penalty must be auto or 0 or more, got {self.missing_eos_penalty}: give for example 1",
        )
        for name in ("kl_target", "target_approxkl"):
            value = getattr(self, name)
            require(value is None or value > 0, f"ppo.{name} must be above 0 nats, got {value}: leave it out for none")
        require(self.clip_low <= 1, f"ppo.clip_low must be at most 1, got {self.clip_low}: give for example 0.2")
        require(self.beta > 0, f"ppo.beta must be above 0, got {self.beta}: give for example 0.1")
        require(
            0 <= self.overlong_fraction <= 1,
            f"ppo.overlong_fraction must be in [0, 1], got {self.overlong_fraction}: give for example 0.2",
        )
        require(
            self.kl_coef > 0 or self.kl_target is None,
            f"ppo.kl_target {self.kl_target} steers the coefficient by factors, got kl_coef 0: give a start, for "
            "example 0.05",
        )
        require(0 <= self.ema_decay < 1, f"ppo.ema_decay must be in [0, 1), got {self.ema_decay}: give 0 for none")
        require(
            self.score_clip is None or self.score_clip > 0,
            f"ppo.score_clip must be above 0, got {self.score_clip}: give null for none",
        )
        require(
            self.dual_clip is None or self.dual_clip > 1,
            f"ppo.dual_clip must be above 1, got {self.dual_clip}: give for example 3, or leave it out",
        )
        require(
            self.kl_in == "reward" or self.kl_estimator != "k1",
            "ppo.kl_estimator k1 has no gradient of the KL in a loss, got ppo.kl_in loss: take k2 or k3",
        )
        require(
            self.sampler_correction_clip >= 1,
            f"ppo.sampler_correction_clip must be 1 or more, got {self.sampler_correction_clip}: give for example 2",
        )
        low = self.sampler_correction_low
        require(
            low is None or 0 < low <= 1,
            f"ppo.sampler_correction_low must be above 0 and at most 1, got {low}: give for example 0.5",
        )

    @property
    def updates_once(self) -> bool:
        """Whether a rollout makes one update, before which the actor is still the one that sampled."""
        return self.epochs * self.mini_batches == 1

    @property
    def reads_old_logprobs(self) -> bool:
        """Whether the actor reads a rollout before it learns from it: for several updates, or to count kept tokens."""
        return not self.updates_once or not self.masked_tokens_count
