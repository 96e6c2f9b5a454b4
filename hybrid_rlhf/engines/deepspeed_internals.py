"""All uses of DeepSpeed's private members, written for DeepSpeed 0.19. A test (tests/house) forbids them elsewhere.

Why one file: DeepSpeed has no public interface to the partitions of a parameter, to its optimizer state, or to the
hooks of ZeRO-3. Only this file has to be checked for a new version of DeepSpeed. The functions have no state of their
own. Attributes that DeepSpeed documents (`global_steps`, `GatheredParameters`, `offload_states`, ...) are used directly
in other files.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from deepspeed.module_inject import layers
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import Init, ZeroParamStatus
from deepspeed.utils import groups
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from hybrid_rlhf.models.weight_split import SplitRanks, WeightSplit, note_split, split_of
from hybrid_rlhf.runtime.world import World

_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


# -- parameters under ZeRO-3


def is_partitioned(parameter: nn.Parameter) -> bool:
    """True if ZeRO-3 partitions a parameter."""
    return hasattr(parameter, "ds_id")


def partition_of(parameter: nn.Parameter) -> Tensor | None:
    """Return this rank's flat partition of a parameter under ZeRO-3; None if it is not partitioned."""
    return getattr(parameter, "ds_tensor", None)


def full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Full shape of a parameter, gathered or not, split or not."""
    shape = list(getattr(parameter, "ds_shape", parameter.shape))
    split = split_of(parameter)
    if split.dim is not None:
        shape[split.dim] *= split.parts
    return tuple(shape)


def full_elements(parameter: nn.Parameter) -> int:
    """Number of elements of a full parameter, gathered or not; of this rank's part of one that is split."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def release_gathered(parameter: nn.Parameter) -> None:
    """Free the full copy of a parameter if ZeRO-3 has gathered it, since changes of the partition do not update it."""
    if getattr(parameter, "ds_status", None) is ZeroParamStatus.AVAILABLE:
        parameter.partition()  # type: ignore[attr-defined]


@contextlib.contextmanager
def zero3_hooks_removed(engine: DeepSpeedEngine) -> Iterator[None]:
    """Remove the module hooks of ZeRO-3, which gather and release parameters around each layer, inside the context."""
    offload: Any = engine.optimizer.parameter_offload
    offload._remove_module_hooks()
    offload.forward_hooks.clear()
    offload.backward_hooks.clear()
    try:
        yield
    finally:
        offload.setup_zero_stage3_hooks()


# -- experts that the ranks of a group share


def register_expert_groups(ranks: SplitRanks) -> None:
    """Make the ranks that split experts, and those that have the same experts, known to ZeRO under the name that
    `expert_parameter` gives them."""
    name = _expert_group(ranks.parts.size)
    for world, group_by_name, ranks_by_name in (
        (ranks.parts, groups._EXPERT_PARALLEL_GROUP, groups._EXPERT_PARALLEL_GROUP_RANKS),
        (ranks.replicas, groups._EXPERT_DATA_PARALLEL_GROUP, groups._EXPERT_DATA_PARALLEL_GROUP_RANKS),
    ):
        group_by_name[name] = world.group
        ranks_by_name[name] = list(world.members)


def expert_parameter(values: Tensor, *, like: nn.Parameter, experts: int) -> nn.Parameter:
    """Return a parameter with this rank's experts, which ZeRO reduces and partitions only over ranks that have them.

    Args:
        values: weights of this rank's experts.
        like: parameter with the weights of all experts, whose memory is freed; under ZeRO-3, the new one is partitioned
            too.
        experts: number of ranks that split the experts.
    """
    part: Any = nn.Parameter(values, requires_grad=like.requires_grad)
    part.allreduce = False
    part.group_name = part.ds_zero_partition_group_name = _expert_group(experts)
    part.ds_zero_placement_family = "autoep_expert"
    part.ds_zero_partition_process_group = groups._EXPERT_DATA_PARALLEL_GROUP[part.group_name]
    if is_partitioned(like):
        like.convert_to_zero_parameters([part])  # type: ignore[attr-defined]
    return part  # type: ignore[no-any-return]


