"""RL runs that differ in their placement alone, and what they must have in common: scores, losses, samples, weights."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hybrid_rlhf.runtime.files.json_lines import read_lines
from hybrid_rlhf.runtime.files.names import METRICS_FILE, SAMPLES_FILE
from tests.support.ahead import save_stopping_model
from tests.support.ranks import run_mains
from tests.support.steps import write_lines
from tests.support.tiny import save_tiny, tiny_model, tiny_scorer

TOLERANCE = 1e-5
COMPARED = (
    "loss/policy loss/value objective/kl objective/scores policy/approxkl policy/entropy val/explained_variance "
    "actor/grad_norm critic/grad_norm lr eval/scores reward/judge/mean teacher/kl teacher/divergence"
).split()
MEASURED = ("time/", "perf/", "placement/")
"""Beginnings of the names of metrics that depend on the machine."""
_OPTIONS = {
    "ppo": "--critic.optimizer.lr 1e-2 --critic.optimizer.eps 1e-2",
    "grpo": "--algorithm.kl.coef 0.05",
    "dapo": "--algorithm.dynamic_sampling.max_refills 2",
    "pass_at_k": "--algorithm.k 1",
    "vapo": "--critic.warmup_steps 0",
}
ALGORITHMS = ("ppo", "grpo", "online_dpo", "remax")
MORE_ALGORITHMS = "dapo rloo raft gspo cispo gdpo gmpo sapo vespo pass_at_k vapo reinforce_pp".split()
"""Which random and fixed trials leave out."""
LORA = "--actor.lora.rank 4".split()
ZERO_3 = "--actor.zero.stage 3".split()
_LIMIT_SECONDS = 240
"""Of a phase of a run, after which its ranks write their stacks and end."""
_STYLES = ("flattening", "interleaving", "separation")
_HYBRIDS: tuple[dict[str, str | dict[str, Any]], ...] = (
    {"actor": "0-4", "critic": "5-7", "reference": "5-6", "judge": "7"},
    {"actor": "0-2", "critic": "3-7", "reference": "0-6", "judge": "1-3"},
    {"sampler": "0-2", "actor": "3-7", "critic": "0-4", "reference": "5-7", "judge": "0"},
    {
        "sampler": {"ranks": "0-3", "tensor_parallel": 2},
        "actor": "4-6",
        "critic": "7",
        "reference": "4-7",
        "judge": {"ranks": "0-1", "zero": 3},
    },
    {"actor": "0,2,4,6", "critic": "1,3,5", "reference": "7", "judge": "1-5"},
    {
        "sampler": "5-7",
        "actor": "0-4",
        "critic": "2-6",
        "reference": "0-2",
        "judge": "3",
    },
)
"""Odd and unequal groups of eight ranks."""


@dataclass(frozen=True)
class PlacementTrial:
    """A run under a placement, and its twin on one rank."""

    name: str
    algorithm: str
    ranks: int
    placement: str
    """As on the command line."""
    extra: tuple[str, ...] = ()
    """More words of the line."""

    @property
    def alone(self) -> PlacementTrial:
        """The same run on one rank; ZeRO does not matter there."""
        extra = self.extra[: -len(ZERO_3)] if self.extra[-len(ZERO_3) :] == tuple(ZERO_3) else self.extra
        return PlacementTrial(" ".join(["alone", self.algorithm, *extra]), self.algorithm, 1, "flattening", extra)


def placement_workspace(folder: Path, model: Path) -> Path:
    """A folder with prompts, texts, a model whose completions stop, and a reward model."""
    rows = [{"prompt": f"{i}+{i % 7}?"} for i in range(40)]
    write_lines(folder / "rows.jsonl", rows)
    write_lines(folder / "texts.jsonl", ({"text": f"{i} is {i}"} for i in range(40)))
    (folder / "model").symlink_to(model)
    save_stopping_model(folder / "stopping")
    save_tiny(folder / "teacher", tiny_model(3))
    judge = tiny_scorer(5)
    with torch.no_grad():
        judge.score.weight.normal_(std=0.5)
    save_tiny(folder / "judge", judge)
    return folder


def launch_placed(
    workspace: Path,
    algorithm: str,
    ranks: int,
    placement: str,
    extra: tuple[str, ...],
    *,
    output: Path | None = None,
) -> Path:
    """Two rollouts; the folder of the run."""
    trial = PlacementTrial("", algorithm, ranks, placement, extra)
    output = output or output_of(workspace, trial)
    if not is_finished(output):
        run_mains("hybrid_rlhf.cli.rl", ranks, [run_words(workspace, trial, output)])
    return output


def launch_together(workspace: Path, trials: Sequence[PlacementTrial]) -> None:
    """Runs on equally many ranks, one after the other in the same processes, each in a process group of its own. Fails
    where a rank does, or a phase takes too long; runs that have finished are left out."""
    runs = {output_of(workspace, trial): trial for trial in trials}  # on few ranks, seeds draw the same twice
    lines = [run_words(workspace, trial, output) for output, trial in runs.items() if not is_finished(output)]
    if lines:
        run_mains("hybrid_rlhf.cli.rl", trials[0].ranks, lines)


def output_of(workspace: Path, trial: PlacementTrial) -> Path:
    """The folder of a run, the same for the same run."""
    words = [trial.algorithm, str(trial.ranks), trial.placement, *trial.extra]
    return workspace / hashlib.sha256(json.dumps(words).encode()).hexdigest()[:12]


def is_finished(output: Path) -> bool:
    """Whether a run has ended well."""
    return (output / "finished.json").exists()


def run_words(workspace: Path, trial: PlacementTrial, output: Path) -> list[str]:
    """The command line of a run."""
    return [
        *f"--data.sources {workspace}/rows.jsonl --data.cache_dir {workspace}/cache --data.eval_fraction 0.1".split(),
        *f"--model.path {workspace}/model --output_dir {output} --logging.sinks [] --seed 3".split(),
        *"--train.max_steps 2 --train.micro_batch_tokens 100 --rollout.prompts_per_step 6".split(),
        *"--rollout.sampling.n 2 --rollout.sampling.max_new_tokens 8 --rollout.max_prompt_tokens 64".split(),
        # with a large eps an update is proportional to the gradient, as rounding is
        *"--algorithm.mini_batches 2 --actor.optimizer.lr 1e-2 --actor.optimizer.eps 1e-2".split(),
        *f"--logging.samples_every 1 --faults.phase_timeout_seconds {_LIMIT_SECONDS}".split(),
        *f"--algorithm {trial.algorithm} {_OPTIONS.get(trial.algorithm, '')}".split(),
        "--reward.components",
        f"[{{model: {workspace}/judge, name: judge}}, {{function: 'tests.support.steps:brevity', weight: 0.1}}]",
        *(str(workspace / word) if word in ("texts.jsonl", "stopping", "teacher") else word for word in trial.extra),
        "--placement",
        trial.placement,
    ]


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics."""
    return read_lines(run / METRICS_FILE)


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    """All weights that a run has saved."""
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
    samples = [[line["completion"] for line in read_lines(run / SAMPLES_FILE)] for run in (expected, found)]
    assert samples[0] == samples[1] and samples[0]
    ours, theirs = weights_of(found), weights_of(expected)
    assert ours.keys() == theirs.keys() and ours
    for name, weight in theirs.items():
        torch.testing.assert_close(
            ours[name], weight, atol=TOLERANCE, rtol=TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
        )


