"""Interface of the engine that samples rollouts: the actor, or a sampler on separate ranks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.generation.backends.native import NativeBackend
from hybrid_rlhf.generation.batching.requests import DecodeWork
from hybrid_rlhf.generation.engine import GenerationEngine
from hybrid_rlhf.models.pretrained.loading import DTYPES
from hybrid_rlhf.runtime.world import World


def backend_maker(rollout: RolloutConfig) -> Callable[..., NativeBackend]:
    """Return NativeBackend with the memory settings of a rollout section."""
    return functools.partial(
        NativeBackend,
        max_batch_rows=rollout.max_decode_rows,
        kv_cache_gib=rollout.kv_cache_gib,
        prefill_tokens=rollout.prefill_tokens,
        cuda_graphs=rollout.cuda_graphs,
    )


def rounds_otherwise(rollout: RolloutConfig, training: torch.dtype) -> bool:
    """True if sampling rounds in another way than training in a dtype: 8-bit products, another dtype, or vLLM."""
    other_products = rollout.quantization is not None or rollout.backend == "vllm"
    return other_products or DTYPES.get(rollout.dtype, training) != training


def groups_of(world: World, generation_world: World) -> tuple[int, int | None]:
    """Return the number of tensor-parallel groups of `world`, and the index of this rank's; None: it is in none."""
    together = generation_world.size
    return world.size // together, world.rank // together if world.is_member else None


class SamplingEngine(Protocol):
    """Generates with the actor's current weights."""

    world: World
    """Ranks that sample; this process may not be one of them."""
    generation_world: World
    """Tensor-parallel ranks that generate together, from the same prompts."""
    work: DecodeWork
    """Decoding work of this rank in the last rollout."""
    weight_sync_seconds: float
    """Time of the last weight sync on this rank, without the check."""
    weight_check_seconds: float
    """Time of the check after the last weight sync."""
    samples_while_training: bool
    """True if an open batch of `inference` may go on after that context."""
    max_logprob_diff: float
    """Limit of the mean difference of log-probs between sampler and trainer, in nats, beyond which a run stops."""

    @property
    def groups(self) -> tuple[int, int | None]:
        """Number of `generation_world`s, and the index of this rank's; None: it does not sample."""

    @property
    def device(self) -> torch.device:
        """Device of this rank."""

    @property
    def weight_version(self) -> int:
        """Number of optimizer updates of the actor's weights; on a rank without the actor, at the last sync."""

    def inference(
        self, *, stop_token_ids: tuple[int, ...] | None = None, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> contextlib.AbstractContextManager[GenerationEngine | None]:
        """Return a context in which the current weights generate. Every rank of actor and sampler must enter.

        Args:
            stop_token_ids: tokens that end every completion; none: the model's own EOS tokens.
            tokenizer: for stop strings.

        Returns:
            Context of the engine; of None on a rank that does not sample.
        """

    def other_weights(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the model temporarily has other weights under the same version."""
