"""LoRA through peft: adapters are injected into a model, disabled for the reference, merged for generation and saving.

Source: Hu et al. 2021 (arXiv 2106.09685). Deviation: the adapters' dropout is 0, like every dropout in this library.
Merged weights are always new tensors: adding to the training weights and subtracting again would drift in bfloat16.

peft is imported by the functions that need it: it takes seconds (3 of 14 s of processor time of a command on a slow
machine, with bitsandbytes), which a run without adapters does not wait for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.model import LoraConfig
from hybrid_rlhf.models.families import WITHOUT_ADAPTERS, unread_weights
from hybrid_rlhf.models.families.vision import images_refused
from hybrid_rlhf.models.four_bit import FourBitWeight, is_four_bit, plain_value
from hybrid_rlhf.models.pretrained.adapters import LowRank
from hybrid_rlhf.models.pretrained.folders import reading
from hybrid_rlhf.models.pretrained.loading import Architecture
from hybrid_rlhf.runtime.files.atomic import whole_folder

if TYPE_CHECKING:
    from peft import LoraConfig as PeftLoraConfig
    from peft.tuners.lora import LoraLayer

_ADAPTER = "default"
_SPECIAL_LINEAR = re.compile("Router|Grouped")
"""Class names of linear layers whose forward is not a plain product."""


def choose_trained(
    model: PreTrainedModel,
    lora: LoraConfig | None,
    architecture: Architecture,
    *,
    learns: bool,
    seed: int,
    trains_vision: bool = False,
) -> None:
    """Choose the trained parameters: none of a frozen model, the adapters of `lora`, or all that text reads, and with
    `trains_vision` those that images read.

    Weights that text never reads have no gradient, but a trained one would decay, in some ZeRO stages.

    Raises:
        UserError: when lora does not fit the model, a trained model has adapters already, or `trains_vision` is for a
            model that reads no images, or with adapters.
    """
    if not learns:
        model.requires_grad_(False)
        return
    require_plain(model)
    if trains_vision:
        _require_trainable_vision(model, lora)
        return
    if lora is not None:
        dtype = model.dtype
        add_lora(model, lora, architecture, seed=seed)
        for parameter in model.parameters():  # not buffers: rotary frequencies are float32 in any model
            if parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
    parameters = dict(model.named_parameters())
    for name in unread_weights(model, parameters):
        parameters[name].requires_grad_(False)


def _require_trainable_vision(model: PreTrainedModel, lora: LoraConfig | None) -> None:
    if (refusal := images_refused(model.config)) is not None:
        raise UserError(f"model.vision train needs a model that reads images, but {refusal}")
    if lora is not None:
        raise UserError(
            "model.vision train trains the weights of the tower, got lora, whose adapters are in the language model: "
            "set lora to null, or model.vision to freeze"
        )


def modules_selected(model: PreTrainedModel, targets: str | Sequence[str]) -> dict[str, set[str]]:
    """Names of the modules that each target selects, of those that text reads. As in peft, a list has whole names or
    their last parts, a text is a regular expression.

    Raises:
        UserError: when a text is no regular expression.
    """
    names = [name for name, _ in model.named_modules()]
    names = sorted(set(names).difference(unread_weights(model, names)))
    if isinstance(targets, str):
        try:
            return {targets: {name for name in names if re.fullmatch(targets, name)}}
        except re.error as error:
            raise UserError(
                f"lora.target_modules {targets} does not fit ({error}): give a regular expression or a list"
            ) from error
    return {target: {name for name in names if f".{name}".endswith(f".{target}")} for target in targets}


def add_lora(model: PreTrainedModel, config: LoraConfig, architecture: Architecture, *, seed: int) -> None:
    """Inject adapters into the modules that text reads and freeze the rest, except for a score head.

    Raises:
        UserError: when lora.target_modules matches no such module, the head, or an embedding tied to the head.
    """
    from peft import LoraConfig as PeftLoraConfig
    from peft import TaskType, inject_adapter_in_model

    if reason := WITHOUT_ADAPTERS.get(model.config.model_type):
        raise UserError(f"{type(model).__name__} has no adapters, {reason}: set lora to null")
    task = TaskType.CAUSAL_LM if architecture == "causal_lm" else TaskType.SEQ_CLS
    head = _head(model, architecture)
    targets: str | list[str] = config.target_modules
    everything = targets == "all-linear"
    if everything:
        targets = linear_layers(model, head)
    else:
        towers = bool(unread_weights(model, (name for name, _ in model.named_modules())))
        place = f"{'the language model of ' if towers else ''}{type(model).__name__}"
        selected = modules_selected(model, targets)
        for target, names in selected.items():  # peft refuses them only if none matches
            if not names:
                raise UserError(
                    f"lora.target_modules {config.target_modules} does not fit (no module of {place} is named "
                    f"{target}): name linear layers of the model"
                )
        if towers:  # peft would find the same names in them
            targets = sorted(set[str]().union(*selected.values()))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # the same initial adapters, however the model was loaded
        with reading(f"lora.target_modules {config.target_modules} does not fit", "name linear layers of the model"):
            inject_adapter_in_model(
                PeftLoraConfig(
                    r=config.rank,
                    lora_alpha=config.alpha,
                    target_modules=targets,
                    target_parameters=stacked_experts(model) if everything else None,
                    lora_dropout=0.0,
                    task_type=task,
                ),
                model,
                _ADAPTER,
            )
    head = _head(model, architecture)  # it may be wrapped by now
    if _is_adapted(head):
        raise UserError(f"lora.target_modules must not match the head, got {config.target_modules}: remove it")
    if any(base_weight(layer) is head.weight for _, layer in lora_layers(model)):
        raise UserError(
            f"lora.target_modules must not match an embedding tied to the head, got {config.target_modules}: remove it"
        )
    adapted = [id(base_weight(layer)) for _, layer in lora_layers(model)]
    if len(set(adapted)) < len(adapted):
        raise UserError(
            f"lora needs a weight of its own for each adapter, layers of {type(model).__name__} share theirs: set lora "
            "to null"
        )
    if architecture == "scorer":
        head.requires_grad_(True)


def four_bit_layers(model: PreTrainedModel, architecture: Architecture) -> list[str]:
    """Names of the layers that model.quantization quantises to 4 bits: those that "all-linear" adapts.

    Raises:
        UserError: for a model with stacked experts, or with layers that are not linear as torch's.
    """
    if experts := stacked_experts(model):
        raise UserError(
            f"model.quantization is for linear layers, {type(model).__name__} stacks its experts in one weight "
            f"({experts[0]}): leave it out"
        )
    names = linear_layers(model, _head(model, architecture))
    for name in names:
        if not isinstance(model.get_submodule(name), nn.Linear):
            raise UserError(
                f"model.quantization needs torch's linear layers, {type(model).__name__} has others ({name}): leave it "
                "out"
            )
    return names


def _head(model: PreTrainedModel, architecture: Architecture) -> nn.Module:
    head: nn.Module = model.get_output_embeddings() if architecture == "causal_lm" else model.score
    return head


def linear_layers(model: PreTrainedModel, head: nn.Module) -> list[str]:
    """Names of the layers that "all-linear" adapts: those that compute a plain product for text, except the head.

    Routers and products in groups are excluded, and projections whose weight Mamba's mixers read without calling the
    layer, as an adapter would have no effect.
    """
    names = []
    for name, module in model.named_modules():
        owner, _, attribute = name.rpartition(".")
        bypassed = attribute in ("dt_proj", "out_proj") and hasattr(model.get_submodule(owner), "ssm_state_size")
        special = _SPECIAL_LINEAR.search(type(module).__name__)
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head and not special and not bypassed:
            names.append(name)
    unread = set(unread_weights(model, names))
    return [name for name in names if name not in unread]


def stacked_experts(model: PreTrainedModel) -> list[str]:
    """Names of the weights that stack a projection of all experts of a layer; their biases are excluded."""
    names = [
        name
        for name, _ in model.named_parameters()
        if name.split(".")[-2:-1] == ["experts"] and not name.endswith("bias")
    ]
    unread = set(unread_weights(model, names))
    return [name for name in names if name not in unread]


def has_lora(module: nn.Module) -> bool:
    """Return True if a module has adapters."""
    return any(map(_is_adapted, module.modules()))


def require_plain(model: PreTrainedModel) -> None:
    """Require a model without adapters, which transformers adds if the folder of its weights also has an adapter.

    Raises:
        UserError: for one with adapters.
    """
    if has_lora(model):
        raise UserError(
            f"a model that trains has no adapter beside its weights, {model.name_or_path} has one: merge it with "
            "hybrid-rlhf export, or remove its adapter_config.json"
        )


def _is_adapted(module: nn.Module) -> bool:
    """Return True for peft's LoraLayer."""
    return hasattr(module, "lora_A")


