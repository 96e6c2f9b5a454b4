"""The same seed gives the same scores, losses and weights wherever the roles live."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from tests.support.ranks import run_main
from tests.support.tiny import tiny_config, tiny_tokenizer

TOLERANCE = 1e-5
COMPARED = (
    "loss/policy",
    "loss/value",
    "objective/kl",
    "objective/scores",
    "policy/approxkl",
    "policy/entropy",
    "val/explained_variance",
    "actor/grad_norm",
    "critic/grad_norm",
    "lr",
    "eval/scores",
    "reward/judge/mean",
)
ALGORITHMS = {
    "ppo": "--algorithm ppo --critic.optimizer.lr 1e-3".split(),
    "grpo": "--algorithm grpo --algorithm.kl.coef 0.05".split(),
    "online_dpo": "--algorithm online_dpo".split(),
}
LORA = "--actor.lora.rank 4".split()
REFRESHED = "--actor.lora.rank 4 --reference.refresh_every 1".split()
"""The reference is a model of its own that takes the actor's weights, from other ranks too."""
ZERO_3 = "--actor.zero.stage 3".split()
Case = tuple[str, int, str, tuple[str, ...]]
CASES: list[Case] = [
    ("ppo", 2, "flattening", ()),
    ("ppo", 2, "interleaving", ()),
    ("ppo", 4, "interleaving", (*ZERO_3,)),
    ("ppo", 3, "interleaving", (*LORA,)),
    ("grpo", 2, "interleaving", (*ZERO_3,)),
    ("online_dpo", 2, "interleaving", ()),
    ("ppo", 2, "{actor: {ranks: 1}, critic: {ranks: 0}}", ()),
    ("ppo", 3, "{actor: {ranks: 0-1, zero: 2}, critic: {ranks: 2}, judge: {ranks: 0}, reference: {ranks: 1-2}}", ()),
    ("ppo", 4, "{actor: {ranks: 1-3}, critic: {ranks: '0,2', zero: 3}, judge: {ranks: 0}}", (*ZERO_3,)),
    ("ppo", 4, "{actor: {ranks: 2-3}, critic: {ranks: 0-1}, reference: {ranks: 0}, reward: {ranks: 1}}", (*REFRESHED,)),
    ("grpo", 3, "{actor: {ranks: '0,2'}, reference: {ranks: 1, zero: 3}, judge: {ranks: 0-2}}", (*REFRESHED,)),
    ("online_dpo", 3, "{actor: {ranks: 1-2}, reference: {ranks: 0}, judge: {ranks: 1}}", (*ZERO_3,)),
]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("placements")
    rows = [{"prompt": f"{i}+{i % 7}?"} for i in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "model").symlink_to(model_folder)
    torch.manual_seed(5)
    judge = AutoModelForSequenceClassification.from_config(tiny_config(num_labels=1))
    with torch.no_grad():
        judge.score.weight.normal_(std=0.5)
    judge.save_pretrained(folder / "judge")
    tiny_tokenizer().save_pretrained(folder / "judge")
    return folder


def launch(workspace: Path, algorithm: str, ranks: int, placement: str, extra: tuple[str, ...]) -> Path:
    """Two rollouts; the folder of the run."""
    words = [algorithm, str(ranks), placement, *extra]
    output = workspace / hashlib.sha256(json.dumps(words).encode()).hexdigest()[:12]
    line = [
        *f"--data.sources {workspace}/rows.jsonl --data.cache_dir {workspace}/cache --data.eval_fraction 0.1".split(),
        *f"--model.path {workspace}/model --output_dir {output} --logging.tensorboard false --seed 3".split(),
        *"--train.max_steps 2 --train.micro_batch_tokens 100 --rollout.prompts_per_step 6".split(),
        *"--rollout.sampling.n 2 --rollout.sampling.max_new_tokens 8 --rollout.max_prompt_tokens 64".split(),
        *"--algorithm.mini_batches 2 --actor.optimizer.lr 1e-3 --logging.samples_every 1".split(),
        *ALGORITHMS[algorithm],
        "--reward.components",
        f"[{{model: {workspace}/judge, name: judge}}, {{function: 'tests.support.steps:brevity', weight: 0.1}}]",
        *extra,
    ]
    if not (output / "finished.json").exists():
        run_main("hybrid_rlhf.cli.rl", ranks, [*line, "--placement", placement])
    return output


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    names = sorted(file.parent.name for file in run.glob("*/model.safetensors"))
    return {f"{name}.{key}": w for name in names for key, w in load_file(run / name / "model.safetensors").items()}


def assert_same_run(found: Path, expected: Path) -> None:
    """Metrics, samples and weights of two runs agree."""
    compared = 0
    for want, got in zip(metrics_of(expected), metrics_of(found), strict=True):
        assert {key for key in want if not key.startswith(("time/", "perf/"))} == {
            key for key in got if not key.startswith(("time/", "perf/"))
        }
        for key in {*COMPARED} & {*want}:
            assert got[key] == pytest.approx(want[key], abs=TOLERANCE, rel=TOLERANCE), (want["step"], key)
            compared += 1
    assert compared >= 12
    samples = [[json.loads(line)["completion"] for line in (run / "samples.jsonl").open()] for run in (expected, found)]
    assert samples[0] == samples[1] and samples[0]
    ours, theirs = weights_of(found), weights_of(expected)
    assert ours.keys() == theirs.keys() and ours
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, atol=TOLERANCE, rtol=TOLERANCE, msg=name)


@pytest.mark.parametrize(("algorithm", "ranks", "placement", "extra"), CASES)
def test_a_placement_computes_what_one_rank_does(
    algorithm: str, ranks: int, placement: str, extra: tuple[str, ...], workspace: Path
) -> None:
    alone = launch(workspace, algorithm, 1, "flattening", () if extra == (*ZERO_3,) else extra)
    assert_same_run(launch(workspace, algorithm, ranks, placement, extra), alone)
