"""A model as numbers, from its config alone: how many weights it has, and what a batch leaves in memory.

Why a run and not a formula: which tensors live at once differs from family to family, with adapters and with
checkpointing. So the very modules that train are built on torch's meta device, where a tensor has a shape and no
memory; a batch passes through them, forward and backward, and the bytes alive are counted.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.files import regular_file
from hybrid_rlhf.configs.sections import LoraConfig, ModelConfig
from hybrid_rlhf.models.activation_offload import ActivationOffload
from hybrid_rlhf.models.folders import load_config, reading
from hybrid_rlhf.models.loading import AUTO_CLASS, Architecture, adapt_config, adapt_model
from hybrid_rlhf.models.lora import choose_trained, lora_layers
from hybrid_rlhf.models.packing import packs, places
from hybrid_rlhf.models.policy import HeadLogprobs
from hybrid_rlhf.models.sources import EMBEDDED_MODEL, embedded_gguf, quiet_transformers
from hybrid_rlhf.runtime.live_bytes import LiveBytes

_LAYERS_RUN = (2, 4)
"""Layers that a batch is run through: layers are alike, so what these take tells what all of them take."""


@dataclass(frozen=True)
class Elements:
    """Numbers of weights. Tied ones count once."""

    trained: int
    frozen: int
    largest: int
    """Of a single tensor."""
    products: int
    """In matrices that tokens are multiplied with, the head included, also where it is tied."""
    adapted: int
    """In matrices under adapters."""

    @property
    def all(self) -> int:
        """Of the model, adapters included."""
        return self.trained + self.frozen


@dataclass(frozen=True)
class Passage:
    """What a batch adds to the memory of a model, in bytes."""

    kept: float
    """Alive between forward and backward."""
    peak: float
    """The most at any time; gradients of weights that are there already do not count."""
    host: float
    """Activations that wait in host memory."""

    def reaching(self, other: Passage, layers: float) -> Passage:
        """Beyond another passage, as far again as many times as `layers` says."""
        pairs = ((self.kept, other.kept), (self.peak, other.peak), (self.host, other.host))
        return Passage(*(b + (b - a) * layers for a, b in pairs))


@dataclass(frozen=True)
class Batch:
    """What passes at once."""

    rows: int
    length: int
    """Tokens of a row."""
    head_tokens: int
    """Tokens whose log-prob is wanted; a scorer reads all."""


class ShapedModel:
    """A model without memory."""

    def __init__(
        self, path: str, architecture: Architecture, *, config: ModelConfig, dtype: torch.dtype, lora: LoraConfig | None
    ) -> None:
        """Read a config and build.

        Args:
            path: folder, hub name, .gguf file or "embedded"; weights are not touched.
            architecture: causal_lm or scorer.
            config: attention kernel, trust, what becomes of activations.
            dtype: of the weights.
            lora: adapters of a model that learns; none: the model is frozen.

        Raises:
            UserError: when there is no config that transformers knows.
        """
        self.lm = _build(path, architecture, config, dtype, lora)
        self.config: PreTrainedConfig = self.lm.config
        self.elements = _count(self.lm, architecture)
        self._offloads = config.activation_offload
        self._passages: dict[tuple[Batch, bool], Passage] = {}

    def passage(self, batch: Batch, *, learns: bool) -> Passage:
        """What a batch takes: forward and backward where the model learns from it, else forward alone."""
        key = (batch, learns)
        if key not in self._passages:
            few, many = _LAYERS_RUN
            layers = len(_layer_list(self.lm))
            with torch.set_grad_enabled(learns):
                passage = self._run(batch, layers=min(many, layers))
                if layers > many:
                    passage = self._run(batch, layers=few).reaching(passage, (layers - many) / (many - few))
            self._passages[key] = passage
        return self._passages[key]

    def _run(self, batch: Batch, *, layers: int) -> Passage:
        """Let a batch pass through the first layers, and count."""
        lm = self.lm
        with _first_layers(lm, layers), _attention_without_scores():
            for parameter in lm.parameters():
                parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
            counter = LiveBytes("meta")
            for tensor in (*lm.parameters(), *lm.buffers(), *(p.grad for p in lm.parameters() if p.grad is not None)):
                counter.count(tensor.detach())
            before = counter.live
            with counter:
                offload = _Forgotten() if self._offloads else None
                with offload or contextlib.nullcontext():
                    total = _forward(lm, batch)
                kept = counter.live - before
                if total.requires_grad:
                    torch.autograd.backward([total])
        moved = 0 if offload is None else offload.moved_bytes
        return Passage(kept=float(kept), peak=float(counter.peak - before), host=float(moved))


class _Forgotten(ActivationOffload):
    """Host memory for tensors that have none."""

    def _to_host(self, tensor: Tensor) -> Any:
        return tuple(tensor.shape), tensor.dtype

    def _to_device(self, host: Any, device: torch.device) -> Tensor:
        return torch.empty(host[0], dtype=host[1], device=device)


class Shapes:
    """Shaped models, each made once: a plan asks for them again and again."""

    def __init__(self) -> None:
        self._models: dict[str, ShapedModel] = {}

    def __call__(
        self, path: str, architecture: Architecture, *, config: ModelConfig, dtype: torch.dtype, lora: LoraConfig | None
    ) -> ShapedModel:
        """See ShapedModel."""
        key = repr((path, architecture, config, dtype, lora))
        if key not in self._models:
            self._models[key] = ShapedModel(path, architecture, config=config, dtype=dtype, lora=lora)
        return self._models[key]


@functools.cache
def read_config(path: str, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The Hugging Face config of a model wherever it lies; of a .gguf file from its header.

    Raises:
        UserError: when there is none.
    """
    source = embedded_gguf() if path == EMBEDDED_MODEL else Path(path).expanduser()
    if source.suffix != ".gguf":
        return load_config(path, trust_remote_code=trust_remote_code)
    regular_file(source, "a model file must exist")
    with quiet_transformers(), reading(f"{path} is no model that transformers knows", "check the path"):
        return AutoConfig.from_pretrained(str(source.parent), gguf_file=source.name)


