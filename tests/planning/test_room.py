"""What a run decides by the memory plan before models are loaded: what does not fit, caches, and kept weights."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.placement import read_placement
from hybrid_rlhf.planning.device import GPU_RESERVE_GIB, Device
from hybrid_rlhf.planning.dotted_keys import with_settings
from hybrid_rlhf.planning.job import read_job
from hybrid_rlhf.planning.phase_memory import PhaseMemory
from hybrid_rlhf.planning.room import misfit, require_room, resolve_keep_weights, resolve_kv_cache
from hybrid_rlhf.planning.step_memory import Planner, lacks_kv_cache
from hybrid_rlhf.rl.roles.placing import log_placement
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.placement import READS_ACTOR, Placement, placed_roles, resolve_placement
from hybrid_rlhf.runtime.world import World
from tests.support.errors import user_error
from tests.support.model_types import tiny_of_type

GPU = torch.device("cuda", 0)
PLENTY = 2.0**50


def config_of(model: Path, placement: str | None, *more: str) -> RLConfig:
    line = (
        f"--model.path {model} --reward.components {model} --rollout.max_prompt_tokens 32 --rollout.kv_cache_gib 0.01"
    )
    sizes = "--rollout.prompts_per_step 16 --rollout.sampling.max_new_tokens 32 --train.micro_batch_tokens 4096"
    return parse_config(
        RLConfig, [*line.split(), *sizes.split(), *(("--placement", placement) if placement else ()), *more]
    )


def with_rollout(config: RLConfig, **changes: Any) -> RLConfig:
    return replace(config, rollout=replace(config.rollout, **changes))


def placed(config: RLConfig, ranks: int) -> Placement:
    return resolve_placement(config.placement, placed_roles(config), ranks=ranks)


def needed(config: RLConfig, ranks: int) -> dict[str, float]:
    """The most that each rank needs, had memory no end."""
    found: dict[str, float] = {}
    planner = Planner(Device(GPU, ranks, PLENTY))
    for each in planner.memory(config, placed(config, ranks)):
        for rank in each.ranks:
            found[str(rank)] = max(found.get(str(rank), 0.0), each.total)
    return found


def let_a_gpu_have(room_bytes: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """So much memory besides what CUDA takes."""
    properties = SimpleNamespace(total_memory=room_bytes + GPU_RESERVE_GIB * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.mark.parametrize(
    "placement", ["interleaving", "{sampler: {ranks: 1}, actor: {ranks: 0}}", "{reference: {zero: 3}}"]
)
def test_one_line_says_where_it_does_not_fit_and_by_how_much(placement: str, model_folder: Path) -> None:
    config = config_of(model_folder, placement)
    most = needed(config, 2)
    rank = max(most, key=lambda name: most[name])
    assert misfit(config, placed(config, 2), Device(GPU, 2, most[rank])) is None
    fault = misfit(config, placed(config, 2), Device(GPU, 2, 0.9 * most[rank]))
    assert fault is not None and "\n" not in fault
    rule, _, advice = fault.partition(" more than its GPU has: ")
    assert rule.startswith(f"placement {placed(config, 2).style} must fit into memory, ") and advice
    found = re.search(r" on ranks? ([\d-]+) needs ([\d.]+) GiB, ([\d.]+)$", rule)
    assert found is not None and rank in found[1]
    assert float(found[2]) == pytest.approx(most[rank] / 2**30, abs=0.01)
    assert float(found[3]) == pytest.approx(0.1 * most[rank] / 2**30, abs=0.01)


def test_the_settings_of_the_advice_fit(model_folder: Path) -> None:
    # the room for CUDA graphs is larger than all else of a tiny model, and no setting of the advice changes it
    config = config_of(model_folder, "interleaving", "--rollout.cuda_graphs", "false")
    machine = Device(GPU, 2, 0.95 * max(needed(config, 2).values()))
    fault = misfit(config, placed(config, 2), machine)
    assert fault is not None and ": set --" in fault
    words = fault.partition(": set ")[2].split()
    settings = {
        key.removeprefix("--"): yaml.safe_load(value) for key, value in zip(words[::2], words[1::2], strict=True)
    }
    changed = with_settings(config, settings)
    assert misfit(changed, placed(changed, 2), machine) is None


def test_what_nothing_makes_fit_needs_another_machine(model_folder: Path) -> None:
    config = config_of(model_folder, "interleaving")
    fault = misfit(config, placed(config, 2), Device(GPU, 2, 1e4))
    assert fault is not None and fault.endswith("use more ranks, or a smaller model")


def test_ranks_of_roles_are_logged_where_there_are_several(model_folder: Path, log_lines: list[str]) -> None:
    plain, lora = config_of(model_folder, None), config_of(model_folder, None, "--actor.lora.rank", "4")
    one, two = (World(0, ranks, 0, ranks, torch.device("cpu")) for ranks in (1, 2))
    log_placement(plain, placed(plain, 1), one)
    assert not log_lines
    log_placement(plain, placed(plain, 2), two)
    assert log_lines[0] == "placement: flattening" and any("  reward: model  0-1 " in line for line in log_lines)
    assert any(line.startswith("  reference ") for line in log_lines) and READS_ACTOR not in log_lines
    log_lines.clear()
    log_placement(lora, placed(lora, 2), two)
    assert READS_ACTOR in log_lines and not any(line.startswith("  reference ") for line in log_lines)


def test_a_named_placement_is_refused_at_start_and_a_run_without_one_is_warned(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    named, plain = config_of(model_folder, "flattening"), config_of(model_folder, None)
    gpu, cpu = (World(0, 1, 0, 1, torch.device(kind)) for kind in ("cuda", "cpu"))
    let_a_gpu_have(PLENTY, monkeypatch)
    require_room(named, placed(named, 1), gpu)
    let_a_gpu_have(0.9 * max(needed(named, 1).values()), monkeypatch)
    with user_error("placement flattening must fit into memory"):
        require_room(named, placed(named, 1), gpu)
    require_room(named, placed(named, 1), cpu)
    assert not log_lines
    require_room(plain, placed(plain, 1), gpu)
    assert any("must fit into memory" in line for line in log_lines)


def test_the_cache_of_sampling_beside_training_is_what_the_plan_leaves(
    model_folder: Path,
) -> None:
    """Without a size, a cache of what is free when sampling starts would take the memory of training."""
    config = config_of(model_folder, "separation", "--rollout.max_lag", "1")
    config = with_rollout(config, kv_cache_gib=None, prompts_per_step=4096)
    where = placed(config, 2)

    def sized(device_bytes: float) -> tuple[float, list[PhaseMemory]]:
        planner = Planner(Device(GPU, 2, device_bytes))
        found = planner.with_kv_cache(config, where).rollout.kv_cache_gib
        assert found is not None
        return found, planner.memory(config, where)

    whole, memory = sized(PLENTY)
    assert not any(each.note for each in memory), "room for all completions at full length"
    most = max(each.total for each in memory)
    little, memory = sized(most - 0.4 * whole * 2**30)
    assert 0 < little < whole and all(each.fits for each in memory)


@pytest.mark.parametrize(
    ("placement", "more", "with_cache"),
    [
        ("separation", "--rollout.max_lag 2", {"generation", "scoring"}),
        ("flattening", "--rollout.max_lag 2", {"generation"}),
        ("flattening", "--rollout.max_lag 1 --rollout.vllm.urls [http://there]", set()),
    ],
)
def test_a_cache_is_planned_where_this_library_samples_beside_training(
    placement: str, more: str, with_cache: set[str], model_folder: Path
) -> None:
    """If ranks alternate, the cache is freed before training; vLLM servers given by URL have their own cache."""
    config = config_of(model_folder, placement, "--rollout.kv_cache_gib", "null", *more.split())
    where = placed(config, 2)
    assert lacks_kv_cache(config, where) == (placement == "separation")
    phases = Planner(Device(GPU, 2, PLENTY)).memory(config, where)
    assert {phase.name for phase in phases if phase.need.cache} == with_cache


def test_weights_are_kept_where_every_phase_has_room(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, on a GPU."""
    config = with_rollout(config_of(model_folder, None), kv_cache_gib=None)
    assert config.rollout.keep_weights == "auto"
    most = max(needed(with_rollout(config, keep_weights=True), 1).values())

    def decided(config: RLConfig, device: str = "cuda") -> bool | str:
        return resolve_keep_weights(config, World(0, 1, 0, 1, torch.device(device), None)).rollout.keep_weights

    let_a_gpu_have(2 * most, monkeypatch)
    assert decided(replace(config, placement=read_placement("separation"))) == "auto", "the sampler decides"
    assert decided(config) is True
    assert decided(config, "cpu") is False
    assert decided(with_rollout(config, keep_weights=False)) is False, "what is set stays"
    assert decided(with_rollout(config, keep_weights=True), "cpu") is True
    assert decided(with_rollout(config, backend="module")) is False
    let_a_gpu_have(0.9 * most, monkeypatch)
    assert decided(config) is False


