"""Builds the engines of all roles from config sections."""

from __future__ import annotations

import logging
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import deepspeed
import torch
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import set_z3_leaf_module
from torch import nn
from transformers import PreTrainedModel

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.model import LoraConfig, ModelConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.training import OptimizerConfig, ZeroConfig
from hybrid_rlhf.engines.deepspeed_internals import (
    align_ids,
    disable_shm_extension,
    engine_ranks,
    expert_parameter,
    experts_declared,
    finish_tensor_parallelism,
    free_weights,
    full_shape,
    register_expert_groups,
    release_closed_groups,
    silence_memory_reports,
)
from hybrid_rlhf.engines.ds_config import deepspeed_config, sums_whole_gradients
from hybrid_rlhf.engines.engine import EngineOptions, ModelEngine, Role
from hybrid_rlhf.engines.hybrid import HybridEngine
from hybrid_rlhf.engines.learning_rates import Learning, derived_rate, lr_factor
from hybrid_rlhf.engines.partition import gathered, set_weights, share_weights
from hybrid_rlhf.engines.residency.rules import RoleResidency
from hybrid_rlhf.generation.image_loading import ModelImages
from hybrid_rlhf.models.distillation import Teacher
from hybrid_rlhf.models.expert_parallel import (
    expert_layers,
    require_expert_parallelism,
    split_experts,
)
from hybrid_rlhf.models.families import unread_weights
from hybrid_rlhf.models.four_bit import quantise_layers, require_bitsandbytes
from hybrid_rlhf.models.head_check import require_own_logits
from hybrid_rlhf.models.lora import choose_trained, four_bit_layers
from hybrid_rlhf.models.packing import (
    require_sequence_parallelism,
    require_tensor_parallelism,
    set_sequence_world,
    set_tensor_world,
    why_padded,
    why_separate,
)
from hybrid_rlhf.models.policy import Policy, Scorer
from hybrid_rlhf.models.pretrained.folders import load_config
from hybrid_rlhf.models.pretrained.loading import Architecture, lacks_kernels, load_model, shape_model, training_dtype
from hybrid_rlhf.models.routers.losses import router_loss
from hybrid_rlhf.models.structure import has_mixture, layer_matrices, listed_mixtures
from hybrid_rlhf.models.weight_split import SplitRanks, split_of
from hybrid_rlhf.runtime.observability.logs import logger, warn_once
from hybrid_rlhf.runtime.world import World

LEARNING: dict[Role, Learning] = {"actor": "actor", "critic": "critic", "reward": "reward", "student": "sft"}
"""Key of the default learning rate (learning_rates.py) of each trained role."""
MODULES: dict[Role, type[Policy] | type[Scorer] | type[Teacher]] = {
    "actor": Policy,
    "reference": Policy,
    "critic": Scorer,
    "reward": Scorer,
    "student": Policy,
    "teacher": Teacher,
}
EngineT = TypeVar("EngineT", bound=ModelEngine)
FRESH_HEAD_STEP = 0.1
"""Learning rate of a critic's head of zeros, times the hidden size. Hidden states have a magnitude of about 1, so an
update changes a value by at most a tenth."""
MUON_MOMENTUM = 0.95
"""Decay of Muon's momentum (Jordan 2024, kellerjordan.github.io/posts/muon; Moonlight)."""
MUON_UPDATE_SIZE = 0.2
"""Root mean square of the elements of Muon's updates, times the learning rate: that of AdamW's (Moonlight, arXiv
2502.16982, section 2.2)."""


