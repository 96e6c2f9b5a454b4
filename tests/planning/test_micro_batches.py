"""The size of micro-batches on a GPU where the settings name none: as large as launches need and memory allows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.planning import micro_batches
from hybrid_rlhf.planning.device import Device
from hybrid_rlhf.planning.machine import DATA_SHEETS
from hybrid_rlhf.planning.micro_batches import (
    filling_tokens,
    halve_micro_batches,
    resolve_micro_batches,
    with_micro_batches,
)
from hybrid_rlhf.planning.phase_memory import AnyStep
from hybrid_rlhf.planning.step_memory import Planner
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.world import World
from tests.support.shapes import write_shape

GRPO = "--algorithm grpo --rollout.prompts_per_step 64 --rollout.sampling.n 8 --rollout.sampling.max_new_tokens 256"


def config_of(kind: type, folder: Path, model: str, more: str = "") -> Any:
    words = [*GRPO.split(), "--reward.components", "{function: rew:score}"] if kind is RLConfig else []
    return parse_config(kind, ["--model.path", write_shape(model, folder), *words, *more.split()])


def chosen(config: AnyStep, machine: str, *, ranks: int = 1, gib: float | None = None) -> int | None:
    sheet = DATA_SHEETS[machine]
    device = sheet.rank(ranks)
    if gib is not None:
        device = replace(device, device_bytes=gib * 2**30)
    sized, why = with_micro_batches(config, Planner(device), sheet.tflops * 1e12)
    assert why
    return int(sized.train.micro_batch_tokens)


@pytest.mark.parametrize(
    ("model", "more", "machine", "tokens"),
    [
        ("Qwen/Qwen2.5-0.5B", "", "h200", 32768),  # 15M weights a layer: launches outlast 24,000 tokens
        ("Qwen/Qwen2.5-0.5B", "", "3090", 8192),
        ("Qwen/Qwen2.5-7B-Instruct", "--actor.lora.rank 8", "h200", 8192),  # 233M weights a layer
    ],
)
def test_the_size_follows_the_layers_of_the_model(
    tmp_path: Path, model: str, more: str, machine: str, tokens: int
) -> None:
    assert chosen(config_of(RLConfig, tmp_path, model, more), machine) == tokens


def test_memory_limits_the_size(tmp_path: Path) -> None:
    """The sizes fall with the memory down to that of 8,192 tokens, which is not refused here."""
    config = config_of(SFTConfig, tmp_path, "Qwen/Qwen2.5-0.5B", "--train.global_batch_size 256")
    sizes = [chosen(config, "h200", gib=gib) for gib in (140, 60, 30, 8)]
    assert sizes[0] == 32768 and sizes[-1] == 8192 and sizes == sorted(sizes, reverse=True)  # type: ignore[type-var]
    assert 16384 in sizes


def test_a_gpu_of_unknown_rate_is_limited_by_memory_alone(tmp_path: Path) -> None:
    config = config_of(SFTConfig, tmp_path, "Qwen/Qwen2.5-0.5B", "--train.global_batch_size 256")
    sized, why = with_micro_batches(config, Planner(DATA_SHEETS["h200"].rank(1)), None)
    assert (
        sized.train.micro_batch_tokens == 65536
        and why == "the rate of this GPU is unknown, and the memory plan has room"
    )


def test_launches_in_closed_form(tmp_path: Path) -> None:
    config = config_of(SFTConfig, tmp_path, "Qwen/Qwen2.5-0.5B")
    hidden, inner, cache = 896, 4864, 2 * 2 * 64
    layer = hidden * (2 * hidden + cache) + hidden + cache + 3 * hidden * inner + 2 * hidden
    planner = Planner(Device(torch.device("cuda"), 1, 2.0**40))
    assert filling_tokens(config, planner, 1e15) == pytest.approx(40 * 20e-6 * 1e15 / (2 * layer), rel=1e-4)


def test_a_size_of_the_settings_stays_and_a_cpu_needs_none(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(micro_batches, "with_micro_batches", pytest.fail)
    config = config_of(SFTConfig, tmp_path, "Qwen/Qwen2.5-0.5B")
    run: Any = SimpleNamespace(world=world, folder=tmp_path)
    assert resolve_micro_batches(config, run) is config and run.micro_batch_tokens == 2048
    run.world = replace(world, device=torch.device("cuda"))
    for more in ("--train.micro_batch_tokens 512", "--train.micro_batch_size 2"):
        sized = config_of(SFTConfig, tmp_path, "Qwen/Qwen2.5-0.5B", more)
        assert resolve_micro_batches(sized, run) is sized


def test_a_run_chooses_once_and_says_why(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(micro_batches, "own_device", lambda ranks, local: DATA_SHEETS["h200"].rank(ranks))
    monkeypatch.setattr(micro_batches, "peak_flops", lambda device: 989e12)
    run: Any = SimpleNamespace(world=replace(world, device=torch.device("cuda")), folder=tmp_path)
    config = config_of(RLConfig, tmp_path, "Qwen/Qwen2.5-0.5B")
    with caplog.at_level("INFO", "hybrid_rlhf"):
        assert resolve_micro_batches(config, run).train.micro_batch_tokens == 32768 == run.micro_batch_tokens
    assert "train.micro_batch_tokens 32,768: products outlast launches from" in caplog.text
    assert halve_micro_batches(run) == 16384 and halve_micro_batches(run) is None, "once"
    with caplog.at_level("INFO", "hybrid_rlhf"):
        assert resolve_micro_batches(config, run).train.micro_batch_tokens == 16384 == run.micro_batch_tokens
    assert "train.micro_batch_tokens 16,384: half of the size with which this run was out of memory" in caplog.text
