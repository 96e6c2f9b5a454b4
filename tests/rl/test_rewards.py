"""Rewards from anywhere: functions and servers that misbehave, models against a computation by hand, sums, ranks."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerFast

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.configs.sections.rewards import RewardComponentConfig, require_distinct_names
from hybrid_rlhf.configs.sections.training import ZeroConfig
from hybrid_rlhf.engines.builder import EngineSpec, build_engine
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
from hybrid_rlhf.rl.rewards import CompletionTexts, Reward, RewardReport, build_reward
from hybrid_rlhf.rl.rewards.endpoint import EndpointReward
from hybrid_rlhf.rl.rewards.functions import FunctionReward
from hybrid_rlhf.rl.rewards.models import ModelReward, RetokenizingModelReward
from hybrid_rlhf.runtime import background as waits
from hybrid_rlhf.runtime.command_line import parse_config, save_config
from hybrid_rlhf.runtime.world import World, solo_world
from tests.support.ranks import run_ranks
from tests.support.rl import COMPLETIONS, MICRO_BATCH_ROWS, rewarded, rollout_of_rows
from tests.support.tiny import tiny_config, tiny_tokenizer

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def score_completions(
    *parts: Any, world: World | None = None, micro: list[list[int | None]] = MICRO_BATCH_ROWS
) -> RewardReport:
    return rewarded(Reward(parts, world or solo_world(CPU)), rollout_of_rows(), micro, COMPLETIONS)


@pytest.fixture
def function(tmp_path: Path) -> Callable[..., FunctionReward]:
    """A component whose function has the body given."""
    numbers = iter(range(99))

    def make(body: str, *, prefix: str = "", **settings: Any) -> FunctionReward:
        file = tmp_path / f"rewards_{next(numbers)}.py"
        header = "import asyncio, time\n\n"
        file.write_text(header + f"{prefix}def f(prompts, completions, **columns):\n" + textwrap.indent(body, "    "))
        return FunctionReward(RewardComponentConfig(function=f"{file}:f", **settings), device=CPU)

    return make


LENGTHS = "return [float(len(text)) for text in completions]"


@pytest.mark.parametrize("prefix", ["", "async "])
def test_a_function_sees_text_and_columns_and_may_have_no_opinion(
    prefix: str, function: Callable[..., FunctionReward]
) -> None:
    body = "assert [p[0]['content'][:8] for p in prompts] == ['question'] * 5\nreturn columns['target']"
    report = score_completions(function(body, prefix=prefix))
    assert report.scores.tolist() == [1, 2, 0, 4, 5] and report.scores.dtype is torch.float32
    assert report.metrics["reward/f/mean"] == 3.0, "a row without an opinion is left out of the mean"
    assert report.metrics["reward/f/std"] == pytest.approx(np.std([1, 2, 4, 5]))
    assert set(report.metrics) == {"reward/f/mean", "reward/f/std"}


@pytest.mark.parametrize(
    ("body", "prefix", "reason", "rows"),
    [
        ("raise ValueError('no such thing')", "", r"raised ValueError: no such thing \(rewards_0.py:4\)", 5),
        ("raise TimeoutError('mine')", "async ", "raised TimeoutError: mine", 5),
        ("raise SystemExit(3)", "", "raised SystemExit: 3", 5),
        ("raise asyncio.CancelledError", "async ", "raised CancelledError", 5),
        ("return [1.0, 2.0]", "", "got 2 values for 5 completions", 5),
        ("return 'high'", "", "got a str in place of a list", 5),
        ("return [1, 'high', 3, 4, 5]", "", "got 'high' for a completion", 1),
        ("return [1, 2, float('nan'), 4, 10 ** 400]", "", "got (nan|10+)", 2),
        ("return [c[0]['content'] for c in completions]", "", "a completion is its text, not a list of messages", 5),
        ("return 1 / columns['absent']", "", "raised KeyError", 5),
        ("time.sleep(30)", "", "took longer than 0.2 s", 5),
        ("await asyncio.sleep(30)", "async ", "took longer than 0.2 s", 5),
    ],
)
def test_a_function_that_fails_stops_the_run_or_scores_0_and_is_counted(
    body: str, prefix: str, reason: str, rows: int, function: Callable[..., FunctionReward], log_lines: list[str]
) -> None:
    settings = {"prefix": prefix, "timeout_seconds": 0.2, "name": "mine"}
    with pytest.raises(
        UserError, match=f"reward component mine must give .* for {rows} of 5 completions: .*{reason}"
    ) as told:
        score_completions(function(body, **settings))
    assert "\n" not in str(told.value) and "on_failure" in str(told.value)
    report = score_completions(function(body, **settings, on_failure="zero"), function(LENGTHS, weight=0.5))
    assert report.metrics["reward/mine/failures"] == rows
    failed = report.scores - 0.5 * torch.tensor([1.0, 2.0, 3.0, 0.0, 5.0]) == 0
    assert int(failed.sum()) == rows
    assert ("reward/mine/mean" in report.metrics) == (rows < 5), "no mean of nothing"
    assert sum("reward component mine is scored 0" in line for line in log_lines) == 1


def test_columns_that_a_function_needs_are_those_without_a_default(tmp_path: Path) -> None:
    (tmp_path / "named.py").write_text("def f(prompts, completions, *, answer, kind=None, **columns): ...\n")
    part = FunctionReward(RewardComponentConfig(function=f"{tmp_path}/named.py:f"), device=CPU)
    part.require_columns([{"kind": "a"}, {"answer": 1}])  # rows may have different columns
    with pytest.raises(UserError, match="reward function f needs the column answer, the data has prompt, kind: "):
        Reward([part], None).require_columns(lambda: [{"kind": "a"}])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "scores"),
    [
        ("return [len(c) > 2 for c in completions]", [0, 0, 1, 0, 1]),
        ("return np.array([len(c) > 2 for c in completions])", [0, 0, 1, 0, 1]),
        ("return [np.float32(len(c)) for c in completions]", [1, 2, 3, 0, 5]),
        ("return [np.int64(len(c)) for c in completions]", [1, 2, 3, 0, 5]),
    ],
)
def test_booleans_and_numbers_of_numpy_are_scores(
    body: str, scores: list[float], function: Callable[..., FunctionReward]
) -> None:
    """TRL's users return comparisons."""
    assert score_completions(function(f"import numpy as np\n{body}")).scores.tolist() == scores


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
        with pytest.raises(UserError, match=rule):
            FunctionReward(RewardComponentConfig(function=name), device=CPU)


