"""Reward models of lists, labels, steps and several heads: what a run of step 2 leaves, and what step 3 reads of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hybrid_rlhf.configs.reward import RewardConfig
from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.configs.sections.rewards import RewardComponentConfig
from hybrid_rlhf.configs.sections.training import OptimizerConfig, ZeroConfig
from hybrid_rlhf.data.rows.stepwise import encode_stepwise_row
from hybrid_rlhf.engines.builder import EngineSpec, build_engine
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.models.pretrained.loading import load_model
from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
from hybrid_rlhf.rl.rewards.components import CompletionTexts
from hybrid_rlhf.rl.rewards.models import RetokenizingModelReward, ScoreTransform
from hybrid_rlhf.rl.rewards.reward import Reward, build_reward
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.world import World
from tests.support.errors import refused
from tests.support.messages import assistant, user
from tests.support.ranks import run_main
from tests.support.rl import COMPLETIONS, MICRO_BATCH_ROWS, rewarded, rollout_of_rows
from tests.support.steps import read_rows, words, write_lines
from tests.support.tiny import save_tiny, tiny_config, tiny_scorer, tiny_tokenizer

HEADS = "--objective.heads [helpful,harmless]"


def pair(i: int, **more: Any) -> dict[str, Any]:
    return {"prompt": f"say {i % 9}", "chosen": str(i % 9), "rejected": "x" * (i % 5 + 1), **more}


ROWS: dict[str, list[dict[str, Any]]] = {
    "pairwise": [pair(i) for i in range(40)],
    "listwise": [
        {"prompt": f"say {i % 9}", "responses": [f"{i % 9}", f"{i % 9}x", "xx", f"y{i}"], "ranks": [1, 2, 3, 3]}
        for i in range(40)
    ],
    "binary": [
        {"prompt": f"say {i % 9}", "completion": str(i % 9) if i % 2 else "x" * (i % 5 + 1), "label": bool(i % 2)}
        for i in range(40)
    ],
    "steps": [
        {"prompt": f"count to {i % 9}", "completions": ["1", "2" if i % 2 else "x", "3"], "labels": [1, i % 2, i % 2]}
        for i in range(40)
    ],
    "heads": [pair(i, head="harmless") if i % 3 else pair(i) for i in range(40)],
    "one head": [pair(i, head="harmless") for i in range(40)],
}


def run_reward(name: str, folder: Path, model: Path, *more: str) -> tuple[Path, list[dict[str, Any]]]:
    """Four updates on the rows of a name; the folder and its metrics."""
    output, rows = folder / "run", folder / "rows.jsonl"
    write_lines(rows, ROWS[name])
    loss = f"--objective.loss {name}" if name in ("listwise", "binary", "steps") else "--objective.loss pairwise"
    line = (
        f"--model.path {model} --data.sources {rows} --output_dir {output} --data.max_length 64 "
        f"--data.cache_dir {folder}/cache --data.eval_fraction 0.25 --train.max_steps 4 --train.epochs 9 "
        "--train.global_batch_size 8 --logging.sinks [] --optimizer.lr 3e-3 --optimizer.warmup_fraction 0"
    )
    run_main("hybrid_rlhf.cli.reward", 1, words(line, loss, *more))
    return output, read_rows(output / "metrics.jsonl")


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForSequenceClassification.from_pretrained(folder).eval()


def engine_of(path: Path, world: World, seed: int = 0, *more: Any, **settings: Any) -> ModelEngine:
    """A reward model's engine."""
    spec = EngineSpec("reward", str(path), ModelConfig(dtype="float32"), ZeroConfig(), seed, *more, **settings)
    return build_engine(spec, world)


def reward_of(component: RewardComponentConfig, engine: ModelEngine, tokenizer: PreTrainedTokenizerBase) -> Reward:
    """The reward of one model, for an actor with this tokenizer."""
    return build_reward(
        [component],
        engine.world,
        tokenizer=tokenizer,
        resolve=str,
        load_tokenizer=load_tokenizer,
        build_engine=lambda name, path: engine,
        build_judge=None,
    )


