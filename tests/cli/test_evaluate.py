"""`hybrid-rlhf evaluate`: each measure against an independent computation."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from hybrid_rlhf.cli.saved_models import evaluate
from hybrid_rlhf.cli.saved_models.evaluation.results import Estimate, bootstrap, pass_at_k, wilson
from hybrid_rlhf.data.chat.conversation import encode_prompt
from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.models.head_check import module_logprobs
from hybrid_rlhf.models.pretrained.cards import read_card_metadata
from hybrid_rlhf.runtime.observability.metrics import read_metrics
from tests.support.commands import refusal
from tests.support.ranks import run_main
from tests.support.servers import json_server
from tests.support.steps import MODULES, step_line, write_lines
from tests.support.tiny import tiny_config, tiny_model, tiny_tokenizer

REWARD = """
def digits(prompts, completions, answer, **columns):
    return [float(len(text) % 2 == wanted) for text, wanted in zip(completions, answer)]

def absent(prompts, completions, gold, **columns):
    raise AssertionError

def none(prompts, completions, **columns):
    return [None] * len(completions)
"""

TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/rows.jsonl
test_split: test
doc_to_text: "Q: {{{{question}}}}\\nA:"
"""
CHOOSE = """
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: gold
metric_list:
  - metric: acc
"""
WRITE = """
output_type: generate_until
doc_to_target: answer
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 6
  do_sample: false
process_results: !function lengths.lengths
metric_list:
  - metric: mean_length
    aggregation: mean
    higher_is_better: true
"""


@pytest.fixture
def scorer_folder(tmp_path: Path) -> Path:
    """A random reward model."""
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_config(tiny_config(num_labels=1)).save_pretrained(tmp_path / "reward")
    tiny_tokenizer().save_pretrained(tmp_path / "reward")
    return tmp_path / "reward"


@pytest.fixture
def other_folder(tmp_path: Path) -> Path:
    """Another model."""
    tiny_model(3).save_pretrained(tmp_path / "other")
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    return tmp_path / "other"


@pytest.fixture
def prompts(write_jsonl: Callable[..., Path]) -> Path:
    return write_jsonl([{"prompt": f"say {i}", "answer": i % 2} for i in range(6)], "prompts.jsonl")


def measured(tmp_path: Path, *words: object) -> dict[str, Any]:
    """The document that the command writes."""
    output = tmp_path / f"results{len(list(tmp_path.glob('results*')))}.json"
    evaluate.main([*map(str, words), "--output", str(output)])
    document: dict[str, Any] = json.loads(output.read_text())
    assert document["versions"]["torch"] and document["settings"]["path"] == str(words[0])
    return document


@pytest.mark.slow
def test_perplexity_and_accuracy_are_those_of_training(tmp_path: Path, model_folder: Path, pair_rows: Path) -> None:
    """Of the same rows, in the evaluation after the last update; and the models have a card."""
    rows = tmp_path / "held_out.jsonl"
    rows.write_text("".join(pair_rows.read_text().splitlines(keepends=True)[:10]))
    for step, metric, name in (("sft", "perplexity", "perplexity"), ("reward", "accuracy", "accuracy")):
        output = tmp_path / step
        line = step_line(step, output, model_folder, pair_rows, "--data.eval_sources", str(rows))
        run_main(MODULES[step], 1, [*line, "--data.max_eval_rows", "10"])
        last = read_metrics(output)[-1]
        found = measured(tmp_path, output, "--data", rows, "--max_length", 64)
        assert found["measure"] == name
        assert found["results"][name]["value"] == pytest.approx(last[f"eval/{metric}"], rel=1e-4)
        assert found["results"][name]["low"] <= found["results"][name]["value"] <= found["results"][name]["high"]
        card = (output / "README.md").read_text()
        assert f"| {metric} | " in card and str(tmp_path) not in card and "max_steps: 6" in card
        kind = "text-generation" if step == "sft" else "text-classification"
        assert read_card_metadata(output)["pipeline_tag"] == kind
    assert found["results"]["margin"]["value"] == pytest.approx(last["eval/margin"], rel=1e-3)


def test_what_is_truncated_or_cannot_be_measured_is_counted(
    tmp_path: Path, model_folder: Path, write_jsonl: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "hi", "completion": "x" * 50}, {"prompt": "y" * 60, "completion": "no"}]
    rows += [{"prompt": "hi", "completion": "ok"}] * 3
    found = measured(tmp_path, model_folder, "--data", write_jsonl(rows), "--max_length", 40, "--max_rows", 4)
    results = found["results"]
    assert (results["conversations"], results["truncated"], results["without tokens to measure"]) == (3, 2, 1)
    assert "perplexity" in capsys.readouterr().out


