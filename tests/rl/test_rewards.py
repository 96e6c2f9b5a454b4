"""Rewards of functions and models against a computation by hand, sums, ranks, and config errors."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerFast

from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.judge import JudgeConfig
from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.configs.sections.rewards import RewardComponentConfig
from hybrid_rlhf.configs.sections.sandbox import SandboxConfig
from hybrid_rlhf.configs.sections.training import ZeroConfig
from hybrid_rlhf.engines.builder import EngineSpec, build_engine
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
from hybrid_rlhf.rl.rewards import CompletionTexts, Reward, RewardReport, build_reward
from hybrid_rlhf.rl.rewards.functions import FunctionReward
from hybrid_rlhf.rl.rewards.models import ModelReward, RetokenizingModelReward
from hybrid_rlhf.runtime.command_line import parse_config, save_config
from hybrid_rlhf.runtime.world import World, solo_world
from tests.support.errors import refused, user_error
from tests.support.ranks import run_ranks
from tests.support.rewards import function_reward, score_completions
from tests.support.rl import COMPLETIONS, MICRO_BATCH_ROWS, rewarded, rollout_of_rows
from tests.support.tiny import tiny_config, tiny_tokenizer

CPU = torch.device("cpu")


LENGTHS = "return [float(len(text)) for text in completions]"


@pytest.mark.parametrize("prefix", ["", "async "])
def test_a_function_sees_text_and_columns_and_may_have_no_opinion(prefix: str, tmp_path: Path) -> None:
    """Comparisons, which TRL's users return, are 1 or 0."""
    body = "assert [p[0]['content'][:8] for p in prompts] == ['question'] * 5\n"
    body += "return [t == 1 or t for t in columns['target']]"
    report = score_completions(function_reward(tmp_path, body, prefix=prefix))
    assert report.scores.tolist() == [1, 2, 0, 4, 5] and report.scores.dtype is torch.float32
    assert report.metrics == {
        "reward/mine/mean": 3.0,  # a row without an opinion is left out
        "reward/mine/std": pytest.approx(np.std([1, 2, 4, 5])),
    }


def test_columns_that_a_function_needs_are_those_without_a_default(tmp_path: Path) -> None:
    (tmp_path / "named.py").write_text("def f(prompts, completions, *, answer, kind=None, **columns): ...\n")
    part = FunctionReward(RewardComponentConfig(function=f"{tmp_path}/named.py:f"), device=CPU)
    part.require_columns([{"kind": "a"}, {"answer": 1}])  # rows may have different columns
    with user_error("reward component f needs the column answer, the data has prompt, kind: "):
        Reward([part], None).require_columns(lambda: [{"kind": "a"}])  # type: ignore[arg-type]


def test_a_function_that_cannot_be_called_is_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import no_such_module\n")
    (tmp_path / "right.py").write_text("x = 3\ndef narrow(prompts, completions): return []\n")
    for name, rule in {
        f"{file}:f": "cannot be imported .ModuleNotFoundError: No module named 'no_such_module'",
        f"{tmp_path}/absent.py:f": "absent.py does not exist",
        "no_such_module:f": "cannot be imported",
        "json:absent": "cannot be imported .AttributeError",
        f"{tmp_path}/right.py:x": "must be a function, got a int",
        f"{tmp_path}/right.py:narrow": r"takes \(prompts, completions\): add \*\*columns",
    }.items():
        with user_error(rule):
            FunctionReward(RewardComponentConfig(function=name), device=CPU)


def test_components_are_weighted_and_summed(tmp_path: Path, log_lines: list[str]) -> None:
    bodies = {"p0": (1.0, LENGTHS), "p1": (-0.5, "return columns['target']"), "p2": (2.0, "return [None] * 5")}
    reward = Reward(
        [function_reward(tmp_path, body, name=name, weight=weight) for name, (weight, body) in bodies.items()],
        solo_world(CPU),
    )
    report, _ = (rewarded(reward, rollout_of_rows(), MICRO_BATCH_ROWS, COMPLETIONS) for _ in range(2))
    assert report.scores.tolist() == pytest.approx([1 - 0.5, 2 - 1, 3, -2, 5 - 2.5]), "no opinion adds nothing"
    means = {name: value for name, value in report.metrics.items() if name.endswith("mean")}
    assert means == pytest.approx({"reward/p0/mean": 2.2, "reward/p1/mean": 3.0}), "before the weight"
    (line,) = log_lines
    assert "reward component p2 gives None for all 5 completions" in line