def random_trial(seed: int, *, most_ranks: int = 8) -> PlacementTrial:
    """Every role on some ranks, in whatever order and number; the reference and the reward model may be sharded."""
    chance = random.Random(seed)
    algorithm, ranks = chance.choice([*ALGORITHMS]), chance.randint(2, 8)
    if ranks > most_ranks:
        ranks = chance.randint(2, most_ranks)
    placement = json.dumps(_random_placement(chance, algorithm, ranks))
    return PlacementTrial(f"random {seed}", algorithm, ranks, placement)


def fixed_trials(sizes: Iterable[int] = (1, 2, 4, 8)) -> list[PlacementTrial]:
    """PPO, GRPO and online DPO, with and without LoRA, under ZeRO 0 and 3, on so many ranks: the three styles, and on
    eight ranks six hybrids."""
    found = []
    for algorithm, extra, ranks in itertools.product(
        ("ppo", "grpo", "online_dpo"), ((), tuple(LORA), tuple(ZERO_3), (*LORA, *ZERO_3)), sizes
    ):
        placements = {style: style for style in (_STYLES[:1] if ranks == 1 else _STYLES)}
        if ranks == 8:
            missing = {"critic"} if algorithm != "ppo" else set()
            missing |= {"reference"} if {*LORA} <= {*extra} else set()  # it is the actor without its adapters
            placements |= {
                f"hybrid {number}": json.dumps({name: _keys(of) for name, of in roles.items() if name not in missing})
                for number, roles in enumerate(_HYBRIDS, start=1)
            }
        for shown, placement in placements.items():
            words = [algorithm, *(word.lstrip("-") for word in extra), f"on {ranks}", shown]
            found.append(PlacementTrial(" ".join(words), algorithm, ranks, placement, extra))
    return found


def _keys(place: str | dict[str, Any]) -> dict[str, Any]:
    return {"ranks": place} if isinstance(place, str) else place


def _random_placement(chance: random.Random, algorithm: str, ranks: int) -> dict[str, dict[str, Any]]:
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