@dataclass(frozen=True)
class EngineSpec:
    """Everything that one engine is built from."""

    role: Role
    path: str
    """Folder or hub name, resolved."""
    model: ModelConfig
    zero: ZeroConfig
    seed: int
    optimizer: OptimizerConfig | None = None
    """None: the engine is frozen."""
    lora: LoraConfig | None = None
    """None: all weights are trained."""
    total_updates: int = 1
    """Number of optimizer updates of the run, for the schedule."""
    deepspeed_overrides: dict[str, Any] = field(default_factory=dict)
    offload_weights: bool = False
    """Keep the weights in host memory outside `on_device`; for a frozen model that ZeRO-3 does not partition."""
    heads: tuple[str, ...] | None = ()
    """Names of a scorer's scores; empty: one score; none: those stored with the model, at least one."""
    fresh_head: bool = False
    """Initialise a scorer's head also if the model has one."""
    head_lr: float | None = None
    """Learning rate of a critic's head; none: the optimizer's, at least FRESH_HEAD_STEP / hidden size if fresh."""
    learning: Learning | None = None
    """Key of the default learning rate; none: that of the role (LEARNING)."""
    base: PreTrainedModel | None = None
    """A model loaded from the same folder, whose frozen weights are shared; both models have adapters."""
    images: ModelImages | None = None
    """What engines of the same folder share to read images; none: nothing."""


def model_images(path: str, model: ModelConfig) -> ModelImages:
    """What engines of a resolved path share to read images."""
    return ModelImages(path, trust_remote_code=model.trust_remote_code, is_frozen=model.vision == "freeze")


def build_engine(spec: EngineSpec, world: World) -> ModelEngine:
    """Build an engine that computes and, with an optimizer, trains.

    Raises:
        UserError: when the model cannot be loaded, or a section does not fit it.
    """
    return _build(ModelEngine, spec, world)


def build_actor(
    spec: EngineSpec,
    world: World,
    *,
    rollout: RolloutConfig | None = None,
    max_logprob_diff: float | None = None,
    weight_check_every: int = 1,
    samples: bool = True,
    has_images: bool = True,
    residency: RoleResidency | None = None,
) -> HybridEngine:
    """Build the engine of an actor. It also generates, as set in the rollout section, unless a sampler on other ranks
    does (`samples` false). Arguments as in HybridEngine.

    Raises:
        UserError: as in `build_engine`, or when the rollout needs inference weights and the model has none.
    """
    hybrid = partial(
        HybridEngine,
        rollout=rollout,
        max_logprob_diff=max_logprob_diff,
        weight_check_every=weight_check_every,
        samples=samples,
        has_images=has_images,
        residency=residency,
    )
    return _build(hybrid, spec, world)


def _build(engine_type: Callable[..., EngineT], spec: EngineSpec, world: World) -> EngineT:
    _prepare_deepspeed(world)
    align_ids(world)
    size = spec.model.tensor_parallel
    tensor_ranks = SplitRanks.of(world, size) if size > 1 else None
    with engine_ranks(world, tensor_ranks):
        engine, options = _initialize(spec, world, tensor_ranks)
        options = replace(options, images=spec.images or model_images(spec.path, spec.model))
        if tensor_ranks is not None:
            finish_tensor_parallelism(engine, tensor_ranks)
    return engine_type(spec.role, engine, world, options)


