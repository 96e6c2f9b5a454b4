"""Times small models through the engines that runs use: forward, backward, optimizer step, weight sync, decoding.

Models that differ in one size separate what costs per layer, per logit and per call. Their weights are random and their
completions are never ended, so that sizes alone decide the time.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.configs.sections.training import OptimizerConfig, ZeroConfig
from hybrid_rlhf.engines.builder import EngineSpec, build_actor
from hybrid_rlhf.engines.hybrid import HybridEngine
from hybrid_rlhf.functional.operations import linear
from hybrid_rlhf.generation.model.layers import InferenceLinear
from hybrid_rlhf.generation.ops.choice import can_pack
from hybrid_rlhf.models.pretrained.sources import quiet_transformers
from hybrid_rlhf.planning.job import ModelDimensions
from hybrid_rlhf.planning.machines.ranks import median_seconds, synchronize
from hybrid_rlhf.runtime.world import World

SHORT_CONTEXT = 16
LONG_CONTEXT = 128
"""Tokens of prompts that decoding starts from."""
_FEW_STEPS = 6
_MORE_STEPS = 26
"""New tokens of two rollouts, whose difference is that of decoding steps alone."""
SHORT_STEPS = _FEW_STEPS - 1
"""Decoding steps of the shorter rollout, whose first tokens come from the prefill."""
MEAN_NEW_TOKENS = (_FEW_STEPS + _MORE_STEPS) / 2
"""New tokens of a row in the mean decoding step."""
_COLD_BYTES = 2**26
_MOST_COPIES = 64
"""Bytes of weights, and their number, that decoding products take turns with."""
_END = "<|end|>"
_PASSES = 3
"""Passes after a first one, and rollouts. Their median counts, as it does for the steps of a run: what interferes on
this machine belongs to its speed."""


@dataclass(frozen=True)
class TimedModel:
    """Sizes of a model."""

    layers: int
    hidden: int
    vocabulary: int = 512
    zero: Literal[0, 3] = 0

    @property
    def config(self) -> LlamaConfig:
        """The config that transformers reads."""
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=3 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=max(1, self.hidden // 64),
            num_key_value_heads=max(1, self.hidden // 64),
            max_position_embeddings=4096,
            tie_word_embeddings=True,
        )

    @property
    def sizes(self) -> ModelDimensions:
        """As prices take them (costs/)."""
        weights = 13.0 * self.hidden**2  # four of attention, three of the MLP that are three times as large
        parameters = self.layers * weights + self.vocabulary * self.hidden
        return ModelDimensions(
            self.layers,
            self.hidden,
            self.hidden,
            2 * self.hidden,
            max(1, self.hidden // 64),
            weights,
            self.vocabulary,
            parameters,
            parameters,
        )


@dataclass(frozen=True)
class TimedBatch:
    """Equal rows, all of whose tokens but the first have a log-prob."""

    rows: int
    length: int


@dataclass(frozen=True)
class ModelTimes:
    """Seconds of a model."""

    model: TimedModel
    forward: dict[TimedBatch, float]
    backward: dict[TimedBatch, float]
    step: float
    sync: float
    """Weight sync and check."""
    decode: dict[tuple[int, int], float]
    """Seconds of a decoding step, by rows and tokens of the prompts."""
    whole: dict[tuple[int, int], float]
    """Seconds of a rollout of `_FEW_STEPS` tokens, by the same."""


def save_timed_models(folder: Path, model: TimedModel, *, template: str) -> None:
    """`actor` and `reward`, a scorer of the same sizes, with a token for each byte, which are their vocabulary."""
    alphabet = {token: index for index, token in enumerate([_END, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=_END, pad_token=_END)
    tokenizer.chat_template = template
    config = replace(model, vocabulary=len(alphabet)).config
    config.num_labels = 1
    config.pad_token_id = alphabet[_END]
    torch.manual_seed(0)
    for name, kind in (("actor", LlamaForCausalLM), ("reward", LlamaForSequenceClassification)):
        tokenizer.save_pretrained(folder / name)
        with quiet_transformers():
            kind(config).save_pretrained(folder / name)


def time_model(world: World, model: TimedModel, batches: list[TimedBatch], rows: list[int]) -> ModelTimes:
    """Times of a model with so many rows decoded at once; a model under ZeRO is not decoded from."""
    with tempfile.TemporaryDirectory() as own, quiet_transformers():
        torch.manual_seed(0)
        folder = world.broadcast_object(own)
        if world.is_main:
            LlamaForCausalLM(model.config).save_pretrained(folder)
        world.barrier()
        spec = EngineSpec(
            "actor",
            folder,
            ModelConfig(),
            ZeroConfig(stage=model.zero),
            0,
            OptimizerConfig(lr=1e-6, schedule="constant"),
        )
        engine = build_actor(spec, world, rollout=RolloutConfig(kv_cache_gib=0.25))
        world.barrier()
    forward = {}
    backward = {}
    step = 0.0
    for batch in batches:
        forward[batch], backward[batch], step = _passes(engine, batch, model.vocabulary)
    decode: dict[tuple[int, int], float] = {}
    whole: dict[tuple[int, int], float] = {}
    sync = 0.0
    if not model.zero:
        _decoded(engine, rows[0], SHORT_CONTEXT, _FEW_STEPS)  # compiles kernels, finds memory
        for context in (SHORT_CONTEXT, LONG_CONTEXT):
            for count in rows if context == SHORT_CONTEXT else rows[-1:]:
                few, sync = _decoded(engine, count, context, _FEW_STEPS)
                more, _ = _decoded(engine, count, context, _MORE_STEPS)
                whole[count, context] = few
                decode[count, context] = max(1e-9, (more - few) / (_MORE_STEPS - _FEW_STEPS))
    return ModelTimes(model, forward, backward, step, sync, decode, whole)


@torch.no_grad()
def time_products(
    world: World, weights: list[int], rows: list[int], dtype: str, *, decode: bool = False
) -> Iterator[tuple[float, float, float]]:
    """(elements of the weight, rows, seconds) of products in training or, with `decode`, with inference weights."""
    for side in weights:
        weight = torch.randn(side, side, device=world.device, dtype=getattr(torch, dtype))
        product = _taking_turns(weight) if decode else partial(linear, weight=weight)
        for count in rows:
            x = torch.randn(count, side, device=world.device, dtype=weight.dtype)
            seconds = median_seconds(partial(product, x), least_seconds=0.02 if decode else 0.03)
            yield float(side**2), float(count), seconds


def _taking_turns(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """A product with several inference weights by turns: in a decoding step no weight is in a cache."""
    copies = max(1, min(_MOST_COPIES, _COLD_BYTES // weight.nbytes))
    pack = can_pack(weight.device, weight.dtype)
    turns = itertools.cycle([InferenceLinear(weight.clone(), None, pack=pack) for _ in range(copies)])
    return lambda x: next(turns)(x)


@torch.no_grad()
def time_attention(world: World, lengths: list[int]) -> Iterator[tuple[float, float]]:
    """(operations, seconds) of a causal attention of one row with four heads of 64."""
    dtype = torch.float32 if world.device.type == "cpu" else torch.bfloat16
    for length in lengths:
        q = torch.randn(1, 4, length, 64, device=world.device, dtype=dtype)
        attend = partial(torch.nn.functional.scaled_dot_product_attention, q, q, q, is_causal=True)
        yield 2.0 * 256 * length**2, median_seconds(attend)


def time_optimizer(world: World, parameters: list[int]) -> Iterator[tuple[float, float]]:
    """(parameters, seconds) of a fused AdamW step with the norm of the gradient."""
    for count in parameters:
        weight = torch.nn.Parameter(torch.zeros(count, device=world.device))
        weight.grad = torch.full_like(weight, 1e-3)
        optimizer = torch.optim.AdamW([weight], lr=1e-6, fused=True)

        def step(weight: torch.nn.Parameter = weight, optimizer: torch.optim.AdamW = optimizer) -> None:
            torch.nn.utils.clip_grad_norm_([weight], 1.0)
            optimizer.step()

        yield float(count), median_seconds(step)


def time_host_link(world: World, sizes: list[int]) -> Iterator[tuple[float, float]]:
    """(bytes, seconds) from pinned host memory to the device; on a CPU a copy in memory."""
    for size in sizes:
        host = torch.zeros(size, dtype=torch.uint8, pin_memory=world.device.type == "cuda")
        there = torch.zeros(size, dtype=torch.uint8, device=world.device)
        yield float(size), median_seconds(partial(there.copy_, host))


def _passes(engine: HybridEngine, batch: TimedBatch, vocabulary: int) -> tuple[float, float, float]:
    """Seconds of a forward without gradients, of a backward, and of an optimizer step."""
    ids = torch.randint(3, vocabulary, (batch.rows, batch.length), device=engine.device)
    mask = torch.ones_like(ids, dtype=torch.bool)
    forward = []
    both = []
    steps = []
    for _ in range(_PASSES + 1):
        start = time.perf_counter()
        with torch.no_grad():
            engine(ids, mask, mask)
        forward.append(_seconds_since(start))
        start = time.perf_counter()
        logprobs, _ = engine(ids, mask, mask)
        engine.backward(logprobs.sum(), count=float(ids.numel()))
        both.append(_seconds_since(start))
        start = time.perf_counter()
        engine.step()
        steps.append(_seconds_since(start))
    ahead = statistics.median(forward[1:])
    return ahead, max(1e-9, statistics.median(both[1:]) - ahead), statistics.median(steps[1:])


def _seconds_since(start: float) -> float:
    synchronize()
    return time.perf_counter() - start


def _decoded(engine: HybridEngine, rows: int, context: int, new_tokens: int) -> tuple[float, float]:
    """Seconds of a rollout and of its weight sync."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 500, (rows, context), generator=generator).tolist()
    rollouts = []
    syncs = []
    for _ in range(_PASSES):
        with engine.inference(stop_token_ids=()) as generation:
            start = time.perf_counter()
            generation.generate(prompts, SamplingParams(max_new_tokens=new_tokens, seed=0))
            rollouts.append(time.perf_counter() - start)
        syncs.append(engine.weight_sync_seconds + engine.weight_check_seconds)
    return statistics.median(rollouts), statistics.median(syncs)
