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

from hybrid_rlhf.cli.saved_models.evaluation import pass_rate
from hybrid_rlhf.cli.saved_models.evaluation.results import Estimate, bootstrap, pass_at_k, wilson
from hybrid_rlhf.configs.inference import EvaluateConfig
from hybrid_rlhf.configs.sections.rewards import RewardComponentConfig
from hybrid_rlhf.configs.sections.sandbox import SandboxConfig
from hybrid_rlhf.data.chat.conversation import encode_prompt
from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.models.pretrained.cards import read_card_metadata
from hybrid_rlhf.runtime.observability.metrics import read_metrics
from tests.support.commands import CommandLine
from tests.support.judges import Asked, first_is_best, judge_server, ranks_by, verdict_of
from tests.support.messages import user
from tests.support.ranks import run_main
from tests.support.steps import MODULES, step_line
from tests.support.tiny import save_tiny, tiny_model, tiny_scorer, tiny_tokenizer

REWARD = """
def digits(prompts, completions, answer, **columns):
    return [float(len(text) % 2 == wanted) for text, wanted in zip(completions, answer)]

def absent(prompts, completions, gold, **columns):
    raise AssertionError

def none(prompts, completions, **columns):
    return [None] * len(completions)
"""

Measured = Callable[[str], Any]


@pytest.fixture
def other_folder(tmp_path: Path) -> Path:
    """Another model."""
    return save_tiny(tmp_path / "other", tiny_model(3))


@pytest.fixture
def prompts(write_jsonl: Callable[..., Path]) -> Path:
    return write_jsonl([{"prompt": f"say {i}", "answer": i % 2} for i in range(6)], "prompts.jsonl")


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    """A file with rewards."""
    file = tmp_path / "rewards.py"
    file.write_text(REWARD)
    return file


@pytest.fixture
def measured(tmp_path: Path, cli: CommandLine) -> Measured:
    """The document that the command writes."""

    def run(line: str) -> Any:
        output = tmp_path / f"results{len(list(tmp_path.glob('results*')))}.json"
        ended = cli(f"evaluate {line} --output {output}")
        assert ended.code == 0, ended.err
        document = json.loads(output.read_text())
        assert document["versions"]["torch"] and document["settings"]["path"] == line.split()[0]
        assert next(iter(document["results"])) in ended.out
        return document

    return run


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid_rlhf.runtime.background.FIRST_DELAY_SECONDS", 0.0)


@pytest.mark.slow
def test_perplexity_and_accuracy_are_those_of_training(
    tmp_path: Path, model_folder: Path, pair_rows: Path, measured: Measured
) -> None:
    """Of the same rows, in the evaluation after the last update; and the models have a card."""
    rows = tmp_path / "held_out.jsonl"
    rows.write_text("".join(pair_rows.read_text().splitlines(keepends=True)[:10]))
    for step, metric, name in (("sft", "perplexity", "perplexity"), ("reward", "accuracy", "accuracy")):
        output = tmp_path / step
        line = step_line(step, output, model_folder, pair_rows, "--data.eval_sources", str(rows))
        run_main(MODULES[step], 1, [*line, "--data.max_eval_rows", "10"])
        last = read_metrics(output)[-1]
        found = measured(f"{output} --data {rows} --max_length 64")
        assert found["measure"] == name
        value = found["results"][name]
        assert value["value"] == pytest.approx(last[f"eval/{metric}"], rel=1e-4)
        assert value["low"] <= value["value"] <= value["high"]
        card = (output / "README.md").read_text()
        assert f"| {metric} | " in card and str(tmp_path) not in card and "max_steps: 6" in card
        kind = "text-generation" if step == "sft" else "text-classification"
        assert read_card_metadata(output)["pipeline_tag"] == kind
    assert found["results"]["margin"]["value"] == pytest.approx(last["eval/margin"], rel=1e-3)


def test_what_is_truncated_or_cannot_be_measured_is_counted(
    model_folder: Path, write_jsonl: Callable[..., Path], measured: Measured
) -> None:
    rows = [{"prompt": "hi", "completion": "x" * 50}, {"prompt": "y" * 60, "completion": "no"}]
    rows += [{"prompt": "hi", "completion": "ok"}] * 3
    results = measured(f"{model_folder} --data {write_jsonl(rows)} --max_length 40 --max_rows 4")["results"]
    assert (results["conversations"], results["truncated"], results["without tokens to measure"]) == (3, 2, 1)


def test_a_model_ties_with_itself_and_the_reward_decides_against_another(
    tmp_path: Path, model_folder: Path, other_folder: Path, prompts: Path, measured: Measured
) -> None:
    judge = save_tiny(tmp_path / "reward", tiny_scorer())
    more = f"--data {prompts} --judge.model {judge} --sampling.max_new_tokens 6 --against"
    same = measured(f"{model_folder} {more} {model_folder}")
    assert same["results"]["ties"] == 6 and same["results"]["win rate"]["value"] == 0.5
    there = measured(f"{model_folder} {more} {other_folder}")
    back = measured(f"{other_folder} {more} {model_folder}")
    assert there["results"]["wins"] == back["results"]["losses"] and there["results"]["ties"] < 6
    assert there["results"]["win rate"]["value"] == pytest.approx(1 - back["results"]["win rate"]["value"])
    assert [row["completion"] for row in there["rows"]] == [row["other"] for row in back["rows"]]


