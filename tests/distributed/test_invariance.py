"""The same seed gives the same losses whatever the ZeRO stage, the ranks and the micro-batches: all steps."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from hybrid_rlhf.runtime.files.json_lines import read_lines
from hybrid_rlhf.runtime.files.names import METRICS_FILE
from tests.support.families import variant
from tests.support.marks import faults, slow
from tests.support.ranks import run_main
from tests.support.steps import write_lines
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
    **{str(rows): ["--train.micro_batch_size", str(rows)] for rows in (1, 2, 4, 8)},
    "100 tokens": ["--train.micro_batch_tokens", "100"],
    "in parts": "--train.micro_batch_tokens 100 --model.sequence_parallel 2 --model.mlp_parts 3".split(),
    "split weights": "--train.micro_batch_tokens 100 --model.tensor_parallel 2".split(),
    "padded": "--train.micro_batch_tokens 100 --model.attention eager".split(),
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


def launch(
    name: str, workspace: Path, *, ranks: int, stage: int, micro: str, extra: list[str] | None = None
) -> list[dict[str, Any]]:
    """Three updates of a step; the lines of metrics.jsonl."""
    output = workspace / "-".join([name, str(ranks), str(stage), micro.replace(" ", ""), *hashed(extra)])
    if not (output / "finished.json").exists():
        line = [*options(name, workspace, stage, micro), "--output_dir", str(output), *(extra or [])]
        run_main(STEPS[name][0], ranks, line)
    return read_lines(output / METRICS_FILE)


def hashed(extra: list[str] | None) -> list[str]:
    """A part of a folder's name."""
    return [hashlib.sha256(json.dumps(extra).encode()).hexdigest()[:8]] if extra else []


def options(name: str, workspace: Path, stage: int, micro: str) -> list[str]:
    rows = "lists" if name in ("listwise", "steps") else "rows"
    common = [
        *f"--data.sources {workspace}/{rows}.jsonl --data.cache_dir {workspace}/cache --data.eval_fraction 0.2".split(),
        *f"--model.path {workspace}/{'moe' if name == 'moe' else 'model'} --logging.sinks []".split(),
        *"--train.max_steps 3 --seed 3".split(),
        *MICRO_BATCHES[micro],
    ]
    if name != "ppo":
        line = "--data.max_length 64 --optimizer.lr 1e-3 --train.global_batch_size 8"
        return [*common, *line.split(), "--zero.stage", str(stage), *OPTIONS.get(name, "").split()] + (
            ["--reference.logprobs", "live"] if name == "dpo" and stage == 3 else []
        )
    return [
        *common,
        *f"--reward.components {workspace}/reward-1-0-8 --rollout.max_prompt_tokens 64".split(),
        *"--rollout.prompts_per_step 8 --rollout.sampling.n 2 --rollout.sampling.max_new_tokens 8".split(),
        *"--algorithm.epochs 2 --algorithm.mini_batches 2".split(),
        *f"--actor.optimizer.lr 1e-3 --actor.zero.stage {stage}".split(),
        *f"--critic.optimizer.lr 1e-3 --critic.zero.stage {stage}".split(),
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
    launch("reward", workspace, ranks=1, stage=0, micro="8")  # the reward model that PPO needs
    expected = launch(name, workspace, ranks=1, stage=0, micro="8")
    found = launch(name, workspace, ranks=ranks, stage=stage, micro=micro)
    assert len(found) == len(expected) == 4
    compared = 0
    for want, got in zip(expected, found, strict=True):
        for key in STEPS[name][1]:
            if key in want:
                assert got[key] == pytest.approx(want[key], abs=TOLERANCE, rel=TOLERANCE), (want["step"], key)
                compared += 1
    assert compared >= 8


def test_losses_change_with_the_seed(workspace: Path) -> None:
    first = launch("sft", workspace, ranks=1, stage=0, micro="8")
    other = launch("sft", workspace, ranks=1, stage=0, micro="8", extra=["--seed", "4"])
    assert first[1]["sft/loss"] != pytest.approx(other[1]["sft/loss"], abs=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "loss", "more"),
    [
        ("sft", "sft/loss", []),
        faults("sft", "distill/loss", ["--distill.teacher", "moe"]),
        faults("dpo", "preference/loss", []),
        faults("kto", "preference/loss", []),
        slow("ppo", "loss/policy", "--algorithm.epochs 1 --algorithm.mini_batches 1".split()),
    ],
)
def test_every_step_adds_the_losses_of_routers(name: str, loss: str, more: list[str], workspace: Path) -> None:
    launch("reward", workspace, ranks=1, stage=0, micro="8")
    more = [str(workspace / "moe") if word == "moe" else word for word in more]
    first = []
    for coef in (0.0, 0.5):
        extra = [*more, "--model.path", str(workspace / "moe"), "--model.router_aux_loss_coef", str(coef)]
        first.append(launch(name, workspace, ranks=1, stage=0, micro="4", extra=[*extra, "--train.max_steps", "1"])[1])
    metric = f"{'actor' if name == 'ppo' else loss.split('/')[0]}/router_aux_loss"
    assert metric not in first[0] and first[1][metric] >= 2
    assert first[1][loss] - first[0][loss] == pytest.approx(0.5 * first[1][metric], rel=1e-4)


@pytest.mark.parametrize("name", [slow("sft"), *map(faults, ["ppo", "reward", "dpo"])])
def test_losses_over_four_bit_weights_do_not_depend_on_the_layout(name: str, workspace: Path) -> None:
    """In each step the base is quantised, frozen models too, and ZeRO-3 gathers it in 4 bits."""
    launch("reward", workspace, ranks=1, stage=0, micro="8")
    lora = "--actor.lora.rank" if name == "ppo" else "--lora.rank"
    extra = ["--model.quantization", "nf4", lora, "4"]
    expected = launch(name, workspace, ranks=1, stage=0, micro="8", extra=extra)
    found = launch(name, workspace, ranks=2, stage=3, micro="2", extra=extra)
    unquantised = launch(name, workspace, ranks=1, stage=0, micro="8")
    key = STEPS[name][1][0]
    for want, got in zip(expected[1:], found[1:], strict=True):
        assert got[key] == pytest.approx(want[key], abs=TOLERANCE, rel=TOLERANCE), want["step"]
    assert expected[-1][key] != pytest.approx(unquantised[-1][key], abs=1e-6), "the weights are rounded"
