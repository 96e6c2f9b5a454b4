"""`hybrid-rlhf serve` in a process of its own, asked by the openai client."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from hybrid_rlhf.cli.saved_models.loading import load_engine
from hybrid_rlhf.configs.inference import ServeConfig
from hybrid_rlhf.data.chat.conversation import completion_text, encode_prompt
from hybrid_rlhf.generation import Completion, SamplingParams
from tests.support.clock import Gate, wait_until
from tests.support.messages import user
from tests.support.services import HEADERS, Server, metric, open_service, post, served_service
from tests.support.serving import KEY, server_process

NAME, ROWS, QUEUE, TOKENS = "tiny", 4, 30, 3000
HELLO = [user("hello")]
LONG: dict[str, Any] = {"max_tokens": TOKENS - 100, "extra_body": {"min_tokens": TOKENS - 100}}
"""A completion that no stop token ends, of many seconds."""
LONGEST = TOKENS * 20
"""More characters than any TOKENS tokens of the tiny tokenizer have."""


class Served(Server):
    """A server, and the same model in this process."""

    def __init__(self, url: str, model_folder: Path) -> None:
        super().__init__(url, name=NAME)
        self.engine, self.tokenizer = load_engine(ServeConfig(path=str(model_folder)))

    def prompt(self, text: str) -> list[int]:
        return encode_prompt([user(text)], self.tokenizer)

    def text(self, completion: Completion) -> str:
        return completion_text(completion.token_ids, self.tokenizer)

    def metric(self, name: str) -> float:
        return metric(self.url, name)


@pytest.fixture(scope="module")
def served(model_folder: Path) -> Iterator[Served]:
    line = f"{model_folder} --model_name {NAME} --max_batch_rows {ROWS} --max_queue {QUEUE}"
    with server_process(f"{line} --max_sequence_tokens {TOKENS}") as (_, url):
        yield Served(url, model_folder)


def test_chat_completions_are_those_of_the_engine(served: Served) -> None:
    prompt = served.prompt("hello")
    (expected,) = served.engine.generate([prompt], SamplingParams(max_new_tokens=20, n=3, seed=5, top_p=0.9))
    asked = {"max_completion_tokens": 20, "n": 3, "seed": 5, "top_p": 0.9}
    answer = served.chat(**asked, logprobs=True, extra_body={"prompt_logprobs": 0})
    assert [choice.message.content for choice in answer.choices] == [served.text(sample) for sample in expected]
    assert [choice.finish_reason for choice in answer.choices] == [sample.finish_reason for sample in expected]
    for choice, sample in zip(answer.choices, expected, strict=True):
        assert choice.token_ids == sample.token_ids
        logprobs = [entry.logprob for entry in choice.logprobs.content]
        assert logprobs == pytest.approx(sample.logprobs, abs=1e-4)
    assert answer.prompt_token_ids == prompt
    assert answer.prompt_logprobs[0] is None and len(answer.prompt_logprobs) == len(prompt)
    assert all(
        values[str(token)]["logprob"] < 0
        for token, values in zip(prompt, answer.prompt_logprobs, strict=True)
        if values
    )
    tokens = sum(len(sample.token_ids) for sample in expected)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), tokens)


def test_completions_of_text_and_token_ids_are_those_of_the_engine(served: Served) -> None:
    texts = ["once", "twice upon"]
    prompts = [served.tokenizer(text)["input_ids"] for text in texts]
    expected = served.engine.generate(prompts, SamplingParams(max_new_tokens=12, n=2, seed=8))
    for given in (texts, prompts):
        answer = served.complete(given, max_tokens=12, n=2, seed=8, logprobs=0)
        flat = [sample for samples in expected for sample in samples]
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert [choice.text for choice in answer.choices] == [served.text(sample) for sample in flat]
        assert [choice.prompt_token_ids for choice in answer.choices] == [prompts[0]] * 2 + [prompts[1]] * 2
        for choice, sample in zip(answer.choices, flat, strict=True):
            assert choice.logprobs.token_logprobs == pytest.approx(sample.logprobs, abs=1e-4)
    assert answer.usage.prompt_tokens == sum(map(len, prompts))


@pytest.mark.parametrize("stop", [None, ["e", "zz"]])
def test_a_streamed_answer_is_the_whole_one(served: Served, stop: list[str] | None) -> None:
    settings: dict[str, Any] = {"n": 2, "seed": 11, "max_tokens": 60, "stop": stop}
    whole = served.chat(logprobs=True, **settings)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(served.chat(logprobs=True, **options, **settings))
    for choice in whole.choices:
        pieces = [piece for chunk in chunks for piece in chunk.choices if piece.index == choice.index]
        content = choice.message.content
        assert "".join(piece.delta.content or "" for piece in pieces) == content
        assert [token for piece in pieces for token in getattr(piece, "token_ids", None) or []] == choice.token_ids
        assert pieces[-1].finish_reason == choice.finish_reason
        logprobs = [entry.logprob for piece in pieces if piece.logprobs for entry in piece.logprobs.content]
        assert logprobs == pytest.approx([entry.logprob for entry in choice.logprobs.content], abs=1e-4)
        assert not any(text in content for text in stop or ())
    assert chunks[-1].usage == whole.usage
    plain = served.complete("so", **settings)
    chunks = list(served.complete("so", stream=True, **settings))
    for choice in plain.choices:
        pieces = [piece.text for chunk in chunks for piece in chunk.choices if piece.index == choice.index]
        assert "".join(pieces) == choice.text


def test_an_agents_turns_are_never_tokenised_again(served: Served) -> None:
    """The tokens of a turn, invalid UTF-8 included, are part of the next prompt as they were sampled."""
    ids = served.prompt("hello")
    for turn in range(2):
        answer = served.chat(max_tokens=15, seed=turn, extra_body={"prompt_token_ids": ids})
        sampling = SamplingParams(max_new_tokens=15, seed=turn)
        assert answer.prompt_token_ids == ids
        assert answer.choices[0].token_ids == served.engine.generate([ids], sampling)[0][0].token_ids
        ids = [*ids, *answer.choices[0].token_ids, *served.tokenizer("\nresult\n")["input_ids"]]


def test_the_template_renders_tools_and_results(served: Served) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    answer = served.chat(messages=messages, tools=tools, max_tokens=2)
    parsed = [
        *messages[:1],
        {"role": "assistant", "tool_calls": [{**call, "function": {"name": "f", "arguments": {"x": 1}}}]},
    ]
    assert answer.prompt_token_ids == encode_prompt([*parsed, messages[2]], served.tokenizer, tools=tools)


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_disconnects_frees_its_row(served: Served, streams: bool) -> None:
    wait_until(lambda: served.metric("rows_running") == 0)
    body = {"model": NAME, "prompt": "x", "max_tokens": TOKENS - 100, "min_tokens": TOKENS - 100, "stream": streams}
    wait = 10.0 if streams else 0.2  # a whole answer takes about 1 s on a fast machine
    with httpx2.Client() as client, pytest.raises((httpx2.ReadTimeout, InterruptedError)):
        with client.stream("POST", f"{served.url}/v1/completions", json=body, headers=HEADERS, timeout=wait) as answer:
            for _ in answer.iter_lines():
                assert served.metric("rows_running") == 1
                raise InterruptedError
    before = served.metric("completion_tokens_total")
    wait_until(lambda: served.metric("rows_running") == 0)
    assert served.metric("completion_tokens_total") < before + TOKENS - 200
    assert served.metric("kv_cache_used_ratio") == 0


def test_what_exceeds_the_queue_is_refused_and_may_come_later(served: Served) -> None:
    running = served.complete(stream=True, n=ROWS + QUEUE, **LONG)
    with pytest.raises(openai.RateLimitError, match=f"{ROWS + QUEUE} completions run or wait"):
        served.complete(max_tokens=1)
    assert served.metric("rows_waiting") >= QUEUE
    running.close()
    wait_until(lambda: served.metric("rows_running") + served.metric("rows_waiting") == 0)
    served.complete(max_tokens=1)


def test_only_who_has_the_key_is_answered(served: Served) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
        answer = httpx2.get(f"{served.url}/v1/models", headers=headers)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    assert [model.id for model in served.client.models.list()] == [NAME]
    assert served.client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="the model of this server is tiny, got 'other'"):
        served.complete(model="other")
    with pytest.raises(openai.NotFoundError):
        served.client.models.retrieve("other")
    assert httpx2.get(f"{served.url}/health").json() == {"status": "ok"}


def test_an_endpoint_that_is_not_supported_says_so(served: Served) -> None:
    """It read like a misspelt path."""
    unsupported = "unsupported_endpoint"
    for path, code in (("embeddings", unsupported), ("images/generations", unsupported), ("x", None)):
        answer = served.post(f"/v1/{path}", {})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (404, code)
        said = f"{path.partition('/')[0]} are not supported: GET /openapi.json lists what is"
        assert error["message"] == (said if code else "Not Found: POST /v1/x")
    listed = httpx2.get(f"{served.url}/openapi.json", headers={"Authorization": f"Bearer {KEY}"}).json()["paths"]
    assert {CHAT, TEXT} <= {*listed} and "/v1/embeddings" not in listed
    served.post(TEXT, {})
    assert f'path="{TEXT}",status="400"' in httpx2.get(f"{served.url}/metrics").text, "the label is the whole path"


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


# changes of a good body, what the error says, and its key, where that is not the first of the changes
REFUSED: dict[str, list[tuple[Any, ...]]] = {
    TEXT: [
        ({"temperature": -1}, r"temperature must be 0 \(greedy\) or .*, got -1.0: change it"),
        ({"temperature": float("nan")}, "temperature must be a finite number"),
        ({"top_p": "1"}, "top_p must be a valid number, got '1': change it"),
        ({"n": 0}, "n must be greater than or equal to 1, got 0"),
        ({"n": 99}, "a request has at most 34 completions", None),
        ({"best_of": 2}, "best_of is not supported, got 2"),
        ({"temprature": 2}, "temprature is an unknown key: the nearest is temperature"),
        (
            {"stream_options": {"include": True}},
            "stream_options.include is an unknown key: the nearest is include_usage",
            "stream_options.include",
        ),
        ({"model": ...}, "model is required, got none: add it"),
        ({"prompt": []}, "prompt must be text or token ids, got none"),
        ({"prompt": ""}, "a prompt has at least one token|a prompt must|prompt 0", None),
        ({"prompt": [1, 259]}, r"prompt must be token ids in 0\.\.258, got 259"),
        ({"prompt": {"a": 1}}, "prompt must be a valid string or be a valid list, got {'a': 1}"),
        ({"prompt": "\ud800"}, "prompt must be Unicode text"),
        (
            {"prompt": "x" * TOKENS},
            f"^(?!.*max_new_tokens).*maximum context length of {TOKENS} tokens, got {TOKENS} tokens and max_tokens",
        ),
        ({"max_tokens": 0}, "max_tokens must be 1 or more, got 0: raise it"),
        ({"min_tokens": -1}, "min_tokens must be 0 or more, got -1"),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens must be at most max_tokens 5, got 9"),
        ({"stop": [""]}, "stop must contain no empty string"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs needs stream false"),
        ({"stop_token_ids": [999]}, r"stop_token_ids must be token ids in 0\.\.258, got 999"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids must have at most 128 items"),
        ({"stop": "a" * 1001}, "stop must have at most 1000 characters"),
        ({"prompt": "x" * 10 * LONGEST}, f"context length of {TOKENS} tokens, got {10 * LONGEST} char"),
        ({"logit_bias": {"a": 1}}, "logit_bias must have token ids as keys, got 'a'"),
        ({"logit_bias": {"9999": 1}}, r"logit_bias must be token ids in 0\.\.258, got 9999"),
        ({"logit_bias": {"9": 101}}, "less than or equal to 100"),
        ({"presence_penalty": 2.5}, "less than or equal to 2"),
    ],
    CHAT: [
        ({"top_logprobs": 21, "logprobs": True}, "less than or equal to 20, got 21"),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs true, got top_logprobs 3 alone"),
        ({"max_completion_tokens": 0}, "max_completion_tokens must be 1 or more, got 0"),
        ({"messages": HELLO * 8193}, "messages must have at most 8192 items"),
        ({"messages": HELLO * TOKENS}, f"maximum context length of {TOKENS} tokens, got"),
        ({"max_completion_tokens": TOKENS}, f"and max_completion_tokens {TOKENS}: shorten one of them", "messages"),
        ({"prompt_token_ids": [1] * TOKENS}, "maximum context length"),
        ({"messages": []}, r"messages must have at least 1 item, got \[\]: change it"),
        ({"messages": [{"role": "king", "content": "x"}]}, "a role must be one of .*: change it$", "messages.0"),
        ({"messages": [user("\ud800")]}, "messages must be Unicode text"),
        (
            {"messages": [user([{"type": "image_url"}])]},
            "must be text, as no images are read here",
            "messages.0.content.0",
        ),
        (
            {"tools": [{"type": "function", "function": {}}]},
            "must be {type: function, function: {name: ...}}",
            "tools.0",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "must not have what rendering sets, got messages", "messages"),
    ],
}
CODES = {
    "context length": "context_length_exceeded",
    "is an unknown key": "unknown_parameter",
    "is required": "missing_required_parameter",
    "is not supported": "unsupported_parameter",
    "must be a valid": "invalid_type",
    "greater than": "integer_below_min_value",
    "less than": "integer_above_max_value",
    "at most .* characters": "string_above_max_length",
    "at most .* items": "array_above_max_length",
    "at least 1 item": "empty_array",
}
"""OpenAI's codes, by what an error says."""


