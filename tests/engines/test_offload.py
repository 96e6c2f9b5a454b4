"""What lives elsewhere, or is shared, computes what it would: activations and frozen weights on the host, one base."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

from hybrid_rlhf.configs.sections.model import LoraConfig, ModelConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.training import ZeroConfig
from hybrid_rlhf.engines.builder import EngineSpec, build_actor, build_engine
from hybrid_rlhf.engines.deepspeed_internals import (
    copied_to_host,
    master_partitions,
    use_host_buffers,
    wrapped_optimizer,
)
from hybrid_rlhf.engines.partition import base_parameters, copy_weights
from hybrid_rlhf.engines.residency import offload
from hybrid_rlhf.engines.residency.offload import OffloadedStates
from hybrid_rlhf.engines.saved.training_state import TrainingState
from hybrid_rlhf.generation import SamplingParams
from hybrid_rlhf.models import activation_offload
from hybrid_rlhf.models.activation_offload import ActivationOffload, HostBlocks
from hybrid_rlhf.runtime.world import World
from tests.support.engines import accumulate, actor_spec, token_rows, train_step, training_logprobs
from tests.support.marks import faults, slow
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_model


def read(engine: Any) -> torch.Tensor:
    return training_logprobs(engine, token_rows())


def offloaded_activations(world: World, path: Path) -> dict[str, Any]:
    """Losses over three updates with and without, what moved, and whether it was ever a weight."""
    activation_offload._LEAST_BYTES = 64
    told: dict[str, Any] = {}
    for name, stage, lora, checkpointing in (
        ("plain", 0, 0, False),
        ("adapters", 2, 4, False),
        ("checkpointing", 0, 0, True),
        ("partitioned", 3, 0, False),
        ("partitioned, checkpointing", 3, 4, True),
    ):
        losses, moved, weights = [], 0, 0
        for offloads in (False, True):
            config = ModelConfig(dtype="float32", gradient_checkpointing=checkpointing, activation_offload=offloads)
            engine = build_engine(replace(actor_spec(path, stage=stage, lora=lora), model=config), world)
            parts = {p.data_ptr() for p in engine.module.parameters()}
            pack = ActivationOffload._to_host

            def watched(self: Any, tensor: torch.Tensor, pack: Any = pack, parts: set[int] = parts) -> Any:
                nonlocal moved, weights
                moved += tensor.nbytes
                weights += tensor.untyped_storage().data_ptr() in parts
                return pack(self, tensor)

            ActivationOffload._to_host = watched  # type: ignore[method-assign]
            losses.append([train_step(engine, world) for _ in range(3)])
            ActivationOffload._to_host = pack  # type: ignore[method-assign]
        told[name] = (*losses, moved, weights)
    return told


@pytest.mark.parametrize("ranks", [slow(1), faults(2)])
def test_activations_come_back_from_the_host_as_they_were(ranks: int, model_folder: Path, tmp_path: Path) -> None:
    for told in run_ranks(offloaded_activations, ranks, tmp_path, model_folder):
        for name, (plain, offloaded, moved, weights) in told.items():
            assert plain == offloaded, name
            assert moved > 0 and weights == 0, name
        assert told["checkpointing"][2] < told["plain"][2] / 3, "a layer keeps one tensor"


def test_activations_fill_blocks_of_one_size() -> None:
    """torch rounds pinned memory up to a power of two for each allocation: 1.9 times a 7B model, tensor by tensor."""
    whole = torch.arange(24_000, dtype=torch.float32).view(40, 20, 30)
    tensors = [
        whole,
        whole.transpose(0, 2),
        whole[3:, :7],
        whole[:1].expand(5, -1, -1),
        whole > 7,
        whole[:0],
        whole[0, 0, 0],
    ]
    for block_bytes in (1000, 2**20):
        host = HostBlocks(block_bytes)
        kept = [host.put(tensor) for tensor in tensors]
        blocks = [piece.untyped_storage() for _, pieces in kept for piece in pieces]
        assert {block.nbytes() for block in blocks} == {block_bytes}
        needed = -(-sum(tensor.nbytes for tensor in tensors) // block_bytes)
        assert len({block.data_ptr() for block in blocks}) == needed
        for tensor, (form, pieces) in zip(tensors, kept, strict=True):
            found = host.get(form, pieces, torch.device("cpu"))
            assert torch.equal(found, tensor) and found.stride() == torch.empty_like(tensor).stride()


def test_what_moves_to_the_host_is_in_one_block() -> None:
    """As above; and a state that was replaced by one of another shape must not find the buffer of the old one."""
    tensors = [torch.ones(3, 5), torch.ones(7, dtype=torch.bfloat16), torch.ones(4, 6).T, torch.ones(0)]
    buffers = offload.host_buffers(tensors, torch.device("cpu"))
    (storage,) = {buffer.untyped_storage().data_ptr() for buffer in buffers}
    assert buffers[0].untyped_storage().nbytes() <= 2 * offload._PAGE and buffers[0].data_ptr() % offload._PAGE == 0
    for number, (tensor, buffer) in enumerate(zip(tensors, buffers, strict=True)):
        assert (tensor.shape, tensor.stride(), tensor.dtype) == (buffer.shape, buffer.stride(), buffer.dtype)
        buffer.fill_(number)
    assert all(bool((buffer == number).all()) for number, buffer in enumerate(buffers)), "they do not overlap"


def test_states_may_move_before_there_are_any(model_folder: Path, world: World) -> None:
    """In float32 without ZeRO, in the first rollout and in an evaluation before training."""
    actor = build_actor(actor_spec(model_folder), world)
    states = OffloadedStates(actor.deepspeed_engine, world.device)
    with states.on_host():
        pass
    train_step(actor, world)
    with states.on_host():
        pass
    train_step(actor, world)


def test_a_state_of_another_shape_takes_another_buffer(model_folder: Path, world: World) -> None:
    """The id of a state that is gone may return with another shape; the same states reuse their buffers."""
    actor = build_actor(actor_spec(model_folder, stage=1), world)
    train_step(actor, world)
    states = OffloadedStates(actor.deepspeed_engine, world.device)
    moment = next(iter(wrapped_optimizer(actor.deepspeed_engine).state.values()))["exp_avg"]
    places = []
    for size in (len(moment), len(moment), 2 * len(moment)):
        moment.data = torch.arange(size, dtype=torch.float32)
        with states.on_host():
            assert torch.equal(moment, torch.arange(size, dtype=torch.float32))
            places.append(moment.data_ptr())
        assert torch.equal(moment, torch.arange(size, dtype=torch.float32))
    assert places[0] == places[1]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_takes_the_buffers_for_what_it_moves(stage: int, model_folder: Path, world: World) -> None:
    """It would make pinned ones of its own, which are rounded up to a power of two."""
    actor = build_actor(actor_spec(model_folder, stage=stage), world)
    engine = actor.deepspeed_engine
    train_step(actor, world)
    moved = copied_to_host(engine)
    expected = [tensor.clone() for tensor in moved]
    for _ in range(2):
        buffers = offload.host_buffers(moved, world.device)
        use_host_buffers(engine, buffers)
        kind = OffloadStateTypeEnum.lp_grads if stage == 3 else OffloadStateTypeEnum.hp_params
        engine.offload_states(include=(kind,), pin_memory=True)  # nothing is pinned on a CPU
        assert [tensor.data_ptr() for tensor in copied_to_host(engine)] == [tensor.data_ptr() for tensor in buffers]
        engine.reload_states()
        assert all(map(torch.equal, copied_to_host(engine), expected))
    train_step(actor, world)


def test_frozen_weights_are_on_the_device_only_in_use(model_folder: Path, world: World, tmp_path: Path) -> None:
    """A reference between uses, in use, and after it took the actor's weights."""
    tiny_model(seed=5).save_pretrained(tmp_path / "other")
    config = EngineSpec("reference", str(model_folder), ModelConfig(dtype="float32"), ZeroConfig(), 0)
    plain, offloaded = build_engine(config, world), build_engine(replace(config, offload_weights=True), world)
    weights = list(offloaded.module.parameters())
    places = [parameter.data_ptr() for parameter in weights]
    expected = read(plain)
    for _ in range(2):
        with offloaded.on_device():
            assert not {parameter.data_ptr() for parameter in weights} & set(places)
            assert torch.equal(read(offloaded), expected)
        assert [parameter.data_ptr() for parameter in weights] == places
    actor = build_engine(actor_spec(tmp_path / "other"), world)
    copy_weights(actor.lm, offloaded.lm)
    with offloaded.on_device():
        assert torch.equal(read(offloaded), read(actor)) and not torch.equal(read(offloaded), expected)
    with plain.on_device():
        assert torch.equal(read(plain), expected)


