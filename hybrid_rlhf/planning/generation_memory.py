"""Memory of generation besides the weights: KV cache, states, recorded experts, temporaries. Bytes on one rank.

Follows the rules of generation/batching/capacity.py, from shapes alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.generation.architecture.hugging_face import attention_sizes, layers_with, recurrent_fields
from hybrid_rlhf.generation.architecture.model_description import Experts
from hybrid_rlhf.generation.backends.native import PREFILL_TOKENS
from hybrid_rlhf.generation.batching.capacity import (
    FREE_SHARE,
    GRAPHS_BYTES,
    Sequences,
    WorkingMemory,
    capacity_tokens,
    rows_and_pages,
    saved_states,
)
from hybrid_rlhf.generation.model.cache import CacheLayout, RouteSize, blocks_of, page_bytes
from hybrid_rlhf.generation.model.recurrent.states import state_bytes
from hybrid_rlhf.models.families import family_of
from hybrid_rlhf.planning.shapes import ShapedModel

_FLOAT32 = 4
_FLOAT64 = 8
_ROW_NUMBERS = 20
"""Numbers of a row in the tables besides its uniform ones: its state, sampling parameters and stop tokens."""
_MOST_SPLITS = 32
_SPLIT_PROGRAMS = 528
"""Parts of the attention of a row, at most, and programs of all rows: two waves of an H100 (ops/attention.py)."""


def _recurrence(model: ShapedModel) -> dict[str, Any]:
    family = family_of(model.lm)
    return {} if family is None else recurrent_fields(model.lm, family)


def _state_bytes(model: ShapedModel, rollout: RolloutConfig, dtype: torch.dtype) -> int:
    """Bytes of the states of the recurrent layers, for each row."""
    fields = _recurrence(model)
    if not fields:
        return 0
    kind = fields["recurrence"]
    layers = len(fields["recurrent_layers"])
    return state_bytes(kind, layers=layers, units=math.ceil(kind.units / rollout.tensor_parallel), dtype=dtype)


def route_size(model: ShapedModel, rollout: RolloutConfig) -> RouteSize | None:
    """The recorded experts of a token; none for a model without inference weights or without a mixture of experts."""
    family = family_of(model.lm)
    if rollout.backend == "module" or family is None or family.experts is None:
        return None
    mixtures = layers_with(model.lm, family, "router")
    if not mixtures:
        return None
    kind = Experts(**family.experts(model.config.get_text_config()))
    return RouteSize(len(mixtures), kind.per_token, kind.index_dtype)


def route_bytes(model: ShapedModel, rollout: RolloutConfig) -> tuple[int, int]:
    """Memory of the recorded experts: of a rollout, on the host of every rank; and of a token on the device of the
    actor, where it replays them."""
    size = route_size(model, rollout)
    if size is None:
        return 0, 0
    longest = rollout.max_prompt_tokens + rollout.sampling.max_new_tokens
    completions = rollout.recorded_prompts(rollout.prompts_per_step) * rollout.sampling.n
    return completions * longest * size.nbytes, size.nbytes if rollout.routing_replay else 0


@dataclass(frozen=True)
class _Sizes:
    """Sizes of a decoder on this rank."""

    kv_sizes: list[tuple[int, int]]
    """KV heads and dimensions of each, of the layers with keys and values of their own."""
    heads: float
    hidden: int
    mlp: float
    vocabulary: float
    stores: int
    """Keys and values in the cache; 1 where they are the same (latent attention)."""


def _sizes(model: ShapedModel, tensor_parallel: int) -> _Sizes:
    c: Any = model.config.get_text_config()
    mlp = getattr(c, "intermediate_size", None) or getattr(c, "ffn_dim", None) or 4 * c.hidden_size
    family = family_of(model.lm)
    layers = frozenset(range(c.num_hidden_layers))
    own = {} if family is None else family.settings(c)
    if family is not None and family.recurrence is not None:
        layers = layers_with(model.lm, family, "o")
    heads, kv_heads, head_dim = attention_sizes(c, own)

    def kv_size(layer: int) -> tuple[int, int]:
        sizes = own.get("kv_sizes")
        count, size = (kv_heads, head_dim) if sizes is None else sizes[c.layer_types[layer]]
        return math.ceil(count / tensor_parallel), size

    return _Sizes(
        [kv_size(layer) for layer in sorted(layers - set(own.get("kv_sources", ())))],
        heads / tensor_parallel,
        c.hidden_size,
        mlp / tensor_parallel,
        c.vocab_size / tensor_parallel,
        1 if "latent" in own else 2,
    )


def _prefill_tokens(rollout: RolloutConfig, device: torch.device) -> int:
    return rollout.prefill_tokens or PREFILL_TOKENS[device.type]


def _capacity(rollout: RolloutConfig, device: torch.device) -> int:
    return capacity_tokens(rollout.max_prompt_tokens + rollout.sampling.max_new_tokens, device)


@dataclass(frozen=True)
class CachePlan:
    """The KV cache of a rollout, and the states of recurrent layers."""

    cache_bytes: float
    rows: int
    """Completions decoded at once."""
    wanted_rows: int
    """With unlimited memory."""
    full_length_rows: int
    """Number of these that have room at the maximum length at once."""


def cache_plan(
    model: ShapedModel,
    rollout: RolloutConfig,
    *,
    ranks: int,
    room_bytes: float,
    dtype: torch.dtype,
    device: torch.device,
    records_routes: bool = True,
) -> CachePlan:
    """How generation divides memory: all rows at the maximum length if there is room, else as much as fits. RL records
    the experts of a mixture in the cache."""
    groups = max(1, ranks // rollout.tensor_parallel)
    wanted = -(-(rollout.prompts_per_step + rollout.extra_prompts) // groups) * rollout.sampling.n
    if rollout.max_decode_rows is not None:
        wanted = min(wanted, rollout.max_decode_rows)
    routes = route_size(model, rollout) if records_routes else None
    sequences = _sequences(model, rollout, rows=wanted, dtype=dtype, device=device, routes=routes)
    if rollout.kv_cache_gib is not None:
        budget = rollout.kv_cache_gib * 2**30
        working = WorkingMemory()
    else:
        budget = FREE_SHARE[device.type] * room_bytes
        working = working_memory(model, rollout, rows=wanted, dtype=dtype, device=device)
    rows, pages = rows_and_pages(budget, sequences, working)
    pages = max(pages, sequences.longest_pages)
    each = sequences.layout.pages_of(sequences.longest_tokens)
    states = rows + 1 + saved_states(budget, sequences, working, rows)
    taken = float(pages * sequences.page_bytes + states * sequences.state_bytes)
    return CachePlan(taken, rows, wanted, min(rows, max(1, (pages - 1) // each)))


def _sequences(
    model: ShapedModel,
    rollout: RolloutConfig,
    *,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    routes: RouteSize | None,
) -> Sequences:
    """Sequences of the maximum length; windows, which need less, are left out."""
    s = _sizes(model, rollout.tensor_parallel)
    layout = CacheLayout.of_layers([None] * len(s.kv_sizes), s.kv_sizes, stores=s.stores, routes=routes)
    return Sequences(
        layout,
        page_bytes(layout, dtype),
        longest_tokens=rollout.max_prompt_tokens + rollout.sampling.max_new_tokens,
        prompt_tokens=rollout.max_prompt_tokens,
        rows=rows,
        prefill_tokens=_prefill_tokens(rollout, device),
        state_bytes=_state_bytes(model, rollout, dtype),
    )


def working_memory(
    model: ShapedModel, rollout: RolloutConfig, *, rows: int, dtype: torch.dtype, device: torch.device
) -> WorkingMemory:
    """Memory of generation beside the cache: a layer of a prefill; per row, logits, attention scores on a CPU or parts
    of split attention on a GPU, and the tables."""
    s = _sizes(model, rollout.tensor_parallel)
    size = dtype.itemsize
    tokens = min(_prefill_tokens(rollout, device), rows * rollout.max_prompt_tokens)
    qkv = max(((s.heads + 2 * count) * width for count, width in s.kv_sizes), default=0.0)
    prefill = tokens * size * (3 * s.hidden + max(4 * qkv, 4 * s.mlp))
    cuts = rollout.sampling.top_p < 1 or rollout.sampling.top_k > 0
    logits = s.vocabulary * _FLOAT32 * (8 if cuts else 2 + (rollout.sampling.temperature != 1) + size / _FLOAT32)
    scores = s.heads * _capacity(rollout, device) * _FLOAT32 * 2 if device.type == "cpu" else 0.0
    row = max(logits, scores)
    capacity = _capacity(rollout, device)
    graphs = False
    if device.type == "cuda":
        kv_heads, width = max(s.kv_sizes, key=math.prod, default=(1, 0))
        splits = min(_MOST_SPLITS, _SPLIT_PROGRAMS // (rows * kv_heads))
        row += s.heads * splits * (width + 2) * _FLOAT32 if splits > 1 else 0.0
        graphs = rollout.cuda_graphs and rollout.policy_lag <= 1
    numbers = _ROW_NUMBERS + rollout.sampling.max_new_tokens
    table = _FLOAT64 * numbers + _FLOAT32 * blocks_of(capacity)
    return WorkingMemory(prefill, row, table, cuda_graphs=graphs, reserve=GRAPHS_BYTES if graphs else 0)


def decode_buffer_bytes(
    model: ShapedModel, rollout: RolloutConfig, *, rows: int, dtype: torch.dtype, device: torch.device
) -> float:
    """Memory beside the cache with so many rows. The pool of CUDA graphs keeps its own besides that of a prefill."""
    return working_memory(model, rollout, rows=rows, dtype=dtype, device=device).of_rows(rows)
