"""Adapters of peft folders: merged into a model, or as the low-rank factors of the weights that they change.

`models/lora.py` has the adapter that trains; here adapters are read from folders. `merge_adapter` serves export;
`read_adapter` leaves a model unchanged, and generation adds the factors to its outputs (generation/model/adapters.py);
`stored_adapter` reads the factors alone, to train them on (engines/adapters/).
peft is imported where it is needed, as in `models/lora.py`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.models.head_check import probe_tokens
from hybrid_rlhf.models.pretrained.folders import reading
from hybrid_rlhf.runtime.files.reading import user_path

if TYPE_CHECKING:
    from peft import LoraConfig, PeftConfig, PeftModel
    from peft.tuners.lora import LoraLayer

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_NAME = "default"
_PREFIX = "base_model.model."
_FACTORS = (".lora_A.weight", ".lora_B.weight")
_TOLERANCE = 1e-3
"""Largest difference of logits that are computed with the same weights, as a part of the largest: other orders of sums
give about 1e-6 in float32, another model more than 0.1."""
_FIX = "give the model that it was trained on"
_BEYOND_FACTORS = (
    "use_dora",
    "modules_to_save",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "layer_replication",
    "kasa_config",
)
"""Settings of LoRA with which an adapter is more than an addition of factors to weights."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of init_lora_weights for which peft subtracts the initial factors from the base, also when it loads an
adapter."""


@torch.no_grad()
def merge_adapter(lm: PreTrainedModel, folder: str) -> PreTrainedModel:
    """The model with an adapter merged into its weights, in their dtype; the given model must not be used afterwards.

    A head that shares its weight with an embedding that the adapter changes gets a weight of its own, as the adapter
    changes one of them alone.

    Raises:
        UserError: when the folder has no adapter in safetensors, it does not fit the model, the weights that it adds
            to cannot be restored, or the merged model has other logits than the model with the adapter beside it.
    """
    config = _adapter_config(folder)
    if "_niter_" in _start(config):
        raise UserError(
            f"merging needs the weights that an adapter adds to, those of {folder} are a random decomposition by "
            f"{_start(config)}: save it again with path_initial_model_for_weight_conversion of peft"
        )
    wrapped = _wrapped(with_rows_of(lm, folder), folder, config).eval()
    expected = probe_logits(wrapped)
    _untie_changed(lm)
    with reading(f"the adapter {folder} must be one that peft can merge", "merge it in a script"):
        merged: PreTrainedModel = wrapped.merge_and_unload(safe_merge=True)
    require_equal_logits(probe_logits(merged), expected, f"the model with {folder} merged")
    return merged


@torch.no_grad()
def with_rows_of(lm: PreTrainedModel, folder: str) -> PreTrainedModel:
    """The model with as many embeddings as an adapter has that stores its own: its vocabulary was resized."""
    path = user_path(folder) / _WEIGHTS
    with reading(f"an adapter's weights must be safetensors, {path} is not", "save it again with peft"):
        stored = safe_open(path, "pt")
        shapes = {name: stored.get_slice(name).get_shape() for name in stored.keys()}  # noqa: SIM118 - no mapping
    modules = {name: module for name, module in lm.named_modules() if module is lm.get_input_embeddings()}
    names = {f"{_PREFIX}{name}{rest}" for name in modules for rest in (".weight", ".base_layer.weight")}
    rows = next((shape[0] for name, shape in shapes.items() if name in names), None)
    if rows is not None and rows != lm.get_input_embeddings().weight.shape[0]:
        lm.resize_token_embeddings(rows, mean_resizing=False)
    return lm


@torch.no_grad()
def probe_logits(lm: nn.Module) -> Tensor:
    """Logits of a few tokens, in float32 on the host."""
    config: Any = lm.config
    rows = config.get_text_config().vocab_size
    parameter = next(lm.parameters())
    ids = torch.tensor([probe_tokens(rows)], device=parameter.device)
    logits: Tensor = lm(input_ids=ids).logits
    return logits.float().cpu()


def require_equal_logits(logits: Tensor, expected: Tensor, what: str) -> None:
    """Require that a model that is written has the logits of its source.

    Raises:
        UserError: when they differ by more than a thousandth of the largest.
    """
    most = _TOLERANCE * max(1.0, float(expected.abs().max()))
    if logits.shape != expected.shape or not torch.allclose(logits, expected, rtol=0, atol=most, equal_nan=True):
        difference = float((logits - expected).abs().max()) if logits.shape == expected.shape else float("inf")
        raise UserError(
            f"an exported model must have the logits of its source to {most:.2g}, those of {what} differ by "
            f"{difference:.3g}: serve the model and the adapter as they are, and report this"
        )


def _untie_changed(lm: PreTrainedModel) -> None:
    """Give the head a weight of its own if the adapter of a wrapped model changes it or the embedding that it is tied
    to."""
    from peft.tuners.lora import LoraLayer

    layers = [lm.get_input_embeddings(), lm.get_output_embeddings()]
    embedding, head = (layer.get_base_layer() if isinstance(layer, LoraLayer) else layer for layer in layers)
    if head is None or getattr(head, "weight", None) is not getattr(embedding, "weight", None):
        return
    if any(isinstance(layer, LoraLayer) for layer in layers):
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        for config in (lm.config, lm.config.get_text_config()):
            config.tie_word_embeddings = False


@dataclass(frozen=True)
class LowRank:
    """The product up @ down that an adapter adds to a weight of N outputs and K inputs."""

    up: Tensor
    """[N, r], with the adapter's scale."""
    down: Tensor
    """[r, K]."""
    transposed: bool
    """True if the weight is stored as [K, N]."""

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """The weight with the product added in float32, as a new tensor."""
        product = (self.up.float() @ self.down.float()).to(weight.device)
        return (weight.float() + (product.t() if self.transposed else product)).to(weight.dtype)


