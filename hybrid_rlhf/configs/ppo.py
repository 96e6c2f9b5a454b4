"""Config of step 3, PPO with a critic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hybrid_rlhf.configs.rewards import RewardPartConfig, require_distinct_names
from hybrid_rlhf.configs.sections import (
    DataConfig,
    DataSource,
    LoopConfig,
    LoraConfig,
    OptimizerConfig,
    StepConfig,
    ZeroConfig,
    require,
)


@dataclass(frozen=True, kw_only=True)
class PromptDataConfig(DataConfig):
    """Where the prompts come from, and the pretraining text of the PTX loss."""

    ptx_sources: list[str | DataSource] = field(default_factory=list)
    """Pretraining text (a `text` column) or conversations for the PTX loss; needs ppo.ptx_coef."""


@dataclass(frozen=True, kw_only=True)
class TrainedRoleConfig:
    """A role that learns: actor or critic."""

    path: str | None = None
    """Model to start from; none: model.path for the actor, the reward model for the critic, or where there is none the
    actor's start with a fresh head."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)


@dataclass(frozen=True, kw_only=True)
class CriticConfig(TrainedRoleConfig):
    """The critic."""

    share_base: bool = False
    """The critic starts where the actor does and has adapters of its own on the actor's weights; needs LoRA."""


@dataclass(frozen=True, kw_only=True)
class FrozenRoleConfig:
    """The reference. It shards as the actor does under ZeRO-3."""

    path: str | None = None
    """Model folder or hub name; none: where the actor starts."""


def frozen_zero(sibling: ZeroConfig, *, offload: bool) -> ZeroConfig:
    """How a frozen role shards: not at all, or with the role beside it under ZeRO-3."""
    if sibling.stage < 3:
        return ZeroConfig()
    return ZeroConfig(stage=3, offload_parameters=sibling.offload_parameters or offload)


