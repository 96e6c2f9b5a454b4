"""The same seed gives the same losses whatever the ZeRO stage, the ranks and the micro-batches: all steps."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from hybrid_rlhf.runtime.files.json_lines import read_lines
from hybrid_rlhf.runtime.files.names import METRICS_FILE
from tests.support.families import variant
from tests.support.marks import faults, slow
from tests.support.ranks import run_main
from tests.support.steps import words, write_lines
from tests.support.tiny import tiny_tokenizer

TOLERANCE = 1e-4
STEPS = {
    "sft": ("hybrid_rlhf.cli.sft", ["sft/loss", "grad_norm", "eval/loss"]),
    "moe": (
        "hybrid_rlhf.cli.sft",
        ["sft/loss", "sft/router_aux_loss", "sft/router_z_loss", "sft/router_max_share", "grad_norm", "eval/loss"],
    ),
    "reward": ("hybrid_rlhf.cli.reward", ["reward/loss", "reward/accuracy", "grad_norm", "eval/loss"]),
    "listwise": ("hybrid_rlhf.cli.reward", ["reward/loss", "reward/accuracy", "grad_norm", "eval/loss"]),
    "steps": ("hybrid_rlhf.cli.reward", ["reward/loss", "reward/accuracy_b", "grad_norm", "eval/loss"]),
    "dpo": ("hybrid_rlhf.cli.preference", ["preference/loss", "preference/margin", "grad_norm", "eval/loss"]),
    "kto": ("hybrid_rlhf.cli.preference", ["preference/loss", "preference/kl", "grad_norm", "eval/loss"]),
    "ppo": (
        "hybrid_rlhf.cli.rl",
        [
            "loss/policy",
            "loss/value",
            "objective/kl",
            "objective/scores",
            "policy/approxkl",
            "actor/grad_norm",
            "eval/scores",
        ],
    ),
}
MICRO_BATCHES = {
    **{str(rows): f"--train.micro_batch_size {rows}" for rows in (1, 2, 4, 8)},
    "100 tokens": "--train.micro_batch_tokens 100",
    "in parts": "--train.micro_batch_tokens 100 --model.sequence_parallel 2 --model.mlp_parts 3",
    "split weights": "--train.micro_batch_tokens 100 --model.tensor_parallel 2",
    "padded": "--train.micro_batch_tokens 100 --model.attention eager",
}
OPTIONS = {
    "moe": "--model.router_aux_loss_coef 0.1 --model.router_z_loss_coef 0.01",
    "listwise": "--objective.loss listwise",
    "steps": "--objective.loss steps --objective.heads [a,b]",
    "dpo": "--algorithm dpo --optimizer.warmup_fraction 0",
    "kto": "--algorithm kto --optimizer.warmup_fraction 0",
}
"""Options of single steps."""
LAYOUTS = [
    (1, 2, "4"),
    (1, 3, "2"),
    (1, 0, "padded"),
    (2, 0, "2"),
    (2, 2, "1"),
    (2, 3, "100 tokens"),
    (2, 1, "in parts"),
    (2, 3, "in parts"),
    (2, 2, "split weights"),
    (2, 3, "split weights"),
    (2, 0, "split weights"),
]
"""Ranks, ZeRO stage, micro-batches; each is held against one rank, stage 0, packed micro-batches of 8."""
COVERING = {
    "sft": (5, 6),
    "moe": (1,),
    "reward": (9,),
    "listwise": (4,),
    "steps": (2,),
    "dpo": (0, 7),
    "kto": (2,),
    "ppo": (3,),
}
"""Layouts of each step that `make test` runs, or `make slow`; `make faults` runs all."""


def _mark(name: str, place: int) -> Any:
    if place not in COVERING[name]:
        return pytest.mark.faults
    return pytest.mark.slow if (name, place) in (("reward", 9), ("dpo", 7), ("listwise", 4)) else []


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("invariance")
    rows = [
        {"prompt": f"{i}+{i % 7}?", "chosen": "=" * (1 + i % 5) + str(i + i % 7), "rejected": "x" * (1 + i % 9)}
        for i in range(40)
    ]
    lists = [
        {
            "prompt": f"{i}+{i % 7}?",
            "responses": [str(i), "x" * (1 + i % 9), "y" * (1 + i % 4)],
            "ranks": [1, 2, 2 + i % 2],
            "completions": ["=" * (1 + i % 5), str(i), "x"],
            "labels": [1, i % 2, 0],
            "head": "ab"[i % 2],
        }
        for i in range(40)
    ]
    for name, content in (("rows", rows), ("lists", lists)):
        write_lines(folder / f"{name}.jsonl", content)
    (folder / "model").symlink_to(model_folder)
    for part in (variant("qwen2_moe"), tiny_tokenizer()):
        part.save_pretrained(folder / "moe")
    return folder


def launch(name: str, workspace: Path, *more: str, ranks: int = 1, stage: int = 0, micro: str = "8") -> Path:
    """The folder of three updates of a step."""
    line = words(*options(name, workspace, stage), MICRO_BATCHES[micro], *more)
    output = workspace / hashlib.sha256(repr((name, ranks, line)).encode()).hexdigest()
    if not (output / "finished.json").exists():
        run_main(STEPS[name][0], ranks, [*line, f"--output_dir={output}"])
    return output


def lines_of(*given: Any, **how: Any) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of such a run."""
    return read_lines(launch(*given, **how) / METRICS_FILE)


