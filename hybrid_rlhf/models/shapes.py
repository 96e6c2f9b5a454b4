"""A model as numbers, from its config alone: how many weights it has, and what a batch leaves in memory.

Why a run and not a formula: which tensors live at once differs from family to family, with adapters and with activation
checkpointing. So the very modules that train are built on torch's meta device, where a tensor has a shape and no memory;
a batch passes through them, forward and backward, and the bytes alive are counted.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections import LoraConfig, ModelConfig
from hybrid_rlhf.models.loading import Architecture, load_config, switch_dropout_off
from hybrid_rlhf.models.lora import add_lora, lora_layers
from hybrid_rlhf.models.packing import packs, use_packing
from hybrid_rlhf.models.policy import HeadLogprobs
from hybrid_rlhf.models.sources import EMBEDDED_MODEL, _embedded_gguf, quiet_transformers
from hybrid_rlhf.models.tokenizers import first_line

_LAYERS_RUN = (2, 4)
"""Layers that a batch is run through: layers are alike, so what these take tells what all of them take."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that come to life while it is entered, as long as they live."""

    def __init__(self, device_type: str) -> None:
        """Args: the kind of device whose tensors count."""
        super().__init__()
        self._device_type = device_type
        self._alive: dict[int, tuple[Any, int]] = {}
        self.live = 0
        """Bytes alive."""
        self.peak = 0
        """The most there were since `restart`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self.count, result)
        return result

    def count(self, tensor: Tensor) -> None:
        """Count a tensor that may have been there before; its storage counts once."""
        if tensor.device.type != self._device_type:
            return
        opaque = tensor.is_mkldnn  # packed weights of a CPU have no storage
        holder = tensor if opaque else tensor.untyped_storage()
        key, size = (id(tensor), tensor.numel() * tensor.element_size()) if opaque else (holder._cdata, holder.nbytes())
        if key not in self._alive:
            self._alive[key] = weakref.ref(holder, lambda _: self._forget(key)), size
            self.live += size
            self.peak = max(self.peak, self.live)

    def restart(self) -> None:
        """Look for the peak from here on."""
        self.peak = self.live

    def _forget(self, key: int) -> None:
        self.live -= self._alive.pop(key)[1]


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

    def reaching(self, other: Passage, layers: float) -> Passage:
        """Beyond another passage, as far again as many times as `layers` says."""
        return Passage(*(b + (b - a) * layers for a, b in ((self.kept, other.kept), (self.peak, other.peak))))


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
            config: attention kernel, trust, gradient checkpointing.
            dtype: of the weights.
            lora: adapters of a model that learns; none: the model is frozen.

        Raises:
            UserError: when there is no config that transformers knows.
        """
        self._settings = (path, architecture, config, dtype, lora)
        self.lm = _build(*self._settings)
        self.config: PreTrainedConfig = self.lm.config
        self.elements = _count(self.lm, architecture)
        self._passages: dict[Batch, Passage] = {}

    def passage(self, batch: Batch) -> Passage:
        """What a batch takes, forward and backward; forward alone where the model is frozen or gradients are off."""
        key = batch if torch.is_grad_enabled() else replace(batch, head_tokens=-batch.head_tokens)
        if key not in self._passages:
            layers = len(_layer_list(self.lm))
            lm = _build(*self._settings)
            if layers <= _LAYERS_RUN[1]:
                self._passages[key] = _run(lm, batch)
            else:
                many, few = (_run_cut(lm, batch, count) for count in reversed(_LAYERS_RUN))
                steps = (layers - _LAYERS_RUN[1]) / (_LAYERS_RUN[1] - _LAYERS_RUN[0])
                self._passages[key] = few.reaching(many, steps)
        return self._passages[key]


class Shapes:
    """Shaped models, each made once."""

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


def read_config(path: str, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The Hugging Face config of a model wherever it lies; of a .gguf file from its header.

    Raises:
        UserError: when there is none.
    """
    source = _embedded_gguf() if path == EMBEDDED_MODEL else Path(path).expanduser()
    if source.suffix != ".gguf":
        return load_config(path, trust_remote_code=trust_remote_code)
    try:
        with quiet_transformers():
            return AutoConfig.from_pretrained(str(source.parent), gguf_file=source.name)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"{path} is no model that transformers knows ({first_line(error)}): check the path") from error


def _build(
    path: str, architecture: Architecture, config: ModelConfig, dtype: torch.dtype, lora: LoraConfig | None
) -> PreTrainedModel:
    """As `load_model` and the engines prepare a model, on the meta device."""
    hf_config = read_config(path, trust_remote_code=config.trust_remote_code)
    switch_dropout_off(hf_config)
    if architecture == "scorer":
        hf_config.num_labels = 1
    auto: Any = AutoModelForCausalLM if architecture == "causal_lm" else AutoModelForSequenceClassification
    attention = "sdpa" if config.attention.startswith("flash") else config.attention
    with quiet_transformers(), torch.device("meta"):
        lm = auto.from_config(
            hf_config, dtype=dtype, attn_implementation=None if attention == "auto" else attention,
            trust_remote_code=config.trust_remote_code,
        )  # fmt: skip
        if attention in ("auto", "sdpa"):
            use_packing(lm)
        if config.gradient_checkpointing:
            lm.gradient_checkpointing_enable({"use_reentrant": False})
        if lora is None:
            lm.requires_grad_(False)
        elif lora.rank > 0:
            add_lora(lm, lora, architecture, seed=0)
            lm.to(dtype=dtype)
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


def _run_cut(lm: PreTrainedModel, batch: Batch, layers: int) -> Passage:
    """Of the first layers alone; the others are lost."""
    del _layer_list(lm)[layers:]
    lm.config.get_text_config().num_hidden_layers = layers
    return _run(lm, batch)


def _run(lm: PreTrainedModel, batch: Batch) -> Passage:
    """Let a batch pass and count."""
    for parameter in lm.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    counter = LiveBytes("meta")
    for tensor in (*lm.parameters(), *lm.buffers(), *(p.grad for p in lm.parameters() if p.grad is not None)):
        counter.count(tensor.detach())
    before = counter.live
    with _attention_without_scores(), counter:
        total = _forward(lm, batch)
        kept = counter.live - before
        if total.requires_grad:
            torch.autograd.backward([total])
    return Passage(kept=float(kept), peak=float(counter.peak - before))


def _forward(lm: PreTrainedModel, batch: Batch) -> Tensor:
    """The way of Policy and Scorer: backbone, head, a number."""
    shape = (1, batch.rows * batch.length) if packs(lm) else (batch.rows, batch.length)
    ids = torch.zeros(shape, dtype=torch.long, device="meta")
    arguments = {}
    if packs(lm):
        places = torch.zeros(1, 1, batch.rows, batch.length, dtype=torch.long, device="meta")
        arguments = {"position_ids": ids, "attention_mask": places}
    hidden = lm.base_model(input_ids=ids, use_cache=False, **arguments).last_hidden_state.flatten(0, 1)
    if lm.get_output_embeddings() is None:
        return lm.score(hidden).float().sum()  # type: ignore[operator, union-attr]
    wanted = ids.flatten()[: batch.head_tokens]
    logprobs, entropy = HeadLogprobs(lm)(hidden[wanted], wanted, 1.0)
    return logprobs.sum() + 0.0 * entropy.sum().detach()  # type: ignore[no-any-return]


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