def _initialize(
    spec: EngineSpec, world: World, tensor_ranks: SplitRanks | None = None
) -> tuple[DeepSpeedEngine, EngineOptions]:
    """Load the model of a role and initialise DeepSpeed with it."""
    dtype = training_dtype(spec.model, world.device)
    config = deepspeed_config(zero=spec.zero, dtype=dtype, optimizer=spec.optimizer, overrides=spec.deepspeed_overrides)
    partitioned = config["zero_optimization"]["stage"] == 3
    architecture: Architecture = "scorer" if MODULES[spec.role] is Scorer else "causal_lm"
    _require_optimizer(spec.optimizer, world.device)
    _require_supported(spec, architecture, dtype, zero=config["zero_optimization"], ranks=world.size)
    lm, fresh_head = load_model(
        spec.path,
        architecture,
        config=spec.model,
        dtype=dtype,
        zero3_config=config if partitioned and spec.model.quantization is None and tensor_ranks is None else None,
        heads=spec.heads,
    )
    if spec.model.quantization is not None:  # DeepSpeed partitions the quantised weights
        quantise_layers(lm, four_bit_layers(lm, architecture), device=world.device)
    if spec.optimizer is not None:
        for name in ("calibration", "step_separator"):  # they describe scores before training
            vars(lm.config).pop(name, None)
    fresh_head |= spec.fresh_head
    if fresh_head:
        _init_head(lm, role=spec.role, seed=spec.seed)
    _share_work(lm, spec.model, world, tensor_ranks)
    learns, trains_vision = spec.optimizer is not None, spec.model.vision == "train"
    choose_trained(lm, spec.lora, architecture, learns=learns, seed=spec.seed, trains_vision=trains_vision)
    if spec.base is not None:
        share_weights(spec.base, lm)
    module: nn.Module = MODULES[spec.role](lm)
    if tensor_ranks is not None:
        module.config = lm.config  # type: ignore[assignment]  # which has the plan that AutoTP follows
        config["tensor_parallel"] = {"autotp_size": tensor_ranks.parts.size, "vocab_parallel_lm_head": False}
    elif architecture == "causal_lm" and not partitioned:
        require_own_logits(lm.to(world.device))  # type: ignore[arg-type]
    if world.size > 1:
        _gather_experts_together(lm, config, learns=spec.optimizer is not None)
    if spec.optimizer is None:
        engine, *_ = deepspeed.initialize(model=module, config=config)
        module.eval()
        return engine, EngineOptions(offload_weights=spec.offload_weights, tensor_ranks=tensor_ranks)
    section = spec.optimizer
    total = spec.total_updates
    lr = learning_rate(spec, lm, section, is_main=world.is_main)
    head = (lm.score, _head_lr(spec, lm, lr, fresh=fresh_head)) if spec.role == "critic" else None
    weights = dict(lm.named_parameters())
    towers = {id(weights[name]) for name in unread_weights(lm, weights)}
    optimizer = (
        _muon(module, section, lr, lm, head=head, towers=towers)
        if section.name == "muon"
        else _adamw(module, section, lr, head=head, towers=towers)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(step, config=section, total_steps=total)
    )
    if world.is_main:
        _log_work(spec.role, lm, world.device)
    with experts_declared(any(group.get("moe") for group in optimizer.param_groups)):
        engine, *_ = deepspeed.initialize(model=module, config=config, optimizer=optimizer, lr_scheduler=schedule)
    module.train()
    if isinstance(module, Policy):
        module.router_loss = router_loss(lm, spec.model)
    return engine, EngineOptions(
        section.max_grad_norm,
        offload_activations=spec.model.activation_offload,
        muon=section.name == "muon",
        tensor_ranks=tensor_ranks,
    )


def _log_work(role: Role, lm: PreTrainedModel, device: torch.device) -> None:
    """Log what a trained model computes more than once, for nothing, or slowly."""
    if device.type == "cuda" and lacks_kernels(lm):
        warn_once(
            "layers with the gated delta rule train by torch's functions, without the kernels of fla-core: "
            "pip install 'hybrid_rlhf[fla]' (transformers#48718: 0.70 instead of 1.22 s per step of Qwen3.5-9B)"
        )
    if (reason := why_padded(lm)) is not None:
        logger.info("%s: %s trains on padded rows: %s", role, type(lm).__name__, reason)
    elif role in ("actor", "critic") and (reason := why_separate(lm)) is not None:
        logger.info("%s: %s computes a prompt once for each completion: %s", role, type(lm).__name__, reason)


def _share_work(lm: PreTrainedModel, model: ModelConfig, world: World, tensor_ranks: SplitRanks | None) -> None:
    """Set the ranks that compute rows or experts of a model together."""
    if model.expert_parallel > 1:
        _split_experts(lm, SplitRanks.of(world, model.expert_parallel))
    if model.sequence_parallel > 1:
        set_sequence_world(lm, world.split(model.sequence_parallel))
    if tensor_ranks is not None:
        set_tensor_world(lm, tensor_ranks.parts)