def _build(
    path: str, architecture: Architecture, config: ModelConfig, dtype: torch.dtype, lora: LoraConfig | None
) -> PreTrainedModel:
    """As `load_model` and the engines prepare a model, on the meta device."""
    hf_config = copy.deepcopy(read_config(path, trust_remote_code=config.trust_remote_code))
    adapt_config(hf_config, architecture)
    # Flash attention refuses the meta device; what it keeps is the same.
    config = replace(config, attention="sdpa") if config.attention.startswith("flash") else config
    with quiet_transformers(), torch.device("meta"):
        lm = AUTO_CLASS[architecture].from_config(
            hf_config, dtype=dtype, attn_implementation=None if config.attention == "auto" else config.attention,
            trust_remote_code=config.trust_remote_code,
        )  # fmt: skip
        adapt_model(lm, config)
        choose_trained(lm, lora, architecture, seed=0)
    lm.train(lora is not None)
    return lm  # type: ignore[no-any-return]


def _count(lm: PreTrainedModel, architecture: Architecture) -> Elements:
    parameters = list(lm.parameters())
    products = sum(
        module.weight.numel()
        for name, module in lm.named_modules()
        if getattr(module, "weight", None) is not None and module.weight.dim() == 2
        and not isinstance(module, nn.Embedding) and ".lora_" not in name
        and not hasattr(module, "base_layer")
    )  # fmt: skip
    return Elements(
        trained=sum(p.numel() for p in parameters if p.requires_grad),
        frozen=sum(p.numel() for p in parameters if not p.requires_grad),
        largest=max(p.numel() for p in parameters),
        products=products,
        adapted=sum(layer.get_base_layer().weight.numel() for _, layer in lora_layers(lm)),
    )


def _layer_list(lm: PreTrainedModel) -> nn.ModuleList:
    layers: int = lm.config.get_text_config().num_hidden_layers
    for module in lm.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == layers:
            return module
    raise UserError(f"a plan needs a model with a list of layers, {type(lm).__name__} has none: leave out --plan")


@contextlib.contextmanager
def _first_layers(lm: PreTrainedModel, count: int) -> Iterator[None]:
    """A model without its other layers."""
    layers, config = _layer_list(lm), lm.config.get_text_config()
    others = list(layers)[count:]
    del layers[count:]
    config.num_hidden_layers = count
    try:
        yield
    finally:
        layers.extend(others)
        config.num_hidden_layers = len(layers)


def _forward(lm: PreTrainedModel, batch: Batch) -> Tensor:
    """The way of Policy and Scorer: backbone, head, a number."""
    shape = (1, batch.rows * batch.length) if packs(lm) else (batch.rows, batch.length)
    ids = torch.zeros(shape, dtype=torch.long, device="meta")
    arguments = {}
    if packs(lm):
        mask = places([batch.length] * batch.rows, [batch.rows], device=ids.device)
        arguments = {"position_ids": ids, "attention_mask": mask}
    hidden = lm.base_model(input_ids=ids, use_cache=False, **arguments).last_hidden_state.flatten(0, 1)
    if lm.get_output_embeddings() is None:
        return lm.score(hidden).float().sum()  # type: ignore[operator, union-attr]
    wanted = ids.flatten()[: batch.head_tokens]
    logprobs, _ = HeadLogprobs(lm)(hidden[wanted], wanted, 1.0)
    return logprobs.sum()  # type: ignore[no-any-return]


@contextlib.contextmanager
def _attention_without_scores() -> Iterator[None]:
    """Attention as a fused kernel leaves it in memory; on the meta device torch would hold the scores of all pairs."""
    functional: Any = torch.nn.functional
    kept = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = lambda q, k, v, **options: _FusedAttention.apply(q, k, v)
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = kept


class _FusedAttention(torch.autograd.Function):
    """Keeps queries, keys, values, the result and a normaliser a row (arXiv 2205.14135)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mixed = torch.empty_like(query)
        normaliser = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, mixed, normaliser)
        return mixed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Sequence[Tensor]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])