@pytest.mark.parametrize("kind", ["first", "longer", "silent"])
def test_an_endpoint_is_asked_in_both_orders(
    kind: str, model_folder: Path, other_folder: Path, prompts: Path, measured: Measured, cli: CommandLine
) -> None:
    """The judge of training, with an explanation by default; what two models say alike is a tie."""
    judging = {"first": first_is_best, "longer": ranks_by(len), "silent": lambda asked: "I cannot say."}[kind]

    def explained(asked: Asked) -> str:
        found = judging(asked)
        return found if isinstance(found, str) else verdict_of(found, explanation="Because.")

    with judge_server(explained) as server:
        line = f"{model_folder} --data {prompts} --against {other_folder} --judge.url {server.url} --judge.retries 0"
        line += " --sampling.max_new_tokens 6 --sampling.temperature 1"
        if kind == "silent":
            rule = "error: a judge may fail for 10% of the completions, wise does for 12 of 12: got 'I cannot say.'"
            assert rule in cli.refused(f"evaluate {line}")
            return
        found = measured(line)
    assert len(server.asked) == found["results"]["requests"] == 12 and found["results"]["tokens"] == 120
    if kind == "first":
        assert found["results"]["ties"] == 6 and found["results"]["agreement"] == 0
    else:
        lengths = [(len(row["completion"]), len(row["other"])) for row in found["rows"]]
        assert [row["outcome"] for row in found["rows"]] == [0.5 + 0.5 * float(np.sign(a - b)) for a, b in lengths]
        assert found["results"]["agreement"] == 1


def test_a_judge_in_this_process_gives_each_model_what_the_other_loses(
    tmp_path: Path, model_folder: Path, other_folder: Path, prompts: Path, measured: Measured
) -> None:
    """Catches a judge that is loaded as the model that it judges, or that is asked as one."""
    judge = save_tiny(tmp_path / "judge", tiny_model(3, max_position_embeddings=8192))
    more = f"--data {prompts} --judge.path {judge} --judge.explain false --sampling.max_new_tokens 6 --against"
    there = measured(f"{model_folder} {more} {other_folder}")["results"]
    back = measured(f"{other_folder} {more} {model_folder}")["results"]
    assert there["requests"] == 12 and there["without a verdict"] == 0
    assert (there["wins"], there["ties"], there["losses"]) == (back["losses"], back["ties"], back["wins"])


def test_the_judge_of_a_reward_evaluates_with_its_section(
    model_folder: Path, other_folder: Path, prompts: Path, measured: Measured, tmp_path: Path
) -> None:
    with judge_server(lambda asked: [len(asked.answers[0])]) as server:
        judge = {"url": [server.url], "mode": "score", "explain": False, "range": [0, 100], "rubric_column": "answer"}
        RewardComponentConfig(judge=judge)
        (tmp_path / "judge.yaml").write_text(json.dumps({"judge": judge}))
        line = f"{model_folder} --config {tmp_path}/judge.yaml --data {prompts} --against {other_folder}"
        found = measured(f"{line} --sampling.max_new_tokens 6 --sampling.temperature 1")
    outcomes = [0.5 + 0.5 * float(np.sign(len(row["completion"]) - len(row["other"]))) for row in found["rows"]]
    assert [row["outcome"] for row in found["rows"]] == outcomes
    assert {asked.instructions.splitlines()[2] for asked in server.asked} == {"0", "1"}, "the rubrics of the rows"


def test_pass_rates_are_those_of_the_rewards(
    model_folder: Path, prompts: Path, rewards: Path, measured: Measured
) -> None:
    found = measured(
        f"{model_folder} --data {prompts} --reward {rewards}:digits --k '[1, 2]' --sampling.n 4 --seed 5"
        " --sampling.max_new_tokens 4 --sampling.temperature 1"
    )
    given = [row["rewards"] for row in found["rows"]]
    assert [len(row) for row in given] == [4] * 6 and 0 < sum(map(sum, given)) < 24
    of_two = [np.mean([max(pair) for pair in combinations(row, 2)]) for row in given]
    for name, expected in (("pass@2", of_two), ("pass@1", given), ("avg@4", given)):
        assert found["results"][name]["value"] == pytest.approx(np.mean(expected))
    tokenizer = tiny_tokenizer()
    sampled = GenerationEngine.from_pretrained(str(model_folder), dtype=torch.float32).generate(
        [encode_prompt([user(f"say {i}")], tokenizer) for i in range(6)],
        SamplingParams(n=4, max_new_tokens=4, temperature=1.0, top_p=0.95, seed=5),
    )
    texts = [[tokenizer.decode(one.token_ids, skip_special_tokens=True) for one in row] for row in sampled]
    assert [row["completions"] for row in found["rows"]] == texts


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="needs util-linux")
def test_a_verifier_gives_the_reason_of_each_score(
    model_folder: Path, write_jsonl: Callable[..., Path], measured: Measured
) -> None:
    """The reward of training by its name; with a function there is no reason."""
    file = write_jsonl([{"prompt": f"say {i}", "tests": [{"input": "", "output": "3"}]} for i in range(2)])
    found = measured(f"{model_folder} --data {file} --reward code --sampling.n 2 --sampling.max_new_tokens 4")
    assert found["results"]["pass@1"]["value"] == 0.0
    assert [row["reasons"] for row in found["rows"]] == [["no_answer: it has no fenced block of code"] * 2] * 2


