"""Config of a rollout: what is sampled, with which layout, and what it may take of memory and time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybrid_rlhf.configs.sections import require


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How completions are sampled."""

    prompts_per_step: int = 256
    """Prompts in a rollout, over all ranks; the default is that many completions, of 64 prompts or more."""
    samples_per_prompt: int = 1
    """Completions of each prompt."""
    max_prompt_tokens: int = 512
    """Longer prompts are truncated on the left or dropped, as data.too_long says."""
    max_new_tokens: int = 512
    """Longest completion, in tokens (TRL, verl); with an environment all that follows the prompt, observations too."""
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
    """Memory of a rank for keys and values; none: half of what is free on a CPU, 0.9 of it on a GPU less what a prefill
    and captured steps take."""
    max_decode_rows: int | None = None
    """Completions that a rank decodes together, at most; none: as many as memory has room for."""
    offload_states: bool = False
    """Optimizer states, master weights and gradients go to host memory while generating."""
    offload_frozen: bool = False
    """Reward models and reference live in host memory, and each is on the device only while it scores."""
    keep_weights: bool | Literal["auto"] = "auto"
    """The inference layout, its cache and captured steps stay in memory after a rollout, and are updated in place;
    auto: on a GPU where the memory plan of the run has room for them in every phase, on a CPU never."""
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
        require(
            self.max_decode_rows is None or self.max_decode_rows >= 1,
            f"rollout.max_decode_rows must be 1 or more, got {self.max_decode_rows}: leave it out to follow memory",
        )
        self._check_staleness()

    def _check_staleness(self) -> None:
        ahead = self.max_staleness
        require(ahead >= 0, f"rollout.max_staleness must be 0 or more, got {ahead}: give 0 to sample between updates")
        for name, barred, needed in (
            ("tensor_parallel", self.tensor_parallel > 1, 1), ("layout", self.layout != "auto", "auto"),
            ("keep_weights", self.keep_weights is True, False), ("offload_states", self.offload_states, False),
        ):  # fmt: skip
            require(
                not ahead or not barred,
                f"rollout.max_staleness {ahead} samples from a copy of the weights beside training, got rollout.{name} "
                f"{getattr(self, name)}: give {needed}",
            )
        require(
            not ahead or self.kv_cache_gib is not None,
            f"rollout.max_staleness {ahead} shares memory with training, so that nothing is simply free, got no "
            "rollout.kv_cache_gib: give the GiB for keys and values",
        )
