"""Namespace of the Triton kernels of a step on a GPU; `choice.kernels_for` returns this module."""

from hybrid_rlhf.generation.ops.attention import chunk_tiles, paged_attention, tokens_at_once
from hybrid_rlhf.generation.ops.convolution import convolve
from hybrid_rlhf.generation.ops.experts import experts_down, experts_up
from hybrid_rlhf.generation.ops.latent import latent_attention, latent_tokens_at_once, write_latents
from hybrid_rlhf.generation.ops.norms import add_norm, norm
from hybrid_rlhf.generation.ops.quantisation import quantise_rows
from hybrid_rlhf.generation.ops.recurrence import delta_step, mamba2_step
from hybrid_rlhf.generation.ops.routing import choose_experts
from hybrid_rlhf.generation.ops.rows import gated, rotate_and_write
from hybrid_rlhf.generation.ops.sampling import sample

__all__ = [
    "add_norm",
    "chunk_tiles",
    "choose_experts",
    "convolve",
    "delta_step",
    "experts_down",
    "experts_up",
    "gated",
    "latent_attention",
    "latent_tokens_at_once",
    "mamba2_step",
    "norm",
    "paged_attention",
    "quantise_rows",
    "rotate_and_write",
    "sample",
    "tokens_at_once",
    "write_latents",
]