def _require_optimizer(section: OptimizerConfig | None, device: torch.device) -> None:
    """Require bitsandbytes and a GPU for moments in 8 bits; on a CPU its update takes 30 times that of AdamW."""
    if section is None or section.name != "adamw_8bit":
        return
    require_bitsandbytes("optimizer.name adamw_8bit")
    if device.type == "cpu":
        raise UserError("optimizer.name adamw_8bit needs a GPU, this is a CPU: set it to adamw")


def _require_supported(
    spec: EngineSpec, architecture: Architecture, dtype: torch.dtype, *, zero: dict[str, Any], ranks: int
) -> None:
    """Check, before its weights are loaded, that a model supports 4-bit weights, sequence, tensor and expert
    parallelism, MLPs in parts and Muon as set."""
    section = spec.model
    muon = spec.optimizer is not None and spec.optimizer.name == "muon"
    shared = max(section.sequence_parallel, section.tensor_parallel, section.expert_parallel) > 1
    if not (muon or shared or section.quantization is not None or section.mlp_parts != 1):
        return
    config = load_config(spec.path, trust_remote_code=section.trust_remote_code)
    lm = shape_model(config, architecture, section, dtype=dtype)
    if section.quantization is not None:
        require_bitsandbytes("model.quantization nf4")
        four_bit_layers(lm, architecture)
    if section.sequence_parallel > 1:
        require_sequence_parallelism(lm, section.sequence_parallel)
    # a critic and frozen models may be dense where the model that trains from model.path is a mixture
    trains = spec.optimizer is not None and spec.role != "critic"
    if section.expert_parallel > 1 and (trains or expert_layers(lm)):
        require_expert_parallelism(lm, section.expert_parallel, ranks=ranks)
        _require_experts_trainable(spec, zero)
    if section.tensor_parallel > 1:
        require_tensor_parallelism(lm, section.tensor_parallel)
    if muon and (has_mixture(lm) or not layer_matrices(lm)):
        raise UserError(
            f"optimizer.name muon is for dense models with a list of layers, got {type(lm).__name__}: set it to adamw"
        )


def _require_experts_trainable(spec: EngineSpec, zero: dict[str, Any]) -> None:
    """Check that ZeRO and the adapters of a model support experts that ranks split."""
    size = spec.model.expert_parallel
    lora = spec.lora
    if lora is not None and lora.target_modules == "all-linear":
        raise UserError(
            f"model.expert_parallel {size} trains no adapters of experts, got lora.target_modules all-linear: name "
            "other layers, such as [q_proj, k_proj, v_proj, o_proj]"
        )
    for key in ("zero_hpz_partition_size", "zero_quantized_gradients"):
        if zero.get(key, 1) not in (1, False):
            raise UserError(
                f"model.expert_parallel {size} partitions experts over the ranks that have them, got {key} "
                f"{zero[key]} in deepspeed_config: leave it out"
            )


def _split_experts(lm: PreTrainedModel, ranks: SplitRanks) -> None:
    """Let groups of ranks split the experts of each layer (models/expert_parallel.py). Under ZeRO-3, the experts of one
    layer at a time are gathered."""
    register_expert_groups(ranks)

    def replace(parameter: nn.Parameter) -> nn.Parameter:
        with gathered([parameter]):
            values = split_of(parameter).local(parameter.detach()).clone()
        part = expert_parameter(values, like=parameter, experts=ranks.parts.size)
        free_weights([parameter])
        return part

    for layer in expert_layers(lm):
        split_experts(layer, ranks.parts, replace)


