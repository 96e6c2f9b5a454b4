"""Config of step 3, learning from the actor's own completions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hybrid_rlhf.configs.algorithms import ON_POLICY, ON_POLICY_KEYS, KeyRule, OnPolicyName, OnPolicyTraits
from hybrid_rlhf.configs.environment import EnvironmentConfig
from hybrid_rlhf.configs.on_policy import AlgorithmConfig
from hybrid_rlhf.configs.presets import whole_number
from hybrid_rlhf.configs.rewards import RewardPartConfig, require_distinct_names
from hybrid_rlhf.configs.rollout import RolloutConfig
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
    """Model to start from; none: model.path for the actor; for the critic the reward model's layers, or where there is
    none the actor's, with a head of zeros. A critic's path keeps the head of the model that it names."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)


@dataclass(frozen=True, kw_only=True)
class CriticConfig(TrainedRoleConfig):
    """The critic."""

    lam: float = 1.0
    """Lambda of the returns that it learns; apart from ppo.lam, which is the actor's (VC-PPO, arXiv 2503.01491)."""
    head_lr: float | None = None
    """Highest learning rate of its head; none: optimizer.lr, of a head of zeros at least 0.1 / hidden size."""
    share_base: bool = False
    """The critic starts where the actor does and has adapters of its own on the actor's weights; needs LoRA."""

    def __post_init__(self) -> None:
        require(0 <= self.lam <= 1, f"critic.lam must be in [0, 1], got {self.lam}: give for example 1.0")
        rate = self.head_lr
        require(
            rate is None or rate >= 0, f"critic.head_lr must be 0 or more, got {rate}: leave it out for the default"
        )


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


_FEWEST_PROMPTS = 64
"""In a rollout of several completions each, where the user does not say."""


@dataclass(frozen=True, kw_only=True)
class PPOConfig(StepConfig):
    """Step 3: an actor learns from its own completions and their rewards, by PPO or another on-policy algorithm."""

    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {name: traits.defaults for name, traits in ON_POLICY.items()}
    """Defaults that each algorithm brings."""
    KEY_RULES: ClassVar[tuple[KeyRule, ...]] = ON_POLICY_KEYS
    """Keys that some cases do not read."""

    algorithm: OnPolicyName = "ppo"
    """Who learns what from a rollout; brings defaults of its own (docs/algorithms.md)."""
    output_dir: str = "output/step3_ppo"
    """Folder of the run: actor/, critic/, config.yaml, metrics.jsonl, samples.jsonl, checkpoints."""
    data: PromptDataConfig = field(default_factory=PromptDataConfig)
    actor: TrainedRoleConfig = field(
        default_factory=lambda: TrainedRoleConfig(optimizer=OptimizerConfig(lr=1e-6, schedule="constant"))
    )
    critic: CriticConfig = field(
        default_factory=lambda: CriticConfig(optimizer=OptimizerConfig(lr=1e-5, schedule="constant"))
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
        if self.critic.share_base and self.traits.critic:
            self._check_shared_base()

    @staticmethod
    def following(values: Mapping[str, Any], settled: Collection[str]) -> dict[str, int]:
        """Defaults that follow from the size of a rollout: its prompts, and the mini-batches it divides into.

        Args:
            values: dotted keys, as far as they are known.
            settled: keys that are given.
        """
        prompts, samples = (
            whole_number(values[f"rollout.{key}"]) for key in ("prompts_per_step", "samples_per_prompt")
        )
        found = {}
        if samples > 1 and "rollout.prompts_per_step" not in settled:
            prompts = found["rollout.prompts_per_step"] = max(_FEWEST_PROMPTS, prompts // samples)
        if "ppo.mini_batches" not in settled:
            rows, most = prompts * samples, whole_number(values["ppo.mini_batches"])
            unit = whole_number(values["train.micro_batch_size"]) or 1
            divisors = [count for count in range(1, most + 1) if rows and rows % (count * unit) == 0]
            found["ppo.mini_batches"] = max(divisors, default=1)
        return found

    @property
    def corrects_stale(self) -> bool:
        """Whether older weights may sample: the loss is corrected for it, or does not ask who sampled (online DPO)."""
        return self.ppo.sampler_correction != "none" or self.traits.pairs

    def reads_without_adapters(self, reference_path: str | None, actor_path: str | None) -> bool:
        """Whether the actor without its adapters is the reference, which must not follow the actor then."""
        return self.actor.lora.rank > 0 and reference_path == actor_path and not self.ppo.reference_refresh_every

    def _check_algorithm(self) -> None:
        name, least, samples = self.algorithm, self.traits.completions, self.rollout.samples_per_prompt
        require(
            samples >= least,
            f"algorithm {name} compares completions of one prompt, got rollout.samples_per_prompt {samples}: "
            f"give {least} or more",
        )
        require(
            not self.traits.pairs or samples == 2,
            f"algorithm {name} takes pairs, got rollout.samples_per_prompt {samples}: give 2",
        )
        stale = self.rollout.max_staleness
        require(
            not stale or self.corrects_stale,
            f"rollout.max_staleness {stale} learns from samples of older weights, got ppo.sampler_correction none: "
            "give truncate or mask",
        )
        self._check_keys()
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

    def _check_keys(self) -> None:
        """What an algorithm would pass over in silence, or could not bear."""
        name, traits, ppo = self.algorithm, self.traits, self.ppo
        pairs = "learns from pairs, by DPO's loss"
        for wrong, why, key in (
            (ppo.whiten_rewards and not traits.critic, "compares whole completions", "whiten_rewards"),
            (traits.pairs and ppo.mask_truncated, pairs, "mask_truncated"),
            (traits.pairs and ppo.whiten_advantages, pairs, "whiten_advantages"),
            (traits.pairs and ppo.loss_normalisation != "token", pairs, "loss_normalisation"),
            (traits.pairs and ppo.sampler_correction != "none", pairs, "sampler_correction"),
        ):
            require(not wrong, f"algorithm {name} {why}, got ppo.{key} {getattr(ppo, key)}: leave it out")
        require(
            not traits.selects or ppo.kl_coef == 0 or ppo.kl_in == "loss",
            f"algorithm {name} selects by scores, got ppo.kl_coef {ppo.kl_coef} in the reward: give ppo.kl_in loss",
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
    def clip_is_idle(self) -> bool:
        """Whether the algorithm clips ratios, and one update from a rollout leaves them all at 1."""
        return self.ppo.updates_once and not self.traits.once

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