def test_answers_are_what_the_data_says_and_the_actor_said() -> None:
    """The turns of an episode are lines, without observations."""
    tokenizer = tiny_tokenizer()
    prompts = [
        {"prompt": json.dumps([{"role": "user", "content": text}]), "columns": columns}
        for text, columns in (("1+1?", '{"answer": 2}'), ("why?", '{"kind": "open"}'))
    ]
    one, two, end = *map(tokenizer.encode, ("one", "é")), tokenizer.eos_token_id
    rollout = rollout_of_rows([[7, *one, end], [7, *one, 9, 9, *two, end], [7, end]], prompt=1)
    rollout.response_mask[rollout.input_ids == 9] = False
    answers = CompletionTexts.read(prompts, replace(rollout, groups=torch.tensor([0, 0, 1])), tokenizer)
    assert answers.completions == ["one", "one\né", ""]
    assert [prompt[0]["content"] for prompt in answers.prompts] == ["1+1?", "1+1?", "why?"]
    assert answers.columns == {"answer": [2, 2, None], "kind": [None, None, "open"]}
    plain = tiny_tokenizer(template=None)
    spoken = rollout_of_rows([[7, *plain.encode(" 2"), plain.eos_token_id]], prompt=1)
    assert CompletionTexts.read(prompts, spoken, plain).completions == ["2"], "a plain turn has a space before it"
    prompts[0]["columns"] = '{"prompts": 1}'
    with user_error("rename it"):
        CompletionTexts.read(prompts, rollout, tokenizer)


def other_tokenizer() -> PreTrainedTokenizerFast:
    """Another vocabulary, merges and template; pad is a token of its own."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    vocabulary = {token: index for index, token in enumerate(["<pad>", *letters, "st", "<eos>"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("s", "t")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['content'] == 'forbidden' %}{{ raise_exception('not that') }}{% endif %}"
        "[{{ m['role'] }}] {{ m['content'] }}<eos>{% endfor %}"
    )
    return tokenizer


@pytest.fixture(scope="module")
def judges(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Reward models by name: one with the actor's tokens, one with others."""
    folder = tmp_path_factory.mktemp("judges")
    for name, tokenizer in (("own", tiny_tokenizer()), ("other", other_tokenizer())):
        torch.manual_seed(len(name))
        config = tiny_config(num_labels=1, vocab_size=len(tokenizer), pad_token_id=0)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return {name: str(folder / name) for name in ("own", "other")}


def load(path: str) -> PreTrainedModel:
    return AutoModelForSequenceClassification.from_pretrained(path).eval()


def by_hand(model: PreTrainedModel, ids: Sequence[int]) -> float:
    with torch.no_grad():
        hidden = model.model(input_ids=torch.tensor([list(ids)])).last_hidden_state
        return float(model.score(hidden)[0, -1, 0])


def frozen_engine(path: str, world: World, *, stage: Literal[0, 3] = 0) -> ModelEngine:
    return build_engine(EngineSpec("reward", path, ModelConfig(dtype="float32"), ZeroConfig(stage=stage), 0), world)


def test_models_score_their_own_reading_of_a_conversation(world: World, judges: dict[str, str]) -> None:
    reward = build_reward(
        [RewardComponentConfig(model=judges[name], weight=weight) for name, weight in (("own", 2.0), ("other", 0.5))],
        world,
        tokenizer=tiny_tokenizer(),
        resolve=str,
        load_tokenizer=load_tokenizer,
        build_engine=lambda name, path: frozen_engine(path, world),
        build_judge=None,
    )
    assert [type(part) for part in reward._components] == [ModelReward, RetokenizingModelReward]
    rows = [[5, 6, 7], [9, 8], [4, 4, 4, 4], [11], [3, 200, 7]]
    report = rewarded(reward, rollout_of_rows(rows), [*MICRO_BATCH_ROWS, [None]], COMPLETIONS)
    own, other, tokenizer = load(judges["own"]), load(judges["other"]), other_tokenizer()
    for score, ids, prompt, said in zip(report.scores, rows, COMPLETIONS.prompts, COMPLETIONS.completions, strict=True):
        messages = [*prompt, {"role": "assistant", "content": said}]
        theirs = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        assert float(score) == pytest.approx(2.0 * by_hand(own, ids) + 0.5 * by_hand(other, theirs), abs=1e-5)
    assert {*report.metrics} == {f"reward/{name}/{what}" for name in ("own", "other") for what in ("mean", "std")}


def test_a_model_on_the_actors_tokens_reads_what_its_template_has_behind_an_answer_that_ended(
    world: World, judges: dict[str, str]
) -> None:
    """It needs no text, and alone it logs nothing."""
    engine = frozen_engine(judges["own"], world)
    part = ModelReward(RewardComponentConfig(model=judges["own"]), engine, end=(6, [12, 13]))
    longest = [6] * (engine.lm.config.max_position_embeddings - 1)  # there is no room behind it
    rollout, micro = rollout_of_rows([[5, 6], [9, 8, 7], [6], longest]), [[1, 0], [2, None], [3]]
    report = rewarded(Reward([part], world), rollout, micro)
    for score, ids in zip(report.scores, ([5, 6, 12, 13], [9, 8, 7], [6, 12, 13], longest), strict=True):
        assert float(score) == pytest.approx(by_hand(load(judges["own"]), ids), abs=1e-5)
    assert report.metrics == {}
    with torch.no_grad():
        engine.lm.score.weight.fill_(math.nan)
    with user_error("for 4 of 4 completions: got nan"):
        rewarded(Reward([part], world), rollout, micro)


