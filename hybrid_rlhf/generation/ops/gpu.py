"""Triton kernels of a step on a GPU, for operations that take torch several passes over memory.

Read `rows.py` (rotary positions with the write to the KV cache, gates), `norms.py`, `attention.py` (rows and chunks
over the KV cache), `latent.py` (the same over latents), `routing.py`, `experts.py` with `expert_tiles.py`, and
`expert_sums.py` (mixtures of experts), `convolution.py` and `recurrent.py` (recurrent layers), `quantisation.py`, and
`sampling.py`. Each kernel has a reference in torch, which the tests compare it with.
"""

from hybrid_rlhf.generation.ops.attention import chunk_tiles, paged_attention, tokens_at_once
from hybrid_rlhf.generation.ops.convolution import convolve
from hybrid_rlhf.generation.ops.expert_sums import sum_and_norm, sum_choices
from hybrid_rlhf.generation.ops.experts import experts_down, experts_up
from hybrid_rlhf.generation.ops.latent import latent_attention, latent_tokens_at_once, write_latents
from hybrid_rlhf.generation.ops.norms import (
    add_norm,
    add_normed,
    gated_norm,
    norm,
    norm_all_heads,
    norm_heads,
)
from hybrid_rlhf.generation.ops.quantisation import quantise_rows
from hybrid_rlhf.generation.ops.recurrence import (
    delta_step,
    lightning_step,
    mamba2_step,
    selective_scan,
)
from hybrid_rlhf.generation.ops.routing import choose_experts
from hybrid_rlhf.generation.ops.rows import activate, gated, rotate, rotate_and_write
from hybrid_rlhf.generation.ops.sampling import sample

__all__ = [
    "activate",
    "add_norm",
    "add_normed",
    "chunk_tiles",
    "choose_experts",
    "convolve",
    "delta_step",
    "experts_down",
    "experts_up",
    "gated",
    "gated_norm",
    "latent_attention",
    "latent_tokens_at_once",
    "lightning_step",
    "mamba2_step",
    "norm",
    "norm_all_heads",
    "norm_heads",
    "paged_attention",
    "quantise_rows",
    "rotate",
    "rotate_and_write",
    "sample",
    "selective_scan",
    "sum_and_norm",
    "sum_choices",
    "tokens_at_once",
    "write_latents",
]
