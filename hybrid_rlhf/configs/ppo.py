"""Config of step 3, learning from the actor's own completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from hybrid_rlhf.configs.algorithms import ON_POLICY, OnPolicyName, OnPolicyTraits
from hybrid_rlhf.configs.environment import EnvironmentConfig
from hybrid_rlhf.configs.on_policy import AlgorithmConfig
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
    """The reference, where anything asks for it. It shards as the actor does under ZeRO-3."""

    path: str | None = None
    """Model folder or hub name; none: where the actor starts."""


def frozen_zero(sibling: ZeroConfig, *, offload: bool) -> ZeroConfig:
    """How a frozen role shards: not at all, or with the role beside it under ZeRO-3."""
    if sibling.stage < 3:
        return ZeroConfig()
    return ZeroConfig(stage=3, offload_parameters=sibling.offload_parameters or offload)


@dataclass(frozen=True, kw_only=True)
class RewardRoleConfig:
    """What completions are scored by. Models shard as the critic does under ZeRO-3, or as the actor without one."""

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
    """Longest completion, in tokens; with an environment all that follows the prompt, observations too."""
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
    max_staleness: int = 0
    """Steps that the weights which sample a rollout lie behind; above 0 it is sampled while earlier ones are learned
    from (docs/async.md)."""

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
        self._check_staleness()

    def _check_staleness(self) -> None:
        ahead = self.max_staleness
        require(ahead >= 0, f"rollout.max_staleness must be 0 or more, got {ahead}: give 0 to sample between updates")
        for name, needed in (("tensor_parallel", 1), ("layout", "auto"), ("keep_weights", False),
                             ("offload_states", False)):  # fmt: skip
            value = getattr(self, name)
            require(
                not ahead or value == needed,
                f"rollout.max_staleness {ahead} samples from a copy of the weights beside training, got rollout.{name} "
                f"{value}: give {needed}",
            )
        require(
            not ahead or self.kv_cache_gib is not None,
            f"rollout.max_staleness {ahead} shares memory with training, so that nothing is simply free, got no "
            "rollout.kv_cache_gib: give the GiB for keys and values",
        )


@dataclass(frozen=True, kw_only=True)
class PPOConfig(StepConfig):
    """Step 3: an actor learns from its own completions and their rewards, by PPO or another on-policy algorithm."""

    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {name: traits.defaults for name, traits in ON_POLICY.items()}
    """Defaults that each algorithm brings."""

    algorithm: OnPolicyName = "ppo"
    """Who learns what from a rollout; brings defaults of its own (docs/algorithms.md)."""
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
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    ppo: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    train: LoopConfig = field(default_factory=LoopConfig)

    def __post_init__(self) -> None:
        require(
            self.ppo.ptx_coef == 0 or bool(self.data.ptx_sources),
            f"ppo.ptx_coef {self.ppo.ptx_coef} needs pretraining text, got no data.ptx_sources: name a source",
        )
        self._check_algorithm()
        if self.critic.share_base:
            self._check_shared_base()

    @property
    def corrects_stale(self) -> bool:
        """Whether older weights may sample: the loss is corrected for it, or does not ask who sampled (online DPO)."""
        return self.ppo.sampler_correction != "none" or self.algorithm == "online_dpo"

    def _check_algorithm(self) -> None:
        name, least, samples = self.algorithm, self.traits.completions, self.rollout.samples_per_prompt
        require(
            samples >= least,
            f"algorithm {name} compares completions of one prompt, got rollout.samples_per_prompt {samples}: "
            f"give {least} or more",
        )
        require(
            name != "online_dpo" or samples == 2,
            f"algorithm online_dpo takes pairs, got rollout.samples_per_prompt {samples}: give 2",
        )
        stale = self.rollout.max_staleness
        require(
            not stale or self.corrects_stale,
            f"rollout.max_staleness {stale} learns from samples of older weights, got ppo.sampler_correction none: "
            "give truncate or mask",
        )
        require(
            name != "online_dpo" or not self.ppo.mask_truncated,
            "algorithm online_dpo takes pairs, got ppo.mask_truncated, which takes them apart: leave it out",
        )
        require(
            self.traits.critic or self.ppo.critic_warmup_steps == 0,
            f"algorithm {name} has no critic, got ppo.critic_warmup_steps {self.ppo.critic_warmup_steps}: leave it out",
        )
        require(
            self.traits.critic or not self.critic.share_base,
            f"algorithm {name} has no critic, got critic.share_base: leave it out",
        )
        require(
            not self.ppo.dynamic_sampling or samples >= 2,
            f"ppo.dynamic_sampling compares completions of one prompt, got rollout.samples_per_prompt {samples}: "
            "give 2 or more",
        )
        require(
            self.ppo.selected_per_prompt < max(samples, 2),
            f"ppo.selected_per_prompt must be below rollout.samples_per_prompt {samples}, got "
            f"{self.ppo.selected_per_prompt}: lower it",
        )
        require(
            self.uses_reference or not self.ppo.reference_refresh_every,
            f"ppo.reference_refresh_every {self.ppo.reference_refresh_every} needs a reference, got ppo.kl_coef 0: "
            "leave it out",
        )

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
    def traits(self) -> OnPolicyTraits:
        """What the algorithm needs."""
        return ON_POLICY[self.algorithm]

    @property
    def uses_reference(self) -> bool:
        """Whether anything asks for the reference's log-probs."""
        return self.ppo.kl_coef > 0 or self.traits.reference

    @property
    def learned_per_prompt(self) -> int:
        """Completions of a prompt that are learned from, at most."""
        return self.ppo.selected_per_prompt if self.traits.selects else self.rollout.samples_per_prompt

    @property
    def reward_sibling(self) -> TrainedRoleConfig:
        """The role beside which reward models shard."""
        return self.critic if self.traits.critic else self.actor

    @property
    def critic_start(self) -> str | None:
        """The model that the critic starts from; none: the actor's start."""
        return None if self.critic.share_base else self.critic.path or self.reward.path
