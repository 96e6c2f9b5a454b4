"""Plans of every recipe's model on every machine of the planner's list: each is an answer, and what it prints runs."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.training import OptimizerConfig
from hybrid_rlhf.planning.device import GPU_RESERVE_GIB, Device
from hybrid_rlhf.planning.job import read_job
from hybrid_rlhf.planning.machine import DATA_SHEETS
from hybrid_rlhf.planning.placement_table import plan_placement
from hybrid_rlhf.planning.plans import StepPlan
from hybrid_rlhf.planning.shapes import BatchShape, ForwardMemory, ShapedModel
from hybrid_rlhf.rl.roles.building import _Builder
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.placement import placed_roles, resolve_placement
from tests.support.commands import CommandLine
from tests.support.marks import slow
from tests.support.shapes import PUBLISHED

MODELS = [name for place, name in enumerate(PUBLISHED) if PUBLISHED[name] not in [*PUBLISHED.values()][:place]]
GRPO = "--algorithm grpo --reward.components '{verifier: math}'"
FOLDS = 8
KINDS = {
    "sft": "sft",
    "grpo": f"rl {GRPO}",
    "grpo with lora": f"rl --actor.lora.rank 16 {GRPO}",
    "ppo": "rl --reward.components '[MODEL]'",
}


@pytest.fixture(scope="module")
def folded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders with the configs of the models, with a part of their layers and without weights."""
    folders = {name: str(tmp_path_factory.mktemp("folded")) for name in MODELS}
    for name, folder in folders.items():
        layers = PUBLISHED[name]["num_hidden_layers"] // FOLDS
        AutoConfig.for_model(**PUBLISHED[name] | {"num_hidden_layers": layers}).save_pretrained(folder)
    return folders


@pytest.fixture
def by_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines with as small a part of their memory, and activations by a rule: to build models of many layers and to
    measure batches takes a minute for each model."""

    def measure(model: ShapedModel, batch: BatchShape, *, backward: bool) -> ForwardMemory:
        config = model.text_config
        tokens = batch.rows * batch.length
        layer = 2.0 * tokens * config.hidden_size * (2 if model.lm.is_gradient_checkpointing else 17)
        kept = layer * config.num_hidden_layers if backward else 0.0
        return ForwardMemory(kept, kept + 17 * layer + 4.0 * batch.head_tokens * batch.rows * config.vocab_size, 0.0)

    monkeypatch.setattr(ShapedModel, "measure", measure)
    for name, sheet in DATA_SHEETS.items():
        part = (sheet.device_gib - GPU_RESERVE_GIB) / FOLDS + GPU_RESERVE_GIB
        monkeypatch.setitem(DATA_SHEETS, name, replace(sheet, device_gib=part))


def asked() -> Iterator[Any]:
    """A model that no 24 GB card trains in `make test`; each kind with each model and with each machine in `make slow`;
    all of them in `make faults`."""
    for (column, model), (row, kind), machine in itertools.product(enumerate(MODELS), enumerate(KINDS), DATA_SHEETS):
        turn = [*DATA_SHEETS][(column + 3 * row) % len(DATA_SHEETS)]
        first = (model, machine) == ("Qwen/Qwen2.5-7B-Instruct", "4090") and kind in ("grpo with lora", "ppo")
        marks = () if first else pytest.mark.slow if machine == turn else pytest.mark.faults
        yield pytest.param(model, kind, machine, marks=marks)


@pytest.mark.parametrize(("model", "kind", "machine"), asked())
def test_every_plan_is_an_answer(
    model: str, kind: str, machine: str, folded: dict[str, str], by_rule: None, cli: CommandLine
) -> None:
    """An error of keys that nobody had given, or no way out where one exists."""
    line = f"plan {KINDS[kind].replace('MODEL', folded[model])} --model.path {folded[model]}"
    code, text, errors = cli(f"{line} --machine {machine} --ranks 1")
    assert code in (0, 1) and "error" not in errors, errors
    assert ("does not fit as configured (" in text) == (code == 1)
    assert code == 0 or re.search(r"does not fit as configured \(.*\): (it fits|no known setting suffices)", text), text


PLANNED = {
    "ppo": "--reward.components [MODEL]",
    "two sections": "--reward.components [MODEL] --critic.zero.stage 2 --actor.zero.stage 1",
    "parameters on the host": f"{GRPO} --actor.zero.stage 3 --actor.zero.offload_parameters true",
    "optimizer on the host": "--reward.components [MODEL] --actor.zero.stage 1 --actor.zero.offload_optimizer true",
    "nf4": f"{GRPO} --model.quantization nf4 --actor.lora.rank 16",
    "lora": f"{GRPO} --actor.lora.rank 16",
    "one base": "--reward.components [MODEL] --actor.lora.rank 16 --critic.share_base true",
    "a lag": f"{GRPO} --rollout.max_lag 1",
}
HOST_AND_LAG = ("parameters on the host", "optimizer on the host", "a lag")
"""Those of which a run refused rows; `make slow` has all."""


@pytest.mark.parametrize("given", [given if given in HOST_AND_LAG else slow(given) for given in PLANNED])
def test_every_row_of_a_plan_runs_as_planned(given: str, folded: dict[str, str], by_rule: None) -> None:
    """Its printed settings are accepted, and memory is where the row counts it: parameters on the host failed under a
    placement with ZeRO 0 to 2, and rows with a policy lag offloaded states or sampled without the lag."""
    model = folded["meta-llama/Llama-3.2-1B-Instruct"]
    words = shlex.split(f"--model.path {model} {PLANNED[given].replace('MODEL', model)}")
    config = parse_config(RLConfig, words)
    styles = set()
    for gib in (5, 20):
        machine = Device(torch.device("cuda"), 2, gib * 2**30)
        job = read_job(config, machine.device)
        found = plan_placement(job, DATA_SHEETS["h100"], machine, listed=9).result
        for plan in {repr(row.plan): row.plan for row in (*found.ranked, *found.fastest[:20])}.values():
            options = {"placement": json.dumps(plan.placement_setting().as_given()), **plan.settings(config)}
            pasted = [word for key, value in options.items() for word in (f"--{key}", str(value).lower())]
            again = parse_config(RLConfig, [*words, *pasted])
            placement = resolve_placement(again.placement, placed_roles(again), ranks=machine.ranks)
            mine = StepPlan.of(again, placement)
            assert mine.roles == plan.roles, plan
            assert (mine.offload_frozen, mine.offload_states) == (plan.offload_frozen, plan.offload_states), plan
            run: Any = SimpleNamespace(world=SimpleNamespace(device=machine.device))
            for role in job.learners:
                spec = _Builder(again, run, placement, 1)._trained(role.name, model, OptimizerConfig(), None)
                assert spec.zero == plan.residency(job)[role.name].zero(plan.roles[role.name].zero), plan
            styles.add(plan.placement.style)
    assert "flattening" in styles
