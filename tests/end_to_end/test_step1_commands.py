"""docs/algorithms.md: each command of step 1 runs, in small, on rows with a score."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from hybrid_rlhf.cli import train
from hybrid_rlhf.runtime.command_line import save_config
from hybrid_rlhf.runtime.observability.metrics import read_metrics
from tests.support.ranks import run_main
from tests.support.runs import ALGORITHMS_PAGE, documented_step

COMMANDS = re.findall(r"^python train\.py (.*)$", ALGORITHMS_PAGE, re.MULTILINE)
SMALL = {
    "train.max_steps": 2,
    "data.max_length": 64,
    "data.max_eval_rows": 4,
    "logging.sinks": [],
    "lora.rank": 4,
    "distill.sampling.max_new_tokens": 6,
    "data.split": "null",
}


def test_distillation_condition_and_packing_have_commands() -> None:
    for key in ("distill.teacher", "distill.on_policy_fraction", "condition.buckets", "data.packing"):
        assert any(f"--sft.{key} " in line for line in COMMANDS), key


@pytest.mark.parametrize("line", [line for line in COMMANDS if "--sft." in line])
@pytest.mark.slow
def test_the_commands_run(line: str, tmp_path: Path, model_folder: Path) -> None:
    name, step = documented_step(line)
    assert name == "sft"
    rows = [{"prompt": f"say {i % 9}", "completion": str(i % 9), "score": i % 9} for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_config(step, tmp_path / "step.yaml")
    own = SMALL | {
        "model.path": model_folder,
        "data.sources": tmp_path / "rows.jsonl",
        "data.cache_dir": tmp_path / "cache",
        "output_dir": tmp_path / "run",
    }
    if step.distill is not None:
        assert step.distill.teacher == "output/step1_sft", "what the command before leaves"
        own |= {"distill.teacher": model_folder}
    own = {key: value for key, value in own.items() if key.split(".")[0] != "distill" or step.distill is not None}
    run_main(
        train.MODULES[name],
        1,
        ["--config", str(tmp_path / "step.yaml"), *(f"--{key}={value}" for key, value in own.items())],
    )
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_a_template_of_the_config_is_trained_with_saved_and_stops_answers(tmp_path: Path, model_folder: Path) -> None:
    rows = [{"prompt": f"say {i}", "completion": str(i)} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}{{ m.role + '|' + m.content + '<|endoftext|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant|' + mood }}{% endif %}"
    )
    own = {
        "model.path": model_folder,
        "data.sources": tmp_path / "rows.jsonl",
        "data.cache_dir": tmp_path / "cache",
        "data.chat_template": tmp_path / "chat.jinja",
        "data.chat_template_kwargs": '{"mood": "glad "}',
        "train.max_steps": 1,
        "train.global_batch_size": 4,
        "logging.sinks": [],
    }

    def run(folder: str, **changes: Any) -> None:
        words = {**own, "output_dir": tmp_path / folder, **changes}
        run_main(train.MODULES["sft"], 1, [f"--{key}={value}" for key, value in words.items()])

    run("run")
    saved = AutoTokenizer.from_pretrained(tmp_path / "run")
    prompt = [{"role": "user", "content": "q"}]
    assert saved.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True).endswith("assistant|glad ")
    ends = json.loads((tmp_path / "run" / "generation_config.json").read_text())["eos_token_id"]
    assert set(ends) == {0, 2}, "the template's end of turn beside the tokenizer's eos"
    assert "does not learn to stop" not in (tmp_path / "run" / "log.txt").read_text()
    endless = (tmp_path / "chat.jinja").read_text().replace("<|endoftext|>", "\\n")
    (tmp_path / "endless.jinja").write_text(endless)
    run("endless", **{"data.chat_template": tmp_path / "endless.jinja"})
    assert "does not learn to stop: set data.chat_template" in (tmp_path / "endless" / "log.txt").read_text()