@contextlib.contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Context in which the base model computes, without adapters.

    Sets peft's flag directly: its public method also changes requires_grad, which must not change once a ZeRO engine
    has grouped its parameters.
    """
    layers = [layer for _, layer in lora_layers(module)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def lora_layers(module: nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    """The layers with adapters, with their names."""
    return ((name, cast("LoraLayer", layer)) for name, layer in module.named_modules() if _is_adapted(layer))


def base_weight(layer: LoraLayer) -> nn.Parameter:
    """The weight that a layer adapts; in a mixture of experts it contains a projection of all experts."""
    from peft.tuners.lora.layer import ParamWrapper

    weight: nn.Parameter = layer.get_param() if isinstance(layer, ParamWrapper) else layer.get_base_layer().weight
    return weight


def plain_name(name: str) -> str:
    """Name of a weight in the model without adapters; a module with two adapted weights has the prefix twice."""
    return name.replace(".base_layer", "")


def weights_of(layer: LoraLayer) -> list[nn.Parameter]:
    """The adapted weight and its adapter."""
    return [base_weight(layer), layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight]


def write_adapter(folder: Path, tensors: Iterable[tuple[str, Tensor | None]], *, lm: PreTrainedModel) -> None:
    """Write the adapters of a model as peft does, for `PeftModel.from_pretrained`; the folder appears once complete.

    Args:
        folder: folder to write; replaced if it exists.
        tensors: names in the model and weights, also of a trained head; see `engines.partition.adapter_tensors`.
        lm: model with the adapters.
    """
    weights = {f"base_model.model.{name.replace(f'.{_ADAPTER}', '')}": x for name, x in tensors if x is not None}
    heads = sorted({name.split(".")[-2] for name in weights if ".lora_" not in name})
    config: PeftLoraConfig = lm.peft_config[_ADAPTER]
    config = dataclasses.replace(
        config, base_model_name_or_path=lm.name_or_path, modules_to_save=heads or None, inference_mode=True
    )
    write_adapter_folder(folder, weights, config)


def write_adapter_folder(
    folder: Path, weights: Mapping[str, Tensor], config: PeftLoraConfig, *, files: Mapping[str, bytes] | None = None
) -> None:
    """Write a peft folder from weights, config and further files; it appears once complete, and replaces another."""
    with whole_folder(folder) as beside:
        beside.mkdir()
        save_file(dict(weights), beside / "adapter_model.safetensors", metadata={"format": "pt"})
        for name, content in (files or {}).items():
            (beside / name).write_bytes(content)
        config.save_pretrained(beside)


def _experts(layer: LoraLayer) -> tuple[int, bool]:
    """Number of experts in the weight of a layer, [experts, out, in], and whether it is [experts, in, out] instead."""
    from peft.tuners.lora.layer import ParamWrapper

    if isinstance(layer, ParamWrapper) and layer.num_experts > 1:
        return layer.num_experts, not layer._did_swap_in_out_features
    return 1, False


@torch.no_grad()
def merged_weight(layer: LoraLayer) -> Tensor:
    """The merged weight of a layer, base + scale * B @ A, bit for bit as peft merges it: a new tensor in the shape and
    dtype of the base weight, which is dequantised if it is in 4 bits.

    A is [experts * rank, in] and B [out, rank * experts]; the experts alternate in the last dimension of B.
    """
    weight, a, b = weights_of(layer)
    base = plain_value(weight)
    scale = layer.scaling[_ADAPTER]
    experts, inputs_first = _experts(layer)
    if experts == 1:
        # like peft, use float32 on a CPU, where 16-bit products may be slow
        wide = base.device.type == "cpu" and b.dtype in (torch.float16, torch.bfloat16)
        product = b.float() @ a.float() if wide else b @ a
        change = (product.t() if layer.fan_in_fan_out else product) * scale
        return base + change.to(b.dtype).to(base.dtype)
    of_a, of_b = a.reshape(experts, -1, a.shape[-1]), b.reshape(len(b), -1, experts)
    change = torch.einsum(f"ore,eri->{'eio' if inputs_first else 'eoi'}", of_b, of_a) * scale
    return base + change.to(base.dtype)


@torch.no_grad()
def merged_elements(layer: LoraLayer, base: Tensor, *, places: Tensor, shape: Sequence[int]) -> Tensor:
    """Some elements [E] of `merged_weight`, each computed separately.

    Args:
        layer: the layer.
        base: [E] elements of the base weight.
        places: [E] indices in the flattened weight.
        shape: shape of the weight.
    """
    _, a, b = weights_of(layer)
    experts, inputs_first = _experts(layer)
    expert = torch.zeros_like(places)
    row = places // shape[-1]
    column = places % shape[-1]
    if experts > 1:
        expert = row // shape[-2]
        row = row % shape[-2]
    transposed = inputs_first or (experts == 1 and layer.fan_in_fan_out)
    out, inner = (column, row) if transposed else (row, column)
    left = b.reshape(len(b), -1, experts)[out, :, expert].float()
    right = a.reshape(experts, -1, a.shape[-1])[expert, :, inner].float()
    change = (left * right).sum(dim=-1) * layer.scaling[_ADAPTER]
    return base + change.to(b.dtype).to(base.dtype)


def four_bit_weight(parameter: nn.Parameter, layer: LoraLayer | None) -> FourBitWeight:
    """A base weight in 4 bits with its adapter; `layer`: with the adapter of this weight; none: it has no adapter."""
    change = None
    if layer is not None:
        _, a, b = weights_of(layer)
        change = LowRank(b.detach() * layer.scaling[_ADAPTER], a.detach(), transposed=False)
    return FourBitWeight(parameter.detach(), parameter.quant_state, change)  # type: ignore[attr-defined]


@contextlib.contextmanager
def lora_merged(module: nn.Module) -> Iterator[None]:
    """Context in which the base layers use merged copies in place of their weights.

    All weights must be gathered. Adapters of 4-bit weights are not merged.
    """
    layers = [layer for _, layer in lora_layers(module)]
    if any(is_four_bit(base_weight(layer)) for layer in layers):
        yield
        return
    base_data = [base_weight(layer).data for layer in layers]
    for layer in layers:
        base_weight(layer).data = merged_weight(layer)
    try:
        with adapters_off(module):
            yield
    finally:
        for layer, data in zip(layers, base_data, strict=True):
            base_weight(layer).data = data
