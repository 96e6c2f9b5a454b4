"""Each rule fires on an unhealthy curve, once, and is silent on a healthy one."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import pytest

from hybrid_rlhf.configs.parsing.building import config_tree
from hybrid_rlhf.configs.reward import RewardConfig
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.loop.advice.advisor import Advisor, Finding, findings
from hybrid_rlhf.loop.advice.rules import RULES

OTHERS = {"objective/scores_std": 5.25, "critic/lr": 1e-5}


def watched(curves: dict[str, Sequence[float | None]]) -> list[Finding]:
    """The findings over the steps from 1 on; None: a step without the metric."""
    length = max(len(values) for values in curves.values())
    lines = []
    for place in range(length):
        values = {name: values[place] for name, values in curves.items() if place < len(values)}
        lines.append({"step": place + 1, **OTHERS, **{name: v for name, v in values.items() if v is not None}})
    return findings(lines)


def wave(mean: float, count: int, *, share: float = 0.2) -> list[float]:
    """A curve around a mean."""
    return [mean * (1 + share * math.sin(1.7 * place)) for place in range(count)]


def line(start: float, end: float, count: int) -> list[float]:
    """A straight curve."""
    return [start + (end - start) * place / (count - 1) for place in range(count)]


def numbers(text: str) -> list[float]:
    """A recorded curve."""
    return [float(word) for word in text.split()]


STILL: dict[str, Sequence[float | None]] = {
    "objective/kl": numbers("0.0 -0.0 -0.0 0.001 -0.001 0.001 0.002 -0.002 0.004 -0.0 -0.004 0.003 -0.0 -0.002"),
    "objective/scores": numbers("2.495 2.305 2.367 2.378 2.19 2.551 2.593 2.039 2.426 2.36 2.387 2.613 2.5 2.301"),
    "objective/scores_std": numbers(
        "1.443 1.52 1.557 1.457 1.653 1.632 1.503 1.572 1.571 1.508 1.492 1.428 1.432 1.481"
    ),
    "rollout/updates": [4.0] * 14,
    "lr": [1e-6] * 14,
}
"""PPO of a model of width 64 at 1e-6, the rate of 7B (benchmarks/learning_rates.py)."""
MOVING: dict[str, Sequence[float | None]] = {
    "objective/kl": numbers(
        "0.0 0.011 0.081 0.054 0.196 0.234 0.172 0.098 0.371 0.1 0.174 0.42 0.496 0.169 0.458 0.519 0.736 "
        "0.807 0.677 0.668 0.985 1.077 1.115 0.949"
    ),
    "objective/scores": numbers(
        "2.495 2.613 2.356 2.535 2.555 2.695 2.693 2.378 2.45 2.867 2.41 2.855 2.71 2.718 2.874 2.884 2.864 "
        "3.151 2.984 2.684 3.087 2.982 3.565 3.358"
    ),
    "objective/scores_std": numbers(
        "1.443 1.626 1.427 1.529 1.688 1.436 1.438 1.532 1.543 1.597 1.52 1.453 1.507 1.512 1.433 1.47 1.382 "
        "1.624 1.416 1.545 1.413 1.482 1.434 1.406"
    ),
    "val/explained_variance": numbers(
        "0.0 0.004 0.017 0.026 0.012 0.005 0.017 0.011 0.03 0.026 0.064 0.047 0.093 0.014 0.18 0.104 0.088 "
        "0.148 0.046 0.197 0.143 0.05 0.107 0.219"
    ),
    "rollout/updates": [4.0] * 24,
    "lr": [3.2e-5] + [6.4e-5] * 23,
}
"""The same run at 6.4e-5, the derived rate."""
MOVING_GRPO: dict[str, Sequence[float | None]] = {
    "objective/kl": numbers(
        "0.0 0.01 0.017 0.071 0.042 0.051 -0.014 0.08 0.273 0.161 0.244 0.102 0.163 0.29 0.148 0.362 0.46 "
        "0.369 0.549 0.343 0.464 0.52 0.724 0.466"
    ),
    "objective/scores": numbers(
        "2.99 2.541 3.316 3.128 2.914 3.335 3.26 3.112 3.025 3.236 2.989 2.776 3.269 3.308 3.082 3.231 3.264 "
        "3.498 3.343 3.376 3.319 3.509 3.522 3.293"
    ),
    "objective/scores_std": numbers(
        "1.244 1.215 1.443 1.393 1.414 1.439 1.283 1.279 1.383 1.149 1.236 1.413 1.255 1.203 1.219 1.164 "
        "1.308 1.121 1.227 1.203 1.338 1.122 1.101 1.184"
    ),
    "rollout/updates": [4.0] * 24,
    "lr": [3.2e-5] + [6.4e-5] * 23,
}
"""GRPO at 6.4e-5."""
IDLE_CRITIC: dict[str, Sequence[float | None]] = {
    "val/explained_variance": numbers(
        "0 0.004 0.008 0.014 -0.025 -0.027 -0.018 -0.014 -0.001 -0.028 0.008 -0.006 -0.006 -0.006"
    ),
    "rollout/updates": [4.0] * 14,
}
"""PPO of SmolLM2-135M with a sharp reward, seed 1 (docs/benchmarks/learning.md), 12 rollouts, the last one repeated."""
EVALS = [3.0, *[None] * 9, 2.0, *[None] * 9, 2.1, *[None] * 9, 2.2]
FALLING: dict[str, Sequence[float | None]] = {
    "eval/scores": [*[None] * 9, 1.0, *[None] * 9, 0.9, *[None] * 9, 0.5],
    "eval/scores_std": [*[None] * 9, 1.0, *[None] * 9, 1.0, *[None] * 9, 1.0],
}
UNHEALTHY: list[tuple[str, dict[str, Sequence[float | None]], int]] = [
    ("KL explosion", {"objective/kl": wave(1.0, 20) + [60.0] * 5, "objective/scores": line(0, 1, 25)}, 22),
    ("held-out score falls", {**FALLING, "objective/scores": line(0, 1, 30)}, 30),
    ("diverging components", {"reward/a/mean": line(0, 1, 30), "reward/b/mean": line(1, 0, 30)}, 10),
    (
        "constant component",
        {"reward/right/mean": [0.5] + [0.0] * 8, "reward/right/std": [0.5] + [0.0] * 8, "reward/long/std": [0.0] * 9},
        6,
    ),
    (
        "growing truncation",
        {"completions/clipped_ratio": line(0.3, 0.83, 12), "objective/scores": line(0.0, 0.56, 12)},
        11,
    ),
    ("entropy collapse", {"policy/entropy": wave(2.0, 10) + [0.05] * 10}, 15),
    ("length drift", {"completions/mean_length": line(20, 90, 40)}, 20),
    ("length drift", {"completions/mean_length": line(90, 20, 40)}, 24),
    ("truncated completions", {"completions/clipped_ratio": [0.5] + [0.95] * 8}, 6),
    ("clip fraction", {"policy/clipfrac": [0.1] * 5 + [0.45] * 6}, 10),
    ("negative explained variance", {"val/explained_variance": [-0.4] * 15}, 10),
    ("policy hardly moves", STILL, 10),
    ("critic explains nothing", IDLE_CRITIC, 13),
    ("saturated scores", {"objective/scores_std": wave(1.0, 10) + [0.001] * 10}, 15),
    ("groups of equal scores", {"rollout/frac_reward_zero_std": [0.5] * 5 + [0.95] * 5}, 10),
    ("sampler and trainer disagree", {"rollout/logprob_abs_diff_mean": [0.001] * 3 + [0.2] * 5}, 8),
    ("few effective samples", {"rollout/effective_samples": [0.9] * 3 + [0.2] * 3}, 6),
    ("loss not finite", {"sft/loss": [1.0, math.nan, 1.0]}, 2),
    ("skipped steps", {"faults/skipped_steps": [None] * 5 + [1.0, 1.0, 2.0]}, 8),
    ("gradient spikes", {"actor/grad_norm": wave(1.0, 20) + [50.0, 1.0, 80.0, 1.0, 90.0]}, 25),
    ("overfitting", {"eval/loss": EVALS, "sft/loss": line(3.0, 1.0, 31)}, 31),
    ("accuracy at chance", {"eval/accuracy": [None] + ([None] * 9 + [0.51]) * 3}, 31),
    ("accuracy at chance", {"reward/accuracy": wave(0.5, 40)}, 30),
]
HEALTHY: list[dict[str, Sequence[float | None]]] = [
    {"reward/right/mean": line(0, 0.1, 9), "reward/right/std": [0.0] * 4 + [0.1] * 5},
    {"completions/clipped_ratio": line(0.3, 0.83, 12), "objective/scores": line(0.5, 0.1, 12)},
    {"completions/clipped_ratio": wave(0.6, 30), "objective/scores": line(0, 1, 30)},
    {"objective/kl": line(0.0, 8.0, 60), "objective/scores": line(0, 1, 60)},
    {"objective/kl": wave(60.0, 60), "objective/scores": line(0, 1, 60)},
    {"objective/kl": wave(1.0, 20) + [60.0] * 5, "objective/scores": line(1, 0, 25)},
    {**FALLING, "objective/scores": line(1, 0, 30)},
    {"reward/a/mean": line(0, 1, 60), "reward/b/mean": line(0, -0.06, 60), "reward/b/std": [1.0] * 60},
    MOVING,
    MOVING_GRPO,
    {**STILL, "lr": line(1e-6, 2e-6, 14)},
    {**STILL, "lr": [0.0] * 14},
    {"objective/scores": wave(1.0, 30), "lr": [1e-6] * 30},
    {"val/explained_variance": wave(0.01, 30), "rollout/updates": [1.0] * 30},
    {"policy/entropy": line(2.0, 0.8, 60), "objective/scores_std": wave(1.0, 60)},
    {"completions/mean_length": line(60, 90, 40)},
    {"completions/clipped_ratio": [0.95] * 4 + [0.9] * 4},
    {"rollout/logprob_abs_diff_mean": [0.2] * 10, "rollout/stale_updates": [1.0] * 10},
    {"faults/skipped_steps": [1.0] * 30},
    {"actor/grad_norm": wave(1.0, 20) + [50.0] + wave(1.0, 20)},
    {"eval/loss": [3.0, 2.0, 1.5, 1.4, 1.41], "sft/loss": line(3.0, 1.0, 5)},
    {"eval/loss": EVALS, "sft/loss": line(1.0, 3.0, 31)},
    {"eval/accuracy": [0.52, 0.54, 0.6, 0.65], "reward/accuracy": wave(0.5, 40)},
    {"sft/loss": wave(1.0, 50), "perf/mfu": [math.nan] * 50},
]


@pytest.mark.parametrize(("rule", "curves", "step"), UNHEALTHY, ids=[f"{case[0]} {case[2]}" for case in UNHEALTHY])
def test_a_rule_fires_once_on_an_unhealthy_curve(
    rule: str, curves: dict[str, Sequence[float | None]], step: int
) -> None:
    found = watched(curves)
    assert [(finding.rule, finding.step) for finding in found] == [(rule, step)]
    (finding,) = found
    assert finding.evidence and finding.source and "\n" not in str(finding) and "{" not in str(finding)
    assert str(finding) == f"step {step}: {finding.evidence}: {finding.advice}"


@pytest.mark.parametrize("curves", HEALTHY, ids=lambda curves: " ".join(curves))
def test_rules_are_silent_on_healthy_curves(curves: dict[str, Sequence[float | None]]) -> None:
    assert watched(curves) == []


def test_every_rule_has_a_case_and_a_distinct_name() -> None:
    assert {case[0] for case in UNHEALTHY} == {rule.name for rule in RULES}
    assert len({rule.name for rule in RULES}) == len(RULES)


def test_the_advice_has_the_values_of_the_run() -> None:
    (finding,) = watched({"val/explained_variance": [-0.4] * 15})
    assert str(finding).startswith(
        "step 10: val/explained_variance is -0.4, out of range for 10 rollouts in a row: the critic predicts"
    )
    for part in ("critic.optimizer.lr (1e-05)", "critic.warmup_steps", "deviation is 5.25", "algorithm.score_scaling"):
        assert part in str(finding)
    assert len(watched({"val/explained_variance": [-1.0] * 10 + [0.1] + [-1.0] * 10})) == 2, "again, after it had gone"


def test_the_advice_names_the_rate_to_try() -> None:
    (still,) = watched(STILL)
    assert "raise actor.optimizer.lr (1e-06) to 5e-06" in still.advice
    assert "0.001 nats per completion after 10 rollouts" in still.evidence
    (idle,) = watched(IDLE_CRITIC)
    assert "raise critic.optimizer.lr (1e-05) to 5e-05" in idle.advice and "after 52 updates" in idle.evidence


def test_a_resumed_run_does_not_repeat_its_advice() -> None:
    lines = [{"step": step, "val/explained_variance": -1.0} for step in range(1, 21)]
    advisor = Advisor()
    before = [finding for each in lines[:12] for finding in advisor.watch(int(each["step"]), each)]
    after = [finding for each in lines[12:] for finding in advisor.watch(int(each["step"]), each)]
    assert len(before) == 1 and after == []


def test_the_last_steps_of_a_long_run_cost_what_the_first_do() -> None:
    """The overfitting rule applies at every step. With means over all values, the last took as long as there were
    values."""
    advisor = Advisor()
    took = []
    for step in range(1, 10_001):
        losses = {"sft/loss": -step, "lr": -step} | ({"eval/loss": step} if step % 100 == 1 else {})
        start = time.thread_time()
        advisor.watch(step, losses)
        took.append(time.thread_time() - start)
    assert median(took[-500:]) < 5 * median(took[500:1000]), "of values that are ten times as many"


def test_advice_names_keys_that_exist() -> None:
    trees = [config_tree(RLConfig, ["--algorithm", name]) for name in ("ppo", "grpo", "dr_grpo")]
    trees += [config_tree(kind) for kind in (SFTConfig, RewardConfig)]
    keys = {name for tree in trees for name in tree.all_keys(off=True)}
    keys |= {section.name for tree in trees for section in tree.walk(off=True)}
    for rule in RULES:
        for word in re.findall(r"\b[a-z]+(?:\.[a-z_]+)+", rule.advice):
            assert word in keys or word == "samples.jsonl", (rule.name, word)


def test_the_page_lists_every_rule_with_its_source() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs" / "logging.md").read_text().split())
    for rule in RULES:
        assert f"| {rule.name} |" in page and rule.source in page, rule.name
