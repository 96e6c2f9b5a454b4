"""PPO and GRPO from end to end on tiny models of today's families, with adapters and with ZeRO-3, with and without
routing replay."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.model_types import tiny_of_type
from tests.support.ranks import run_main
from tests.support.runs import rl_line
from tests.support.steps import brevity
from tests.support.tiny import VOCABULARY, save_tiny

FAMILIES = ["qwen3_moe", "gpt_oss", "qwen3_5_text", "jamba"]
WITHOUT_CRITIC = ["llama4_text", "gemma4_text"]
"""Types that transformers has no sequence classifier for."""
SIZES = ("vocab_size", "vocab_size_per_layer_input")
WAYS = {
    "ppo with adapters": (1, ["--actor.lora.rank", "4"]),
    "grpo with zero 3": (2, ["--algorithm", "grpo", "--rollout.sampling.n", "4", "--actor.zero.stage", "3"]),
}
CROSSED = {
    "grpo with adapters": (1, ["--algorithm", "grpo", "--rollout.sampling.n", "4", "--actor.lora.rank", "4"]),
    "ppo with zero 3": (2, ["--actor.zero.stage", "3", "--critic.zero.stage", "3"]),
}
"""Each algorithm in the way of the other."""
QUICK = ("qwen3_5_text", "grpo with adapters")
SLOW = [("gpt_oss", "ppo with adapters"), ("qwen3_5_text", "grpo with zero 3")]
REPLAY = {
    **WAYS,
    "grpo with one update": (1, ["--algorithm", "grpo", "--rollout.sampling.n", "4", "--algorithm.mini_batches", "1"]),
    "ppo with tensor parallelism": (2, ["--rollout.tensor_parallel", "2"]),
    "ppo in bfloat16 with checkpointing": (1, ["--model.dtype", "bfloat16", "--model.gradient_checkpointing", "true"]),
    "grpo with a policy lag": (
        1,
        "--algorithm grpo --rollout.sampling.n 4 --rollout.max_lag 1 --rollout.kv_cache_gib 0.01 "
        "--algorithm.correction.method truncate".split(),
    ),
}


def train(
    model_type: str, way: tuple[int, list[str]], rows: Path, folder: Path, *more: str
) -> tuple[PreTrainedModel, list[dict[str, float]]]:
    """A tiny model as it began, and the metrics of each step of its run."""
    model = tiny_of_type(model_type, **dict.fromkeys(SIZES, VOCABULARY), pad_token_id=2)
    save_tiny(folder / "model", model)
    ranks, settings = way
    reward = f"[{{function: '{Path(brevity.__code__.co_filename)}:brevity'}}]"
    line = rl_line(folder / "run", folder / "model", rows, "--reward.components", reward, *settings, *more)
    run_main("hybrid_rlhf.cli.rl", ranks, [*line[1:], "--actor.optimizer.lr", "1e-3", "--logging.sinks", "[]"])
    lines = [json.loads(text) for text in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return model, [line for line in lines if "rollout/updates" in line]


@pytest.mark.parametrize(
    ("model_type", "way"),
    [
        QUICK,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
        *(
            pytest.param(*case, marks=pytest.mark.faults)
            for case in [
                *itertools.product(FAMILIES, {**WAYS, **CROSSED}),
                *((name, "grpo with zero 3") for name in WITHOUT_CRITIC),
            ]
            if case not in (QUICK, *SLOW)
        ),
    ],
)
def test_a_family_learns_by_reinforcement(model_type: str, way: str, pair_rows: Path, tmp_path: Path) -> None:
    model, lines = train(model_type, {**WAYS, **CROSSED}[way], pair_rows, tmp_path)
    assert lines[-1]["step"] == 2
    assert all(("rollout/router_agreement" in line) == (model_type != "qwen3_5_text") for line in lines)
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert lines[-1]["actor/grad_norm"] > 0
    assert lines[-1]["rollout/logprob_abs_diff_mean"] < 1e-4, "sampled and trained distributions agree"
    trained, info = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "actor", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert any(not one.equal(other) for one, other in zip(model.parameters(), trained.parameters(), strict=True))


@pytest.mark.parametrize(
    ("model_type", "way"),
    [
        ("qwen3_moe", "ppo with adapters"),
        *(("gpt_oss", "grpo with a policy lag"), ("gemma4_text", "grpo with one update")),
        pytest.param("gpt_oss", "ppo with tensor parallelism", marks=pytest.mark.slow),
        *(
            pytest.param(*case, marks=pytest.mark.faults)
            for case in itertools.product(["gpt_oss", "qwen3_moe"], REPLAY)
        ),
    ],
)
def test_training_routes_as_sampling_did(model_type: str, way: str, pair_rows: Path, tmp_path: Path) -> None:
    _, lines = train(model_type, REPLAY[way], pair_rows, tmp_path, "--rollout.routing_replay", "true")
    assert lines[-1]["step"] == 2
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert [line["rollout/router_agreement"] for line in lines] == [1.0, 1.0]
    assert lines[-1]["actor/grad_norm"] > 0


@pytest.mark.faults
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_replay_removes_the_largest_differences_of_low_precision(
    model_type: str, pair_rows: Path, tmp_path: Path
) -> None:
    """Of log-probs in bfloat16, before any update; they come from tokens that were sent to other experts."""
    way = (1, "--model.dtype bfloat16 --rollout.prompts_per_step 16 --rollout.sampling.max_new_tokens 24".split())
    first = {}
    for replays in ("false", "true"):
        _, lines = train(model_type, way, pair_rows, tmp_path / replays, "--rollout.routing_replay", replays)
        first[replays] = lines[0]
    assert 0.9 < first["false"]["rollout/router_agreement"] < 1 == first["true"]["rollout/router_agreement"]
    worst = {replays: line["rollout/logprob_abs_diff_max"] for replays, line in first.items()}
    assert worst["true"] < 0.5 * worst["false"]
