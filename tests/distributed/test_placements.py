"""The same seed gives the same scores, losses and weights wherever the roles live."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from hybrid_rlhf.cli import rl
from hybrid_rlhf.placement.machines.stored import save_curves
from tests.support.ahead import save_stopping_model
from tests.support.placement import cpu_machine
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
    "ppo": "--algorithm ppo --critic.optimizer.lr 1e-2 --critic.optimizer.eps 1e-2".split(),
    "grpo": "--algorithm grpo --algorithm.kl.coef 0.05".split(),
    "online_dpo": "--algorithm online_dpo".split(),
    "remax": "--algorithm remax".split(),
}
LORA = "--actor.lora.rank 4".split()
REFRESHED = "--actor.lora.rank 4 --reference.refresh_every 1".split()
"""The reference is a model of its own that takes the actor's weights, from other ranks too."""
ZERO_3 = "--actor.zero.stage 3".split()
TENSOR_PARALLEL = "--rollout.tensor_parallel 2".split()
AHEAD = (
    "--rollout.async_sampling.policy_lag 1 --algorithm.correction.method truncate --rollout.kv_cache_gib 0.1".split()
)
REFILLED = "--algorithm.dynamic_sampling.max_refills 2 --rollout.prompts_per_step 4".split()
MIXED = "--actor.ema_decay 0.9 --ptx.coef 0.5 --ptx.max_length 32 --ptx.sources texts.jsonl".split()
PARTIAL = "--rollout.partial.extra_prompts 0.5 --algorithm.correction.method truncate --model.path stopping".split()
"""Completions end early by themselves, so that some are carried."""
EPISODES = f"--environment.path {__file__}:Questions --rollout.sampling.max_new_tokens 40".split()
MEASURED = ("time/", "perf/", "placement/")
ADAPTS = "{style: auto, adapt: true}"
Case = tuple[str, int, str, tuple[str, ...]]
CASES: list[Case] = [
    ("ppo", 2, "flattening", ()),
    ("ppo", 2, "interleaving", ()),
    ("ppo", 4, "interleaving", (*ZERO_3,)),
    ("ppo", 3, "interleaving", (*LORA,)),
    ("ppo", 2, "separation", ()),
    ("ppo", 3, "{style: separation, critic_copy: {tensor_parallel: 1}}", (*LORA,)),
    ("ppo", 4, "{style: separation, critic_copy: {tensor_parallel: 2}}", (*ZERO_3, *TENSOR_PARALLEL)),
    ("grpo", 2, "separation", (*ZERO_3,)),
    ("online_dpo", 3, "{sampler: {ranks: 1-2, tensor_parallel: 2}, judge: {ranks: 0-1}}", ()),
    ("ppo", 4, "{sampler: {ranks: 0}, actor: {ranks: 1-3}, critic: {ranks: 0-1}, reference: {ranks: 2}}", ()),
    ("ppo", 2, "separation", (*AHEAD,)),
    ("ppo", 3, "{sampler: {ranks: 0-1, tensor_parallel: 2}, actor: {ranks: 2}}", (*AHEAD,)),
    ("ppo", 2, "separation", (*PARTIAL,)),
    ("grpo", 3, "{sampler: {ranks: 0-1, tensor_parallel: 2}, actor: {ranks: 2}}", (*PARTIAL, *AHEAD)),
    ("ppo", 2, "{style: separation, sampler: {with_actor: true}}", (*ZERO_3,)),
    ("grpo", 4, "{sampler: {ranks: 2-3, tensor_parallel: 2, with_actor: true}}", (*LORA,)),
    ("grpo", 2, "separation", (*REFILLED,)),
    ("remax", 3, "separation", ()),
    ("ppo", 3, "{sampler: {ranks: 0}, actor: {ranks: 1-2}}", (*MIXED,)),
    ("ppo", 2, "separation", (*EPISODES,)),
    ("grpo", 2, "interleaving", (*ZERO_3,)),
    ("online_dpo", 2, "interleaving", ()),
    ("ppo", 2, "{actor: {ranks: 1}, critic: {ranks: 0}}", ()),
    ("ppo", 3, "{actor: {ranks: 0-1, zero: 2}, critic: {ranks: 2}, judge: {ranks: 0}, reference: {ranks: 1-2}}", ()),
    ("ppo", 4, "{actor: {ranks: 1-3}, critic: {ranks: '0,2', zero: 3}, judge: {ranks: 0}}", (*ZERO_3,)),
    ("ppo", 4, "{actor: {ranks: 2-3}, critic: {ranks: 0-1}, reference: {ranks: 0}, reward: {ranks: 1}}", (*REFRESHED,)),
    ("grpo", 3, "{actor: {ranks: '0,2'}, reference: {ranks: 1, zero: 3}, judge: {ranks: 0-2}}", (*REFRESHED,)),
    ("online_dpo", 3, "{actor: {ranks: 1-2}, reference: {ranks: 0}, judge: {ranks: 1}}", (*ZERO_3,)),
    ("ppo", 4, "{judge: {ranks: 0-3, tensor_parallel: 2}, reference: {ranks: '1,3', tensor_parallel: 2}}", (*ZERO_3,)),
    ("grpo", 3, "{style: separation, actor: {ranks: 0}, reference: {ranks: 1-2, tensor_parallel: 2}}", ()),
    (
        "ppo",
        3,
        "{sampler: {ranks: 0-1, tensor_parallel: 2}, actor: {ranks: 2}, reward: {ranks: 0-1, tensor_parallel: 2}}",
        (*AHEAD,),
    ),
    ("online_dpo", 4, "{reference: {ranks: 0-1, tensor_parallel: 2}, reward: {ranks: 0-3, tensor_parallel: 4}}", ()),
]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("placements")
    rows = [{"prompt": f"{i}+{i % 7}?"} for i in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": f"{i} is {i}"}) + "\n" for i in range(40)))
    (folder / "model").symlink_to(model_folder)
    save_stopping_model(folder / "stopping")
    torch.manual_seed(5)
    judge = AutoModelForSequenceClassification.from_config(tiny_config(num_labels=1))
    with torch.no_grad():
        judge.score.weight.normal_(std=0.5)
    judge.save_pretrained(folder / "judge")
    tiny_tokenizer().save_pretrained(folder / "judge")
    return folder


def launch(
    workspace: Path,
    algorithm: str,
    ranks: int,
    placement: str,
    extra: tuple[str, ...],
    *,
    output: Path | None = None,
    module: str = "hybrid_rlhf.cli.rl",
) -> Path:
    """Two rollouts; the folder of the run. `module` has the main of a rank."""
    words = [algorithm, str(ranks), placement, *extra]
    output = output or workspace / hashlib.sha256(json.dumps(words).encode()).hexdigest()[:12]
    line = [
        *f"--data.sources {workspace}/rows.jsonl --data.cache_dir {workspace}/cache --data.eval_fraction 0.1".split(),
        *f"--model.path {workspace}/model --output_dir {output} --logging.sinks [] --seed 3".split(),
        *"--train.max_steps 2 --train.micro_batch_tokens 100 --rollout.prompts_per_step 6".split(),
        *"--rollout.sampling.n 2 --rollout.sampling.max_new_tokens 8 --rollout.max_prompt_tokens 64".split(),
        # with a large eps an update is proportional to the gradient, as rounding is
        *"--algorithm.mini_batches 2 --actor.optimizer.lr 1e-2 --actor.optimizer.eps 1e-2".split(),
        *"--logging.samples_every 1".split(),
        *ALGORITHMS[algorithm],
        "--reward.components",
        f"[{{model: {workspace}/judge, name: judge}}, {{function: 'tests.support.steps:brevity', weight: 0.1}}]",
        *(str(workspace / word) if word in ("texts.jsonl", "stopping") else word for word in extra),
    ]
    if not (output / "finished.json").exists():
        run_main(module, ranks, [*line, "--placement", placement])
    return output


class Questions:
    """An environment of two turns."""

    def reset(self, row: Mapping[str, Any]) -> None:
        """See Environment."""
        self.turns = 0

    def step(self, completion: str) -> tuple[str, float, bool]:
        """See Environment."""
        self.turns += 1
        return "and?", float(len(completion)), self.turns == 2


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    names = sorted(file.parent.name for file in run.glob("*/model.safetensors"))
    return {f"{name}.{key}": w for name in names for key, w in load_file(run / name / "model.safetensors").items()}


def assert_same_run(found: Path, expected: Path) -> None:
    """Metrics, samples and weights of two runs agree."""
    compared = 0
    for want, got in zip(metrics_of(expected), metrics_of(found), strict=True):
        assert {key for key in want if not key.startswith(MEASURED)} == {
            key for key in got if not key.startswith(MEASURED)
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
        torch.testing.assert_close(
            ours[name], weight, atol=TOLERANCE, rtol=TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(("algorithm", "ranks", "placement", "extra"), CASES)
def test_a_placement_computes_what_one_rank_does(
    algorithm: str, ranks: int, placement: str, extra: tuple[str, ...], workspace: Path
) -> None:
    layout = {*ZERO_3, *TENSOR_PARALLEL}
    alone = launch(workspace, algorithm, 1, "flattening", () if {*extra} <= layout else extra)
    assert_same_run(launch(workspace, algorithm, ranks, placement, extra), alone)


def test_weights_travel_while_the_critic_learns(workspace: Path) -> None:
    """Both have learned from the same rollout, and the actor's weights need not wait for the next one."""
    steps = [line for line in metrics_of(launch(workspace, "ppo", 2, "separation", ())) if "loss/policy" in line]
    assert len(steps) == 2
    for line in steps:
        assert line["time/hidden_weight_sync_seconds"] > 0 and line["time/weight_wait_seconds"] >= 0
    alone = metrics_of(launch(workspace, "grpo", 2, "separation", (*ZERO_3,)))
    assert not any("time/weight_wait_seconds" in line for line in alone), "nothing computes meanwhile"


def random_placement(chance: random.Random, algorithm: str, ranks: int) -> dict[str, dict[str, Any]]:
    """Every role on some ranks, in whatever order and number; the reference and the reward model may be sharded."""
    whole = range(ranks)
    roles = ["actor", "reference", "judge", *(["critic"] if algorithm == "ppo" else [])]
    placement: dict[str, dict[str, Any]] = {
        role: {"ranks": sorted(chance.sample(whole, chance.randint(1, ranks)))} for role in roles
    }
    if ranks > 2 and chance.random() < 0.5:
        mixed = chance.sample(whole, ranks)
        cut = chance.randint(1, ranks - 1)
        together = chance.choice([size for size in (1, 2) if cut % size == 0])
        sampler = {"ranks": sorted(mixed[:cut]), "tensor_parallel": together}
        placement |= {"actor": {"ranks": sorted(mixed[cut:])}, "sampler": sampler}
    for role, keys in placement.items():
        if role == "sampler":
            continue
        keys["zero"] = chance.choice((0, 3) if role in ("reference", "judge") else (0, 1, 2, 3))
    return placement


def assert_random_placements(workspace: Path, tmp_path: Path, seeds: range) -> None:
    """The test of ranks limits the time of each run, so a deadlock fails."""
    for seed in seeds:
        chance = random.Random(seed)
        algorithm, ranks = chance.choice([*ALGORITHMS]), chance.randint(2, 8)
        placement = random_placement(chance, algorithm, ranks)
        found = launch(workspace, algorithm, ranks, json.dumps(placement), (), output=tmp_path / str(seed))
        assert_same_run(found, launch(workspace, algorithm, 1, "flattening", ()))


def test_random_placements_neither_hang_nor_differ(workspace: Path, tmp_path: Path) -> None:
    assert_random_placements(workspace, tmp_path, range(4))


@pytest.mark.faults
def test_three_hundred_random_placements_neither_hang_nor_differ(workspace: Path, tmp_path: Path) -> None:
    assert_random_placements(workspace, tmp_path, range(300))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, "flattening"), (3, "{actor: {ranks: 1-2}, critic: {ranks: 0}}")),
        ((3, "{actor: {ranks: '0,2'}, critic: {ranks: 1, zero: 3}, judge: {ranks: 0}}"), (1, "flattening")),
        ((2, "interleaving"), (2, "{actor: {ranks: 0}, critic: {ranks: 1}}")),
    ],
)
def test_a_checkpoint_resumes_under_another_placement(
    before: tuple[int, str], after: tuple[int, str], workspace: Path, tmp_path: Path
) -> None:
    evaluated = ("--train.eval_every", "1")
    whole, run = launch(workspace, "ppo", 1, "flattening", evaluated), tmp_path / "run"
    stops = ("--train.save_every", "1", "--train.max_steps", "1")
    launch(workspace, "ppo", *before, (*evaluated, *stops), output=run)
    (run / "finished.json").unlink()
    launch(workspace, "ppo", *after, (*evaluated, "--resume", "auto"), output=run)
    assert_same_run(run, whole)