@pytest.mark.parametrize(("path", "case"), [(path, case) for path, cases in REFUSED.items() for case in cases])
def test_bad_input_is_refused_with_the_rule(served: Served, path: str, case: tuple[Any, ...]) -> None:
    changes, rule, *key = case
    body = {"model": NAME, **({"messages": HELLO} if path == CHAT else {"prompt": "x"}), **changes}
    answer = served.post(path, {name: value for name, value in body.items() if value is not ...})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert re.search(rule, error["message"]) and error["type"] == "invalid_request_error", error
    assert error["param"] == (key[0] if key else next(iter(changes)))
    other = "invalid_value" if error["param"] else None
    assert error["code"] == next((code for text, code in CODES.items() if re.search(text, error["message"])), other)


NUMBERS: tuple[dict[str, Any], ...] = (
    *(
        {key: value}
        for key in ("top_k", "seed", "max_tokens", "min_tokens", "n", "prompt_logprobs")
        for value in (2**31, 2**63, -(2**63), 10**4000)
    ),
    *(
        {key: value, "logprobs": 5}
        for key in ("temperature", "top_p", "min_p", "repetition_penalty")
        for value in (5e-324, 1e-300, 1e-5, 0.999999999999, 100, 1e300)
    ),
    *({key: [value]} for key in ("stop_token_ids", "prompt") for value in (2**63, -(2**63))),
    {"top_p": 1e-300, "logprobs": 5, "temperature": 100},
)