class LateCopies:
    """Copies as a busy GPU makes them: only when something waits for them. Until then the target is not a number."""

    def __init__(self, device: torch.device) -> None:
        self._started: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._made = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._started.append((target.fill_(torch.nan), source))

    def mark(self) -> int:
        return len(self._started)

    def wait(self, mark: int | None) -> None:
        for target, source in self._started[self._made : mark or 0]:
            target.copy_(source)
        self._made = max(self._made, mark or 0)


@pytest.mark.parametrize(
    ("stage", "dtype"), [(2, "float32"), (3, "float32"), (0, "bfloat16"), faults(0, "float32"), faults(3, "bfloat16")]
)
def test_nothing_reads_what_has_not_arrived(
    stage: int, dtype: str, model_folder: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is computed with copies that arrive late is what is computed without any."""
    config = EngineSpec("reference", str(model_folder), ModelConfig(dtype="float32"), ZeroConfig(), 0)
    expected = read(build_engine(config, world))
    actors = [build_actor(actor_spec(model_folder, stage=stage, dtype=dtype), world)]
    monkeypatch.setattr(offload, "CopyStream", LateCopies)
    reference = build_engine(replace(config, offload_weights=True), world)
    with reference.on_device():
        for layer in reference.lm.model.layers:
            assert all(bool(weight.isnan().all()) for weight in layer.parameters()), "no layer has arrived"
        assert torch.equal(read(reference), expected)
    offloads = RolloutConfig(offload_states=True)
    actors.append(build_actor(actor_spec(model_folder, stage=stage, dtype=dtype), world, rollout=offloads))
    results: list[list[Any]] = []
    for actor in actors:
        results.append([train_step(actor, world)])
        for _ in range(2):
            with actor.inference(stop_token_ids=()) as generation:
                ((completion,),) = generation.generate([[5, 6, 7]], SamplingParams(max_new_tokens=4, seed=3))
            results[-1] += [completion.token_ids, train_step(actor, world)]
    assert results[0] == results[1]
    with actor.inference():
        pass
    assert all(bool(tensor.isfinite().all()) for _, tensor in TrainingState(actor).tensors()), "what a checkpoint has"


def test_bfloat16s_states_leave_the_device_as_a_whole(model_folder: Path, world: World) -> None:
    """Its optimizer keeps views of gradients, master weights and moments, which would keep their memory."""
    actor = build_actor(actor_spec(model_folder, dtype="bfloat16"), world)
    train_step(actor, world)
    engine = actor.deepspeed_engine
    gradients = engine.optimizer.fp32_groups_gradients_flat
    assert not any(flat.untyped_storage().nbytes() for flat in gradients), "freed between updates"
    moments = [state["exp_avg"] for state in wrapped_optimizer(engine).state.values()]
    kept = [weakref.ref(tensor.untyped_storage()) for tensor in (*master_partitions(engine), *moments)]
    with OffloadedStates(engine, world.device).on_host():
        assert not any(storage() for storage in kept)
    train_step(actor, world)


def critics(world: World, path: Path, stages: tuple[int, ...]) -> bool:
    """A critic on the actor's base learns as one with a base of its own, and neither changes the other."""
    for stage in stages:
        actor = build_actor(actor_spec(path, stage=stage, lora=4), world)
        lora = LoraConfig(rank=2, target_modules=["q_proj", "down_proj"])
        config = replace(actor_spec(path, stage=stage), role="critic", lora=lora)
        own, shared = build_engine(config, world), build_engine(replace(config, base=actor.lm), world)
        base = {name: p.data_ptr() for name, p in base_parameters(actor.lm.base_model)}
        ids = token_rows()[world.rank :: world.size]
        mask = torch.ones_like(ids, dtype=torch.bool)
        logprobs = read(actor)
        for critic in (own, shared):
            for _ in range(3):
                critic.backward(critic(ids, mask).square().sum(), count=40)
                critic.step()
        assert torch.equal(own(ids, mask), shared(ids, mask)), stage
        assert torch.equal(read(actor), logprobs)
        values = shared(ids, mask).detach()
        accumulate(actor, world)
        actor.step()
        assert not torch.equal(read(actor), logprobs)
        with actor.inference(stop_token_ids=()) as generation:
            generation.generate([[5, 6, 7]], SamplingParams(max_new_tokens=2))
        assert torch.equal(values, shared(ids, mask))
        assert {name: p.data_ptr() for name, p in base_parameters(shared.lm.base_model)} == base
    return True


@pytest.mark.parametrize(
    ("ranks", "stages"),
    [(2, (0, 2)), faults(2, (1,)), faults(1, (0, 1, 2))],
)
def test_a_critic_may_be_a_second_adapter(
    ranks: int, stages: tuple[int, ...], model_folder: Path, tmp_path: Path
) -> None:
    assert all(run_ranks(critics, ranks, tmp_path, model_folder, stages))
