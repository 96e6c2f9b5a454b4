"""What `hybrid-rlhf serve` has beside its model: the scores of a reward model, adapters, and calls that it writes."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import torch

from hybrid_rlhf.cli.saved_models.loading import engine_at, find_model, load_scorer
from hybrid_rlhf.configs.inference import ServeConfig
from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.data.chat.conversation import encode_completion, encode_prompt
from hybrid_rlhf.generation import SamplingParams
from hybrid_rlhf.generation.open_batch import StreamedToken
from hybrid_rlhf.models.policy import Scorer
from hybrid_rlhf.models.pretrained.loading import load_model
from hybrid_rlhf.serving.answers import Answer
from hybrid_rlhf.serving.app import Access, build_scoring_app
from hybrid_rlhf.serving.bodies import ChatBody
from hybrid_rlhf.serving.saved_scorer import NotWanted, ScoredRow
from hybrid_rlhf.serving.scores import ScoreService
from hybrid_rlhf.serving.service import Job
from hybrid_rlhf.serving.token_text import TokenText
from hybrid_rlhf.serving.web import served_in_background
from tests.support.clock import wait_until
from tests.support.commands import CommandLine
from tests.support.messages import assistant, user
from tests.support.models import random_adapter
from tests.support.services import Server, post
from tests.support.serving import learn_by_heart, server_process
from tests.support.tiny import save_tiny, tiny_model, tiny_tokenizer

CALL = 'Yes. <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
TOOLS: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
ASK: list[Any] = [user("call")]


@pytest.fixture(scope="module")
def caller_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned one answer by heart, which is a call."""
    tokenizer, model = tiny_tokenizer(), tiny_model()
    prompt = encode_prompt(ASK, tokenizer)
    ids = torch.tensor([*prompt, *tokenizer(CALL, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id])
    learn_by_heart(model, ids, answer_begins=len(prompt))
    return save_tiny(tmp_path_factory.mktemp("caller"), model)


@pytest.fixture(scope="module")
def reward_folder(paths: dict[str, str]) -> str:
    return paths["reward"]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two adapters, of other layers and ranks."""
    each: dict[str, Any] = {"poet": ["q_proj", "down_proj"], "clerk": "all-linear"}
    return {
        name: random_adapter(tiny_model(), tmp_path_factory.mktemp(name), seed, layers)
        for seed, (name, layers) in enumerate(each.items())
    }


@pytest.fixture(scope="module")
def url(caller_folder: Path, reward_folder: str, adapters: dict[str, str]) -> Iterator[str]:
    named = ", ".join(f"{name}: {folder}" for name, folder in adapters.items())
    line = f"{caller_folder} --model_name caller --reward_model {reward_folder} --adapters '{{{named}}}'"
    with server_process(f"{line} --max_sequence_tokens 256") as (_, found):
        yield found


@pytest.fixture(scope="module")
def server(url: str) -> Server:
    return Server(url, "call", name="caller")


def test_scores_are_those_of_the_reward_model_alone(url: str, reward_folder: str) -> None:
    prompts, answers = ["hello", "a", "why? " * 9], ["yes", "a longer answer", "n"]
    model, _ = load_model(reward_folder, "scorer", config=ModelConfig(), dtype=torch.float32)
    both = [[user(prompt), assistant(answer)] for prompt, answer in zip(prompts, answers, strict=True)]
    expected = []
    for prompt, answer in both:
        ids = torch.tensor([encode_completion([prompt], [answer], tiny_tokenizer()).input_ids])
        with torch.no_grad():
            expected.append(float(Scorer(model)(ids, torch.ones_like(ids))[0, -1]))
    for path, body in (
        ("/score", {"prompt": prompts, "completion": answers}),
        ("/v1/score", {"messages": both}),
        ("/v1/score", {"messages": both[0]}),
        ("/score", {"prompt": prompts[0], "completion": answers[0]}),
        ("/score", {"text_1": prompts, "text_2": answers}),  # vLLM's names
    ):
        answer = post(f"{url}{path}", {"model": reward_folder, **body}).json()
        assert [row["index"] for row in answer["data"]] == list(range(len(answer["data"])))
        scores = [row["score"] for row in answer["data"]]
        assert scores == pytest.approx(expected[: len(scores)], abs=1e-5) and len(scores) in (1, 3)
    assert len(set(expected)) == 3 and answer["usage"]["prompt_tokens"] > 0
    one_with_all, both = (
        post(f"{url}/score", {"model": reward_folder, "text_1": text, "text_2": ["b", "c d"]}).json()["data"]
        for text in ("a", ["a", "a"])
    )
    assert one_with_all == both


def test_a_reward_model_is_served_alone(reward_folder: str, url: str) -> None:
    """Its scores are those beside another model; it completes nothing."""
    body = {"prompt": ["hello", "a"], "completion": ["yes", "no"]}
    beside = post(f"{url}/score", {"model": reward_folder, **body}).json()
    with server_process(f"{reward_folder} --model_name judge") as (process, alone):
        found = post(f"{alone}/score", {"model": "judge", **body}).json()
        assert found["data"] == beside["data"] and found["model"] == "judge"
        server = Server(alone, name="judge")
        assert [model.id for model in server.client.models.list()] == ["judge"]
        assert server.client.models.retrieve("judge").id == "judge"
        with pytest.raises(openai.NotFoundError, match="the reward model of this server is judge, got 'x'"):
            server.client.models.retrieve("x")
        for ask in (server.chat, server.complete):
            with pytest.raises(openai.BadRequestError, match="judge is a reward model: send conversations to /score"):
                ask()
        assert httpx2.get(f"{alone}/v1/models").status_code == 401
        assert 'path="/score",status="200"' in httpx2.get(f"{alone}/metrics").text
        assert httpx2.get(f"{alone}/health").json() == {"status": "ok"}
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0


def test_scores_wait_within_a_bound_and_for_clients_that_are_there() -> None:
    """A request that runs, one that waits and whose client then leaves, and one too many."""
    scorer = SlowScorer()
    app = build_scoring_app(ScoreService(scorer, max_queue=1), Access(), created=0)  # type: ignore[arg-type]
    with served_in_background(app) as url, ThreadPoolExecutor(1) as clients:
        body = {"model": "judge", "prompt": "x", "completion": "y"}

        def ask() -> int:
            return httpx2.post(f"{url}/score", json=body, timeout=60).status_code

        running = clients.submit(ask)
        wait_until(lambda: len(scorer.encoded) == 1)
        content = json.dumps(body).encode()
        head = "POST /score HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(content)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as leaves:
            leaves.sendall(head.encode() + content)
            wait_until(lambda: len(scorer.encoded) == 2)
            assert ask() == 429
        wait_until(lambda: 'path="/score",status="499"' in httpx2.get(f"{url}/metrics").text)
        scorer.may_end.set()
        assert running.result() == ask() == 200
    assert len(scorer.encoded) == 3 and scorer.scored == 2


class SlowScorer:
    """A reward model whose scores end when the test says so."""

    name, heads, reads_images = "judge", (), False

    def __init__(self) -> None:
        self.encoded: list[Any] = []
        self.scored, self.may_end = 0, threading.Event()

    def read_images(self, *_: Any) -> None:
        return None

    def encode(self, prompt: Any, answer: Any, **_: Any) -> ScoredRow:
        self.encoded.append(answer)
        return ScoredRow([1])

    def scores(self, ids: list[ScoredRow], is_wanted: Callable[[], bool]) -> torch.Tensor:
        assert self.may_end.wait(60)
        self.scored += 1
        return torch.zeros(len(ids))


def test_what_a_reward_model_does_not_read_is_refused(reward_folder: str, cli: CommandLine) -> None:
    ended = cli(f"serve {reward_folder} --port 0 --max_batch_rows 8")
    assert ended.code == 2 and "is a reward model, which generates nothing, got max_batch_rows" in ended.err


def test_bad_requests_for_scores_are_refused(url: str, reward_folder: str) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    for body, rule in (
        ({"messages": [user("x")]}, "must end with a turn of the assistant, got user"),
        ({"prompt": ["a", "b"], "completion": ["c"]}, "got 0 messages, 2 prompts and 1 completions"),
        ({"messages": [[]]}, "messages.0 must"),
        ({"text_1": "a"}, "as many prompts as completions"),
        ({"text_2": "a", "prompt": "x", "completion": "y"}, "as many prompts as completions"),
        ({"text_1": "a", "text_2": "b", "prompt": "x"}, "as many prompts as completions"),
        ({}, "as many prompts as completions"),
        ({"prompt": "x" * 300, "completion": "y"}, "must have at most 256 tokens"),
        ({"prompt": "\ud800", "completion": "y"}, "Unicode"),
        (
            {"messages": [user([image]), assistant("y")]},
            r"^messages\.0\.content\.0 must be text, as no images are read here",
        ),
        ({"messages": [{"role": "king"}]}, "'role' and 'content'|a role must be one of"),
    ):
        answer = post(f"{url}/score", {"model": reward_folder, **body})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert re.search(rule, error["message"]) and error["param"].partition(".")[0] in (*body, "messages"), error
    assert post(f"{url}/score", {"model": "caller", "messages": [user("x")]}).status_code == 404
    assert httpx2.post(f"{url}/score", json={}).status_code == 401


def test_each_adapter_has_its_own_tokens_also_at_the_same_time(
    server: Server, caller_folder: Path, adapters: dict[str, str]
) -> None:
    engine = engine_at(find_model(ServeConfig(path=str(caller_folder))), kv_cache_gib=None, adapters=adapters)
    prompt, greedy = [7, 8, 9, 30], SamplingParams(max_new_tokens=40, temperature=0.0, min_new_tokens=40)
    completions = engine.generate([prompt] * 3, greedy, adapters=[None, *adapters])
    expected = [completion.token_ids for (completion,) in completions]
    assert len(set(map(tuple, expected))) == 3

    def ask(name: str) -> Any:
        settings = {"max_tokens": 40, "temperature": 0, "extra_body": {"min_tokens": 40}}
        return server.complete(prompt, model=name, **settings).choices[0].token_ids

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, ["caller", *adapters] * 4)) == expected * 4


def test_adapters_are_listed_with_their_parent(server: Server, reward_folder: str) -> None:
    listed = {model.id: getattr(model, "parent", None) for model in server.client.models.list()}
    assert listed == {"caller": None, "poet": "caller", "clerk": "caller", reward_folder: None}
    assert server.client.models.retrieve("poet").parent == "caller"
    with pytest.raises(openai.NotFoundError, match="the model of this server is caller, poet, clerk, got 'x'"):
        server.complete(model="x")


def test_calls_are_returned_as_calls(server: Server) -> None:
    (choice,) = server.chat(tools=TOOLS, temperature=0).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Yes."
    (call,) = choice.message.tool_calls
    assert call.function.name == "f" and json.loads(call.function.arguments) == {"x": 1} and len(call.id) == 9
    chunks = [chunk.choices[0] for chunk in server.chat(tools=TOOLS, temperature=0, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "Yes." and chunks[-1].finish_reason == "tool_calls"
    calls = [streamed for chunk in chunks for streamed in chunk.delta.tool_calls or []]
    assert [(streamed.index, streamed.function.name) for streamed in calls] == [(0, "f")]
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        plain = server.chat(temperature=0, **more).choices[0]
        assert plain.message.tool_calls is None and plain.finish_reason == "stop" and plain.message.content == CALL
    cut = server.chat(tools=TOOLS, temperature=0, max_tokens=30).choices[0]
    assert cut.message.content == "Yes." and cut.finish_reason == "length"  # the beginning of a call is no text


def test_one_call_at_most_where_the_request_says_so() -> None:
    """`parallel_tool_calls: false` was ignored."""
    token = StreamedToken(0, 0, 5, -0.1, -0.1, "stop")
    for parallel, count in ((None, 2), (True, 2), (False, 1)):
        body = ChatBody(model="m", messages=ASK, tools=TOOLS, parallel_tool_calls=parallel)
        tokenizer = tiny_tokenizer()
        ids = tokenizer(CALL.partition(" ")[2] * 2, add_special_tokens=False)["input_ids"]
        answer = Answer(body, Job([[1]], SamplingParams()), tokenizer, TokenText(tokenizer))
        tokens = [replace(token, token_id=each, finish_reason=None) for each in ids[:-1]]
        calls = answer._add([*tokens, replace(token, token_id=ids[-1])]).calls
        assert len(calls) == count


def test_a_forward_whose_scores_nobody_wants_ends(reward_folder: str) -> None:
    """After a client has left, the next request waited until all of the first one's conversations were scored."""
    place = find_model(ServeConfig(path=reward_folder))
    scorer, asked = load_scorer(place), list[int]()

    def is_wanted() -> bool:
        asked.append(1)
        return len(asked) < 2

    with pytest.raises(NotWanted):
        scorer.scores([ScoredRow([1, 2, 3])], is_wanted)
    assert len(asked) == 2  # one before each layer
    assert scorer.scores([ScoredRow([1, 2, 3])]).shape == (1,)