@pytest.mark.parametrize("changes", NUMBERS, ids=lambda changes: "-".join(f"{key}" for key in changes))
def test_no_number_reaches_the_batch_out_of_bounds(served: Served, changes: dict[str, Any]) -> None:
    """A top_k of 2^63 ended decoding for every client; a temperature of 1e-300 gave NaN."""
    body = json.dumps({"model": NAME, "prompt": "x", "max_tokens": 2, **changes}).encode()
    answer = served.post(TEXT, body)
    assert answer.status_code in (200, 400), answer.text
    json.loads(answer.text, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
    assert served.post(TEXT, {"model": NAME, "prompt": "x", "max_tokens": 1}).status_code == 200
    assert httpx2.get(f"{served.url}/health").status_code == 200


def test_odd_bodies_that_are_valid_are_answered(served: Served) -> None:
    """NUL, keys that come twice, tokens of templates, and blanks."""
    twice = b'{"model":"other","model":"tiny","prompt":"a","prompt":"b","max_tokens":9,"max_tokens":1}'
    chats = (b"a\\u0000b", b"<|im_end|></s><s>[INST]", b" \\n")
    chat = b'{"model":"tiny","messages":[{"role":"user","content":"%s"}],"max_tokens":1}'
    for path, body in ((TEXT, twice), *((CHAT, chat % content) for content in chats)):
        answer = served.post(path, body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 1


def test_a_message_that_no_template_can_read_is_refused_briefly(served: Served) -> None:
    """An error repeated the message, megabytes of it; deeply nested values were an internal error."""
    call = b'{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"' + b"[" * 5000 + b'"}}]}'
    nested = b'{"role":"user","content":"x","a":' + b'{"a":' * 900 + b"1" + b"}" * 901
    for message in (b'{"role":"' + b"x" * 10_000 + b'"}', call, nested):
        answer = served.post(CHAT, b'{"model":"tiny","messages":[' + message + b"]}")
        assert answer.status_code == 400 and len(answer.text) < 1000, answer.text[:2000]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1, "a"] * 150_000},
        {"messages": HELLO * 100_000},
        {"messages": [user("ab " * 1_000_000)]},
        {"prompt": "x", "user": [[]] * 1_500_000},
    ],
    ids=["mixed", "messages", "content", "lists"],
)
def test_a_large_body_is_refused_before_its_texts_are_tokenized(
    body: dict[str, Any], model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sizes that took seconds: limits are checked first."""
    engine, tokenizer = load_engine(ServeConfig(path=str(model_folder)))
    with open_service(engine, tokenizer, max_tokens=TOKENS, max_new_tokens=2) as service:
        with served_service(service) as url:
            monkeypatch.setattr(type(tokenizer), "__call__", lambda *_, **__: 1 / 0)
            monkeypatch.setattr(type(tokenizer), "apply_chat_template", lambda *_, **__: 1 / 0)
            answer = post(f"{url}{CHAT if 'messages' in body else TEXT}", {"model": "m", **body})
    assert answer.status_code == 400, answer.text


def test_text_is_tokenized_on_another_thread(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/health is answered while a tokenizer is busy."""
    engine, tokenizer = load_engine(ServeConfig(path=str(model_folder)))
    with open_service(engine, tokenizer, max_tokens=100, max_new_tokens=2) as service:
        gate = Gate(service.encode)
        monkeypatch.setattr(service, "encode", gate)
        with served_service(service) as url, ThreadPoolExecutor(1) as thread:
            asking = thread.submit(post, f"{url}{TEXT}", {"model": "m", "prompt": "x"})
            with gate.held():
                assert httpx2.get(f"{url}/health", timeout=60).status_code == 200
            assert asking.result().status_code == 200


def test_the_bytes_of_tokens_are_those_of_the_content(served: Served) -> None:
    """A token that is a part of a character has bytes of its own, and is not merged with others of the same text."""
    settings: dict[str, Any] = {"seed": 3, "max_tokens": 60, "temperature": 2.0}
    chat = served.chat(logprobs=True, top_logprobs=5, **settings).choices[0]
    special = set(served.tokenizer.all_special_ids)
    pieces = zip(chat.logprobs.content, chat.token_ids, strict=True)
    joined = b"".join(bytes(entry.bytes) for entry, token in pieces if token not in special)
    assert "\ufffd" in chat.message.content  # a random model writes parts of characters
    assert joined.decode("utf-8", "replace").strip() == chat.message.content.strip()
    for entry in chat.logprobs.content:
        assert (entry.token, entry.bytes) in [(top.token, top.bytes) for top in entry.top_logprobs]
        assert len(entry.top_logprobs) in (5, 6)
    text = served.complete(logprobs=20, **settings).choices[0].logprobs
    for token, value, top in zip(text.tokens, text.token_logprobs, text.top_logprobs, strict=True):
        assert top[token] == pytest.approx(value, abs=1e-5) and len(top) in (20, 21)


def test_any_bytes_are_answered_without_a_traceback(served: Served) -> None:
    for content in (
        b"",
        b"{",
        b"\xff\xfe",
        b"[1]",
        b"null",
        b"[" * 100_000,
        b'{"model": 1e999}',
        b'{"seed":' + b"9" * 5000,
    ):
        answer = served.post(TEXT, content)
        assert answer.status_code == 400 and answer.json()["error"]["message"]
    assert served.post("/v1/nothing", {}).status_code == 404
    assert httpx2.get(f"{served.url}{TEXT}", headers=HEADERS).status_code == 405
    assert served.post(TEXT, b" " * (33 * 2**20)).status_code == 413
    assert served.metric("rows_running") == 0 and httpx2.get(f"{served.url}/health").status_code == 200


def test_sigterm_lets_running_requests_finish(model_folder: Path) -> None:
    with server_process(f"{model_folder} --model_name {NAME} --max_sequence_tokens {TOKENS}") as (process, url):
        stream = Server(url, name=NAME).complete(stream=True, max_tokens=400, extra_body={"min_tokens": 400})
        ids = list(next(iter(stream)).choices[0].token_ids)
        process.send_signal(signal.SIGTERM)
        for chunk in stream:
            ids += [token for choice in chunk.choices for token in choice.token_ids]
        assert len(ids) == 400
        assert process.wait(timeout=60) == 0