@contextlib.contextmanager
def experts_declared(trained: bool) -> Iterator[None]:
    """Context in which DeepSpeed builds an engine that trains split experts, if it does. Otherwise ZeRO 0 to 2 would
    not know them, as DeepSpeed looks for the layers of its own mixtures."""
    configure = DeepSpeedEngine._configure_distributed_model

    def declared(engine: DeepSpeedEngine, model: nn.Module) -> None:
        engine.has_moe_layers = engine.zero_optimization_stage() < 3
        configure(engine, model)

    DeepSpeedEngine._configure_distributed_model = declared if trained else configure
    try:
        yield
    finally:
        DeepSpeedEngine._configure_distributed_model = configure


def _expert_group(size: int) -> str:
    """Return DeepSpeed's name for the groups of ranks that split experts."""
    return f"ep_size_{size}"


# -- tensor parallelism


def finish_tensor_parallelism(engine: DeepSpeedEngine, ranks: SplitRanks) -> None:
    """Note how AutoTP has split each parameter, and allow ranks that compute together to pass different rows to the
    forward, which exchanges them."""
    engine.first_dataloader_check.remove()
    for parameter in engine.module.parameters():
        is_split = is_model_parallel_parameter(parameter)
        dim = getattr(parameter, DS_AUTOTP_UC_META)["partition_dim"] if is_split else None
        note_split(parameter, WeightSplit(ranks.parts, dim))


@contextlib.contextmanager
def _tensor_parallel(ranks: SplitRanks | None) -> Iterator[None]:
    """Make DeepSpeed use the ranks of one engine under tensor parallelism.

    DeepSpeed keeps one set of groups and one mode for all engines, and an engine without tensor parallelism fails when
    they are set.
    """
    if ranks is None:
        yield
        return
    parts = ranks.parts.group
    values = {"_TENSOR_MODEL_PARALLEL_GROUP": parts, "_MODEL_PARALLEL_GROUP": parts, "mpu": groups}
    values |= {"_DATA_PARALLEL_GROUP": ranks.replicas.group}
    before = {name: getattr(groups, name) for name in values}
    mode = layers.DEEPSPEED_AUTOTP_MODE
    vars(groups).update(values)
    deepspeed.set_autotp_mode(training=True)
    try:
        yield
    finally:
        vars(groups).update(before)
        layers.DEEPSPEED_AUTOTP_MODE = mode


# -- optimizer state of a parameter


@dataclass(frozen=True)
class OptimizerSlice:
    """Location of this rank's part of a parameter in the optimizer."""

    flat: Tensor
    """Tensor that the optimizer updates, with the master weights of one or more parameters."""
    start: int
    """Index of the first element of the part in `flat`."""
    offset: int
    """Index of the first element of the part in the flattened parameter."""
    elements: int
    """Number of elements of the part."""

    def of(self, state: Tensor) -> Tensor:
        """Return the part [elements] of a tensor with the layout of `flat`, as a view."""
        return state.detach().flatten()[self.start : self.start + self.elements]


def wrapped_optimizer(engine: DeepSpeedEngine) -> Any:
    """Return the torch optimizer inside DeepSpeed's, or the engine's optimizer if it is not wrapped."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def swaps_optimizer_states(engine: DeepSpeedEngine) -> bool:
    """True if optimizer states are on NVMe."""
    return bool(getattr(engine.optimizer, "swap_optimizer", False))


def master_partitions(engine: DeepSpeedEngine) -> list[Tensor]:
    """Return this rank's master weights under ZeRO, one flat tensor per parameter group."""
    optimizer: Any = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        return list(optimizer.fp32_partitioned_groups_flat)
    if has_whole_gradients(engine):
        return list(optimizer.fp32_groups_flat_partition)
    return list(optimizer.single_partition_of_fp32_groups)


def copied_to_host(engine: DeepSpeedEngine) -> list[Tensor]:
    """Return what `offload_states` copies into buffers of its own: gradients of ZeRO-3, master weights of ZeRO 1 and
    2."""
    if engine.zero_optimization_stage() == 3:
        return [engine.optimizer.grad_partitions_flat_buffer]
    return master_partitions(engine)


