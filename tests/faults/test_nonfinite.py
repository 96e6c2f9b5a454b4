"""NaN in losses, gradients, values and weights: the step is skipped on all ranks, logged and limited in number."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hybrid_rlhf.functional.losses import LossSum
from hybrid_rlhf.runtime.files.json_lines import read_lines
from hybrid_rlhf.runtime.observability.metrics import read_metrics
from tests.support.faults import intercept, run_step
from tests.support.steps import MODULES, step_line, write_rows


def nan_loss(result: Any, arguments: Sequence[Any]) -> Any:
    """Of a LossSum, alone or first of several."""
    if isinstance(result, LossSum):
        return replace(result, total=result.total * math.nan)
    return (nan_loss(result[0], arguments), *result[1:])


def nan_tensor(result: Any, arguments: Sequence[Any]) -> Any:
    return result * math.nan


def nan_weight(result: Any, arguments: Sequence[Any]) -> Any:
    """After a step of an engine."""
    with torch.no_grad():
        next(arguments[0].module.parameters()).view(-1)[:40].fill_(math.nan)
    return result


def infinite_gradient(result: Any, arguments: Sequence[Any]) -> Any:
    """A finite loss whose gradient is not."""
    return replace(result, total=result.total + (result.total * 0).abs().sqrt())


@dataclass(frozen=True)
class Poison:
    """Changes what some calls of a function return, on one rank or all."""

    place: str
    change: Callable[[Any, Sequence[Any]], Any]
    calls: tuple[int, ...]
    rank: int | None = 0

    def arm(self) -> None:
        def around(call: int, run: Callable[[], Any], arguments: Sequence[Any]) -> Any:
            result = run()
            return self.change(result, arguments) if call in self.calls else result

        intercept(self.place, around)


RL, SUPERVISED = "hybrid_rlhf.rl", "hybrid_rlhf.supervised"
ONCE: dict[str, tuple[Any, ...]] = {
    "critic loss": ("ppo", Poison(f"{RL}.updates.updater:Updater.value_loss", nan_loss, (5,), rank=1), 1),
    "actor loss": ("ppo", Poison(f"{RL}.updates.policy_loss:PolicyLoss.__call__", nan_loss, (6,), rank=0), 0),
    "actor loss, separate": (
        "ppo",
        Poison(f"{RL}.updates.policy_loss:PolicyLoss.__call__", nan_loss, (6,), rank=0),
        0,
        "--placement",
        "separation",
    ),
    "values": ("ppo", Poison(f"{RL}.rollouts.scoring:values_before", nan_tensor, (4,), rank=1), 0),
    "sft loss": ("sft", Poison(f"{SUPERVISED}.objectives.sft:SFTObjective.loss", nan_loss, (4,), rank=1), 1),
    "sft gradient": (
        "sft",
        Poison(f"{SUPERVISED}.objectives.sft:SFTObjective.loss", infinite_gradient, (4,), rank=1),
        1,
    ),
}


@pytest.mark.parametrize(
    "what",
    [pytest.param(what, marks=[] if what in ("critic loss", "sft gradient") else pytest.mark.faults) for what in ONCE],
)
def test_a_step_that_is_not_finite_is_skipped_and_its_rows_are_kept(
    what: str, model_folder: Path, tmp_path: Path
) -> None:
    name, poison, rank, *more = ONCE[what]
    rows, output = write_rows(tmp_path / "rows.jsonl"), tmp_path / "out"
    line = step_line(name, output, model_folder, rows, "--data.eval_fraction", "0", *more)
    assert run_step(MODULES[name], 2, line, poison) == [0, 0]
    lines = read_metrics(output)
    assert [row["step"] for row in lines] == [0, 1, 2, 3, 4, 5, 6]
    skipped = [row.get("faults/skipped_steps", 0) for row in lines]
    assert skipped[0] == 0 and skipped[-1] == 1 and sorted(skipped) == skipped
    first = skipped.index(1)
    found = read_lines(output / "nonfinite" / f"rank_{rank:05}.jsonl")
    assert {row["step"] for row in found} == {first} and found[0].keys() >= (
        {"input_ids"} if name == "sft" else {"prompt", "completion", "score"}
    )
    weights = [
        t for file in output.rglob("*.safetensors") if "checkpoints" not in file.parts for t in load_file(file).values()
    ]
    assert weights and all(bool(t.isfinite().all()) for t in weights)


LASTING = {
    "sft loss": (
        "sft",
        Poison(f"{SUPERVISED}.objectives.sft:SFTObjective.loss", nan_loss, tuple(range(3, 99)), rank=1),
    ),
    "weights": ("ppo", Poison("hybrid_rlhf.engines.engine:ModelEngine.step", nan_weight, (7,), rank=None)),
}


@pytest.mark.parametrize("what", ["sft loss", pytest.param("weights", marks=pytest.mark.faults)])
def test_several_in_a_row_end_the_run_with_advice(what: str, model_folder: Path, tmp_path: Path) -> None:
    name, poison = LASTING[what]
    rows, output = write_rows(tmp_path / "rows.jsonl"), tmp_path / "out"
    line = step_line(name, output, model_folder, rows, "--data.eval_fraction", "0", "--train.eval_every", "0")
    assert run_step(MODULES[name], 2, line, poison, errors=tmp_path / "errors") == [2, 2]
    said = (tmp_path / "errors").read_text()
    assert said.count("error: losses and gradients must be finite, 3 steps in a row are not (") == 1
    assert "Traceback" not in said
    assert "lower optimizer.lr, inspect the rows in" in said
