"""The examples run as they stand, on a tiny model, and stay short; the public names import lazily."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hybrid_rlhf
from hybrid_rlhf import RL, SFT
from hybrid_rlhf.rl.rewards.functions import load_function
from hybrid_rlhf.runtime.observability.metrics import read_metrics
from tests.support.errors import user_error
from tests.support.ranks import FORKSERVER
from tests.support.runs import ROOT, run_python
from tests.support.steps import read_rows
from tests.support.tiny import tiny_model, tiny_tokenizer

SHAPES = ROOT / "examples" / "shapes.py"
"""Makes its own model."""
EXAMPLES = sorted({*(ROOT / "examples").glob("*.py")} - {SHAPES})


def run_file(file: Path, output: Path, options: list[str]) -> None:
    """Be the process of an example."""
    os.chdir(output.parent)
    os.environ["HOME"] = str(output.parent)
    sys.argv = [str(file), *options, "--output_dir", str(output)]
    runpy.run_path(str(file), run_name="__main__")


@pytest.mark.slow
@pytest.mark.parametrize("file", [*EXAMPLES, SHAPES], ids=lambda file: file.stem)
def test_an_example_runs(file: Path, model_folder: Path, tmp_path: Path) -> None:
    assert len(file.read_text().splitlines()) <= 100 or file == SHAPES
    options = ["--sft_steps", "2", "--rl_steps", "1"] if file == SHAPES else ["--model", str(model_folder)]
    process = FORKSERVER.Process(target=run_file, args=(file, tmp_path / "out", options))
    process.start()
    process.join(900)
    assert process.exitcode == 0
    lines = [json.loads(line) for path in tmp_path.rglob("metrics.jsonl") for line in path.read_text().splitlines()]
    assert any(name.endswith(("/loss", "loss/policy")) for line in lines for name in line)
    assert list(tmp_path.rglob("*model.safetensors"))


@pytest.mark.faults
def test_a_model_learns_to_see_by_sft_and_grpo(tmp_path: Path) -> None:
    """Shares of right answers on held-out pictures: GRPO raises the worst question without losing the others."""
    done = run_python([str(SHAPES), "--output_dir", str(tmp_path / "run")])
    assert done.returncode == 0, done.stderr[-3000:]
    sft, grpo = (
        {question: float(share) for question, share in re.findall(r"(colour|shape|how many)\? ([\d.]+)", line)}
        for line in done.stdout.splitlines()[-2:]
    )
    assert sft["colour"] >= 0.9 and grpo["shape"] >= sft["shape"] + 0.2
    assert min(grpo["colour"], grpo["how many"]) >= 0.9


@pytest.mark.faults
def test_a_loop_of_ones_own_trains_and_evaluates_on_two_ranks(model_folder: Path, tmp_path: Path) -> None:
    words = ["--model", str(model_folder), "--output_dir", str(tmp_path / "run")]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run_python([*torchrun, str(ROOT / "examples" / "custom_loop.py"), *words])
    assert done.returncode == 0, done.stderr[-3000:]
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["actor/grad_norm"] > 0 and "eval/scores" in line for line in lines)
    assert (tmp_path / "run" / "actor" / "model.safetensors").exists() and not (tmp_path / "run" / "critic").exists()


def test_public_names_import_lazily() -> None:
    code = "import sys, hybrid_rlhf; assert 'torch' not in sys.modules and 'datasets' not in sys.modules"
    assert run_python(["-c", code]).returncode == 0
    assert [getattr(hybrid_rlhf, name).__name__ for name in hybrid_rlhf.__all__] == hybrid_rlhf.__all__
    assert set(hybrid_rlhf.__all__) <= set(dir(hybrid_rlhf))
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        hybrid_rlhf.Trainer  # noqa: B018


def test_rows_in_memory_and_on_disk_are_the_same_data(model_folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"say {i}", "completion": str(i)} for i in range(4)]
    kept = (rows, datasets.Dataset.from_list(rows))
    steps = [SFT(model=model_folder, data={"sources": data, "cache_dir": str(tmp_path)}) for data in kept]
    sources = [step.config.data.sources for step in steps]
    assert sources[0] == sources[1] and str(sources[0][0]).startswith(str(tmp_path))
    assert read_rows(Path(str(sources[0][0]))) == rows
    dated = SFT("m", data={"sources": [{"prompt": "a", "day": date(2024, 5, 1)}], "cache_dir": str(tmp_path)})
    assert json.loads(Path(str(dated.config.data.sources[0])).read_text()) == {"prompt": "a", "day": "2024-05-01"}
    assert SFT(model=model_folder, data=tmp_path / "rows.jsonl").config.data.sources == [str(tmp_path / "rows.jsonl")]
    # the default, which was an error about training rows
    assert SFT("m", data={"sources": "rows.jsonl", "eval_sources": []}).config.data.eval_sources == []


def test_models_and_splits_in_memory_are_those_on_disk(model_folder: Path, tmp_path: Path) -> None:
    """A model object with its tokenizer, a DatasetDict, the model as first argument: TRL's users have these."""
    rows = [{"prompt": f"say {i}", "completion": str(i)} for i in range(4)]
    splits = datasets.Dataset.from_list(rows).train_test_split(test_size=1, seed=0)
    assert SFT(str(model_folder), data=rows).config.model.path == str(model_folder)
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(model_folder), AutoTokenizer.from_pretrained(model_folder)
    section = {"sources": splits["train"], "eval_sources": splits["test"], "cache_dir": str(tmp_path)}
    first, again = (SFT(lm, tokenizer=tokenizer, data=section).config for _ in range(2))
    assert first == again, "the same model has the same folder, so that a script that runs again resumes"
    saved = AutoModelForCausalLM.from_pretrained(first.model.path).state_dict()
    assert all(torch.equal(saved[name], value) for name, value in lm.state_dict().items())
    found = SFT(model_folder, data=splits).config.data
    for data in (first.data, found):
        for split, sources in (("train", data.sources), ("test", data.eval_sources)):
            assert datasets.Dataset.from_json(str(sources[0])).to_list() == splits[split].to_list()
    with torch.no_grad():
        next(lm.parameters()).add_(1.0)
    assert SFT(lm, tokenizer=tokenizer, data=section).config.model.path != first.model.path


