"""`placement: auto` places the roles as the planner answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.placement import RolePlacements
from hybrid_rlhf.planning.automatic import automatic_answer, choose_placement
from hybrid_rlhf.planning.calibration import Link
from hybrid_rlhf.planning.stored import save_machine
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.world import World, solo_world
from tests.support.errors import user_error
from tests.support.placement import cpu_machine, machine

CPU = torch.device("cpu")


def config_of(model: Path, cache: Path) -> RLConfig:
    line = f"--model.path {model} --reward.components {model} --data.cache_dir {cache} --placement auto"
    return parse_config(RLConfig, line.split())


def test_the_plan_becomes_the_placement(
    model_folder: Path, tmp_path: Path, log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config = config_of(model_folder, tmp_path)
    with user_error("run hybrid-rlhf calibrate, or name a placement"):
        choose_placement(config, solo_world(CPU))
    save_machine(machine(), 1, str(tmp_path))
    with user_error("needs the measured speed of this machine, got none"):
        choose_placement(config, solo_world(CPU))
    save_machine(cpu_machine(), 1, str(tmp_path))
    chosen = choose_placement(config, solo_world(CPU))
    assert isinstance(chosen.placement, RolePlacements)
    assert {role.ranks for role in chosen.placement.roles.values()} == {(0,)}
    assert any("plan in seconds of an RL step: 1 x synthetic" in line for line in log_lines)


def test_a_measured_link_between_hosts_decides(model_folder: Path, tmp_path: Path) -> None:
    """Over a slow one, fewer messages are worth more than ranks."""
    save_machine(cpu_machine(), 2, str(tmp_path))
    config, world = config_of(model_folder, tmp_path), World(0, 2, 0, 1, CPU)
    fast, slow = (automatic_answer(config, world, link=Link(*link)) for link in ((1.0, 10.0), (0.001, 1e6)))
    assert fast.best is not None and slow.best is not None
    assert slow.best.seconds > 2 * fast.best.seconds and slow.machine.network_source == "measured"
    assert any("between hosts: " in line and line.endswith("measured") for line in slow.lines())
