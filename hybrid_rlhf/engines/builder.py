"""The one builder of engines: role, config sections and ranks in, engine out. For all roles."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import deepspeed
import torch
from deepspeed.utils import groups
from torch import nn
from torch.distributed import distributed_c10d
from transformers import PreTrainedModel

from hybrid_rlhf.configs.rollout import RolloutConfig
from hybrid_rlhf.configs.sections import LoraConfig, ModelConfig, OptimizerConfig, ZeroConfig
from hybrid_rlhf.engines.ds_config import deepspeed_config
from hybrid_rlhf.engines.engine import EngineOptions, ModelEngine, Role
from hybrid_rlhf.engines.hybrid import HybridEngine
from hybrid_rlhf.engines.partition import set_weights, share_weights
from hybrid_rlhf.engines.schedules import lr_factor
from hybrid_rlhf.models.distillation import Student, Teacher
from hybrid_rlhf.models.head_check import require_own_logits
from hybrid_rlhf.models.loading import Architecture, load_model, training_dtype
from hybrid_rlhf.models.lora import choose_trained
from hybrid_rlhf.models.policy import Policy, Scorer
from hybrid_rlhf.runtime.world import World

ARCHITECTURE: dict[Role, Architecture] = {
    "actor": "causal_lm",
    "reference": "causal_lm",
    "critic": "scorer",
    "reward": "scorer",
    "student": "causal_lm",
    "teacher": "causal_lm",
}
MODULES: dict[Role, type[Policy] | type[Scorer] | type[Teacher]] = {
    "actor": Policy, "reference": Policy, "critic": Scorer, "reward": Scorer, "student": Student, "teacher": Teacher,
}  # fmt: skip
EngineT = TypeVar("EngineT", bound=ModelEngine)
FRESH_HEAD_STEP = 0.1
"""Learning rate of a critic's head of zeros, times the hidden size: hidden states are of size 1 or so, and an update
then moves a value by a tenth at most."""


@dataclass(frozen=True)
class EngineSpec:
    """What one engine is built from."""

    role: Role
    path: str
    """Folder or hub name, resolved."""
    model: ModelConfig
    zero: ZeroConfig
    seed: int
    optimizer: OptimizerConfig | None = None
    """None: the engine is frozen."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    total_updates: int = 1
    """Optimizer updates of the run, for the schedule."""
    deepspeed_overrides: dict[str, Any] = field(default_factory=dict)
    offload_weights: bool = False
    """Frozen, and not sharded by ZeRO-3: its weights are on the device only inside `on_device`."""
    heads: tuple[str, ...] | None = ()
    """Names of a scorer's several scores; empty: one score; none: as it is stored."""
    fresh_head: bool = False
    """A scorer's head is started anew even where the model has one."""
    head_lr: float | None = None
    """Of a critic; none: the optimizer's, at least FRESH_HEAD_STEP / hidden size of a fresh head."""
    base: PreTrainedModel | None = None
    """A model of the same start, on the device: its frozen weights are this one's too; both have adapters."""


def build_engine(spec: EngineSpec, world: World) -> ModelEngine:
    """An engine that computes and, with an optimizer, trains.

    Raises:
        UserError: when the model cannot be loaded or the sections do not fit it.
    """
    return _build(ModelEngine, spec, world)


def build_actor(spec: EngineSpec, world: World, *, rollout: RolloutConfig | None = None) -> HybridEngine:
    """An actor's engine, which also generates, as the rollout section says.

    Raises:
        UserError: as `build_engine`, or when the model has no layout for tensor parallelism.
    """
    return _build(partial(HybridEngine, rollout=rollout), spec, world)