def use_host_buffers(engine: DeepSpeedEngine, buffers: list[Tensor]) -> None:
    """Replace these buffers for the next call of `offload_states` with `pin_memory`."""
    optimizer: Any = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        (optimizer.lp_grad_partitions_flat_pin_buffers,) = buffers
    else:
        optimizer.hp_params_pin_buffers = buffers


def optimizer_slice(engine: DeepSpeedEngine, parameter: nn.Parameter) -> OptimizerSlice | None:
    """Return the location of this rank's part of a trained parameter in the optimizer; None if it has no part."""
    optimizer: Any = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        group, start, elements = optimizer.grad_position[optimizer.get_param_id(parameter)]
        offset = elements * optimizer._get_param_partition_rank(parameter)
        elements = min(elements, full_elements(parameter) - offset)
        if elements <= 0:  # the last partitions may be padding
            return None
        return OptimizerSlice(optimizer.fp32_partitioned_groups_flat[group], start, offset, elements)
    if hasattr(parameter, "_hp_mapping"):  # stages 1 and 2
        mapping: Any = parameter._hp_mapping
        if mapping is None:
            return None
        flat = master_partitions(engine)[mapping.param_group_index]
        here = mapping.hp_fragment_address
        return OptimizerSlice(flat, here.start, mapping.lp_fragment_address.start, here.numel)
    return OptimizerSlice(parameter, 0, 0, parameter.numel())


@dataclass(frozen=True)
class MomentumSlice:
    """This rank's part of Muon's momentum of a matrix."""

    values: Tensor
    """[n], a view of the optimizer's memory."""
    offset: int
    """Index of the first element in the flattened matrix."""
    is_copy: bool
    """True if another rank has the same values."""


@contextlib.contextmanager
def muon_on_cpu() -> Iterator[None]:
    """Context in which Muon's Newton-Schulz iteration runs in float32, and is not compiled.

    DeepSpeed runs it in float16 where the accelerator supports that. All GPUs do; a CPU's support, and with it the
    result, would depend on the processor. Compilation takes a minute on a CPU, and a compiler.
    """
    from deepspeed.runtime.zero.muon import original_muon  # imports the tables of torch.compile

    compute_dtype = original_muon.ns_compute_dtype
    original_muon.ns_compute_dtype = lambda _: torch.float32
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        original_muon.ns_compute_dtype = compute_dtype


def muon_momentum(engine: DeepSpeedEngine, parameter: nn.Parameter, place: OptimizerSlice) -> MomentumSlice:
    """Return Muon's momentum of a matrix, which is created if there is none yet.

    It is laid out as the master weights; but under stage 1 or 2 without offload, a rank with any part of a matrix has
    the momentum of the whole matrix, unless it trains in bfloat16 under stage 1.

    Args:
        engine: engine of the model.
        parameter: the matrix.
        place: result of `optimizer_slice`.
    """
    optimizer: Any = engine.optimizer
    states = wrapped_optimizer(engine).state[place.flat]
    stage = engine.zero_optimization_stage()
    if stage in (1, 2) and not has_whole_gradients(engine) and not optimizer.cpu_offload:
        matrices = optimizer.params_in_partition[parameter._hp_mapping.param_group_index]  # type: ignore[attr-defined]
        if "momentum_buffer" not in states:  # DeepSpeed converts it to the dtype of the gradients, without loss
            elements = sum(matrix.numel() for matrix in matrices)
            states["momentum_buffer"] = torch.zeros(elements, dtype=torch.float32, device=place.flat.device)
        index = next(index for index, matrix in enumerate(matrices) if matrix is parameter)
        start = sum(matrix.numel() for matrix in matrices[:index])
        values = states["momentum_buffer"][start : start + parameter.numel()]
        return MomentumSlice(values, 0, is_copy=place.offset > 0)
    if "momentum_buffer" not in states and stage == 3:
        group = optimizer.grad_position[optimizer.get_param_id(parameter)][0]
        optimizer._create_momentum_buffer(place.flat.numel(), group, getattr(place.flat, "ds_id", None))
    elif "momentum_buffer" not in states:
        states["momentum_buffer"] = torch.zeros_like(place.flat)
    return MomentumSlice(
        place.of(wrapped_optimizer(engine).state[place.flat]["momentum_buffer"]), place.offset, is_copy=False
    )