def test_a_conversation_that_a_model_cannot_read_fails_like_any_other(world: World, judges: dict[str, str]) -> None:
    engine = frozen_engine(judges["other"], world)
    odd = CompletionTexts(COMPLETIONS.prompts, ["fine", "forbidden", "x" * 300, "", "fine"], {})

    def run(on_failure: Any) -> RewardReport:
        config = RewardComponentConfig(model=judges["other"], on_failure=on_failure)
        part = RetokenizingModelReward(config, engine, other_tokenizer())
        return rewarded(Reward([part], world), rollout_of_rows(), MICRO_BATCH_ROWS, odd)

    with user_error("for 2 of 5 completions: .*(tokens and the model reads|template must accept)"):
        run("stop")
    report = run("zero")
    assert (report.scores == 0).tolist() == [False, True, True, False, False]
    assert report.metrics["reward/other/failures"] == 2
    assert torch.equal(report.components["other"], report.scores), "a failure that scores 0 is a score"


def on_two_ranks(world: World, judge: str) -> tuple[list[float], list[str]]:
    """Rank 0 has rows 0, 2 and 3, rank 1 has rows 1 and 4; what fails, fails on rank 1."""
    micro: list[list[int | None]] = [[0, 2], [3]] if world.rank == 0 else [[1, 4], [None]]
    engine = frozen_engine(judge, world, stage=3)
    forbidden = CompletionTexts(COMPLETIONS.prompts, ["", "forbidden", "", "", ""], {})

    def judged(on_failure: Any) -> list[float]:
        part = RetokenizingModelReward(
            RewardComponentConfig(model=judge, on_failure=on_failure), engine, other_tokenizer()
        )
        return rewarded(Reward([part], world), rollout_of_rows(), micro, forbidden).scores.tolist()

    key = "PATH" if world.rank == 0 else "ABSENT_KEY"
    missing = RewardComponentConfig(urls=("http://127.0.0.1:9",), api_key_env=key)
    unused: Any = None
    parts = {"load_tokenizer": unused, "build_engine": unused, "build_judge": unused}
    build = partial(build_reward, tokenizer=unused, resolve=str, **parts)
    return judged("zero"), [refused(judged, "stop"), refused(build, [missing], world)]


def test_what_fails_on_one_rank_stops_both(tmp_path: Path, judges: dict[str, str]) -> None:
    first, second = run_ranks(on_two_ranks, 2, tmp_path, judges["other"])
    assert first == second
    scores, (unread, without_key) = first
    assert [value == 0 for value in scores] == [False, True, False, False, False]
    assert "1 of 5 completions: the chat template must accept" in unread and "ABSENT_KEY is not set" in without_key


def test_components_come_from_yaml_and_go_back(tmp_path: Path) -> None:
    """An item of a list has sections of its own, whose unknown keys would have been ignored."""
    file = tmp_path / "config.yaml"
    file.write_text(
        "reward:\n  components:\n  - {model: models/mine, weight: 2}\n  - {function: 'a.b:f', on_failure: zero}\n"
        "  - {urls: ['http://u:${P}@host:80/x?k=1'], batch_size: 3}\n"
        "  - {verifier: code, sandbox: {memory_gib: 2, command: [python3, -s]}}\n"
        "  - {judge: {url: 'http://h/v1', mode: pairwise, against_column: gold, request: {seed: 1}}}\n"
    )
    config = parse_config(RLConfig, ["--config", str(file)])
    assert [component.label for component in config.reward.named] == ["mine", "f", "host:80", "code", "judge"]
    assert config.reward.named[0].weight == 2.0
    assert config.reward.named[3].sandbox == SandboxConfig(memory_gib=2.0, command=("python3", "-s"))
    judge = JudgeConfig(url="http://h/v1", mode="pairwise", against_column="gold", request={"seed": 1})
    assert config.reward.named[4].judge == judge
    save_config(config, file)
    assert parse_config(RLConfig, ["--config", str(file)]) == config


@pytest.mark.slow
def test_step_3_without_an_endpoint_needs_no_http_client() -> None:
    """None of our modules imports it; huggingface_hub may, as its version wants."""
    script = """
import builtins
real, asked = builtins.__import__, set()

def watched(name, globals=None, *rest, **more):
    if name.startswith("httpx2"):
        asked.add((globals or {}).get("__name__", ""))
    return real(name, globals, *rest, **more)

builtins.__import__ = watched
import hybrid_rlhf.rl.build, hybrid_rlhf.cli.rl
assert not [name for name in asked if name.startswith(("hybrid_rlhf", "training"))], asked
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