@dataclass(frozen=True, kw_only=True)
class RewardRoleConfig:
    """What completions are scored by. Models shard as the critic does under ZeRO-3."""

    path: str | None = None
    """Reward model, a folder or hub name; or give parts."""
    parts: list[RewardPartConfig] = field(default_factory=list)
    """Models, functions and endpoints, each with a weight, whose scores are summed."""

    def __post_init__(self) -> None:
        require(
            self.path is None or not self.parts,
            f"reward.path is a reward by itself, got {self.path} and {len(self.parts)} reward.parts: make it a part",
        )
        require_distinct_names(self.parts)

    @property
    def named_parts(self) -> list[RewardPartConfig]:
        """The parts; a path is a single one."""
        return self.parts if self.path is None else [RewardPartConfig(name="model", model=self.path)]


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How completions are sampled."""

    prompts_per_step: int = 64
    """Prompts in a rollout, over all ranks."""
    samples_per_prompt: int = 1
    """Completions of each prompt."""
    max_prompt_tokens: int = 512
    """Longer prompts are truncated on the left or dropped, as data.too_long says."""
    max_new_tokens: int = 128
    """Longest completion, in tokens."""
    temperature: float = 1.0
    """Logits are divided by this, in sampling and in training (N details, no. 10)."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this probability; 1 samples from all."""
    top_k: int = 0
    """Sample from this many likeliest tokens; 0 samples from all."""
    tensor_parallel: int = 1
    """Ranks that share one model while generating; divides the ranks."""
    layout: Literal["auto", "module"] = "auto"
    """auto generates with the inference layout where it describes the model; module through its own code always."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the inference layout; auto: as in training."""
    kv_cache_gib: float | None = None
    """Memory of a rank for keys and values; none: half of what is free on a CPU, 0.9 of it on a GPU."""
    offload_states: bool = False
    """Optimizer states, master weights and gradients go to host memory while generating."""
    offload_frozen: bool = False
    """Reward models and reference live in host memory, and each is on the device only while it scores."""
    keep_weights: bool = False
    """The inference layout, its cache and captured steps stay in memory after a rollout, and are updated in place."""

    def __post_init__(self) -> None:
        for name in ("prompts_per_step", "samples_per_prompt", "max_prompt_tokens", "max_new_tokens"):
            value = getattr(self, name)
            require(value >= 1, f"rollout.{name} must be 1 or more, got {value}: raise it")
        require(self.temperature > 0, f"rollout.temperature must be above 0, got {self.temperature}: PPO needs samples")
        require(0 < self.top_p <= 1, f"rollout.top_p must be in (0, 1], got {self.top_p}: give 1 to sample from all")
        require(self.top_k >= 0, f"rollout.top_k must be 0 or more, got {self.top_k}: give 0 to sample from all")
        require(
            self.tensor_parallel >= 1,
            f"rollout.tensor_parallel must be 1 or more, got {self.tensor_parallel}: give 1 for none",
        )
        require(
            self.kv_cache_gib is None or self.kv_cache_gib > 0,
            f"rollout.kv_cache_gib must be above 0, got {self.kv_cache_gib}: leave it out to take what is free",
        )


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """PPO (Schulman et al. 2017, arXiv 1707.06347) as InstructGPT uses it."""

    epochs: int = 1
    """Passes over each rollout."""
    mini_batches: int = 1
    """Optimizer updates in one pass over a rollout."""
    target_approxkl: float | None = None
    """The passes end once approxkl of a mini-batch is above this; none: they never end early."""
    critic_warmup_steps: int = 0
    """Steps at the beginning in which the critic learns alone."""
    kl_coef: float = 0.05
    """Weight of the per-token KL penalty against the reference (N+ details)."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """log-ratio, half its square, or r - 1 - log r (joschu.net/blog/kl-approx.html)."""
    kl_in: Literal["reward", "loss"] = "reward"
    """reward: a penalty on each token's reward (InstructGPT); loss: a term of the actor's loss (GRPO)."""
    kl_target: float | None = None
    """KL a completion, in nats, that kl_coef is steered to; none: kl_coef stays."""
    kl_horizon: int = 10000
    """Completions over which kl_coef adapts (arXiv 1909.08593, section 2.2)."""
    reference_refresh_every: int = 0
    """Steps after which the reference takes the actor's weights; 0: never."""
    gamma: float = 1.0
    """Discount a token (InstructGPT: none)."""
    lam: float = 0.95
    """Lambda of generalised advantage estimation (arXiv 1506.02438)."""
    clip_low: float = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: float | None = None
    """For negative advantages the loss is at most this times their size (arXiv 1912.09729: 3); none: no bound."""
    value_clip: float = 0.2
    """Values may move this far from the old ones in one rollout; 0 does not clip."""
    score_scaling: Literal["none", "running", "initial"] = "none"
    """Scores get mean 0 and deviation 1: those of all scores so far, or of the first actor's answers (InstructGPT)."""
    score_clip: float | None = 5.0
    """Scores are clipped to +- this (DeepSpeed-Chat); none does not clip."""
    missing_eos_penalty: float = 0.0
    """Subtracted from the score of a completion that never stops (the EOS trick of N+ details)."""
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
    """Largest such weight (truncate); or the largest and, inverted, the smallest (mask)."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    ptx_coef: float = 0.0
    """Weight of the pretraining loss (InstructGPT's PPO-ptx); needs data.ptx_sources."""
    ema_decay: float = 0.0
    """Decay an update of the averaged actor, evaluated beside it and saved as actor_ema; 0 keeps none
    (DeepSpeed-Chat: 0.992)."""

    def __post_init__(self) -> None:
        for name in ("epochs", "mini_batches", "kl_horizon"):
            require(getattr(self, name) >= 1, f"ppo.{name} must be 1 or more, got {getattr(self, name)}: raise it")
        for name in ("gamma", "lam"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"ppo.{name} must be in [0, 1], got {value}: give for example 0.95")
        for name in (
            "kl_coef", "clip_low", "clip_high", "value_clip", "ptx_coef", "missing_eos_penalty", "critic_warmup_steps",
            "reference_refresh_every",
        ):  # fmt: skip
            require(getattr(self, name) >= 0, f"ppo.{name} must be 0 or more, got {getattr(self, name)}: raise it")
        for name in ("kl_target", "target_approxkl"):
            value = getattr(self, name)
            require(value is None or value > 0, f"ppo.{name} must be above 0 nats, got {value}: leave it out for none")
        require(self.clip_low < 1, f"ppo.clip_low must be below 1, got {self.clip_low}: give for example 0.2")
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

    @property
    def updates_once(self) -> bool:
        """Whether a rollout makes one update, before which the actor is still the one that sampled."""
        return self.epochs * self.mini_batches == 1


@dataclass(frozen=True, kw_only=True)
class PPOConfig(StepConfig):
    """Step 3: PPO of an actor against a reward model, with a critic and a reference."""

    output_dir: str = "output/step3_ppo"
    """Folder of the run: actor/, critic/, config.yaml, metrics.jsonl, samples.jsonl, checkpoints."""
    data: PromptDataConfig = field(default_factory=PromptDataConfig)
    actor: TrainedRoleConfig = field(
        default_factory=lambda: TrainedRoleConfig(optimizer=OptimizerConfig(lr=1e-6, schedule="constant"))
    )
    critic: CriticConfig = field(
        default_factory=lambda: CriticConfig(optimizer=OptimizerConfig(lr=5e-6, schedule="constant"))
    )
    reference: FrozenRoleConfig = field(default_factory=FrozenRoleConfig)
    reward: RewardRoleConfig = field(default_factory=RewardRoleConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    ppo: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    train: LoopConfig = field(default_factory=LoopConfig)

    def __post_init__(self) -> None:
        require(
            self.ppo.ptx_coef == 0 or bool(self.data.ptx_sources),
            f"ppo.ptx_coef {self.ppo.ptx_coef} needs pretraining text, got no data.ptx_sources: name a source",
        )
        if self.critic.share_base:
            self._check_shared_base()

    def _check_shared_base(self) -> None:
        require(
            self.actor.lora.rank > 0 and self.critic.lora.rank > 0,
            f"critic.share_base needs adapters on both, got actor.lora.rank {self.actor.lora.rank} and "
            f"critic.lora.rank {self.critic.lora.rank}: give both a rank, for example 16",
        )
        require(
            self.critic.path is None,
            f"critic.share_base starts the critic where the actor starts, got critic.path {self.critic.path}: "
            "leave one out",
        )
        stage = max(self.actor.zero.stage, self.critic.zero.stage)
        require(
            stage < 3,
            f"critic.share_base needs whole weights, got zero.stage {stage}: take stage 2, or leave share_base out",
        )

    @property
    def critic_start(self) -> str | None:
        """The model that the critic starts from; none: the actor's start."""
        return None if self.critic.share_base else self.critic.path or self.reward.path
