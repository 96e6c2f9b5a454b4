"""What a rollout needs of the engine that samples: the actor itself, or a sampler on ranks of its own."""

from __future__ import annotations

import contextlib
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.generation.backends.native import NativeBackend
from hybrid_rlhf.generation.batching.requests import DecodeWork
from hybrid_rlhf.generation.engine import GenerationEngine
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.models.pretrained.loading import DTYPES
from hybrid_rlhf.runtime.world import World


def rollout_backend(decoder: Decoder, rollout: RolloutConfig, *, cuda_graphs: bool = True) -> NativeBackend:
    """The backend of a decoder with the memory settings of rollouts."""
    return NativeBackend(
        decoder,
        max_batch_rows=rollout.max_decode_rows,
        kv_cache_gib=rollout.kv_cache_gib,
        prefill_tokens=rollout.prefill_tokens,
        cuda_graphs=cuda_graphs and rollout.cuda_graphs,
    )


def rounds_otherwise(rollout: RolloutConfig, training: torch.dtype) -> bool:
    """Whether sampling computes with other precision than training in a dtype: 8-bit products, or another dtype."""
    return rollout.quantization is not None or DTYPES.get(rollout.dtype, training) != training


def check_closed(snapshot: GenerationEngine | None) -> None:
    """Raise RuntimeError if a snapshot, into whose weights newer ones are about to be written, may still sample."""
    if snapshot is not None and not snapshot.is_closed:
        raise RuntimeError("a snapshot is written to by the next one: close it first, or set a policy_lag of 2 or more")


def groups_of(world: World, generation_world: World) -> tuple[int, int | None]:
    """How many tensor-parallel groups `world` has, and the number of this rank's; none: it has none."""
    together = generation_world.size
    return world.size // together, world.rank // together if world.is_member else None


class SamplingEngine(Protocol):
    """Generates with the actor's current weights, or with a copy of them."""

    world: World
    """The ranks that sample; this process may be none of them."""
    generation_world: World
    """The ranks that generate together, from the same prompts."""
    work: DecodeWork
    """What decoding did on this rank in the last rollout."""
    weight_sync_seconds: float
    """Time of the last weight sync on this rank, without the check."""
    weight_check_seconds: float
    """Time of the check after it."""
    max_logprob_diff: float
    """Largest mean difference of log-probs between sampler and trainer, in nats, beyond which a run stops."""

    @property
    def groups(self) -> tuple[int, int | None]:
        """How many `generation_world`s there are, and the number of this rank's; none: it does not sample."""

    @property
    def device(self) -> torch.device:
        """Of this rank."""

    @property
    def weight_version(self) -> int:
        """Optimizer updates of the actor's weights; on a rank without the actor, as of the last sync."""

    def inference(
        self, *, stop_token_ids: tuple[int, ...] | None = None, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> contextlib.AbstractContextManager[GenerationEngine | None]:
        """Generate with the current weights; every rank of actor and sampler enters.

        Args:
            stop_token_ids: tokens that end every completion; none: the model's own EOS tokens.
            tokenizer: for stop strings.

        Returns:
            a context of the engine; of none on a rank that does not sample.
        """

    def snapshot(
        self, *, stop_token_ids: tuple[int, ...], tokenizer: PreTrainedTokenizerBase | None = None
    ) -> GenerationEngine | None:
        """An engine with the current weights, which stay as they are while training goes on; every rank of actor and
        sampler calls. With a policy lag of 1 it must be closed before the next one is made.

        Args:
            stop_token_ids: tokens that end every completion.
            tokenizer: for stop strings.

        Returns:
            the engine; none on a rank that does not sample.
        """

    def other_weights(self) -> contextlib.AbstractContextManager[None]:
        """While other weights than those of training are in place, under the same version."""
