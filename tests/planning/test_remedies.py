"""Remedies on a machine whose memory and times are sums of what settings take, against all combinations of settings."""

from __future__ import annotations

import contextlib
import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from hybrid_rlhf.cli.machine.plan import _unplanned
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.planning.device import Device
from hybrid_rlhf.planning.dotted_keys import Settings, with_settings
from hybrid_rlhf.planning.engine_memory import MemoryUse
from hybrid_rlhf.planning.phase_memory import PhaseMemory
from hybrid_rlhf.planning.remedies import nearest, remedies, tensor_parallel_sizes
from hybrid_rlhf.runtime.command_line import parse_config

GIB = 2.0**30
CONFIG = parse_config(
    RLConfig,
    "--algorithm grpo --model.path none --reward.components [reward] --rollout.sampling.n 4 "
    "--rollout.sampling.max_new_tokens 1024 --rollout.kv_cache_gib 0.5 --train.micro_batch_tokens 512".split(),
)


@dataclass
class SummedPlanner:
    """Generation and training of a model of 70 GiB, or 20 GiB in 4 bits, on 16 ranks of two hosts or more."""

    machine: Device

    def phases(self, config: RLConfig) -> list[PhaseMemory]:
        """By rule, like the memory plan's."""
        zero, lora = config.actor.zero, config.actor.lora is not None
        ranks = self.machine.ranks
        base = 20.0 if config.model.quantization else 70.0
        weights = 0.0 if zero.offload_parameters else base / (ranks if zero.stage == 3 else 1)
        states = 210.0
        if config.actor.optimizer.name == "adamw_8bit":
            if zero.stage == 3 or zero.offload_optimizer:
                raise UserError("as deepspeed_config")
            states = 105.0
        optimizer = 0.0 if zero.offload_optimizer or lora else states / (ranks if zero.stage else 1)
        host = (210.0 / ranks if zero.offload_optimizer and not lora else 0.0) + 70.0 / ranks * zero.offload_parameters
        kept = 0.0 if config.rollout.offload_states else optimizer
        # ZeRO-3 copies inference weights, where other stages use views
        together = config.rollout.tensor_parallel
        inference = base / together if zero.stage == 3 or together > 1 else 0.0
        passing = 4.0 if config.model.gradient_checkpointing else 30.0
        passing -= 2.0 * config.model.activation_offload
        passing *= config.rollout.sampling.max_new_tokens / 1024
        found = {"generation": weights + kept + inference, "actor training": weights + optimizer + passing}
        return [PhaseMemory(n, MemoryUse(weights=v * GIB, host=host * GIB), self.machine) for n, v in found.items()]


def seconds(config: RLConfig) -> float:
    """Of a step, by its settings."""
    return 10.0 * config.actor.zero.stage + config.rollout.tensor_parallel


def planner(device_gib: float, host_gib: float | None = None) -> Any:
    host = None if host_gib is None else host_gib * GIB
    return SummedPlanner(Device(torch.device("cuda"), 16, device_gib * GIB, host, ranks_per_host=8))


CHOICES = {
    "model.gradient_checkpointing": (None, True),
    "model.activation_offload": (None, True),
    "actor.zero.stage": (None, 1, 2, 3),
    "actor.zero.offload_optimizer": (None, True),
    "actor.zero.offload_parameters": (None, True),
    "rollout.offload_states": (None, True),
    "rollout.tensor_parallel": (None, 2, 4, 8, 16),
}


@functools.cache
def every_config() -> dict[frozenset[tuple[str, Any]], RLConfig]:
    """The config of each combination of settings that the rules allow, without adapters."""
    configs = {}
    for values in itertools.product(*CHOICES.values()):
        settings = {key: value for key, value in zip(CHOICES, values, strict=True) if value is not None}
        with contextlib.suppress(UserError):
            configs[frozenset(settings.items())] = with_settings(CONFIG, settings)
    return configs


def every_minimal(planner: SummedPlanner) -> list[Settings]:
    """Settings with which a step fits and of which none can be left out, by brute force."""
    fitting = {
        settings for settings, config in every_config().items() if all(phase.fits for phase in planner.phases(config))
    }
    return [dict(settings) for settings in fitting if not any(settings - {item} in fitting for item in settings)]


@pytest.mark.parametrize("device_gib", [309.0, 200.0, 105.0, 60.0, 40.0, 25.0, 14.0])
def test_a_remedy_is_one_of_the_minimal_ones(device_gib: float) -> None:
    """Settings were dropped cheapest first, which left some that nothing needed, and tensor parallelism over all ranks
    was the only one offered."""
    machine = planner(device_gib)
    minimal = every_minimal(machine)
    found = remedies(machine, CONFIG, seconds)[0]
    assert found.settings in minimal
    assert found.seconds == seconds(with_settings(CONFIG, found.settings))
    assert remedies(machine, CONFIG)[0] == replace(found, seconds=None)
    needs_host = all(any("offload" in key for key in settings) for settings in minimal)
    assert found.uses_host <= needs_host, "only where nothing else suffices"


