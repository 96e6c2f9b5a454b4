"""Memory of a rank while it samples: inference weights, KV cache, states, recorded experts, temporaries. In bytes.

Follows the rules of generation/batching/capacity.py, from shapes alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.engines.hybrid import BUCKET_ELEMENTS
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
from hybrid_rlhf.generation.batching.images import ENCODED_BYTES
from hybrid_rlhf.generation.image_loading import KEPT_PIXEL_BYTES
from hybrid_rlhf.generation.model.cache import CacheLayout, RouteSize, blocks_of, page_bytes
from hybrid_rlhf.generation.model.recurrent.states import state_bytes
from hybrid_rlhf.models.families.vision import banned_ids
from hybrid_rlhf.planning.device import Device
from hybrid_rlhf.planning.engine_memory import FLOAT32, MemoryUse
from hybrid_rlhf.planning.inference_memory import inference_weight_bytes
from hybrid_rlhf.planning.job import LEARNED_BYTES, LIKELY_BYTES
from hybrid_rlhf.planning.memo import once
from hybrid_rlhf.planning.phase_memory import PhaseMemory, longest_row
from hybrid_rlhf.planning.shapes import ShapedModel

_FLOAT64 = 8
_ROW_NUMBERS = 20
"""Numbers of a row in the tables, without its uniform random numbers: state, sampling parameters and stop tokens."""
_MOST_SPLITS = 32
_SPLIT_PROGRAMS = 528
"""Parts of the attention of a row, at most, and programs of all rows: two waves of an H100 (ops/attention.py)."""


def route_size(model: ShapedModel, rollout: RolloutConfig) -> RouteSize | None:
    """The recorded experts of a token; none for a model without inference weights or without a mixture of experts."""
    if rollout.backend != "auto" or not model.experts:
        return None
    kind = Experts(**model.experts)
    return RouteSize(len([*model.named(["router"])]), kind.per_token, kind.index_dtype)


def rollout_bytes(
    model: ShapedModel, rollout: RolloutConfig, *, groups: int | None, ranks: int, likely_tokens: int = 0
) -> float:
    """Memory of the longest rollout on the host of a rank: the rows that it holds and those that it computes, with the
    recorded experts.

    Args:
        model: the actor.
        rollout: settings.
        groups: number of groups that sample; None if the rank is in none of them. The first rank of a group holds its
            rows.
        ranks: number of ranks of the run.
        likely_tokens: number of a teacher's most likely tokens that are stored for each token.
    """
    size = route_size(model, rollout)
    recorded = 0 if size is None else rollout.recorded_prompts(rollout.prompts_per_step) * size.nbytes
    learned = LEARNED_BYTES + likely_tokens * LIKELY_BYTES
    whole = rollout.sampling.n * longest_row(rollout) * (rollout.prompts_per_step * learned + recorded)
    computed = whole / ranks if ranks > 1 else 0.0
    return computed + (0.0 if groups is None else whole / groups)


def replayed_bytes(model: ShapedModel, rollout: RolloutConfig) -> int:
    """Memory of the recorded experts of a token on the device of the actor, where it replays them."""
    size = route_size(model, rollout)
    return 0 if size is None or not rollout.routing_replay else size.nbytes


@dataclass(frozen=True)
class CachePlan:
    """The KV cache of a rollout, and the states of recurrent layers."""

    cache_bytes: float
    rows: int
    """Completions decoded at once."""
    wanted_rows: int
    """Completions decoded at once with unlimited memory."""
    full_length_rows: int
    """Completions that have room at the maximum length at once."""


@dataclass(frozen=True)
class InferenceBytes:
    """Bytes of inference weights."""

    weights: float
    """Bytes of copies of the training weights; views take none."""
    building: float
    """Largest temporaries of a weight sync, before the cache is allocated."""


@dataclass(frozen=True)
class SamplingMemory:
    """Memory of the phase `generation`."""

    phase: PhaseMemory
    cache: CachePlan
    step_buffers: float
    """Bytes of the temporaries of a decoding step."""


@dataclass(frozen=True)
class GenerationMemory:
    """A model from which a rank samples."""

    model: ShapedModel
    rollout: RolloutConfig
    dtype: torch.dtype
    """Data type of the inference weights."""
    device: torch.device

    @cached_property
    def _kv_sizes(self) -> list[tuple[int, int]]:
        """KV heads and dimensions of each on this rank, of the layers with keys and values of their own."""
        model = self.model
        config = model.text_config
        if model.attention_sizes is None:
            return []
        _, kv_heads, head_dim = model.attention_sizes
        layers: Sequence[int] = range(config.num_hidden_layers)
        if model.recurrent_layers:
            layers = [one.layer for one in model.named(["o"])]
        by_type = model.settings.get("kv_sizes")
        sizes = [
            (kv_heads, head_dim) if by_type is None else by_type[config.layer_types[layer]]
            for layer in layers
            if layer not in model.settings.get("kv_sources", ())
        ]
        return [(math.ceil(count / self.rollout.tensor_parallel), size) for count, size in sizes]

    @cached_property
    def _state_bytes(self) -> int:
        """Bytes of the states of the recurrent layers, for each row."""
        fields = self.model.recurrent_layers
        if not fields:
            return 0
        kind = fields["recurrence"]
        units = math.ceil(kind.units / self.rollout.tensor_parallel)
        return state_bytes(kind, layers=len(fields["recurrent_layers"]), units=units, dtype=self.dtype)

    @property
    def _prefill_tokens(self) -> int:
        return self.rollout.prefill_tokens or PREFILL_TOKENS[self.device.type]

    @once
    def weights(self, *, stage: int, gathers: bool, in_use: bool = False) -> InferenceBytes:
        """Bytes of the inference weights of an actor.

        Args:
            stage: ZeRO stage of the actor.
            gathers: the training weights are gathered from ZeRO-3's parts.
            in_use: training changes the weights meanwhile, which rules out views.
        """

        def copied(rollout: RolloutConfig) -> float:
            return inference_weight_bytes(
                self.model, rollout, stage=stage, dtype=self.dtype, device=self.device, in_use=in_use
            )

        weights = copied(self.rollout)
        if self.model.tower is not None and (gathers or in_use):  # else the training module encodes images
            weights += self.dtype.itemsize * sum(weight.numel() for weight in self.model.tower.weights)
        building = 2.0 * self.model.elements.largest * self.dtype.itemsize
        if gathers:
            building += min(BUCKET_ELEMENTS, self.model.elements.all) * self.dtype.itemsize
        if self.rollout.quantization is not None:  # all are there in their own dtype before the first is quantised
            building += copied(replace(self.rollout, quantization=None)) - weights
        return InferenceBytes(weights, building)

    def cache(self, *, ranks: int, room_bytes: float, records_routes: bool = True) -> CachePlan:
        """How generation divides memory: all rows at the maximum length if there is room, otherwise as many as fit. RL
        records the experts of a mixture in the cache. Windows, which need less, are left out."""
        rollout = self.rollout
        groups = max(1, ranks // rollout.tensor_parallel)
        wanted = -(-rollout.prompts_per_step * (1 + rollout.max_lag) // groups) * rollout.sampling.n
        if rollout.max_decode_rows is not None:
            wanted = min(wanted, rollout.max_decode_rows)
        routes = route_size(self.model, rollout) if records_routes else None
        sizes = self._kv_sizes
        if not sizes:  # no pages, whose number decides how many rows there are
            return CachePlan(float(wanted * self._state_bytes), wanted, wanted, wanted)
        stores = 1 if "latent" in self.model.settings else 2  # keys that are values too
        layout = CacheLayout.of_layers([None] * len(sizes), sizes, stores=stores, routes=routes)
        sequences = Sequences(
            layout,
            page_bytes(layout, self.dtype),
            longest_tokens=longest_row(rollout),
            prompt_tokens=rollout.max_prompt_tokens,
            rows=wanted,
            prefill_tokens=self._prefill_tokens,
            state_bytes=self._state_bytes,
        )
        if rollout.kv_cache_gib is not None:
            budget = rollout.kv_cache_gib * 2**30
            working = WorkingMemory()
        else:
            budget = FREE_SHARE[self.device.type] * room_bytes
            working = self.working(wanted)
        rows, pages = rows_and_pages(budget, sequences, working)
        pages = max(pages, sequences.longest_pages)
        each = layout.pages_of(sequences.longest_tokens)
        states = rows + 1 + saved_states(budget, sequences, working, rows)
        taken = float(pages * sequences.page_bytes + states * sequences.state_bytes)
        return CachePlan(taken, rows, wanted, min(rows, max(1, (pages - 1) // each)))

    def working(self, rows: int) -> WorkingMemory:
        """Memory beside the cache for some rows: a layer of a prefill; per row, logits, attention scores on a CPU
        or parts of split attention on a GPU, and the tables."""
        config = self.model.text_config
        rollout = self.rollout
        ranks = rollout.tensor_parallel
        heads = (self.model.attention_sizes or (0,))[0] / ranks
        width = getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", None) or 4 * config.hidden_size
        mlp = width / ranks
        size = self.dtype.itemsize
        capacity = capacity_tokens(longest_row(rollout), self.device)
        tokens = min(self._prefill_tokens, rows * rollout.max_prompt_tokens)
        qkv = max(((heads + 2 * count) * width for count, width in self._kv_sizes), default=0.0)
        prefill = tokens * size * (3 * config.hidden_size + max(4 * qkv, 4 * mlp))
        if banned_ids(self.model.config):  # states of images, those of one prefill and those that are kept
            prefill += tokens * config.hidden_size * size + ENCODED_BYTES
        cuts = rollout.sampling.top_p < 1 or rollout.sampling.top_k > 0
        copies = 8 if cuts else 2 + (rollout.sampling.temperature != 1) + size / FLOAT32
        logits = config.vocab_size / ranks * FLOAT32 * copies
        scores = heads * capacity * FLOAT32 * 2 if self.device.type == "cpu" else 0.0
        row = max(logits, scores)
        graphs = False
        if self.device.type == "cuda":
            kv_heads, width = max(self._kv_sizes, key=math.prod, default=(1, 0))
            splits = min(_MOST_SPLITS, _SPLIT_PROGRAMS // (rows * kv_heads))
            row += heads * splits * (width + 2) * FLOAT32 if splits > 1 else 0.0
            graphs = rollout.cuda_graphs
        numbers = _ROW_NUMBERS + rollout.sampling.max_new_tokens
        table = _FLOAT64 * numbers + FLOAT32 * blocks_of(capacity)
        return WorkingMemory(prefill, row, table, cuda_graphs=graphs, reserve=GRAPHS_BYTES if graphs else 0)

    def sampling(
        self,
        base: MemoryUse,
        inference: InferenceBytes,
        machine: Device,
        *,
        ranks: int,
        records_routes: bool = True,
    ) -> SamplingMemory:
        """Memory of a rank that samples.

        Args:
            base: other memory that the rank holds.
            inference: of the inference weights.
            machine: device of the rank.
            ranks: number of ranks that sample.
            records_routes: the experts of a mixture are recorded in the cache.
        """
        room = machine.device_bytes - (base + MemoryUse(inference=inference.weights)).device
        cache = self.cache(ranks=ranks, room_bytes=room, records_routes=records_routes)
        # the pool of CUDA graphs keeps its own memory in addition to that of a prefill
        buffers = self.working(cache.rows).of_rows(cache.rows)
        tower = None
        if self.model.tower is not None:
            encoded = self.model.tower.measure(self.rollout.max_prompt_tokens, backward=False)
            tower = MemoryUse(buffers=encoded.peak, host=KEPT_PIXEL_BYTES)
        need = base + MemoryUse(
            inference=inference.weights,
            cache=cache.cache_bytes,
            buffers=max(buffers + (0.0 if tower is None else tower.buffers), inference.building - cache.cache_bytes),
        )
        note = ""
        if cache.full_length_rows < cache.wanted_rows:
            note = f"{cache.rows} of {cache.wanted_rows} completions at once, {cache.full_length_rows} at full length"
        return SamplingMemory(PhaseMemory("generation", need, machine, note, tower=tower), cache, buffers)