def test_the_planner_places_and_tells_how_wrong_it_was(workspace: Path, tmp_path: Path) -> None:
    save_curves(cpu_machine(), 2, str(tmp_path / "cache"))
    settings = ("--data.cache_dir", str(tmp_path / "cache"), "--train.max_steps", "5")
    run = launch(workspace, "ppo", 2, "auto", settings, output=tmp_path / "run")
    found = [line for line in metrics_of(run) if "loss/policy" in line]
    assert len(found) == 5
    for line in found:
        predicted, measured_seconds = line["placement/predicted_step_seconds"], line["time/step_seconds"]
        assert line["placement/step_seconds_error"] == pytest.approx(predicted / measured_seconds - 1)
        assert {f"placement/{phase}_seconds_error" for phase in ("generation", "scoring", "training")} <= {*line}
    assert weights_of(run)
    alone = launch(workspace, "ppo", 1, "flattening", ("--train.max_steps", "5"))
    for name, weight in weights_of(alone).items():
        torch.testing.assert_close(weights_of(run)[name], weight, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("algorithm", "ranks", "extra"),
    [("ppo", 2, ()), pytest.param("grpo", 4, (*LORA, *AHEAD), marks=pytest.mark.faults)],
)
def test_a_run_moves_where_it_gains_and_resumes(
    algorithm: str, ranks: int, extra: tuple[str, ...], workspace: Path, tmp_path: Path
) -> None:
    save_curves(cpu_machine(), ranks, str(tmp_path / "cache"))
    lasts = ("--train.max_steps", "5", *extra)
    settings = (
        "--data.cache_dir",
        str(tmp_path / "cache"),
        "--train.save_every",
        "1",
        "--train.keep_last",
        "9",
        *lasts,
    )
    moving = "tests.distributed.moving"
    run = launch(workspace, algorithm, ranks, ADAPTS, settings, output=tmp_path / "run", module=moving)
    whole = launch(workspace, algorithm, 1, "flattening", lasts)
    assert_same_run(run, whole)
    marked = [line["step"] for line in metrics_of(run) if "placement/move_seconds" in line]
    assert marked == [3]
    log = (run / "log.txt").read_text()
    assert len(re.findall(r"moved to \w+ after step 2 in [0-9.]+ s, [0-9.]+ s were predicted; expected gain", log)) == 1
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [f"step_{step}" for step in range(1, 6)]
    (run / "finished.json").unlink()
    for step in (4, 5):
        shutil.rmtree(run / "checkpoints" / f"step_{step}")
    launch(workspace, algorithm, ranks, "flattening", (*settings, "--resume", "auto"), output=run)
    assert_same_run(run, whole)


def test_the_planner_needs_curves_of_this_machine(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SystemExit, match="2"):
        rl.main(
            f"--data.sources {workspace}/rows.jsonl --model.path {workspace}/model --output_dir {tmp_path}/run "
            f"--reward.components {workspace}/judge --placement auto".split()
        )
    assert "run hybrid-rlhf calibrate, or name a placement" in capsys.readouterr().err
