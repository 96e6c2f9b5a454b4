"""Numbers of weights and memory of a batch, from a model's config alone.

Measured instead of computed by formula, because which tensors are alive at once differs between families, with adapters
and with gradient checkpointing. The modules that train are built on torch's meta device, where tensors have a shape and
no memory; a forward and a backward run on them, and the bytes of live tensors are counted.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.model import LoraConfig, ModelConfig
from hybrid_rlhf.generation.architecture.hugging_face import attention_sizes, recurrent_fields
from hybrid_rlhf.models.expert_parallel import expert_layers, require_expert_parallelism
from hybrid_rlhf.models.families import Family, family_of
from hybrid_rlhf.models.four_bit import BYTES_PER_WEIGHT
from hybrid_rlhf.models.lora import base_weight, choose_trained, four_bit_layers, lora_layers, plain_name
from hybrid_rlhf.models.packing import (
    NO_PREFIX,
    layer_masks,
    packs,
    places,
    require_tensor_parallelism,
    shares_prefixes,
)
from hybrid_rlhf.models.policy import HeadLogprobs
from hybrid_rlhf.models.pretrained.embedded import embedded_gguf
from hybrid_rlhf.models.pretrained.folders import first_line, load_config, reading
from hybrid_rlhf.models.pretrained.gguf.reading import read_gguf_config
from hybrid_rlhf.models.pretrained.loading import Architecture, adapt_config, require_score, shape_model
from hybrid_rlhf.models.pretrained.names import EMBEDDED_MODEL
from hybrid_rlhf.models.pretrained.sources import dequantised_folder, quiet_transformers
from hybrid_rlhf.models.structure import backbone_of, layer_list, layer_matrices
from hybrid_rlhf.planning.memo import once
from hybrid_rlhf.planning.meta_device import ForwardMemory, passage
from hybrid_rlhf.planning.tower import Tower, find_tower
from hybrid_rlhf.runtime.files.reading import regular_file, user_path

_LAYERS_RUN = (2, 4)
"""Numbers of layers that are measured. Layers are alike, so the memory of all of them is extrapolated from these."""


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of weights. Tied weights count once."""

    trained: int
    frozen: int
    largest: int
    """Elements of the largest tensor."""
    adapted: int
    """Weights of the matrices that have adapters."""
    four_bit: int = 0
    """Weights of the matrices that are stored in 4 bits."""
    largest_four_bit: int = 0
    """Elements of the largest of these matrices, which is dequantised at once."""
    matrices: int = 0
    """Weights of the matrices of the layers, which Muon trains and tensor parallelism splits."""

    def stored_bytes(self, itemsize: int) -> float:
        """Bytes of the weights, if those that are not in 4 bits take `itemsize` each."""
        return itemsize * (self.all - self.four_bit) + BYTES_PER_WEIGHT * self.four_bit

    @property
    def all(self) -> int:
        """Weights of the model, adapters included."""
        return self.trained + self.frozen