def copy_master_weights_to_model(engine: DeepSpeedEngine) -> None:
    """Update the model's weights from the master weights. Every rank must make this call."""
    optimizer: Any = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        optimizer.checkpoint_event_prologue()
        for group in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        optimizer.checkpoint_event_epilogue()
    elif hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()


# -- gradients of bfloat16's optimizer, stage 1 with float32 gradients


def has_whole_gradients(engine: DeepSpeedEngine) -> bool:
    """True if the engine has bfloat16's optimizer (ds_config.sums_whole_gradients)."""
    return isinstance(engine.optimizer, BF16_Optimizer)


def allocate_gradients(engine: DeepSpeedEngine) -> None:
    """Allocate the float32 gradients of bfloat16's optimizer, zero, unless they are; other optimizers allocate theirs.

    Its norm leaves out a weight without a gradient on this rank, though another rank may have one: all count here.
    """
    if has_whole_gradients(engine):
        for flat, received in zip(
            engine.optimizer.fp32_groups_gradients_flat, engine.optimizer.fp32_groups_has_gradients, strict=True
        ):
            received[:] = [True] * len(received)
            if not flat.untyped_storage().size():
                flat.untyped_storage().resize_(flat.numel() * flat.element_size())
                flat.zero_()


def release_gradients(engine: DeepSpeedEngine) -> None:
    """Free the float32 gradients of bfloat16's optimizer, which keeps views of them between updates."""
    if has_whole_gradients(engine):
        for flat, masters in zip(
            engine.optimizer.fp32_groups_gradients_flat, engine.optimizer.fp32_groups_flat_partition, strict=True
        ):
            masters.grad = None
            flat.untyped_storage().resize_(0)


def forget_fragments(engine: DeepSpeedEngine) -> None:
    """Drop the views of master weights and optimizer states that bfloat16's optimizer keeps for functions that are not
    used here, and that would keep their memory."""
    if has_whole_gradients(engine):
        for parameter in engine.module.parameters():
            if (mapping := getattr(parameter, "_hp_mapping", None)) is not None:
                mapping.hp_fragment = mapping.optim_fragment = None


# -- counters and the loss scale


def counters(engine: DeepSpeedEngine) -> dict[str, int]:
    """Return the engine's counters of steps and samples."""
    return {name: getattr(engine, name) for name in _COUNTERS}


def set_counters(engine: DeepSpeedEngine, values: Mapping[str, int]) -> None:
    """Restore the result of `counters`."""
    for name, value in values.items():
        setattr(engine, name, value)


def loss_scale(engine: DeepSpeedEngine) -> dict[str, Any]:
    """Return the state of float16's loss scale; empty without one."""
    scaler = _loss_scaler(engine)
    return {name: getattr(scaler, name) for name in _LOSS_SCALE if hasattr(scaler, name)}


def set_loss_scale(engine: DeepSpeedEngine, values: Mapping[str, Any]) -> None:
    """Restore the result of `loss_scale`, for the fields that this engine has."""
    scaler = _loss_scaler(engine)
    for name, value in values.items():
        if hasattr(scaler, name):
            setattr(scaler, name, value)


def end_scale_search_quietly(engine: DeepSpeedEngine) -> None:
    """Let float16's loss scale stay at its minimum when a gradient overflows there, where DeepSpeed raises."""
    scaler = _loss_scaler(engine)
    if hasattr(scaler, "raise_error_at_min_scale"):
        scaler.raise_error_at_min_scale = False


def searches_loss_scale(engine: DeepSpeedEngine) -> bool:
    """True if float16's loss scale can fall, so that a gradient that overflows may not overflow in the next update."""
    scaler = _loss_scaler(engine)
    return bool(getattr(scaler, "dynamic", False) and scaler.cur_scale > scaler.min_scale)