def test_a_verifier_s_sandbox_has_the_keys_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without isolation could train with `limits_alone`, and not evaluate."""
    monkeypatch.setattr(pass_rate, "VerifierReward", lambda config, device: config)
    sandbox = SandboxConfig(limits_alone=True)
    config = EvaluateConfig(path="m", data=["rows.jsonl"], reward="code", sandbox=sandbox)
    assert pass_rate._verified_reward(config) == RewardComponentConfig(verifier="code", sandbox=sandbox)


def test_estimates() -> None:
    assert [pass_at_k(5, c, 2) for c in range(6)] == pytest.approx([0, 0.4, 0.7, 0.9, 1.0, 1.0])
    assert [pass_at_k(10, 3, k) for k in (1, 8)] == pytest.approx([0.3, 1.0])
    found = wilson([1.0] * 8 + [0.0] * 2)  # Wilson's interval of 8 of 10, from tables
    assert (found.value, found.low, found.high) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-4)
    assert wilson([1.0] * 5).low < 0.6 and wilson([1.0] * 5).high == 1.0
    assert all(wilson([0.0] * count).low == 0.0 for count in range(1, 40)), "5.551e-17 was shown for 3 rows"
    around = bootstrap(np.arange(400.0), np.ones(400), seed=0)  # 199.5, and its standard error 400 / sqrt(12 * 400)
    assert (around.low, around.high) == pytest.approx((199.5 - 1.96 * 5.774, 199.5 + 1.96 * 5.774), rel=0.01)
    assert bootstrap([2.0, 2.0], [1.0, 1.0], seed=0, transform=np.exp) == Estimate(*[math.exp(2.0)] * 3)


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("", "evaluate needs rows, got none"),
        (
            "--data {data} --tasks x",
            "unknown option --tasks: start `hybrid-rlhf serve`, and run lm_eval or inspect on it",
        ),
        ("--data {data} --against x", "win_rate needs a judge"),
        ("--data {data} --judge.model a --judge.url http://h/v1", "judge takes one of model and url"),
        ("--data {data} --against x --reward a:b", "one measure at a time, got against and reward"),
        ("--data {data} --measure pass_rate", "pass_rate needs --reward"),
        ("--data {data} --reward maths", "or a verifier, math or code, got maths: the nearest is math"),
        ("--data {data} --reward a:b --sandbox.strict true", "sandbox goes with the rewards math and code, got a:b"),
        ("--data {data} --reward code --sandbox.output_bytes 9", "sandbox.output_bytes of code is 9: give 1024"),
        ("--data {data} --reward a:b --k 4", "k must be at most sampling.n 1"),
        ("--data {data} --measure accuracy", "a reward model must have a score head"),
        ("--data {data} --reward {rewards}:absent", "absent needs the column gold, the data has prompt"),
        ("--data {data} --reward {rewards}:none", "must give a number per completion"),
        ("--data {data}", "must have messages or prompt"),
        ("--data {data} --output {data}", "--output must be a new file"),
        ("--data {data} --reward {rewards}:digits --max_length 9", "a prompt may have max_length 9"),
        (
            "--data {data} --against x --judge.url http://127.0.0.1:9/v1",
            "reward component judge must answer, http://127.0.0.1:9/v1",
        ),
        ("--data {data} --judge.url http://h/v1", "judge goes with win_rate and --against, got the section judge"),
        ("--data {data} --against x --judge.model a --judge.rubric b", "a reward model as judge has no other keys"),
        (
            "--data {data} --against x --judge.path a --judge.model b",
            "a reward model as judge has no other keys, got p",
        ),
        ("--data {data} --against x --judge.path a/b/c", "a model must be a folder, a .gguf file or a hub name, a/b/c"),
    ],
)
def test_mistakes_are_one_line(
    line: str, rule: str, model_folder: Path, prompts: Path, rewards: Path, cli: CommandLine
) -> None:
    assert rule in cli.refused(f"evaluate {model_folder} {line.format(data=prompts, rewards=rewards)}")
