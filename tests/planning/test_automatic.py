"""`placement: auto` logs its plan, its errors, and what the measurements would choose."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.placement import RolePlacements, read_placement
from hybrid_rlhf.planning.automatic import MeasuredStep, PlacementWatch, choose_placement
from hybrid_rlhf.planning.curves import MachineCurves
from hybrid_rlhf.planning.job import StepLengths, measured_lengths
from hybrid_rlhf.planning.machines.stored import save_curves
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.world import World, solo_world
from tests.support.errors import user_error
from tests.support.placement import cpu_machine

CPU = torch.device("cpu")


SHORT = (
    "--rollout.prompts_per_step 6 --rollout.sampling.n 2 --rollout.sampling.max_new_tokens 8 "
    "--rollout.max_prompt_tokens 64 --train.micro_batch_tokens 100 --algorithm.mini_batches 2"
)
"""So little work that actor and critic are on ranks of their own."""


def config_line(model: Path, cache: Path, more: str = "") -> list[str]:
    line = f"--model.path {model} --reward.components {model} --data.cache_dir {cache} --placement auto"
    return f"{line} {more}".split()


def config_of(model: Path, cache: Path, more: str = "") -> RLConfig:
    return parse_config(RLConfig, config_line(model, cache, more))


def test_errors_are_told_and_correct_the_curves(model_folder: Path, tmp_path: Path, log_lines: list[str]) -> None:
    save_curves(cpu_machine(), 2, str(tmp_path))
    watch = PlacementWatch.of(config_of(model_folder, tmp_path), World(0, 2, 0, 2, CPU))
    assert watch.answer.best is not None and watch.answer.best.time is not None
    predicted = {**watch.answer.best.time.phases, "step": watch.answer.best.time.step_seconds}
    most = max(watch.answer.best.memory.phases, key=lambda each: each.total)
    took = {most.timed_as: 2 * most.total / 2**30}
    lengths = watch.job.lengths
    first = watch.answer.best
    slow = watch.curves.corrected({"decode": 100.0})
    peaks = [took if rank in most.ranks else {} for rank in range(2)]
    for step in range(1, 6):
        measured = {phase: 2.0 * seconds for phase, seconds in predicted.items()}
        told = watch.metrics(MeasuredStep(measured, lengths, peaks))
        assert told["placement/step_seconds_error"] == pytest.approx(-0.5)
        assert told["placement/predicted_training_seconds"] == predicted["training"]
        of_memory = {name: value for name, value in told.items() if "memory" in name}
        assert of_memory == pytest.approx({f"placement/{most.timed_as}_memory_error": -0.5})
        assert any("predicted and measured seconds of steps 2 to 4" in line for line in log_lines) == (step >= 4)
    corrected = PlacementWatch(replace(watch.job, lengths=lengths), slow, watch.machine).answer.best
    assert corrected is not None and corrected.seconds > first.seconds
    assert watch.metrics(MeasuredStep({}, lengths)) == {}


def test_measured_lengths_replace_the_assumed_ones_before_the_curves_are_corrected(
    model_folder: Path, tmp_path: Path, log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that is as fast as its curves say, nothing is left to correct."""
    save_curves(cpu_machine(), 2, str(tmp_path))
    watch = PlacementWatch.of(config_of(model_folder, tmp_path, SHORT), World(0, 2, 0, 2, CPU))
    ratios: dict[str, float] = {}
    sampled = StepLengths(20.0, (1, 1, 1, 1, 1, 2) * 2)
    took = PlacementWatch(replace(watch.job, lengths=sampled), watch.curves, watch.machine).seconds(watch.plan)
    correct = MachineCurves.corrected

    def corrected(self: MachineCurves, found: Mapping[str, float]) -> MachineCurves:
        ratios.update(found)
        return correct(self, found)

    monkeypatch.setattr(MachineCurves, "corrected", corrected)
    assumed = statistics.fmean(watch.job.lengths.completions)
    assert took["generation"] < 0.7 * watch.seconds(watch.plan)["generation"], "which a wrong curve would explain too"
    for _ in range(4):
        watch.metrics(MeasuredStep(took, sampled))
    found = watch.job.lengths
    assert found.prompt_tokens == sampled.prompt_tokens
    assert sorted(found.completions) == sorted(sampled.completions)
    assert {*ratios} >= {"decode", "prefill", "forward", "backward"}
    assert ratios == pytest.approx(dict.fromkeys(ratios, 1.0), rel=0.02)
    assert any(f"of 1.2 tokens in the mean; the plan assumed {assumed:.1f}" in line for line in log_lines)


def test_lengths_of_some_steps_are_those_of_a_rollout() -> None:
    steps = [StepLengths.of((2, 4, 6), tokens=42), StepLengths.of((8, 10, 12, 14), tokens=44)]
    assert [step.prompt_tokens for step in steps] == [10.0, 0.0] and steps[0].tokens == 42
    found = measured_lengths(steps, prompts=7, per_prompt=1)
    assert sorted(found.completions) == [2, 4, 6, 8, 10, 12, 14]
    assert found.prompt_tokens == pytest.approx(30 / 7)
    assert sorted(measured_lengths(steps, prompts=1, per_prompt=2).completions) == [4, 12]
    assert len(measured_lengths(steps, prompts=7, per_prompt=3).completions) == 21


def test_the_log_has_the_command_that_resumes_under_a_faster_placement(
    model_folder: Path, tmp_path: Path, log_lines: list[str]
) -> None:
    save_curves(cpu_machine(), 2, str(tmp_path))
    config = config_of(model_folder, tmp_path, SHORT)
    watch = PlacementWatch.of(config, World(0, 2, 0, 2, CPU))
    best = watch.answer.best
    assert best is not None and best.time is not None and len(best.plan.sampling.ranks) == 1
    measured = {**best.time.phases, "generation": 1e6 * best.time.phases["generation"], "step": 1e3}
    for _ in range(4):
        watch.metrics(MeasuredStep(measured, watch.job.lengths))
    (line,) = [line for line in log_lines if "is expected to take" in line]
    words = shlex.split(line.split("hybrid-rlhf rl ")[1])
    resumed = parse_config(RLConfig, [*config_line(model_folder, tmp_path, SHORT), *words[2:]])
    assert words[:4] == ["--config", f"{config.output_dir}/config.yaml", "--resume", "auto"]
    assert watch.answer.best is not None and resumed.resume == "auto"
    assert resumed.placement == read_placement(watch.answer.best.plan.placement_setting().as_given())
    assert len(watch.answer.best.plan.sampling.ranks) == 2


def test_the_plan_becomes_the_placement(
    model_folder: Path, tmp_path: Path, log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config = config_of(model_folder, tmp_path)
    with user_error("run hybrid-rlhf calibrate, or name a placement"):
        choose_placement(config, solo_world(CPU))
    save_curves(cpu_machine(), 1, str(tmp_path))
    chosen, watch = choose_placement(config, solo_world(CPU))
    assert isinstance(chosen.placement, RolePlacements) and watch is not None
    assert {role.ranks for role in chosen.placement.roles.values()} == {(0,)}
    assert any("placement plan in seconds of an RL step: 1 x synthetic" in line for line in log_lines)
    assert choose_placement(chosen, solo_world(CPU)) == (chosen, None)