@dataclass(frozen=True)
class BatchShape:
    """Sizes of a micro-batch."""

    rows: int
    length: int
    """Tokens per row."""
    head_tokens: int
    """Tokens whose log-prob is computed; a scorer computes all."""
    prefix: int = 0
    """Tokens of a row that are computed once for several rows,"""
    sharing: int = 1
    """and the number of these rows."""
    device: str = "cpu"
    """Type of the device that computes them."""
    image_tokens: int = 0
    """Tokens of different images, at most, if the model reads images."""

    @property
    def prefixes(self) -> int:
        """Number of different prefixes."""
        return -(-self.rows // self.sharing) if self.prefix else 0

    @property
    def tokens(self) -> int:
        """Tokens that are computed."""
        return self.prefixes * self.prefix + self.rows * (self.length - self.prefix)


class Unplannable(UserError):
    """Raised for a model whose memory cannot be planned, because it does not run on the meta device."""

    def __init__(self, reason: str) -> None:
        """Take the reason, which the message continues with the advice to leave out the plan."""
        super().__init__(f"{reason}: leave out the plan")
        self.reason = reason


class NamedWeight(NamedTuple):
    """A weight of a model with its role in the family."""

    role: str
    layer: int
    name: str
    weight: Tensor


class ShapedModel:
    """A model on the meta device."""

    def __init__(
        self, lm: PreTrainedModel, config: ModelConfig, *, four_bit: Sequence[int], tower: Tower | None = None
    ) -> None:
        """Args: the model, how it is trained and split, the sizes of its 4-bit weights, and its tower if rows may have
        images."""
        self.lm = lm
        self.tower = tower
        self.config: PreTrainedConfig = lm.config
        self.tensor_parallel = config.tensor_parallel
        expert_parallel = config.expert_parallel
        self.elements = _counts(lm, four_bit)
        self.local = _counts(lm, four_bit, expert_parallel=expert_parallel, tensor_parallel=config.tensor_parallel)
        """Numbers of the weights that a rank has where ZeRO does not partition them."""
        experts = sum(weight.numel() for layer in expert_layers(lm) for weight in layer.parameters())
        self.split_experts = experts if expert_parallel > 1 else 0
        """Elements of all experts, if ranks split them."""
        self._sequence_parallel = config.sequence_parallel
        self._offloads = config.activation_offload
        self._expert_parallel = expert_parallel

    @functools.cached_property
    def shares_prefixes(self) -> bool:
        """True if the common tokens of rows that begin alike are computed once."""
        return self.tensor_parallel == 1 and self._sequence_parallel == 1 and shares_prefixes(self.lm)

    @functools.cached_property
    def weights(self) -> dict[str, Tensor]:
        """The weights by their names without adapters."""
        return {plain_name(name): weight for name, weight in self.lm.named_parameters()}

    @functools.cached_property
    def text_config(self) -> Any:
        """The config of the language model."""
        return self.config.get_text_config()

    @functools.cached_property
    def attention_sizes(self) -> tuple[int, int, int] | None:
        """Number of heads, number of KV heads and head size; None for a model without attention, such as Mamba."""
        if not hasattr(self.text_config, "num_attention_heads"):
            return None
        return attention_sizes(self.text_config, self.settings)

    @functools.cached_property
    def layer_elements(self) -> int:
        """Number of the weights of all layers."""
        return sum(weight.numel() for weight in _layer_list(self.lm).parameters())

    @functools.cached_property
    def family(self) -> Family | None:
        """The family of inference weights; None: generation runs the model's own modules."""
        return family_of(self.lm)

    @property
    def names(self) -> Mapping[str, str]:
        """Names of modules by role, as the family has them; {} without a family."""
        return {} if self.family is None else self.family.names

    @functools.cached_property
    def settings(self) -> Mapping[str, Any]:
        """Settings that the family derives from the model's config; {} without a family."""
        return {} if self.family is None else self.family.settings(self.text_config)

    @functools.cached_property
    def experts(self) -> Mapping[str, Any]:
        """Fields of the mixture of experts; {} for a model without one."""
        if self.family is None or self.family.experts is None or not any(self.named(["router"])):
            return {}
        return self.family.experts(self.text_config)

    @functools.cached_property
    def recurrent_layers(self) -> Mapping[str, Any]:
        """Kind and indices of the recurrent layers; {} without any."""
        return {} if self.family is None else recurrent_fields(self.lm, self.family)

    def named(self, roles: Iterable[str], *, layers: int | None = None) -> Iterator[NamedWeight]:
        """The weights with some roles, in each layer that has them."""
        count = self.text_config.num_hidden_layers if layers is None else layers
        for role in roles:
            for layer in range(count):
                modules = (module.format(layer, head=0) for module in self.names.get(role, "").split("|"))
                candidates = (name for module in modules for name in (f"{module}.weight", module))
                name = next((name for name in candidates if name in self.weights), None)
                if name is not None:
                    yield NamedWeight(role, layer, name, self.weights[name])

    @once
    def measure(self, batch: BatchShape, *, backward: bool) -> ForwardMemory:
        """Memory of a batch: of a forward and a backward, or of a forward alone."""
        few, many = _LAYERS_RUN
        layers = len(_layer_list(self.lm))
        try:
            with torch.set_grad_enabled(backward):
                memory = self._run(batch, layers=min(many, layers))
                if layers > many:
                    memory = self._run(batch, layers=few).extrapolated(memory, (layers - many) / (many - few))
                if self.tower is not None and batch.image_tokens:
                    memory = memory.with_tower(self.tower.measure(batch.image_tokens, backward=backward))
        except (NotImplementedError, RuntimeError, ValueError) as fault:
            # a forward that needs the values of tensors, or an operation without a shape rule, is the model's own
            raise Unplannable(
                f"a memory plan runs the model on shapes alone, {type(self.lm).__name__} fails there "
                f"({first_line(fault)})"
            ) from fault
        return memory

    def _run(self, batch: BatchShape, *, layers: int) -> ForwardMemory:
        """Run a batch through a few layers and count live bytes."""
        lm = self.lm
        with _some_layers(lm, layers), _local_experts(lm, self._expert_parallel):
            return passage(lm, lambda: _forward(lm, batch), device=batch.device, offloads=self._offloads)


def _counts(
    lm: PreTrainedModel, four_bit: Sequence[int], *, expert_parallel: int = 1, tensor_parallel: int = 1
) -> ParameterCounts:
    """Return the numbers of a model's weights on one of the ranks that split the experts or matrices of each layer."""
    matrices = layer_matrices(lm)
    parts = {id(weight): expert_parallel for layer in expert_layers(lm) for weight in layer.parameters()}
    parts |= {id(matrix): tensor_parallel for matrix in matrices}
    sizes = [(weight.numel() // parts.get(id(weight), 1), weight.requires_grad) for weight in lm.parameters()]
    return ParameterCounts(
        trained=sum(size for size, learns in sizes if learns),
        frozen=sum(size for size, learns in sizes if not learns),
        largest=max(size for size, _ in sizes),
        adapted=sum(base_weight(layer).numel() for _, layer in lora_layers(lm)),
        four_bit=sum(four_bit),
        largest_four_bit=max(four_bit, default=0),
        matrices=sum(matrix.numel() for matrix in matrices) // tensor_parallel,
    )


@functools.cache
def read_config(path: str, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The Hugging Face config of a folder, a hub model or a .gguf file (from its header).

    Raises:
        UserError: when there is no config that transformers can read.
    """
    source = embedded_gguf() if path == EMBEDDED_MODEL else user_path(path)
    if source.suffix != ".gguf":
        return load_config(path, trust_remote_code=trust_remote_code)
    regular_file(source, "a model file must exist")
    folder = dequantised_folder(source)
    if folder.exists():  # a header has the vocabulary, which takes seconds to read
        return load_config(str(folder), trust_remote_code=trust_remote_code)
    with quiet_transformers(), reading(f"{path} is no model that transformers knows", "check the path"):
        return read_gguf_config(source)


_MODELS: dict[str, ShapedModel] = {}
_MOST_MODELS = 64
"""Models that this process has built, and how many it keeps: a plan needs each several times."""


def shaped_model(
    path: str,
    architecture: Architecture,
    *,
    config: ModelConfig,
    dtype: torch.dtype,
    lora: LoraConfig | None,
    learns: bool,
    max_image_pixels: int = 0,
) -> ShapedModel:
    """The model as `load_model` and the engines prepare it, on the meta device.

    Args:
        path: folder, hub name, .gguf file or "embedded"; weights are not read.
        architecture: causal_lm or scorer.
        config: attention kernel, trust_remote_code, checkpointing and offload of activations.
        dtype: data type of the weights.
        lora: adapters of a trained model; None: all of its weights are trained.
        learns: whether it is trained.
        max_image_pixels: of an image in a row; 0: rows are read as text.

    Raises:
        UserError: when there is no config that transformers can read, or no model of this architecture.
    """
    key = repr((path, architecture, config, dtype, lora, learns, max_image_pixels))
    if key in _MODELS:
        return _MODELS[key]
    hf_config = copy.deepcopy(read_config(path, trust_remote_code=config.trust_remote_code))
    adapt_config(hf_config, architecture)
    # Flash attention does not run on the meta device; sdpa keeps the same tensors.
    config = replace(config, attention="sdpa") if config.attention.startswith("flash") else config
    with reading(f"transformers cannot load {path} as a {architecture}", "choose another", config=hf_config):
        lm = shape_model(hf_config, architecture, config, dtype=dtype)
    if architecture == "scorer":
        require_score(lm, path)
    with torch.device("meta"):
        names = four_bit_layers(lm, architecture) if config.quantization is not None else []
        four_bit = [lm.get_submodule(name).weight.numel() for name in names]  # type: ignore[operator, union-attr]
        trains_vision = config.vision == "train"
        choose_trained(lm, lora, architecture, learns=learns, seed=0, trains_vision=trains_vision)
    if config.expert_parallel > 1 and expert_layers(lm):
        require_expert_parallelism(lm, config.expert_parallel, ranks=config.expert_parallel)
    if config.tensor_parallel > 1:
        require_tensor_parallelism(lm, config.tensor_parallel)
    lm.train(learns)
    if len(_MODELS) == _MOST_MODELS:
        _MODELS.pop(next(iter(_MODELS)))
    tower = find_tower(lm, path, config, max_image_pixels) if max_image_pixels else None
    _MODELS[key] = ShapedModel(lm, config, four_bit=four_bit, tower=tower)
    return _MODELS[key]


def _layer_list(lm: PreTrainedModel) -> nn.ModuleList:
    if (layers := layer_list(lm)) is not None:
        return layers
    raise Unplannable(f"a plan needs a model with a list of layers, {type(lm).__name__} has none")


@contextlib.contextmanager
def _some_layers(lm: PreTrainedModel, count: int) -> Iterator[None]:
    """Remove all layers but some adjacent ones, and put them back at the end. Those of a mixture begin with its first
    layer of experts: dense layers before it (DeepSeek-V3) are not like the others."""
    layers = _layer_list(lm)
    config = lm.config.get_text_config()
    every = list(layers)
    first = next((place for place, layer in enumerate(every) if expert_layers(layer)), 0)
    first = min(first, max(0, len(every) - _LAYERS_RUN[1]))
    del layers[:]
    layers.extend(every[first : first + count])
    config.num_hidden_layers = count
    try:
        yield
    finally:
        del layers[:]
        layers.extend(every)
        config.num_hidden_layers = len(layers)


@contextlib.contextmanager
def _local_experts(lm: PreTrainedModel, parts: int) -> Iterator[None]:
    """Give each layer the number of experts of one of `parts` ranks that split them, and all of them at the end. A rank
    computes as many rows for other ranks as these compute for it, on average."""
    whole = [
        (layer, name, weight) for layer in expert_layers(lm) for name, weight in layer.named_parameters(recurse=False)
    ]
    for layer, name, weight in whole if parts > 1 else ():
        part = weight.detach()[: len(weight) // parts].clone()
        setattr(layer, name, nn.Parameter(part, requires_grad=weight.requires_grad))
    try:
        yield
    finally:
        for layer, name, weight in whole:
            setattr(layer, name, weight)


def _forward(lm: PreTrainedModel, batch: BatchShape) -> Tensor:
    """The forward of Policy and Scorer: backbone, head, a scalar to differentiate."""
    shape = (1, batch.tokens) if packs(lm) else (batch.rows, batch.length)
    ids = torch.zeros(shape, dtype=torch.long, device="meta")
    arguments = {}
    if packs(lm):
        lengths = [batch.prefix] * batch.prefixes + [batch.length - batch.prefix] * batch.rows
        sizes = [size for size in (batch.prefixes, batch.rows) if size]
        continued = [NO_PREFIX] * batch.prefixes + [row // batch.sharing for row in range(batch.rows)]
        mask = places(lengths, sizes, device=ids.device, prefixes=continued if batch.prefix else ())
        arguments = {"position_ids": ids, "attention_mask": layer_masks(lm, mask)}
    hidden = backbone_of(lm)(input_ids=ids, use_cache=False, **arguments).last_hidden_state.flatten(0, 1)
    if lm.get_output_embeddings() is None:
        return lm.score(hidden).float().sum()  # type: ignore[operator, union-attr]
    wanted = ids.flatten()[: batch.head_tokens]
    of_tokens, _ = HeadLogprobs(lm, device_type=batch.device)(hidden[wanted], wanted, 1.0)
    return of_tokens.sum()  # type: ignore[no-any-return]