def test_components_are_weighted_and_summed(function: Callable[..., FunctionReward]) -> None:
    weights, bodies = [1.0, -0.5, 2.0, 0.0], [LENGTHS, "return columns['target']", "return [None] * 5", LENGTHS]
    parts = [function(body, name=f"p{i}", weight=w) for i, (body, w) in enumerate(zip(bodies, weights, strict=True))]
    report = score_completions(*parts)
    values: list[list[float | None]] = [[1, 2, 3, 0, 5], [1, 2, None, 4, 5], [None] * 5, [1, 2, 3, 0, 5]]
    for row in range(5):
        total = 0.0
        for weight, of_part in zip(weights, values, strict=True):
            value = of_part[row]
            total += weight * (0.0 if value is None else value)
        assert float(report.scores[row]) == pytest.approx(total)
    assert report.metrics["reward/p0/mean"] == pytest.approx(2.2), "its own scores, before the weight"
    assert report.metrics["reward/p1/mean"] == 3.0 and report.metrics["reward/p3/mean"] == pytest.approx(2.2)
    assert "reward/p2/mean" not in report.metrics


@dataclass
class Server:
    """A local endpoint: what it was asked, and how it answers."""

    answer: Callable[[dict[str, Any]], tuple[int, bytes]]
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[dict[str, Any]], tuple[int, bytes]]], Server]]:
    running = []

    def start(answer: Callable[[dict[str, Any]], tuple[int, bytes]]) -> Server:
        server = Server(answer)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:  # noqa: N802 - the name that http.server calls
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.requests.append(body)
                server.keys.append(self.headers["Authorization"])
                status, content = server.answer(body)
                try:
                    self.send_response(status)
                    self.end_headers()
                    self.wfile.write(content)
                except BrokenPipeError:
                    pass  # the client had waited long enough

            def log_message(self, *words: Any) -> None:
                pass

        http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        http.daemon_threads = True
        threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
        running.append(http)
        server.url = f"http://127.0.0.1:{http.server_port}/score"
        return server

    yield start
    for http in running:
        http.shutdown()
        http.server_close()