def _loss_scaler(engine: DeepSpeedEngine) -> Any:
    """Return the object with the loss scale; None without one."""
    return getattr(engine.optimizer, "loss_scaler", None)


# -- the update of a plain float32 engine


def replace_model_step(engine: DeepSpeedEngine, step: Callable[[dict[str, Any] | None], None]) -> None:
    """Replace an engine's update by `step`, and disable its clipping. `model_step` is DeepSpeed's update."""
    engine._take_model_step = step
    engine.clip_fp32_gradients = lambda: None


def model_step(engine: DeepSpeedEngine, lr_kwargs: dict[str, Any] | None) -> None:
    """Run DeepSpeed's update: step optimizer and schedule, clear the gradients, count the step."""
    DeepSpeedEngine._take_model_step(engine, lr_kwargs)


def set_grad_norm(engine: DeepSpeedEngine, norm: float) -> None:
    """Set the result of `engine.get_global_grad_norm()`."""
    engine._global_grad_norm = norm


def skip_model_step(engine: DeepSpeedEngine) -> None:
    """Clear the gradients and count a skipped step, as DeepSpeed does when float16 overflows."""
    engine.zero_grad()
    engine._step_applied = False
    engine.skipped_steps += 1
    engine.global_steps += 1


def disable_gradient_allreduce(engine: DeepSpeedEngine) -> None:
    """Disable the all-reduce of gradients on a single rank, where DeepSpeed would copy them into buckets and back."""
    engine.buffered_allreduce_fallback = lambda *_, **__: None


# -- the process


def disable_shm_extension() -> None:
    """Prevent the build of DeepSpeed's shared-memory all-reduce, which takes 40 s and is not used."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def silence_memory_reports() -> None:
    """Keep the optimizer of bfloat16 from printing the memory in use eight times while it is built."""
    bf16_optimizer.see_memory_usage = lambda *_, **__: None


def release_closed_groups() -> None:
    """Release DeepSpeed's process groups if they belong to a closed world of this process."""
    seen = groups._WORLD_GROUP
    if seen is not None and seen not in distributed_c10d._world.pg_group_ranks:
        groups._release_process_group_references()


def align_ids(world: World) -> None:
    """Align the next ids of parameters and modules over the ranks of an engine that is about to be built.

    ZeRO-3 compares ids between ranks, and ranks may have built different engines before. Every rank of the engine makes
    this call.
    """
    modules: list[int] = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0]
    counts = world.all_gather_objects((Init.param_id, modules[0]))
    Init.param_id, modules[0] = (max(numbers) for numbers in zip(*counts, strict=True))


@contextlib.contextmanager
def engine_ranks(world: World, tensor_ranks: SplitRanks | None = None) -> Iterator[None]:
    """Make DeepSpeed use only the ranks of one engine; needed around all calls that may run its collectives.

    DeepSpeed uses torch's default group, and keeps one clone of it for all engines.

    Args:
        world: the ranks.
        tensor_ranks: their groups under tensor parallelism.
    """
    with _tensor_parallel(tensor_ranks), _only_ranks(world):
        yield


@contextlib.contextmanager
def _only_ranks(world: World) -> Iterator[None]:
    if len(world.ranks) in (0, dist.get_world_size()):
        yield
        return
    clone = groups._WORLD_GROUP
    size = os.environ["WORLD_SIZE"]
    with world.as_default():
        groups._WORLD_GROUP = world.group
        os.environ["WORLD_SIZE"] = str(world.size)
        try:
            yield
        finally:
            groups._WORLD_GROUP = clone
            os.environ["WORLD_SIZE"] = size


def free_weights(parameters: Iterable[nn.Parameter]) -> None:
    """Free the memory of weights and their partitions, to which DeepSpeed keeps references."""
    for parameter in parameters:
        for tensor in (parameter, partition_of(parameter)):
            if tensor is not None:
                tensor.data = tensor.data.new_empty(0)