@torch.no_grad()
def read_adapter(model: PreTrainedModel, folder: str) -> dict[str, LowRank]:
    """The factors by the names of the weights; the model, whose weights are frozen, is left unchanged.

    Raises:
        UserError: when the folder has no adapter of this model that consists of such factors.
    """
    from peft.tuners.lora import LoraLayer

    config = _plain_lora(folder)
    model.requires_grad_(False)
    wrapped = _wrapped(model, folder, config)
    try:
        layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, LoraLayer)]
        return {f"{name}.weight": _factors(name, layer, folder) for name, layer in layers}
    finally:
        wrapped.unload()


@dataclass(frozen=True)
class StoredAdapter:
    """Factors of a peft folder as they were trained, for training on."""

    rank: int
    alpha: float
    """The product is scaled by alpha / rank."""
    factors: dict[str, Tensor]
    """Weights by layer and factor: NAME.lora_A.weight [r, K] and NAME.lora_B.weight [N, r]."""


def stored_adapter(folder: str) -> StoredAdapter:
    """The factors of a peft folder, with the same rank in all layers.

    Raises:
        UserError: when the folder has no adapter that consists of such factors.
    """
    config = _plain_lora(folder)
    if config.rank_pattern or config.alpha_pattern:
        raise UserError(
            f"an adapter that trains has one rank and alpha, {folder} has rank_pattern or alpha_pattern: merge it into "
            "the base (hybrid-rlhf export --adapter) and train a new one"
        )
    path = user_path(folder) / _WEIGHTS
    with reading(f"an adapter's weights must be safetensors, {path} is not", "save it again with peft"):
        stored = load_file(path)
    factors = {name.removeprefix(_PREFIX): value.float() for name, value in stored.items()}
    faulty = [name for name, value in factors.items() if not name.endswith(_FACTORS) or config.r not in value.shape]
    if faulty:
        raise UserError(
            f"an adapter must change linear layers by factors of rank {config.r}, {folder} has {faulty[0]}: save it "
            "again with peft"
        )
    alpha = config.lora_alpha * (config.r**0.5 if config.use_rslora else 1.0)
    return StoredAdapter(config.r, float(alpha), factors)


def _plain_lora(folder: str) -> LoraConfig:
    """The config of an adapter that only adds low-rank factors to weights.

    Raises:
        UserError: for any other adapter.
    """
    from peft import LoraConfig

    config = _adapter_config(folder)
    unsupported = [key for key in _BEYOND_FACTORS if getattr(config, key, None)]
    if getattr(config, "bias", "none") != "none":
        unsupported.append("bias")
    if _start(config).startswith(_CHANGES_BASE):
        unsupported.append(f"init_lora_weights {_start(config)}")
    if not isinstance(config, LoraConfig) or unsupported:
        kind = ", ".join([str(getattr(config.peft_type, "value", config.peft_type)), *unsupported])
        raise UserError(
            f"an adapter must be LoRA that changes weights alone, {folder} is {kind}: merge it into the model and "
            "serve that"
        )
    return config


def _start(config: PeftConfig) -> str:
    """The initialization of an adapter's factors (init_lora_weights), in lower case."""
    return str(getattr(config, "init_lora_weights", "")).lower()


def _adapter_config(folder: str) -> PeftConfig:
    from peft import PeftConfig

    path = user_path(folder)
    if not (path / _CONFIG).is_file():
        raise UserError(f"an adapter is a folder with {_CONFIG}, {folder} has none: check the path")
    if not (path / _WEIGHTS).is_file():  # peft would read a pickle
        raise UserError(
            f"an adapter's weights must be safetensors, {folder} has no {_WEIGHTS}: save it again with peft"
        )
    with reading(f"the adapter {folder} must have a config that peft can read", "save it again with peft"):
        return PeftConfig.from_pretrained(str(path))


def _wrapped(model: PreTrainedModel, folder: str, config: PeftConfig) -> PeftModel:
    """The model with the adapter beside its weights."""
    from peft import PeftModel

    with reading(f"the adapter {folder} must fit {type(model).__name__}", _FIX), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)  # peft reads an attribute that transformers renamed
        wrapped = PeftModel(model, config, _NAME)
        # PeftModel.from_pretrained only warns of weights that are missing or left over
        load_result = wrapped.load_adapter(str(user_path(folder)), _NAME)
        faulty = [*load_result.missing_keys, *load_result.unexpected_keys]
        if faulty:
            raise ValueError(f"{len(faulty)} weights are missing or left over, for example {faulty[0]}")
    return wrapped


def _factors(name: str, layer: LoraLayer, folder: str) -> LowRank:
    base = layer.get_base_layer()
    if not isinstance(base, (nn.Linear, Conv1D)) or layer.lora_bias[_NAME]:
        raise UserError(
            f"an adapter must change linear layers without biases of its own, {folder} changes {name} "
            f"({type(base).__name__}): merge it into the model and serve that"
        )
    up = layer.lora_B[_NAME].weight
    down = layer.lora_A[_NAME].weight
    return LowRank(up * layer.scaling[_NAME], down.clone(), isinstance(base, Conv1D))
