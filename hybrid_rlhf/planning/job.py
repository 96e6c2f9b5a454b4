"""The work of an RL step, without its placement: the roles with their dimensions, and the lengths of the completions.

Dimensions come from a model's config alone (planning/shapes.py), so a plan needs no weights. Matrix products of a layer
are taken as equal in size. A mixture of experts computes `active` of its layer weights per token.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.model import LoraConfig, ModelConfig
from hybrid_rlhf.configs.sections.placement import is_role
from hybrid_rlhf.configs.sections.training import OptimizerConfig, ZeroConfig, frozen_zero
from hybrid_rlhf.engines.ds_config import read_overrides
from hybrid_rlhf.engines.sampling_engine import rounds_otherwise
from hybrid_rlhf.models.expert_parallel import expert_layers
from hybrid_rlhf.models.packing.prefixes import is_worth
from hybrid_rlhf.models.pretrained.loading import DTYPES, Architecture, training_dtype
from hybrid_rlhf.models.structure import CHOSEN_EXPERTS, active_experts
from hybrid_rlhf.planning.shapes import ShapedModel, shaped_model

TAIL_SIGMA = 0.6
"""Sigma of the log-normal distribution of lengths that a plan assumes: the longest of 256 completions has about five
times the median."""

SAMPLED_BYTES = 26
"""Bytes of a sampled token: id, log-probs as reported and as drawn, weight version, masks."""
LEARNED_BYTES = 54
"""Bytes of a token in a batch of PPO: log-probs of actor and reference, entropy, value, reward, advantage, return."""
LIKELY_BYTES = 8
"""Bytes of a likely token of a teacher: id and log-prob."""


@dataclass(frozen=True)
class ModelDimensions:
    """Sizes of a decoder that decide what it costs."""

    layers: int
    hidden: int
    attention_width: int
    """Heads x dimensions of a head."""
    cache_width: int
    """Elements of keys and values per token and layer."""
    heads: int
    layer_weights: float
    """Elements of the matrix products of a layer, of all experts."""
    vocabulary: int
    """0 for a scorer."""
    parameters: float
    trained: float
    """Parameters with gradients."""
    active: float = 1.0
    """Part of the layer weights that a token passes through."""
    experts: float = 0.0
    """Parameters of all routed experts."""
    choices: float = 0.0
    """Experts that a token passes through, of all layers."""

    @property
    def trains_all(self) -> bool:
        """True if gradients of all weights are computed, not of adapters alone."""
        return self.trained > 0.5 * self.parameters


def dimensions(model: ShapedModel) -> ModelDimensions:
    """The dimensions of a model on the meta device."""
    config = model.text_config
    heads, kv_heads, head_dim = model.attention_sizes or (1, 0, 0)
    sizes = {name: each.numel() for name, each in model.lm.named_parameters()}
    chosen = next((value for key in CHOSEN_EXPERTS if (value := getattr(config, key, None))), 0)
    routed = sum(size for name, size in sizes.items() if ".experts." in name)
    layers = config.num_hidden_layers
    in_layers = float(model.layer_elements)
    idle = routed * (1 - active_experts(config))
    return ModelDimensions(
        layers=layers,
        hidden=config.hidden_size,
        attention_width=heads * head_dim,
        cache_width=(1 if "latent" in model.settings else 2) * kv_heads * head_dim,
        heads=heads,
        layer_weights=in_layers / layers,
        vocabulary=config.vocab_size if model.lm.get_output_embeddings() is not None else 0,
        parameters=float(model.elements.all),
        trained=float(model.elements.trained),
        active=1 - idle / in_layers,
        experts=float(routed),
        choices=float(chosen * len(expert_layers(model.lm))),
    )


@dataclass(frozen=True)
class RoleJob:
    """One role: a model that trains, or reads completions."""

    name: str
    sizes: ModelDimensions
    model: ShapedModel | None
    """Shapes for the memory plan; None: memory is not planned."""
    zero: ZeroConfig
    """As configured; plans have stages of their own."""
    optimizer: OptimizerConfig | None = None
    """None for a frozen role."""
    bound_to: str | None = None
    """The role on whose weights it is stored and whose ranks it therefore shares."""

    @property
    def is_trained(self) -> bool:
        """True if it learns."""
        return self.optimizer is not None


@dataclass(frozen=True)
class StepLengths:
    """Lengths in the completions of a rollout."""

    prompt_tokens: float
    """Mean."""
    completions: tuple[int, ...]
    """Tokens of each completion, those of a prompt adjacent."""

    @property
    def tokens(self) -> float:
        """Number of tokens of all prompts and completions."""
        return self.prompt_tokens * len(self.completions) + sum(self.completions)

    @cached_property
    def mean_row(self) -> float:
        """Mean tokens of prompt and completion."""
        return self.prompt_tokens + statistics.fmean(self.completions)

    @cached_property
    def mean_square(self) -> float:
        """Mean of the squared tokens of a row, which attention costs."""
        return float(np.mean((self.prompt_tokens + np.asarray(self.completions, dtype=np.float64)) ** 2))


def modelled_lengths(
    *, prompts: int, per_prompt: int, prompt_tokens: float, mean_tokens: float, max_tokens: int
) -> StepLengths:
    """Modelled lengths: quantiles of a log-normal distribution with this mean, cut at the limit.

    A mean of the limit or more gives all completions the limit.
    """
    count = prompts * per_prompt
    if mean_tokens >= max_tokens:
        return StepLengths(prompt_tokens, (max_tokens,) * count)
    normal = statistics.NormalDist()
    spread = np.exp([TAIL_SIGMA * normal.inv_cdf((place + 0.5) / count) for place in range(count)])
    low, high = 0.0, float(max_tokens) * 4  # the cut lowers the mean, so the scale is searched
    for _ in range(40):
        scale = (low + high) / 2
        low, high = (scale, high) if np.minimum(spread * scale, max_tokens).mean() < mean_tokens else (low, scale)
    lengths = np.clip(np.rint(spread * high), 1, max_tokens).astype(int)
    # in an order without meaning, the same in every call
    return StepLengths(prompt_tokens, tuple(np.random.default_rng(0).permutation(lengths).tolist()))


@dataclass(frozen=True)
class RLJob:
    """The work of an RL step."""

    config: RLConfig
    roles: Mapping[str, RoleJob]
    """actor, critic, reference, teacher, names of reward components; those that the step has."""
    lengths: StepLengths
    dtype: torch.dtype
    """Data type of the training weights."""
    inference_dtype: torch.dtype
    device: torch.device
    reads_own_reference: bool = False
    """The actor without its adapters is the reference."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """The user's DeepSpeed JSON."""
    judges: Mapping[str, ShapedModel] = field(default_factory=dict)
    """Models of the judges in the run, by the names of their components."""

    @property
    def actor(self) -> RoleJob:
        """The role that learns to complete prompts."""
        return self.roles["actor"]

    @property
    def learners(self) -> list[RoleJob]:
        """Actor and critic."""
        return [role for role in self.roles.values() if role.is_trained]

    @property
    def frozen(self) -> list[RoleJob]:
        """Reward models, reference and teacher, in the order in which they read."""
        found = [role for role in self.roles.values() if not role.is_trained]
        return sorted(found, key=lambda role: is_role(role.name))

    @property
    def learned_rows(self) -> int:
        """Completions that are trained on."""
        return self.config.rollout.prompts_per_step * self.config.learned_per_prompt

    def sharing(self, prompt_tokens: float, completion_tokens: float) -> int:
        """Number of completions of a prompt in a micro-batch, for which its tokens are computed once; 1 if they are
        computed for each. A mini-batch has whole prompts, if there are as many."""
        config = self.config
        size = config.train.micro_batch_size or config.learned_per_prompt
        rows = max(1, min(size, config.learned_per_prompt, self.learned_rows // config.algorithm.mini_batches))
        tokens = rows * (prompt_tokens + completion_tokens)
        shares = all(role.model is not None and role.model.shares_prefixes for role in self.roles.values())
        return rows if shares and is_worth((rows - 1) * prompt_tokens, tokens, prefix=prompt_tokens) else 1

    @property
    def updates(self) -> int:
        """Optimizer updates of a learner from one rollout."""
        return self.config.algorithm.epochs * self.config.algorithm.mini_batches

    @property
    def actor_reads(self) -> int:
        """How many times the actor reads a rollout before its updates."""
        rollout = self.config.rollout
        other = rollout.max_lag > 0 or rounds_otherwise(rollout, self.dtype)
        old = self.config.algorithm.actor_scores_rollout(
            other_sampler=other, has_teacher=self.config.teacher is not None
        )
        return int(old) + int(self.reads_own_reference)


def read_job(
    config: RLConfig,
    device: torch.device,
    *,
    lengths: StepLengths | None = None,
    starts: Mapping[str, str] | None = None,
) -> RLJob:
    """The job of an RL step.

    Args:
        config: of the step.
        device: of a rank, a GPU or a CPU.
        lengths: of the completions; None: those of `default_lengths`.
        starts: folders that an earlier step will write, each with an existing model of the same shape.

    Raises:
        UserError: when a model has no config that transformers can read.
    """
    dtype = training_dtype(config.model, device)
    roles: dict[str, RoleJob] = {}

    def shaped(
        path: str | None,
        architecture: Architecture,
        section: ModelConfig,
        lora: LoraConfig | None = None,
        *,
        learns: bool = False,
    ) -> ShapedModel:
        return shaped_model(
            (starts or {}).get(str(path), str(path)),
            architecture,
            config=section,
            dtype=dtype,
            lora=lora,
            learns=learns,
            max_image_pixels=config.data.max_image_pixels,
        )

    def add(
        name: str,
        path: str | None,
        architecture: Architecture,
        zero: ZeroConfig,
        optimizer: OptimizerConfig | None = None,
        lora: LoraConfig | None = None,
        *,
        bound_to: str | None = None,
    ) -> None:
        model = shaped(path, architecture, config.model, lora, learns=optimizer is not None)
        roles[name] = RoleJob(name, dimensions(model), model, zero, optimizer, bound_to)

    actor_path = config.model.path
    reference_path = config.reference.path or actor_path
    reads_own = config.reads_without_adapters(reference_path, actor_path)
    actor = config.actor
    add("actor", actor_path, "causal_lm", actor.zero, actor.optimizer, actor.lora)
    if (critic := config.critic) is not None:
        path = config.critic_start or actor_path
        base = "actor" if critic.share_base else None
        add("critic", path, "scorer", config.critic_zero, critic.optimizer, config.critic_lora, bound_to=base)
    if config.uses_reference and not reads_own:
        add("reference", reference_path, "causal_lm", frozen_zero(actor.zero))
    for name, path in (config.teacher.models if config.teacher is not None else {}).items():
        add(name, path, "causal_lm", frozen_zero(actor.zero))
    for part in config.reward.named:
        if part.model:
            add(part.label, part.model, "scorer", frozen_zero(config.critic_zero))
    alone = ModelConfig(trust_remote_code=config.model.trust_remote_code)
    return RLJob(
        config,
        roles,
        lengths or default_lengths(config),
        dtype,
        DTYPES.get(config.rollout.dtype, dtype),
        device,
        reads_own_reference=config.uses_reference and reads_own,
        overrides=read_overrides(config.deepspeed_config),
        judges={
            part.label: shaped(part.judge_path, "causal_lm", alone) for part in config.reward.named if part.judge_path
        },
    )


def default_lengths(
    config: RLConfig, *, prompt_tokens: float | None = None, mean_tokens: float | None = None
) -> StepLengths:
    """Modelled lengths of an RL config: prompts of half their limit and completions of half theirs, unless given."""
    rollout = config.rollout
    limit = rollout.sampling.max_new_tokens
    return modelled_lengths(
        prompts=rollout.prompts_per_step,
        per_prompt=rollout.sampling.n,
        prompt_tokens=rollout.max_prompt_tokens / 2 if prompt_tokens is None else prompt_tokens,
        mean_tokens=math.ceil(limit / 2) if mean_tokens is None else mean_tokens,
        max_tokens=limit,
    )