def test_a_model_ties_with_itself_and_the_reward_decides_against_another(
    tmp_path: Path, model_folder: Path, other_folder: Path, scorer_folder: Path, prompts: Path
) -> None:
    words = ("--data", prompts, "--judge.model", scorer_folder, "--sampling.max_new_tokens", 6, "--against")
    same = measured(tmp_path, model_folder, *words, model_folder)
    assert same["results"]["ties"] == 6 and same["results"]["win rate"]["value"] == 0.5
    there = measured(tmp_path, model_folder, *words, other_folder)
    back = measured(tmp_path, other_folder, *words, model_folder)
    assert there["results"]["wins"] == back["results"]["losses"] and there["results"]["ties"] < 6
    assert there["results"]["win rate"]["value"] == pytest.approx(1 - back["results"]["win rate"]["value"])
    assert [row["completion"] for row in there["rows"]] == [row["other"] for row in back["rows"]]


def judge(verdict: Callable[[str, str], str]) -> Callable[[str, str, bytes], tuple[int, Any]]:
    """An OpenAI-compatible server that decides between two answers; it fails once first."""
    failed: list[str] = []

    def answer(method: str, path: str, body: bytes) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "judge"}]}
        request = json.loads(body)
        assert path == "/v1/chat/completions" and request["model"] == "judge"
        if not failed:
            failed.append(path)
            return 503, {}
        text = request["messages"][0]["content"]
        parts = [text.partition(f"<answer_{x}>\n")[2].partition(f"\n</answer_{x}>")[0] for x in "AB"]
        return 200, {"choices": [{"message": {"content": f"Because. {verdict(*parts)}"}}]}

    return answer


@pytest.mark.parametrize("kind", ["first", "longer", "silent"])
def test_an_endpoint_is_asked_in_both_orders(
    kind: str,
    tmp_path: Path,
    model_folder: Path,
    other_folder: Path,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("hybrid_rlhf.cli.saved_models.evaluation.judges.retry_delay_seconds", lambda tries: 0.0)
    verdicts = {
        "first": lambda a, b: "[[A]]",
        "longer": lambda a, b: "[[A]]" if len(a) > len(b) else "[[B]]" if len(b) > len(a) else "[[C]]",
        "silent": lambda a, b: "I cannot say.",
    }
    with json_server(judge(verdicts[kind])) as url:
        words = [model_folder, "--data", prompts, "--against", other_folder, "--judge.url", f"{url}/v1"]
        words += ["--sampling.max_new_tokens", 6, "--sampling.temperature", 1]
        if kind == "silent":
            with pytest.raises(SystemExit):
                measured(tmp_path, *words)
            assert "error: a judge must end with [[A]], [[B]] or [[C]], judge at" in capsys.readouterr().err
            return
        found = measured(tmp_path, *words)
    if kind == "first":
        assert found["results"]["ties"] == found["results"]["verdicts that changed with the order"] == 6
    else:
        lengths = [(len(row["completion"]), len(row["other"])) for row in found["rows"]]
        assert [row["outcome"] for row in found["rows"]] == [0.5 + 0.5 * float(np.sign(a - b)) for a, b in lengths]
        assert found["results"]["verdicts that changed with the order"] == 0


def test_pass_rates_are_those_of_the_rewards(tmp_path: Path, model_folder: Path, prompts: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(REWARD)
    words = ("--data", prompts, "--reward", f"{file}:digits", "--k", "[1, 2]", "--sampling.n", 4, "--seed", 5)
    found = measured(tmp_path, model_folder, *words, "--sampling.max_new_tokens", 4, "--sampling.temperature", 1)
    rewards = [row["rewards"] for row in found["rows"]]
    assert [len(row) for row in rewards] == [4] * 6 and 0 < sum(map(sum, rewards)) < 24
    expected = [np.mean([max(pair) for pair in combinations(row, 2)]) for row in rewards]
    assert found["results"]["pass@2"]["value"] == pytest.approx(np.mean(expected))
    assert found["results"]["pass@1"]["value"] == pytest.approx(np.mean(rewards))
    assert found["results"]["mean@4"]["value"] == pytest.approx(np.mean(rewards))
    tokenizer = tiny_tokenizer()
    engine = GenerationEngine.from_pretrained(str(model_folder), dtype=torch.float32)
    sampling = SamplingParams(n=4, max_new_tokens=4, temperature=1.0, top_p=0.95, seed=5)
    sampled = engine.generate(
        [encode_prompt([{"role": "user", "content": f"say {i}"}], tokenizer) for i in range(6)], sampling
    )
    texts = [[tokenizer.decode(one.token_ids, skip_special_tokens=True) for one in row] for row in sampled]
    assert [row["completions"] for row in found["rows"]] == texts


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="needs util-linux")
def test_a_verifier_gives_the_reason_of_each_score(tmp_path: Path, model_folder: Path) -> None:
    """The reward of training by its name; with a function there is no reason."""
    file = tmp_path / "problems.jsonl"
    tests = [{"input": "", "output": "3"}]
    file.write_text("".join(json.dumps({"prompt": f"say {i}", "tests": tests}) + "\n" for i in range(2)))
    words = ("--data", file, "--reward", "code", "--sampling.n", 2, "--sampling.max_new_tokens", 4)
    found = measured(tmp_path, model_folder, *words)
    assert found["results"]["pass@1"]["value"] == 0.0
    assert [row["reasons"] for row in found["rows"]] == [["no_answer: it has no fenced block of code"] * 2] * 2


def test_estimates() -> None:
    assert [pass_at_k(5, c, 2) for c in range(6)] == pytest.approx([0, 0.4, 0.7, 0.9, 1.0, 1.0])
    assert [pass_at_k(10, 3, k) for k in (1, 8)] == pytest.approx([0.3, 1.0])
    found = wilson([1.0] * 8 + [0.0] * 2)  # Wilson's interval of 8 of 10, from tables
    assert (found.value, found.low, found.high) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-4)
    assert wilson([1.0] * 5).low < 0.6 and wilson([1.0] * 5).high == 1.0
    assert all(wilson([0.0] * count).low == 0.0 for count in range(1, 40)), "5.551e-17 was shown for 3 rows"
    generator = np.random.default_rng(0)
    inside = 0
    for seed in range(30):
        values = generator.normal(2.0, 1.0, size=50)
        interval = bootstrap(values, np.ones(50), seed=seed)
        inside += interval.low <= 2.0 <= interval.high
    assert 25 <= inside <= 30
    assert bootstrap([2.0, 2.0], [1.0, 1.0], seed=0, transform=np.exp) == Estimate(*[math.exp(2.0)] * 3)


