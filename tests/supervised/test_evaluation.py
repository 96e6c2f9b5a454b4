"""SFT and preference learning measure what their model generates, as RL does, and learn the same as without."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.generation.engine import GenerationEngine
from hybrid_rlhf.rl.metrics import _by_source
from hybrid_rlhf.runtime.command_line import parse_config
from tests.support.errors import refused
from tests.support.ranks import run_main
from tests.support.steps import read_rows, run_outputs, words, write_lines
from tests.support.tiny import tiny_tokenizer

SOURCES = {"easy": [f"say {i}" for i in range(5)], "hard": [f"what is {i} and {i}" for i in range(4)]}


def is_even(prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> list[float]:
    """A reward."""
    return [float(sum(map(ord, text)) % 2 == 0) for text in completions]


def train(step: str, folder: Path, model: Path, rows: Path, *more: str, ranks: int = 1) -> dict[str, Any]:
    """Three updates; what they leave, and the last line of metrics."""
    line = f"--model.path {model} --data.sources {rows} --data.cache_dir {rows.parent}/cache --output_dir {folder}"
    line += " --data.max_length 64 --train.global_batch_size 4 --train.max_steps 3 --optimizer.lr 1e-2"
    line += " --optimizer.warmup_fraction 0 --logging.sinks []"
    run_main(f"hybrid_rlhf.cli.{step}", ranks, words(line, *more))
    return read_rows(folder / "metrics.jsonl")[-1]


def asks(folder: Path, **sampling: Any) -> list[str]:
    files = [
        str(write_lines(folder / f"{name}.jsonl", [{"prompt": prompt} for prompt in prompts]))
        for name, prompts in SOURCES.items()
    ]
    section = {
        "sources": files,
        "components": [{"function": f"{__file__}:is_even"}],
        "sampling": {"max_new_tokens": 6, **sampling},
    }
    return ["--train.evaluate_by_generation", json.dumps(section)]


@pytest.mark.parametrize(
    ("step", "ranks", "more"), [("sft", 1, ""), ("preference", 1, ""), ("sft", 2, "--zero.stage 3")]
)
def test_the_trained_model_is_measured_and_learns_the_same(
    step: str, ranks: int, more: str, model_folder: Path, pair_rows: Path, tmp_path: Path
) -> None:
    """The scores are those of the greedy completions of the saved model, by source."""
    options = [*more.split(), *asks(tmp_path, top_k=1, n=2)]
    told = train(step, tmp_path / "with", model_folder, pair_rows, *options, ranks=ranks)
    generation = GenerationEngine.from_pretrained(str(tmp_path / "with"), dtype=torch.float32, device="cpu")
    tokenizer = tiny_tokenizer()
    scores = {}
    for name, prompts in SOURCES.items():
        asked = [[{"role": "user", "content": prompt}] for prompt in prompts]
        ids = [tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False) for turn in asked]
        completions = generation.generate(ids, SamplingParams(max_new_tokens=6, temperature=0))
        texts = [tokenizer.decode(each[0].token_ids, skip_special_tokens=True) for each in completions]
        scores[name] = is_even(asked, texts)
        mean = sum(scores[name]) / len(prompts)
        assert told[f"eval/{name}/avg@2"] == told[f"eval/{name}/pass@2"] == pytest.approx(mean)
    both = [score for of_source in scores.values() for score in of_source]
    assert told["eval/scores"] == pytest.approx(sum(both) / len(both)) and 0 < sum(both) < len(both)
    assert told["eval/loss"] > 0, "beside the held-out rows"
    without = train(step, tmp_path / "without", model_folder, pair_rows, *more.split(), ranks=ranks)
    assert told["eval/loss"] == without["eval/loss"]
    outputs = [run_outputs(tmp_path / name) for name in ("with", "without")]
    assert outputs[0]["model.safetensors"] == outputs[1]["model.safetensors"]


def test_pass_and_average_are_of_each_source_with_its_group_size() -> None:
    """In a plain loop; scores beyond [0, 1] tell no pass, and a source that is alone has no name."""
    prompts = [{"source": "a"}, {"source": "b"}, {"source": "a"}, {"source": "c"}]
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 3, 3])
    scores = torch.tensor([1.0, 0, 0.5, 0, 0.5, 0, 1, 0, 2, -1])
    found = _by_source(scores, groups, prompts)
    of_prompts: dict[str, list[list[float]]] = {}
    for place, prompt in enumerate(prompts):
        of_prompts.setdefault(prompt["source"], []).append(scores[groups == place].tolist())
    expected = {}
    for name, lists in of_prompts.items():
        k = max(map(len, lists))
        expected[f"{name}/avg@{k}"] = sum(sum(each) / len(each) for each in lists) / len(lists)
        if name != "c":
            expected[f"{name}/pass@{k}"] = sum(any(score == 1 for score in each) for each in lists) / len(lists)
    assert found == pytest.approx(expected) and found["a/pass@4"] == 1.0 and found["b/pass@2"] == 0.0
    assert _by_source(scores[4:6], groups[4:6], prompts) == {"avg@2": 0.25, "pass@2": 0.0}


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"sources": []}, "must name prompts"),
        ({"components": []}, "must have a reward"),
        ({"components": [{"model": "scorer"}]}, "serve it"),
        ({"components": [{"judge": {"path": "m"}}]}, "got the model ['m']: serve it, and give its URL"),
        ({"sampling": {"temperature": 0.0}}, "temperature must be above 0"),
    ],
)
def test_what_it_cannot_do_is_said(changes: dict[str, Any], rule: str) -> None:
    section = {"sources": ["a.jsonl"], "components": [{"verifier": "math"}], **changes}
    assert rule in refused(parse_config, SFTConfig, ["--train.evaluate_by_generation", json.dumps(section)])
