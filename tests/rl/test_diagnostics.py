"""Metrics and log lines from which a user sees that a run cannot learn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.rl.build import few_updates_text, plan_step
from hybrid_rlhf.rl.metrics import _equal_groups, evaluation_metrics
from hybrid_rlhf.rl.roles import place_roles
from hybrid_rlhf.rl.rollouts.advantages import ScoreScaling
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.run import start_run
from hybrid_rlhf.runtime.world import solo_world
from tests.support.rl import rollout_of_rows, scaled


def said(line: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> tuple[RLConfig, list[str]]:
    """The config of a line, and the log lines of its plan."""
    config = parse_config(RLConfig, [*line.split(), "--output_dir", str(folder / "run")])
    with start_run(config) as run:
        plan_step(config, run, place_roles(config, run, "actor"))
    return config, "".join(capfd.readouterr()).splitlines()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "--rollout.prompts_per_step 25",
            "give algorithm.mini_batches or algorithm.epochs 2 or more, and rollout.prompts_per_step a multiple of 4",
        ),
        ("--algorithm grpo --algorithm.mini_batches 1", "give algorithm.mini_batches or algorithm.epochs 2 or more"),
        ("--algorithm remax", None),
        ("--algorithm grpo", None),
    ],
)
def test_a_clip_that_never_acts_is_reported(
    line: str, expected: str | None, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config, lines = said(line, tmp_path, capfd)
    warned = [text for text in lines if "its clip never acts" in text]
    assert len(warned) == (expected is not None)
    assert expected is None or warned[0].endswith(f"clip never acts: {expected}")
    assert any(f"updates: {config.algorithm.mini_batches} from a rollout of " in text for text in lines)


@pytest.mark.parametrize(
    ("line", "cases"),
    [
        ("--algorithm gspo --algorithm.correction.method mask", ["algorithm gspo"]),
        ("--algorithm vespo --algorithm.correction.method mask", ["algorithm vespo"]),
        ("--rollout.max_lag 1 --algorithm.correction.method truncate", ["rollout.max_lag"]),
        ("--rollout.quantization int8 --algorithm.correction.method truncate", ["rollout.quantization"]),
        ("--rollout.quantization int8 --algorithm.correction.ratio sequence", []),
        ("--algorithm gspo --rollout.quantization int8", []),
        ("--algorithm grpo --algorithm.correction.method truncate", []),
        ("--algorithm gspo", []),
    ],
)
def test_a_biased_correction_is_reported(
    line: str, cases: list[str], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Weights per token were accepted silently for a loss on sequences, mixed weight versions and 8-bit sampling."""
    warned = [text for text in said(line, tmp_path, capfd)[1] if "algorithm.correction weighs" in text]
    assert len(warned) == len(cases) and all(case in text for case, text in zip(cases, warned, strict=True))


@pytest.mark.parametrize(
    ("prompts", "size", "text"),
    [
        (600, 256, "8 updates, 4 in each rollout of 256 prompts: rollout.prompts_per_step 200 gives 12"),
        (768, 256, ""),
        (38, 1, ""),
    ],
)
def test_few_updates_of_rl_are_named_with_the_rollout_that_gives_more(prompts: int, size: int, text: str) -> None:
    """120 prompts of a first trial were one rollout, without a word."""
    config = parse_config(RLConfig, f"--rollout.prompts_per_step {size} --algorithm.mini_batches 4".split())
    assert few_updates_text(config, prompts) == (text and f"an epoch of {prompts} prompts has only {text}")


@pytest.mark.parametrize("groups", [[0, 0, 1, 1, 1], [0, 0, 1, 2, 1], [0, 0, 1, 0, 1], [0, 1, 2, 3, 4]])
def test_groups_of_equal_scores_are_counted(groups: list[int]) -> None:
    """By group, not by completion; a group of one is none, and without others there is nothing to compare."""
    found = _equal_groups(torch.tensor([1.0, 1.0, 0.0, 1.0, 2.0]), torch.tensor(groups))
    assert found == ({"rollout/frac_reward_zero_std": pytest.approx(0.5)} if 0 in groups[1:] else {})


@pytest.mark.parametrize("score", [-0.1, 100.1, 1000.1])
def test_rounding_makes_no_difference_between_equal_scores(score: float) -> None:
    """Twelve scores of -0.1 had a deviation of 7e-9, so that no group counted as equal and the advice never came."""
    scores = torch.full((12,), score)
    rows = rollout_of_rows([[5]] * 12)
    rollout = replace(rows, groups=torch.zeros(12, dtype=torch.long), scores=scores, penalties=torch.zeros(12))
    assert _equal_groups(scores, torch.zeros(12, dtype=torch.long)) == {"rollout/frac_reward_zero_std": 1.0}
    told = evaluation_metrics(rollout, solo_world(torch.device("cpu")), prefix="eval", prompts=[{"source": "a"}])
    assert told["eval/scores_std"] == 0.0
    scaling = ScoreScaling("running")
    for _ in range(3):
        assert (scaled(scaling, scores) == 0).all() and scaling.metrics()["objective/scaling_std"] == 0.0