@pytest.mark.parametrize("name", ["listwise", "binary", "steps"])
def test_each_loss_learns_and_leaves_a_classifier(name: str, tmp_path: Path, model_folder: Path) -> None:
    folder, lines = run_reward(name, tmp_path, model_folder)
    assert lines[-1]["eval/loss"] < lines[0]["eval/loss"]
    for line in lines:
        told = {key for key in line if key.startswith(("reward/", "eval/"))}
        assert {key.partition("/")[2] for key in told} == {
            "loss",
            "accuracy",
            "margin",
            "chosen_score",
            "rejected_score",
        }
    model, tokenizer = load(folder), AutoTokenizer.from_pretrained(folder)
    assert getattr(model.config, "step_separator", None) == ("\n" if name == "steps" else None)
    assert model.config.num_labels == 1
    scores = []
    for answer in ("1\n2\n3", "1\nx\n3") if name == "steps" else ("3", "xxxx"):
        prompt = "count to 3" if name == "steps" else "say 3"
        text = tokenizer.apply_chat_template([user(prompt), assistant(answer)], tokenize=False)
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            scores.append(float(model.score(model.model(**inputs).last_hidden_state)[0, -1, 0]))
    assert scores[0] > scores[1]


def test_the_loss_of_steps_is_read_at_their_ends(tmp_path: Path, model_folder: Path, world: World) -> None:
    """The first evaluation, by hand: the fresh head's outputs at the tokens that end a step."""
    rows, tokenizer = ROWS["steps"], tiny_tokenizer()
    _, lines = run_reward("steps", tmp_path, model_folder, f"--data.eval_sources {tmp_path}/rows.jsonl")
    model = engine_of(model_folder, world, 42, OptimizerConfig(lr=0.0)).lm
    total, count = 0.0, 0
    for row in rows:
        (columns,) = encode_stepwise_row("", row, tokenizer, 64, separator="\n")
        with torch.no_grad():
            hidden = model.model(input_ids=torch.tensor(columns["responses"])).last_hidden_state
            outputs = model.score(hidden)[0, :, 0].tolist()
        for end, label in zip(columns["ends"], columns["labels"], strict=True):
            total += math.log1p(math.exp(-outputs[end] if label else outputs[end]))
            count += 1
    assert count == 120
    assert lines[0]["eval/loss"] == pytest.approx(total / count, rel=1e-4)


def test_heads_are_named_measured_calibrated_and_saved(tmp_path: Path, model_folder: Path) -> None:
    folder, (*lines, calibrated) = run_reward("heads", tmp_path, model_folder, f"{HEADS} --objective.calibrate true")
    model = load(folder)
    assert model.config.id2label == {0: "helpful", 1: "harmless"} and model.score.weight.shape[0] == 2
    assert {"eval/accuracy_helpful", "eval/accuracy_harmless"} <= set(lines[0])
    for line in lines[1:]:
        seen = [key for key in line if key.startswith("reward/accuracy_")]
        assert seen and all(0 <= line[key] <= 1 for key in seen)
    for line in lines:  # rows without a name are the first head's
        if {"eval/accuracy", "eval/accuracy_helpful", "eval/accuracy_harmless"} <= set(line):
            low, high = sorted((line["eval/accuracy_helpful"], line["eval/accuracy_harmless"]))
            assert low <= line["eval/accuracy"] <= high
    assert [len(model.config.calibration[name]) for name in ("temperature", "mean", "std")] == [2, 2, 2]
    assert {"eval/ece_helpful", "eval/ece_calibrated_harmless"} <= set(calibrated)


def test_a_row_moves_the_head_it_names_and_no_other(tmp_path: Path, model_folder: Path, world: World) -> None:
    folder, lines = run_reward("one head", tmp_path, model_folder, f"{HEADS} --optimizer.weight_decay 0")
    fresh = engine_of(model_folder, world, 42, OptimizerConfig(lr=0.0), heads=("helpful", "harmless"))
    start, end = fresh.lm.score.weight, load(folder).score.weight  # type: ignore[union-attr]
    assert torch.equal(start[0], end[0]) and not torch.equal(start[1], end[1])
    assert "eval/accuracy_helpful" not in lines[-1] and "eval/accuracy_harmless" in lines[-1]