@pytest.mark.slow
def test_tasks_of_the_harness_are_run_on_the_engine(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task with choices, one with texts, both of a file."""
    pytest.importorskip("lm_eval")
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # starts pip and others, for a minute
    rows = [{"question": f"say {i}", "choices": ["aa", "b c"], "gold": i % 2, "answer": "x"} for i in range(5)]
    write_lines(tmp_path / "rows.jsonl", rows)
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "choose.yaml").write_text(TASK.format(name="tiny_choose", folder=tmp_path) + CHOOSE)
    (tasks / "write.yaml").write_text(TASK.format(name="tiny_write", folder=tmp_path) + WRITE)
    (tasks / "lengths.py").write_text("def lengths(doc, results):\n    return {'mean_length': len(results[0])}\n")
    words = ("--tasks", "[tiny_choose, tiny_write]", "--tasks_folder", tasks, "--max_length", 64)
    results = measured(tmp_path, model_folder, *words)["results"]
    assert results["tiny_choose rows"] == results["tiny_write rows"] == 5
    lm, tokenizer = tiny_model(), tiny_tokenizer()
    right = []
    for row in rows:
        scores = []
        for choice in row["choices"]:
            context, text = tokenizer(f"Q: {row['question']}\nA:")["input_ids"], tokenizer(f" {choice}")["input_ids"]
            scores.append(float(module_logprobs(lm, context + text)[-len(text) :].sum()))
        right.append(int(np.argmax(scores)) == row["gold"])
    assert results["tiny_choose acc"]["value"] == pytest.approx(np.mean(right))
    engine = GenerationEngine.from_pretrained(str(model_folder), dtype=torch.float32)
    greedy = SamplingParams(max_new_tokens=6, temperature=0.0)
    sampled = engine.generate([tokenizer(f"Q: {row['question']}\nA:")["input_ids"] for row in rows], greedy)
    texts = [tokenizer.decode(one.token_ids, skip_special_tokens=True).partition("\n")[0] for (one,) in sampled]
    assert results["tiny_write mean_length"]["value"] == pytest.approx(np.mean([len(text) for text in texts]))


INSPECT = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, Target, mean, scorer, stderr

@scorer(metrics=[mean(), stderr()])
def length():
    async def score(state, target: Target):
        return Score(value=float(len(state.output.completion)))
    return score

class NoScore(Exception):
    def __repr__(self):
        return "no score\\n  of this"

@scorer(metrics=[mean()])
def raising():
    async def score(state, target: Target):
        raise NoScore
    return score

@task
def broken():
    return Task(dataset=[Sample(input="say", target="x")], scorer=raising())

@task
def lengths():
    return Task(dataset=[Sample(input=f"say {n}", target="x") for n in range(5)], scorer=length())

"""


@pytest.mark.slow
def test_tasks_of_inspect_are_run_on_the_engine(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("inspect_ai")
    (tmp_path / "tasks.py").write_text(INSPECT)
    words = (model_folder, "--sampling.temperature", 0, "--sampling.max_new_tokens", 9, "--max_length", 64)
    document = measured(tmp_path, *words, "--inspect_tasks", f"{tmp_path}/tasks.py@lengths")
    assert document["measure"] == "inspect" and document["results"]["lengths rows"] == 5
    engine, tokenizer = GenerationEngine.from_pretrained(str(model_folder), dtype=torch.float32), tiny_tokenizer()
    prompts = [encode_prompt([{"role": "user", "content": f"say {n}"}], tokenizer) for n in range(5)]
    sampled = engine.generate(prompts, SamplingParams(max_new_tokens=9, temperature=0.0))
    lengths = [len(tokenizer.decode(one.token_ids, skip_special_tokens=True)) for (one,) in sampled]
    found = document["results"]["lengths length mean"]
    assert found["value"] == pytest.approx(np.mean(lengths)) and found["low"] < found["value"] < found["high"]
    for name, error in (("absent", "must"), ("broken", "must run to their ends, broken does not (no score): check it")):
        with pytest.raises(SystemExit):
            measured(tmp_path, *words, "--inspect_tasks", f"{tmp_path}/tasks.py@{name}")
        assert f"error: tasks of Inspect {error}" in capsys.readouterr().err


@pytest.mark.faults
def test_a_task_that_is_not_there_is_one_line(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lm_eval")
    with pytest.raises(SystemExit):
        evaluate.main([str(model_folder), "--tasks", "no_such_task"])
    assert "error: tasks must be tasks of lm-evaluation-harness, no_such_task is none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["MODEL"], "evaluate needs rows, got none"),
        (["MODEL", "--data", "PROMPTS", "--against", "x"], "win_rate needs a judge"),
        (["MODEL", "--data", "PROMPTS", "--judge.model", "a", "--judge.url", "b"], "judge takes one of model and url"),
        (
            ["MODEL", "--data", "PROMPTS", "--against", "x", "--reward", "a:b"],
            "one measure at a time, got against and reward",
        ),
        (["MODEL", "--data", "PROMPTS", "--measure", "pass_rate"], "pass_rate needs --reward"),
        (["MODEL", "--data", "PROMPTS", "--reward", "a:b", "--k", "4"], "k must be at most sampling.n 1"),
        (["MODEL", "--data", "PROMPTS", "--measure", "accuracy"], "a reward model must have a score head"),
        (
            ["MODEL", "--data", "PROMPTS", "--reward", "REWARDS:absent"],
            "absent needs the column gold, the data has prompt",
        ),
        (["MODEL", "--data", "PROMPTS", "--reward", "REWARDS:none"], "must give a number per completion"),
        (["MODEL", "--data", "PROMPTS"], "must have messages or prompt"),
        (["MODEL", "--data", "PROMPTS", "--output", "PROMPTS"], "--output must be a new file"),
        (
            ["MODEL", "--data", "PROMPTS", "--reward", "REWARDS:digits", "--max_length", "9"],
            "a prompt may have max_length 9",
        ),
        (
            ["MODEL", "--data", "PROMPTS", "--against", "x", "--judge.url", "http://127.0.0.1:9/v1"],
            "the judge must answer",
        ),
    ],
)
def test_mistakes_are_one_line(
    words: list[str],
    rule: str,
    model_folder: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hybrid_rlhf.cli.saved_models.evaluation.judges.retry_delay_seconds", lambda tries: 0.0)
    (tmp_path / "rewards.py").write_text(REWARD)
    places = {"MODEL": str(model_folder), "PROMPTS": str(prompts)}
    line = [places.get(word, word.replace("REWARDS", f"{tmp_path}/rewards.py")) for word in words]
    assert rule in refusal(evaluate.main, line, capsys)