GRPO = ["--algorithm", "grpo", "--rollout.sampling.n", "2", "--reward.components", "[{function: rewards.py:f}]"]


def test_a_model_whose_memory_cannot_be_planned_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    """A run on a GPU logs a warning and starts. It failed before, and no setting disables the memory check."""
    tiny_of_type("openai-gpt").save_pretrained(tmp_path)
    config = config_of(tmp_path, "flattening", *GRPO)
    world = World(0, 1, 0, 1, GPU)
    let_a_gpu_have(PLENTY, monkeypatch)
    assert resolve_keep_weights(config, world).rollout.keep_weights is False
    require_room(config, placed(config, 1), world)
    assert log_lines[-1].startswith("memory is not checked before the run: a memory plan runs the model on shapes")
    ahead = config_of(tmp_path, "separation", *GRPO, "--rollout.max_lag", "1")
    with user_error("OpenAIGPTLMHeadModel fails there .*: set rollout.kv_cache_gib"):
        resolve_kv_cache(with_rollout(ahead, kv_cache_gib=None), placed(ahead, 2), world)
    assert resolve_kv_cache(ahead, placed(ahead, 2), world) is ahead


@pytest.mark.parametrize("model_type", ["mamba", "rwkv"])
def test_models_without_attention_are_planned(model_type: str, tmp_path: Path) -> None:
    """Runs on a GPU and `hybrid-rlhf plan` raised an AttributeError."""
    tiny_of_type(model_type).save_pretrained(tmp_path)
    config = config_of(tmp_path, None, *GRPO)
    generation, *_ = Planner(Device(GPU, 1, PLENTY)).phases(config)
    assert generation.need.weights > 0 and generation.need.cache == 0 and not generation.note
    assert read_job(config, GPU).actor.sizes.attention_width == 0