def test_scores_are_calibrated_on_held_out_rows(tmp_path: Path, model_folder: Path) -> None:
    folder, lines = run_reward("pairwise", tmp_path, model_folder, "--objective.calibrate true")
    kept = json.loads((folder / "config.json").read_text())["calibration"]
    assert set(kept) == {"temperature", "mean", "std"}
    final = lines[-1]
    assert final["step"] == 4 and final["eval/temperature"] == kept["temperature"] > 0
    assert 0 <= final["eval/ece_calibrated"] <= 1 and 0 <= final["eval/ece"] <= 1
    evaluated = lines[-2]
    means = (evaluated["eval/chosen_score"] + evaluated["eval/rejected_score"]) / 2
    assert kept["mean"] == pytest.approx(means, rel=1e-4) and kept["std"] > 0
    # trained further, the old calibration holds no more
    (tmp_path / "more").mkdir()
    again, _ = run_reward("pairwise", tmp_path / "more", folder)
    assert "calibration" not in json.loads((again / "config.json").read_text())


@pytest.fixture(scope="module")
def two_scores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random reward model of two calibrated heads."""
    calibration = {"temperature": [1.0, 2.0], "mean": [0.5, -1.0], "std": [2.0, 0.5]}
    scorer = tiny_scorer(0, num_labels=2, id2label={0: "helpful", 1: "harmless"}, calibration=calibration)
    return save_tiny(tmp_path_factory.mktemp("two"), scorer)


@pytest.mark.parametrize(
    ("settings", "weights", "normalised"),
    [
        ({}, (1.0, 1.0), False),
        ({"head_weights": {"harmless": 0.5}}, (0.0, 0.5), False),
        ({"head_weights": {"helpful": 1.0, "harmless": -2.0}, "normalize": True}, (1.0, -2.0), True),
    ],
)
def test_step_3_weighs_heads_in_one_pass(
    settings: dict[str, Any], weights: tuple[float, float], normalised: bool, two_scores: Path, world: World
) -> None:
    engine = engine_of(two_scores, world, heads=None)
    reward = reward_of(RewardComponentConfig(model=str(two_scores), **settings), engine, tiny_tokenizer())
    passes = []
    engine.module.register_forward_hook(lambda *_: passes.append(1))
    rows = [[5, 6, 7], [9, 8], [4, 4, 4, 4], [11], [3, 200, 7]]
    report = rewarded(reward, rollout_of_rows(rows), MICRO_BATCH_ROWS, COMPLETIONS)
    assert len(passes) == len(MICRO_BATCH_ROWS), "all heads in one forward"
    model = load(two_scores)
    for row, ids in enumerate(rows):
        with torch.no_grad():
            scores = model.score(model.model(input_ids=torch.tensor([ids])).last_hidden_state)[0, -1]
        if normalised:
            scores = (scores - torch.tensor([0.5, -1.0])) / torch.tensor([2.0, 0.5])
        expected = float((scores * torch.tensor(weights)).sum())
        assert float(report.scores[row]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("steps", ["last", "min", "product", "mean"])
def test_step_3_reads_the_steps_of_an_answer(steps: Any, tmp_path: Path, world: World) -> None:
    save_tiny(tmp_path, tiny_scorer(3, step_separator="|"))
    component = RewardComponentConfig(model=str(tmp_path), steps=steps, name="prm")
    reward = reward_of(component, engine_of(tmp_path, world, heads=None), tiny_tokenizer(None))
    answers = CompletionTexts(COMPLETIONS.prompts, ["1|2|3", "one", "", "a||b|", "|"], {})
    report = rewarded(reward, rollout_of_rows(), MICRO_BATCH_ROWS, answers)
    model, tokenizer = load(tmp_path), tiny_tokenizer()
    for row, (prompt, answer) in enumerate(zip(answers.prompts, answers.completions, strict=True)):
        whole = tokenizer.apply_chat_template([*prompt, assistant(answer)], tokenize=False)
        ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
        begin = len(ids) - len("\n") - 1 - len(answer)  # a token a character, then <|im_end|> and a line break
        ends = [begin + i - 1 for i, c in enumerate(answer) if c == "|" and i and answer[i - 1] != "|"]
        ends = [*ends[:-1], len(ids) - 1] if answer.endswith("|") else [*ends, len(ids) - 1]
        with torch.no_grad():
            outputs = model.score(model.model(input_ids=torch.tensor([ids])).last_hidden_state)[0, :, 0]
        chances = torch.sigmoid(outputs[ends])
        expected = {"last": outputs[-1], "min": chances.min(), "product": chances.prod(), "mean": chances.mean()}[steps]
        assert float(report.scores[row]) == pytest.approx(float(expected), abs=1e-5), answer


MISTAKES = {
    "--objective.loss borda": "objective.loss must be one of pairwise, listwise, binary, steps, got borda: give one of "
    "them",
    "--objective.heads [a]": "objective.heads are two or more different names, got ['a']: leave it out for one score",
    "--objective.heads [a,a]": "objective.heads are two or more different names, got ['a', 'a']: leave it out for "
    "one score",
    "--objective.heads [a,b/c]": "objective.heads: a name has letters, digits and _ - only, got 'b/c': rename it",
    "--objective.calibrate true --data.eval_fraction 0": "objective.calibrate needs held-out rows, got "
    "data.eval_fraction 0: give for example 0.05",
    "--objective.step_separator=": "objective.step_separator may not be empty: leave it out for a line break",
}


@pytest.mark.parametrize(("line", "error"), MISTAKES.items())
def test_what_cannot_be_is_refused(line: str, error: str) -> None:
    assert refused(parse_config, RewardConfig, line.split()) == error


def test_a_separator_may_be_blank() -> None:
    assert parse_config(RewardConfig, ["--objective.step_separator", "\n\n"]).objective.step_separator == "\n\n"


def test_parts_say_what_a_model_does_not_have(two_scores: Path, tmp_path: Path) -> None:
    several = AutoModelForSequenceClassification.from_pretrained(two_scores).config
    single = tiny_config(num_labels=1)
    for config, settings, expected in (
        (
            several,
            {"head_weights": {"honest": 1.0}},
            "head_weights of m must name scores of the model (helpful, harmless), got honest: name one of them",
        ),
        (
            single,
            {"head_weights": {"helpful": 1.0}},
            "head_weights of m must name scores of the model (it has one), got helpful: leave it out",
        ),
        (
            single,
            {"normalize": True},
            "normalize of m needs a calibration in its config.json, got mean None: train it "
            "with objective.calibrate true, or leave normalize out",
        ),
    ):
        assert (
            refused(ScoreTransform, RewardComponentConfig(model="m", **settings), config)
            == f"reward.components: {expected}"
        )


def test_steps_of_a_model_without_them_are_refused(two_scores: Path, world: World) -> None:
    engine = engine_of(two_scores, world, heads=None)
    component = RewardComponentConfig(model=str(two_scores), steps="min")
    assert refused(RetokenizingModelReward, component, engine, tiny_tokenizer()) == (
        f"reward.components: steps min needs a process reward model, {two_scores} is not one: train it with "
        "objective.loss steps, or leave steps out"
    )


@pytest.mark.parametrize("heads", [(), ("harmless", "helpful")])
def test_a_scorer_goes_on_with_the_scores_it_has(heads: tuple[str, ...], two_scores: Path) -> None:
    """A critic, which has one value a token, and other names."""
    settings: Any = {"config": ModelConfig(), "dtype": torch.float32, "heads": heads}
    assert refused(load_model, str(two_scores), "scorer", **settings) == (
        f"a stored scorer keeps its scores, {two_scores} has helpful, harmless, the run needs "
        f"{', '.join(heads) or 'one score'}: set objective.heads to the same, or start from a model without scores "
        "(critic.path, model.path)"
    )
