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
from tests.support.faults import intercept
from tests.support.marks import faults


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


POLICY = "hybrid_rlhf.rl.updates.policy_loss:PolicyLoss.__call__"
SFT = "hybrid_rlhf.supervised.objectives.sft:SFTObjective.loss"
CRITIC = "hybrid_rlhf.rl.updates.updater:Updater.value_loss"
VALUES = "hybrid_rlhf.rl.rollouts.scoring:values_before"


@pytest.mark.parametrize(
    ("name", "poison", "rank", "more"),
    [
        ("ppo", Poison(CRITIC, nan_loss, (5,), rank=1), 1, ""),
        faults("ppo", Poison(POLICY, nan_loss, (6,)), 0, ""),
        faults("ppo", Poison(POLICY, nan_loss, (6,)), 0, "--placement separation"),
        faults("ppo", Poison(VALUES, nan_tensor, (4,), rank=1), 0, ""),
        faults("sft", Poison(SFT, nan_loss, (4,), rank=1), 1, ""),
        ("sft", Poison(SFT, infinite_gradient, (4,), rank=1), 1, ""),
    ],
    ids=["critic loss", "actor loss", "actor loss, separate", "values", "sft loss", "sft gradient"],
)
def test_a_step_that_is_not_finite_is_skipped_and_its_rows_are_kept(
    name: str, poison: Poison, rank: int, more: str, tiny_run: Callable[..., list[int]], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    assert tiny_run(name, f"--data.eval_fraction 0 {more}", armed=poison) == [0, 0]
    lines = read_metrics(output)
    assert [row["step"] for row in lines] == [0, 1, 2, 3, 4, 5, 6]
    skipped = [row.get("faults/skipped_steps", 0) for row in lines]
    assert skipped[0] == 0 and skipped[-1] == 1 and sorted(skipped) == skipped
    found = read_lines(output / "nonfinite" / f"rank_{rank:05}.jsonl")
    assert {row["step"] for row in found} == {skipped.index(1)}
    other = output / "nonfinite" / f"rank_{1 - rank:05}.jsonl"
    assert other.exists() == (poison.change is infinite_gradient), "only an infinite gradient accuses all ranks"
    assert found[0].keys() >= ({"input_ids"} if name == "sft" else {"prompt", "completion", "score"})
    files = [file for file in output.rglob("*.safetensors") if "checkpoints" not in file.parts]
    assert files and all(bool(tensor.isfinite().all()) for file in files for tensor in load_file(file).values())


@pytest.mark.parametrize(
    ("name", "poison"),
    [
        ("sft", Poison(SFT, nan_loss, tuple(range(3, 99)), rank=1)),
        faults("ppo", Poison("hybrid_rlhf.engines.engine:ModelEngine.step", nan_weight, (7,), rank=None)),
    ],
    ids=["sft loss", "weights"],
)
def test_several_in_a_row_end_the_run_with_advice(
    name: str, poison: Poison, tiny_run: Callable[..., list[int]], tmp_path: Path
) -> None:
    more = "--data.eval_fraction 0 --train.eval_every 0"
    assert tiny_run(name, more, armed=poison, errors=tmp_path / "errors") == [2, 2]
    said = (tmp_path / "errors").read_text()
    assert said.count("error: losses and gradients must be finite, 3 steps in a row are not (") == 1
    assert "Traceback" not in said
    assert "lower optimizer.lr, inspect the rows in" in said
