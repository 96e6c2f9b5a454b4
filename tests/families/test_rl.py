"""PPO and GRPO from end to end on tiny models of today's families, with adapters and with ZeRO-3."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.support.model_types import tiny_of_type
from tests.support.ranks import run_main
from tests.support.runs import rl_line
from tests.support.steps import brevity
from tests.support.tiny import VOCABULARY, tiny_tokenizer

FAMILIES = ["qwen3_moe", "gpt_oss", "qwen3_5_text", "jamba"]
WAYS = {
    "ppo with adapters": (1, ["--actor.lora.rank", "4"]),
    "grpo with zero 3": (2, ["--algorithm", "grpo", "--rollout.sampling.n", "4", "--actor.zero.stage", "3"]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_learns_by_reinforcement(model_type: str, way: str, pair_rows: Path, tmp_path: Path) -> None:
    model = tiny_of_type(model_type, vocab_size=VOCABULARY, pad_token_id=2)
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    ranks, more = WAYS[way]
    reward = f"[{{function: '{Path(brevity.__code__.co_filename)}:brevity'}}]"
    line = rl_line(tmp_path / "run", tmp_path / "model", pair_rows, "--reward.components", reward, *more)
    run_main("hybrid_rlhf.cli.rl", ranks, [*line[1:], "--actor.optimizer.lr", "1e-3", "--logging.tensorboard", "false"])
    lines = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 2
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert lines[-1]["actor/grad_norm"] > 0
    assert lines[-1]["rollout/logprob_abs_diff_mean"] < 1e-4, "sampled and trained distributions agree"
    trained, info = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "actor", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert any(not one.equal(other) for one, other in zip(model.parameters(), trained.parameters(), strict=True))