def options(name: str, workspace: Path, stage: int) -> list[str]:
    rows = "lists" if name in ("listwise", "steps") else "rows"
    common = (
        f"--data.sources {workspace}/{rows}.jsonl --data.cache_dir {workspace}/cache --data.eval_fraction 0.2 "
        f"--model.path {workspace}/{'moe' if name == 'moe' else 'model'} --logging.sinks [] --train.max_steps 3 "
        "--seed 3"
    )
    if name != "ppo":
        line = f"--data.max_length 64 --optimizer.lr 1e-3 --train.global_batch_size 8 --zero.stage {stage}"
        live = "--reference.logprobs live" if name == "dpo" and stage == 3 else ""
        return [common, line, OPTIONS.get(name, ""), live]
    return [
        common,
        f"--reward.components {launch('reward', workspace)} --rollout.max_prompt_tokens 64",
        "--rollout.prompts_per_step 8 --rollout.sampling.n 2 --rollout.sampling.max_new_tokens 8",
        "--algorithm.epochs 2 --algorithm.mini_batches 2",
        f"--actor.optimizer.lr 1e-3 --actor.zero.stage {stage}",
        f"--critic.optimizer.lr 1e-3 --critic.zero.stage {stage}",
    ]


@pytest.mark.parametrize(
    ("name", "ranks", "stage", "micro"),
    [
        pytest.param(name, *layout, marks=_mark(name, place))
        for name in STEPS
        for place, layout in enumerate(LAYOUTS)
        if name != "moe" or layout[2] not in ("in parts", "split weights")
    ],
)
def test_losses_do_not_depend_on_the_layout(name: str, ranks: int, stage: int, micro: str, workspace: Path) -> None:
    expected = lines_of(name, workspace)
    found = lines_of(name, workspace, ranks=ranks, stage=stage, micro=micro)
    assert len(found) == len(expected) == 4
    compared = 0
    for want, got in zip(expected, found, strict=True):
        for key in STEPS[name][1]:
            if key in want:
                assert got[key] == pytest.approx(want[key], abs=TOLERANCE, rel=TOLERANCE), (want["step"], key)
                compared += 1
    assert compared >= 8


def test_losses_change_with_the_seed(workspace: Path) -> None:
    first, other = (lines_of("sft", workspace, f"--seed {seed}") for seed in (3, 4))
    assert first[1]["sft/loss"] != pytest.approx(other[1]["sft/loss"], abs=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "loss", "more"),
    [
        ("sft", "sft/loss", ""),
        faults("sft", "distill/loss", "--distill.teacher {moe}"),
        faults("dpo", "preference/loss", ""),
        faults("kto", "preference/loss", ""),
        slow("ppo", "loss/policy", "--algorithm.epochs 1 --algorithm.mini_batches 1"),
    ],
)
def test_every_step_adds_the_losses_of_routers(name: str, loss: str, more: str, workspace: Path) -> None:
    moe = workspace / "moe"
    one = f"--train.max_steps 1 --model.path {moe} {more.format(moe=moe)} --model.router_aux_loss_coef"
    first = [lines_of(name, workspace, f"{one} {coef}", micro="4")[1] for coef in (0.0, 0.5)]
    metric = f"{'actor' if name == 'ppo' else loss.split('/')[0]}/router_aux_loss"
    assert metric not in first[0] and first[1][metric] >= 2
    assert first[1][loss] - first[0][loss] == pytest.approx(0.5 * first[1][metric], rel=1e-4)


@pytest.mark.parametrize("name", [slow("sft"), *map(faults, ["ppo", "reward", "dpo"])])
def test_losses_over_four_bit_weights_do_not_depend_on_the_layout(name: str, workspace: Path) -> None:
    """In each step the base is quantised, frozen models too, and ZeRO-3 gathers it in 4 bits."""
    four_bit = f"--model.quantization nf4 --{'actor.' if name == 'ppo' else ''}lora.rank 4"
    expected = lines_of(name, workspace, four_bit)
    found = lines_of(name, workspace, four_bit, ranks=2, stage=3, micro="2")
    unquantised = lines_of(name, workspace)
    key = STEPS[name][1][0]
    for want, got in zip(expected[1:], found[1:], strict=True):
        assert got[key] == pytest.approx(want[key], abs=TOLERANCE, rel=TOLERANCE), want["step"]
    assert expected[-1][key] != pytest.approx(unquantised[-1][key], abs=1e-6), "the weights are rounded"