@pytest.mark.parametrize(
    ("model_type", "error"),
    [("olmoe", "transformers cannot load .* as a scorer"), ("roberta", "a scorer must have a score per token")],
)
def test_models_that_give_no_scores_are_refused_in_one_line(model_type: str, error: str, tmp_path: Path) -> None:
    """A plan with such a reward model or critic ended in a traceback."""
    tiny_of_type(model_type).save_pretrained(tmp_path)
    with user_error(error):
        Planner(Device(GPU, 1, PLENTY)).phases(config_of(tmp_path, None))


@pytest.mark.parametrize("model_type", ["gpt2", "gemma3"])
def test_layers_are_priced_without_embeddings_and_towers(model_type: str, tmp_path: Path) -> None:
    """Embeddings were recognized by name, which missed those of GPT-2, and vision towers counted as layers."""
    lm: Any = tiny_of_type(model_type)
    lm.save_pretrained(tmp_path)
    layers = lm.transformer.h if model_type == "gpt2" else lm.model.language_model.layers
    sizes = read_job(config_of(tmp_path, None, *GRPO), GPU).actor.sizes
    assert sizes.layers * sizes.layer_weights == sum(weight.numel() for weight in layers.parameters())


def test_the_plan_follows_the_rows_that_are_decoded_together(model_folder: Path) -> None:
    config = with_rollout(config_of(model_folder, None), kv_cache_gib=None, prompts_per_step=512)

    def cache(rows: int | None) -> float:
        planner = Planner(Device(GPU, 1, PLENTY))
        return planner.phases(with_rollout(config, max_decode_rows=rows))[0].need.cache

    row = cache(2) - cache(1)
    assert row > 0 and cache(None) == cache(1) + 511 * row and cache(100) == cache(1) + 99 * row