def _gather_experts_together(lm: PreTrainedModel, config: dict[str, Any], *, learns: bool) -> None:
    """Prepare models with one module per expert for ranks whose tokens go to different experts.

    ZeRO-3 gathers the weights of a module when it is called, so ranks that call different experts would deadlock; the
    weights of a leaf module are gathered together. Stages 1 and 2 reduce buckets of gradients in the order in which a
    rank computes them, which differs between ranks, unless whole gradients are summed first.

    Raises:
        UserError: for a trained model with one module per expert under stage 1 or 2.
    """
    mixtures = listed_mixtures(lm)
    stage = config["zero_optimization"]["stage"]
    if mixtures and learns and stage in (1, 2) and not sums_whole_gradients(config):
        other = "3" if config["fp16"]["enabled"] else "0 or 3"
        raise UserError(
            f"zero.stage {stage} on several ranks needs experts in one weight, {type(lm).__name__} has a module for "
            f"each: use zero.stage {other}"
        )
    for mixture in mixtures:
        set_z3_leaf_module(mixture, True)


def learning_rate(spec: EngineSpec, lm: PreTrainedModel, section: OptimizerConfig, *, is_main: bool) -> float:
    """Return the peak learning rate: as configured, or derived from the width of the model and its adapters."""
    if section.lr is not None:
        return section.lr
    learning = spec.learning or LEARNING[spec.role]
    lr, source = derived_rate(learning, width=_width(lm), lora=spec.lora)
    if is_main:
        logger.info("%s: lr %g: derived from %s (docs/defaults.md)", learning, lr, source)
    return lr


def _width(lm: PreTrainedModel) -> int:
    width = getattr(lm.config.get_text_config(), "hidden_size", None)
    if width is None:
        name = type(lm).__name__
        raise UserError(f"the default learning rate follows from hidden_size, {name} has none: set optimizer.lr")
    return int(width)


def _head_lr(spec: EngineSpec, critic: PreTrainedModel, lr: float, *, fresh: bool) -> float:
    """Return the learning rate of a critic's head (EngineSpec.head_lr).

    The weights of a fresh head are 0 and must reach the scale of the scores. With the learning rate of trained layers
    this takes thousands of updates. The rate of an output layer scales with 1 / width (muP, arXiv 2203.03466, table 3).
    """
    if spec.head_lr is not None:
        return spec.head_lr
    return max(lr, FRESH_HEAD_STEP / _width(critic)) if fresh and lr else lr


def _adamw(
    module: nn.Module,
    config: OptimizerConfig,
    lr: float,
    *,
    head: tuple[nn.Module, float] | None = None,
    towers: Set[int] = frozenset(),
) -> torch.optim.Optimizer:
    """Create AdamW of all trained parameters.

    In 8 bits, under ZeRO, bitsandbytes sees one flat partition per group: its blocks of 256 and its limit of 4096
    elements are those of partitions, and embeddings are in 8 bits too.
    """
    groups = _adamw_groups([p for p in module.parameters() if p.requires_grad], config, lr, head=head, towers=towers)
    if config.name == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(groups, lr=lr, betas=config.betas, eps=config.eps)  # type: ignore[no-any-return]
    return torch.optim.AdamW(groups, lr=lr, betas=config.betas, eps=config.eps, fused=True)