def lengths(body: dict[str, Any]) -> tuple[int, bytes]:
    return 200, json.dumps({"scores": [float(len(text)) for text in body["completions"]]}).encode()


def remote(*urls: str, **settings: Any) -> EndpointReward:
    return EndpointReward(RewardComponentConfig(**{"urls": urls, "name": "far", "retries": 2} | settings), device=CPU)


def test_an_endpoint_is_asked_in_batches_with_the_key_and_its_nulls_are_no_opinions(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MY_KEY", "s3cret")
    server = serve(lambda body: (200, json.dumps({"scores": body["columns"]["target"]}).encode()))
    with caplog.at_level(logging.DEBUG):
        report = score_completions(remote(server.url, batch_size=2, api_key_env="MY_KEY"))
    assert report.scores.tolist() == [1, 2, 0, 4, 5] and report.metrics["reward/far/mean"] == 3.0
    assert sorted(len(body["completions"]) for body in server.requests) == [1, 2, 2]
    assert server.requests[0].keys() == {"prompts", "completions", "columns"}
    assert set(server.keys) == {"Bearer s3cret"}
    assert "s3cret" not in caplog.text
    for value, rule in (("", "is not set"), ("s3cret\n", "line break")):
        monkeypatch.setenv("MY_KEY", value)
        with pytest.raises(UserError, match=rule) as told:
            remote(server.url, api_key_env="MY_KEY")
        assert "s3cret" not in str(told.value)


@pytest.mark.parametrize(
    ("answer", "reason", "tries"),
    [
        (lambda body: (200, b'{"scores": [1.0]}'), r"got 1 values for 5 completions \(try 3\)", 3),
        (lambda body: (200, b'{"scores": [1, 2, "high", 4, 5]}'), "got 'high' for a completion", 3),
        (lambda body: (200, b'{"scores": [1, 2, NaN, 4, 5]}'), "got nan for a completion", 3),
        (lambda body: (200, b'{"score": []}'), "in place of {", 3),
        (lambda body: (200, b"<html>"), "got '<html>' in place of JSON", 3),
        (lambda body: (404, b""), "answered HTTP 404", 1),
        (lambda body: (500, b""), r"answered HTTP 500 \(try 3\)", 3),
        (lambda body: (429, b""), r"answered HTTP 429 \(try 3\)", 3),
        (lambda body: (time.sleep(1), lengths(body))[1], r"took longer than 0.2 s \(try 3\)", 3),
    ],
)
def test_an_endpoint_that_fails_stops_the_run_or_scores_0_and_is_counted(
    answer: Any, reason: str, tries: int, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(answer)
    monkeypatch.setenv("PASSWORD", "s3cret")
    url = server.url.replace("http://", "http://user:${PASSWORD}@")
    with pytest.raises(UserError, match=reason) as told:
        score_completions(remote(url, timeout_seconds=0.2))
    assert len(server.requests) == tries and "s3cret" not in str(told.value)
    report = score_completions(remote(url, timeout_seconds=0.2, retries=0, on_failure="zero"))
    failures = int(report.metrics["reward/far/failures"])
    assert failures == int((report.scores == 0).sum()) and failures in (1, 5)


def test_a_request_is_tried_again_until_it_is_answered(serve: Callable[..., Server]) -> None:
    server = serve(lambda body: lengths(body) if len(server.requests) > 2 else (503, b""))
    assert score_completions(remote(server.url)).scores.tolist() == [1, 2, 3, 0, 5]
    assert len(server.requests) == 3


def test_replicas_share_the_work_and_a_dead_one_is_left_out(serve: Callable[..., Server]) -> None:
    replicas = [serve(lambda body: (time.sleep(0.02), lengths(body))[1]) for _ in range(2)]
    part = remote(*(server.url for server in replicas), batch_size=1)
    assert score_completions(part).scores.tolist() == [1, 2, 3, 0, 5]
    assert {len(server.requests) for server in replicas} == {2, 3}, "the least loaded is asked"
    with_dead = remote("http://127.0.0.1:9/", replicas[0].url, batch_size=1, retries=1)
    assert score_completions(with_dead).scores.tolist() == [1, 2, 3, 0, 5], "a failed request goes to another replica"
    with pytest.raises(UserError, match="http://127.0.0.1:9/ cannot be reached .ConnectError"):
        score_completions(remote("http://127.0.0.1:9/", retries=1))


def test_columns_that_json_cannot_represent_are_logged(serve: Callable[..., Server]) -> None:
    odd = CompletionTexts(COMPLETIONS.prompts, COMPLETIONS.completions, {"x": [float("nan")] * 5})
    with pytest.raises(UserError, match="does not fit JSON"):
        rewarded(Reward([remote(serve(lengths).url)], solo_world(CPU)), rollout_of_rows(), MICRO_BATCH_ROWS, odd)


def test_answers_are_what_the_data_says_and_the_actor_said() -> None:
    tokenizer = tiny_tokenizer()
    prompts = [
        {"prompt": json.dumps([{"role": "user", "content": "1+1?"}]), "columns": '{"answer": 2}'},
        {"prompt": json.dumps([{"role": "user", "content": "why?"}]), "columns": '{"kind": "open"}'},
    ]
    said = ["2", "two", "é", ""]
    rows = [[7, 7, 7, *tokenizer.encode(text), tokenizer.eos_token_id] for text in said]
    groups = torch.tensor([0, 0, 1, 1])
    answers = CompletionTexts.read(prompts, replace(rollout_of_rows(rows, prompt=3), groups=groups), tokenizer)
    assert answers.completions == said
    assert [prompt[0]["content"] for prompt in answers.prompts] == ["1+1?", "1+1?", "why?", "why?"]
    assert answers.columns == {"answer": [2, 2, None, None], "kind": [None, None, "open", "open"]}
    assert answers.select([3, 0]).completions == ["", "2"]
    plain = tiny_tokenizer(template=None)
    rows = [[7, *plain.encode(f" {text}"), plain.eos_token_id] for text in ("2", " two")]
    spoken = CompletionTexts.read(prompts, rollout_of_rows(rows, prompt=1), plain).completions
    assert spoken == ["2", " two"], "a plain turn has a space before it"
    rows = [[7, 7, 7, *tokenizer.encode(text), tokenizer.eos_token_id] for text in said]
    prompts[0]["columns"] = '{"prompts": 1}'
    with pytest.raises(UserError, match="rename it"):
        CompletionTexts.read(prompts, rollout_of_rows(rows, prompt=3), tokenizer)


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
    parts = [
        RewardComponentConfig(model=judges["own"], weight=2.0),
        RewardComponentConfig(model=judges["other"], weight=0.5),
    ]
    reward = build_reward(
        parts,
        world,
        tokenizer=tiny_tokenizer(),
        resolve=str,
        load_tokenizer=load_tokenizer,
        build_engine=lambda name, path: frozen_engine(path, world),
    )
    assert [type(part) for part in reward._components] == [ModelReward, RetokenizingModelReward]
    rows = [[5, 6, 7], [9, 8], [4, 4, 4, 4], [11], [3, 200, 7]]
    report = rewarded(reward, rollout_of_rows(rows), [*MICRO_BATCH_ROWS, [None]], COMPLETIONS)
    own, other, tokenizer = load(judges["own"]), load(judges["other"]), other_tokenizer()
    for row, ids in enumerate(rows):
        messages = [*COMPLETIONS.prompts[row], {"role": "assistant", "content": COMPLETIONS.completions[row]}]
        theirs = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        expected = 2.0 * by_hand(own, ids) + 0.5 * by_hand(other, theirs)
        assert float(report.scores[row]) == pytest.approx(expected, abs=1e-5)
    assert {"reward/own/mean", "reward/own/std", "reward/other/mean", "reward/other/std"} == set(report.metrics)


def test_one_model_on_the_actors_tokens_needs_no_text_and_logs_nothing(world: World, judges: dict[str, str]) -> None:
    engine = frozen_engine(judges["own"], world)
    part = ModelReward(RewardComponentConfig(model=judges["own"]), engine)
    rollout = rollout_of_rows([[5, 6], [9, 8, 7], [4]])
    report = rewarded(Reward([part], world), rollout, [[1, 0], [2, None]])
    assert report.metrics == {}
    assert float(report.scores[1]) == pytest.approx(by_hand(load(judges["own"]), [9, 8, 7]), abs=1e-5)
    with torch.no_grad():
        engine.lm.score.weight.fill_(math.nan)
    with pytest.raises(UserError, match="for 3 of 3 completions: got nan"):
        rewarded(Reward([part], world), rollout, [[1, 0], [2, None]])


def test_a_model_on_the_actors_tokens_reads_what_its_template_has_behind_an_answer_that_ended(
    world: World, judges: dict[str, str]
) -> None:
    engine = frozen_engine(judges["own"], world)
    part = ModelReward(RewardComponentConfig(model=judges["own"]), engine, end=(6, [12, 13]))
    longest = [6] * (engine.lm.config.max_position_embeddings - 1)  # there is no room behind it
    rollout = rollout_of_rows([[5, 6], [9, 8, 7], [6], longest])
    report = rewarded(Reward([part], world), rollout, [[1, 0], [2, None], [3]])
    for score, ids in zip(report.scores, ([5, 6, 12, 13], [9, 8, 7], [6, 12, 13], longest), strict=True):
        assert float(score) == pytest.approx(by_hand(load(judges["own"]), ids), abs=1e-5)


def test_a_conversation_that_a_model_cannot_read_fails_like_any_other(world: World, judges: dict[str, str]) -> None:
    engine = frozen_engine(judges["other"], world)
    odd = CompletionTexts(COMPLETIONS.prompts, ["fine", "forbidden", "x" * 300, "", "fine"], {})

    def run(**settings: Any) -> RewardReport:
        part = RetokenizingModelReward(
            RewardComponentConfig(model=judges["other"], **settings), engine, other_tokenizer()
        )
        return rewarded(Reward([part], world), rollout_of_rows(), MICRO_BATCH_ROWS, odd)

    with pytest.raises(UserError, match="for 2 of 5 completions: .*(tokens and the model reads|template must accept)"):
        run()
    report = run(on_failure="zero")
    assert (report.scores == 0).tolist() == [False, True, True, False, False]
    assert report.metrics["reward/other/failures"] == 2


def on_two_ranks(world: World, folder: Path, judge: str) -> dict[str, Any]:
    """Rank 0 has rows 0, 2 and 3, rank 1 has rows 1 and 4; what fails, fails on rank 1."""
    micro: list[list[int | None]] = [[0, 2], [3]] if world.rank == 0 else [[1, 4], [None]]
    file = folder / f"f{world.rank}.py"

    def run(rank_1: str, **settings: Any) -> RewardReport:
        body = rank_1 if world.rank == 1 else "return [float(len(text)) for text in completions]"
        file.write_text(f"def f(prompts, completions, **columns):\n    {body}\n")
        config = RewardComponentConfig(function=f"{file}:f", **settings)
        reward = Reward([FunctionReward(config, device=world.device)], world)
        return rewarded(reward, rollout_of_rows(), micro, COMPLETIONS)

    result: dict[str, Any] = {}
    try:
        run("raise ValueError('boo')")
    except UserError as error:
        result["stopped"] = str(error)
    zero = run("raise ValueError('boo')", on_failure="zero")
    result["zero"], result["metrics"] = zero.scores.tolist(), zero.metrics
    engine = frozen_engine(judge, world, stage=3)
    forbidden = CompletionTexts(COMPLETIONS.prompts, ["", "forbidden", "", "", ""], {})
    for on_failure in ("stop", "zero"):
        config = RewardComponentConfig(model=judge, on_failure=on_failure)  # type: ignore[arg-type]
        part = RetokenizingModelReward(config, engine, other_tokenizer())
        try:
            report = rewarded(Reward([part], world), rollout_of_rows(), micro, forbidden)
            result["judged"] = report.scores.tolist()
        except UserError as error:
            result["unread"] = str(error)
    missing = RewardComponentConfig(
        urls=("http://127.0.0.1:9",), api_key_env="PATH" if world.rank == 0 else "ABSENT_KEY"
    )
    try:
        build_reward([missing], world, tokenizer=None, resolve=str, load_tokenizer=None, build_engine=None)  # type: ignore[arg-type]
    except UserError as error:
        result["refused"] = str(error)
    return result


def test_what_fails_on_one_rank_stops_both(tmp_path: Path, judges: dict[str, str]) -> None:
    first, second = run_ranks(on_two_ranks, 2, tmp_path, tmp_path, judges["other"])
    assert first == second
    assert "2 of 5 completions: it raised ValueError: boo" in first["stopped"]
    assert first["zero"] == [1, 0, 3, 0, 0]
    assert first["metrics"]["reward/f/failures"] == 2
    assert first["metrics"]["reward/f/mean"] == pytest.approx(4 / 3)
    assert "1 of 5 completions: the chat template must accept" in first["unread"]
    assert [value == 0 for value in first["judged"]] == [False, True, False, False, False]
    assert "ABSENT_KEY is not set" in first["refused"]


@dataclass(frozen=True, kw_only=True)
class Section:
    components: list[RewardComponentConfig] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A config that has reward components."""

    reward: Section = field(default_factory=Section)


def test_components_come_from_yaml_and_go_back(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "reward:\n  components:\n  - {model: models/judge, weight: 2}\n  - {function: 'a.b:f', on_failure: zero}\n"
        "  - {urls: ['http://u:${P}@host:80/x?k=1'], batch_size: 3}\n"
    )
    config = parse_config(Whole, ["--config", str(file)])
    assert [component.label for component in config.reward.components] == ["judge", "f", "host:80"]
    assert config.reward.components[0].weight == 2.0
    save_config(config, file)
    assert parse_config(Whole, ["--config", str(file)]) == config
    file.write_text("reward:\n  components:\n  - {model: m, retires: 2}\n")
    with pytest.raises(UserError, match="unknown key retires in an item of reward.components: the nearest is retries"):
        parse_config(Whole, ["--config", str(file)])
    file.write_text("reward:\n  components:\n  - {model: m, function: 'a:f'}\n")
    with pytest.raises(UserError, match="has one of model, function and urls"):
        parse_config(Whole, ["--config", str(file)])


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({}, "got none"),
        ({"model": "m", "urls": ("http://h",)}, "got model and urls"),
        ({"function": "f"}, "is module:function"),
        ({"urls": ("host/score",)}, "a URL is http"),
        ({"urls": ("ftp://host",)}, "a URL is http"),
        ({"model": "m", "name": "a/b"}, "a name has letters"),
        ({"model": "m", "weight": float("nan")}, "weight of m must be a finite number"),
        ({"model": "m", "timeout_seconds": 0}, "timeout_seconds of m must be above 0"),
        ({"model": "m", "retries": -1}, "retries of m must be 0 or more"),
        ({"model": "m", "batch_size": 0}, "batch_size of m must be 1 or more"),
        ({"model": "m", "api_key_env": "KEY"}, "goes with urls"),
    ],
)
def test_wrong_components_are_refused(settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(UserError, match=rule):
        RewardComponentConfig(**settings)


def test_names_are_distinct() -> None:
    with pytest.raises(UserError, match="'m' is used twice"):
        require_distinct_names([RewardComponentConfig(model="a/m"), RewardComponentConfig(model="b/m")])


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
