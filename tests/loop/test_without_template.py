"""A model without a chat template: what its run says and saves."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoTokenizer

from tests.support.faults import run_step
from tests.support.steps import MODULES, step_line
from tests.support.tiny import save_tiny, tiny_model, tiny_tokenizer


def test_a_run_warns_of_the_fallback_once_and_saves_its_template(pair_rows: Path, tmp_path: Path) -> None:
    """The fallback was silent, and other programs could not render what was trained."""
    tiny_tokenizer(None).save_pretrained(save_tiny(tmp_path / "model", tiny_model()))
    (tmp_path / "model" / "chat_template.jinja").unlink(missing_ok=True)
    more = "--train.max_steps 1 --train.eval_every 0 --train.save_every 0"
    assert run_step(MODULES["sft"], 1, step_line("sft", tmp_path / "run", tmp_path / "model", pair_rows, more)) == [0]
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("has no chat template") == 1 and "data.chat_template" in log
    saved = AutoTokenizer.from_pretrained(tmp_path / "run")
    row = json.loads(pair_rows.read_text().splitlines()[0])
    turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["chosen"]}]
    text = saved.apply_chat_template(turns, tokenize=False)
    assert text == f"Human: {row['prompt']}\n\nAssistant: {row['chosen']}{saved.eos_token}\n\n"