def _muon(
    module: nn.Module,
    config: OptimizerConfig,
    lr: float,
    lm: PreTrainedModel,
    *,
    head: tuple[nn.Module, float] | None = None,
    towers: Set[int] = frozenset(),
) -> torch.optim.Optimizer:
    """Create Muon for matrices and AdamW for the other trained parameters.

    Moonlight (arXiv 2502.16982, eq. 4) multiplies the orthogonalised momentum of an [A, B] matrix by
    0.2 sqrt(max(A, B)), the root mean square of AdamW's updates, so that both have one learning rate and weight decay.
    DeepSpeed multiplies it by sqrt(max(1, A / B)); the rest, 0.2 sqrt(B), is in the learning rate of a group.
    """
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam  # imports the tables of torch.compile

    matrices = [matrix for matrix in layer_matrices(lm) if matrix.requires_grad]
    by_width: dict[int, list[nn.Parameter]] = defaultdict(list)
    for matrix in matrices:
        by_width[full_shape(matrix)[1]].append(matrix)
        matrix.use_muon = True  # type: ignore[attr-defined]  # read by ZeRO
    chosen = {id(matrix) for matrix in matrices}
    others = [p for p in module.parameters() if p.requires_grad and id(p) not in chosen]
    adam = {"lr": lr, "betas": config.betas, "eps": config.eps, "use_muon": False}
    groups = [{**adam, **group} for group in _adamw_groups(others, config, lr, head=head, towers=towers)]
    for width, weights in by_width.items():
        scale = MUON_UPDATE_SIZE * math.sqrt(width)
        groups.append(
            {
                "params": weights,
                "lr": lr * scale,
                "weight_decay": config.weight_decay / scale,
                "momentum": MUON_MOMENTUM,
                "use_muon": True,
            }
        )
    return MuonWithAuxAdam(groups, adam_optimizer=torch.optim.AdamW, adam_optimizer_kwargs={"fused": True})


def _adamw_groups(
    trained: Sequence[nn.Parameter],
    config: OptimizerConfig,
    lr: float,
    *,
    head: tuple[nn.Module, float] | None,
    towers: Set[int],
) -> list[dict[str, Any]]:
    """Return AdamW's groups of parameters: matrices, those without weight decay, a head with a separate learning rate,
    and those of split experts, which DeepSpeed reduces apart.

    Vectors (norms and biases) have no weight decay, nor have the parameters whose ids are in `towers`, which would
    shrink in steps without images.
    """
    score, head_lr = head or (nn.Module(), lr)
    heads = {id(p) for p in score.parameters()} if head_lr != lr else set[int]()
    layers = [(p, len(full_shape(p)) >= 2 and id(p) not in towers) for p in trained if id(p) not in heads]
    groups: list[dict[str, Any]] = [
        {"params": [p for p, decays in layers if decays], "weight_decay": config.weight_decay},
        {"params": [p for p, decays in layers if not decays], "weight_decay": 0.0},
        {"params": [p for p in trained if id(p) in heads], "weight_decay": config.weight_decay, "lr": head_lr},
    ]
    if any(split_of(p).parts > 1 for p in trained):
        named = [{**group, "name": f"group {number}"} for number, group in enumerate(groups)]
        groups = split_params_into_different_moe_groups_for_optimizer(named, max_group_size=None)
    return [group for group in groups if group["params"]]


def _init_head(lm: PreTrainedModel, *, role: Role, seed: int) -> None:
    """Initialise a score head, which has no bias.

    The head of a reward model is normal with standard deviation 1 / sqrt(d + 1) (N details, no. 8). The head of a
    critic is 0, so that the first values are 0 and do not bias the first advantages (lm-human-preference-details,
    train_policy_accelerate.py; VC-PPO, arXiv 2503.01491, section 3.1, on the bias).
    """
    weight: nn.Parameter = lm.score.weight  # type: ignore[assignment, union-attr]
    shape = full_shape(weight)
    generator = torch.Generator().manual_seed(seed)
    scale = 0.0 if role == "critic" else 1 / math.sqrt(shape[-1] + 1)
    set_weights(weight, scale * torch.randn(shape, generator=generator))


def _prepare_deepspeed(world: World) -> None:
    """Silence DeepSpeed's log, prevent the build of an unused extension, and set up communication."""
    deepspeed.utils.logger.setLevel(logging.WARNING)
    silence_memory_reports()
    # about calls that DeepSpeed makes
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    if world.device.type == "cpu":
        disable_shm_extension()
    release_closed_groups()
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend="nccl" if world.device.type == "cuda" else "gloo", verbose=False)