def _build(engine_type: Callable[..., EngineT], spec: EngineSpec, world: World) -> EngineT:
    _prepare_deepspeed(world)
    dtype = training_dtype(spec.model, world.device)
    config = deepspeed_config(zero=spec.zero, dtype=dtype, optimizer=spec.optimizer, overrides=spec.deepspeed_overrides)
    partitioned = config["zero_optimization"]["stage"] == 3
    architecture = ARCHITECTURE[spec.role]
    lm, fresh_head = load_model(
        spec.path, architecture, config=spec.model, dtype=dtype, zero3_config=config if partitioned else None,
        heads=spec.heads,
    )  # fmt: skip
    if spec.optimizer is not None:
        for name in ("calibration", "step_separator"):  # of the scores before training
            vars(lm.config).pop(name, None)
    fresh_head |= spec.fresh_head
    if fresh_head:
        _init_head(lm, role=spec.role, seed=spec.seed)
    choose_trained(lm, None if spec.optimizer is None else spec.lora, architecture, seed=spec.seed)
    if spec.base is not None:
        share_weights(spec.base, lm)
    module: nn.Module = MODULES[spec.role](lm)
    if architecture == "causal_lm" and not partitioned:
        require_own_logits(lm.to(world.device))  # type: ignore[arg-type]
    if spec.optimizer is None:
        engine, *_ = deepspeed.initialize(model=module, config=config)
        module.eval()
        return engine_type(spec.role, engine, world, EngineOptions(offload_weights=spec.offload_weights))
    head = (lm.score, _head_lr(spec, lm, fresh=fresh_head)) if spec.role == "critic" else None
    optimizer = _adamw(module, spec.optimizer, head=head)
    section, total = spec.optimizer, spec.total_updates
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(step, config=section, total_steps=total)
    )
    engine, *_ = deepspeed.initialize(model=module, config=config, optimizer=optimizer, lr_scheduler=schedule)
    module.train()
    options = EngineOptions(section.max_grad_norm, offload_activations=spec.model.activation_offload)
    return engine_type(spec.role, engine, world, options)


def _head_lr(spec: EngineSpec, critic: PreTrainedModel, *, fresh: bool) -> float:
    """See EngineSpec. Weights of 0 must reach the scale of the scores, which the rate of trained layers takes thousands
    of updates for; of an output layer it goes with 1 / width (muP, arXiv 2203.03466, table 3)."""
    assert spec.optimizer is not None
    lr = spec.optimizer.lr
    if spec.head_lr is not None:
        return spec.head_lr
    return max(lr, FRESH_HEAD_STEP / critic.config.get_text_config().hidden_size) if fresh and lr else lr


def _adamw(
    module: nn.Module, config: OptimizerConfig, *, head: tuple[nn.Module, float] | None = None
) -> torch.optim.Optimizer:
    """AdamW whose decay spares norms and biases, the vectors among the parameters; a head with a learning rate of its
    own is the last group."""
    score, head_lr = head or (nn.Module(), config.lr)
    heads = {id(p) for p in score.parameters()} if head_lr != config.lr else set[int]()
    trained = [p for p in module.parameters() if p.requires_grad]
    layers = [(p, len(getattr(p, "ds_shape", p.shape))) for p in trained if id(p) not in heads]
    groups: list[dict[str, Any]] = [
        {"params": [p for p, rank in layers if rank >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p, rank in layers if rank < 2], "weight_decay": 0.0},
        {"params": [p for p in trained if id(p) in heads], "weight_decay": config.weight_decay, "lr": head_lr},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def _init_head(lm: PreTrainedModel, *, role: Role, seed: int) -> None:
    """A fresh score head, without bias.

    A reward model's is normal with deviation 1 / sqrt(d + 1) (N details, no. 8). A critic's is 0, so that the first
    values are 0 and no bias of the values stands in the first advantages (lm-human-preference-details,
    train_policy_accelerate.py; VC-PPO, arXiv 2503.01491, section 3.1, on the bias).
    """
    weight: nn.Parameter = lm.score.weight  # type: ignore[assignment, union-attr]
    shape = tuple(getattr(weight, "ds_shape", weight.shape))
    generator = torch.Generator().manual_seed(seed)
    scale = 0.0 if role == "critic" else 1 / math.sqrt(shape[-1] + 1)
    set_weights(weight, scale * torch.randn(shape, generator=generator))


def _prepare_deepspeed(world: World) -> None:
    """Quiet its logger, and keep it from compiling an extension that we do not use."""
    deepspeed.utils.logger.setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # of calls DeepSpeed makes
    if world.device.type == "cpu":
        # Its shared-memory all-reduce serves tensor-parallel inference; building it takes 40 s on a fresh machine.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    seen = groups._WORLD_GROUP
    if seen is not None and seen not in distributed_c10d._world.pg_group_ranks:
        groups._release_process_group_references()  # those of a world of this process that was closed
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend="nccl" if world.device.type == "cuda" else "gloo", verbose=False)