def test_paths_and_a_single_callback_are_taken_as_they_are(tmp_path: Path) -> None:
    """Those that a step returns, among them; they were errors of types."""
    step = RL("m", reward=tmp_path / "judge", output_dir=tmp_path / "run", data="rows.jsonl", callbacks=print)
    assert (
        step.config == RL("m", reward=[str(tmp_path / "judge")], output_dir=f"{tmp_path}/run", data="rows.jsonl").config
    )
    assert step.callbacks == (print,)


def test_model_and_data_may_be_sections_as_the_other_keywords(model_folder: Path, tmp_path: Path) -> None:
    expected = SFT(model_folder, data="rows.jsonl").config
    expected = replace(expected, model=replace(expected.model, dtype="bfloat16"))
    for section in ({"path": model_folder, "dtype": "bfloat16"}, expected.model):
        for data in ({"sources": "rows.jsonl"}, expected.data):
            assert SFT(model=section, data=data).config == expected
    assert SFT(expected, model={"dtype": "float32"}).config.model == replace(expected.model, dtype="float32")
    lm, tokenizer = tiny_model(), tiny_tokenizer()
    found = SFT(model={"path": lm, "dtype": "bfloat16"}, tokenizer=tokenizer, data={"cache_dir": str(tmp_path)}).config
    assert found.model.dtype == "bfloat16" and (Path(str(found.model.path)) / "config.json").is_file()
    with user_error("model must be a path or a model of transformers, got int"):
        SFT(model={"path": 3})


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: SFT("m", data=[]), "data must have rows, got none"),
        (lambda: SFT("m", trian={"max_steps": 1}), "keywords: unknown key trian: the nearest is train"),
        (lambda: SFT("m", data=5), "data must be a path or rows, got 5"),
        (lambda: RL("m", reward=3), "reward must be a function, a path or a mapping, or a list of them, got 3"),
        (lambda: SFT(3, data=[]), "model must be a path or a model of transformers, got int"),
        (lambda: SFT(tiny_model()), "a model object needs its tokenizer, got none"),
        (lambda: SFT("m", tokenizer=tiny_tokenizer()), "tokenizer needs a model object, got the model m"),
        (lambda: SFT("m", model="n"), "SFT takes one model, got two"),
        (
            lambda: SFT("m", data=datasets.DatasetDict(a=datasets.Dataset.from_list([{"x": 1}]))),
            "must have the split train",
        ),
        (lambda: SFT("m", train_dataset=[]), "unknown key train_dataset: give data.sources"),
        (lambda: SFT("m", learning_rate=1e-5), "unknown key learning_rate: give optimizer.lr"),
        (lambda: RL("m", reward_funcs=len), "unknown key reward_funcs: give reward.components"),
        (lambda: RL("m", args=3), "unknown key args: settings are keywords"),
    ],
)
def test_first_mistakes_of_trl_users_name_the_fix(make: Callable[[], object], error: str) -> None:
    with user_error(re.escape(error)):
        make()


def step_of(*rewards: object) -> tuple[RL, list[Any]]:
    """A step with rewards, and the functions that its run loads."""
    step = RL("m", data=[{"prompt": "a"}], algorithm="grpo", reward=list(rewards))
    return step, [load_function(str(component.function)) for component in step.config.reward.components]


def test_lambdas_and_callable_objects_are_rewards() -> None:
    class Length:
        def __call__(self, completions: list[str], **columns: object) -> list[float]:
            return [float(len(text)) for text in completions]

    rewards = [lambda completions, **columns: [1.0] * len(completions), Length(), Length()]
    step, functions = step_of(*rewards)
    assert len({component.function for component in step.config.reward.components}) == 3
    assert [function(prompts=["a"], completions=["bcd"]) for function in functions] == [[1.0], [3.0], [3.0]]
    assert step_of(*rewards)[0].config == step.config, "the same objects have the same names"


def test_a_function_that_is_defined_again_replaces_the_earlier_one() -> None:
    """A cell of a notebook that ran again gave its function another name, so that the run could not resume."""

    def defined(score: float) -> Callable[..., list[float]]:
        def reward(completions: list[str], **columns: object) -> list[float]:
            return [score] * len(completions)

        reward.__qualname__ = "reward"
        return reward

    (first, _), (second, (function,)) = step_of(defined(1.0)), step_of(defined(2.0))
    assert first.config == second.config and function(prompts=["a"], completions=["b"]) == [2.0]