def test_adapters_are_advised_beside_what_needs_host_memory() -> None:
    full, adapted = remedies(planner(14.0), CONFIG, seconds)
    assert full.settings["actor.zero.offload_optimizer"] and full.host_bytes == pytest.approx(210 / 16 * GIB)
    words = full.in_words("rl.")
    assert "GiB of host memory per rank" in words and "--rl.actor.zero.offload_optimizer true" in words
    assert adapted.settings["actor.lora.rank"] == 16 and adapted.host_bytes == 0 and "host" not in adapted.in_words()
    assert [each.settings for each in remedies(planner(14.0, host_gib=4.0), CONFIG, seconds)] == [adapted.settings]
    assert len(remedies(planner(309.0), CONFIG, seconds)) == 1


def test_moments_in_8_bits_are_advised_before_adapters() -> None:
    """In addition to a remedy that needs host memory; not on a CPU, where they are refused, nor twice."""
    one_gpu = SummedPlanner(Device(torch.device("cuda"), 1, 180 * GIB))
    whole, eight = remedies(one_gpu, CONFIG)
    assert whole.uses_host and eight.settings["actor.optimizer.name"] == "adamw_8bit" and not eight.uses_host
    assert all(phase.fits for phase in one_gpu.phases(with_settings(CONFIG, eight.settings)))
    ppo = parse_config(RLConfig, ["--model.path", "none", "--reward.components", "[reward]"])
    (of_all,) = (each.settings for each in remedies(one_gpu, ppo)[1:])
    assert of_all["actor.optimizer.name"] == of_all["critic.optimizer.name"] == "adamw_8bit"
    for machine, given in (
        (replace(one_gpu.machine, device=torch.device("cpu")), CONFIG),
        (
            replace(one_gpu.machine, device_bytes=170 * GIB),
            with_settings(CONFIG, {"actor.optimizer.name": "adamw_8bit"}),
        ),
    ):
        found = remedies(SummedPlanner(machine), given)
        assert not any("actor.optimizer.name" in remedy.settings for remedy in found)


def test_4_bits_are_advised_where_all_else_needs_the_host() -> None:
    """A base model that fits in 4 bits was only offered with its parameters in host memory."""
    whole, adapted, four_bit = remedies(planner(5.0), CONFIG, seconds)
    assert whole.uses_host and adapted.uses_host and adapted.settings["actor.lora.rank"] == 16
    assert four_bit.settings["model.quantization"] == "nf4" and four_bit.settings["actor.lora.rank"] == 16
    given = with_settings(CONFIG, {"actor.lora.rank": 16})
    assert [each.settings.get("model.quantization") for each in remedies(planner(5.0), given, seconds)] == [None, "nf4"]


def test_few_and_cheap_settings_are_preferred() -> None:
    assert remedies(planner(309.0), CONFIG)[0].settings == {"model.gradient_checkpointing": True}
    assert remedies(planner(1.0), CONFIG) == []


@pytest.mark.parametrize(
    ("device_gib", "expected"),
    [(4.0, [None, 32]), (0.0, [])],
    ids=["4 bits or more ranks fit", "nothing does"],
)
def test_what_comes_nearest_fits(device_gib: float, expected: list[int | None]) -> None:
    """The line said to use more ranks or a smaller model, not how many, nor what else suffices."""
    machine = planner(device_gib)
    assert remedies(machine, CONFIG) == []
    nearby = nearest(machine, CONFIG, ranks_per_host=8)
    for remedy in nearby:
        ranks = remedy.ranks or 16
        larger = replace(machine, machine=replace(machine.machine, ranks=ranks))
        assert all(phase.fits for phase in larger.phases(with_settings(CONFIG, remedy.settings)))
    assert [remedy.ranks for remedy in nearby] == expected, nearby


def test_a_remedy_without_what_a_placement_decides_follows_the_rules() -> None:
    """`plan` searches placements with the rest of a remedy, and parameters on the host want the stage that it had: the
    plan of a model too large for one GPU ended with an error of keys that nobody had given."""
    for settings in map(dict, every_config()):
        assert settings.items() >= _unplanned(settings).items()
        with_settings(CONFIG, _unplanned(settings))


def test_groups_fill_a_host_before_they_cross_hosts() -> None:
    machine = planner(1.0).machine
    assert tensor_parallel_sizes(machine) == [2, 4, 8, 16]
    assert tensor_parallel_sizes(replace(machine, ranks=128), above=2) == [4, 8, 16, 32, 64, 128]
    assert tensor_parallel_sizes(replace(machine, ranks=12, ranks_per_host=6)) == [2, 6, 12]
    assert tensor_parallel_sizes(replace(machine, ranks=1, ranks_per_host=None)) == []
