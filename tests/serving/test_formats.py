"""Answers that follow a grammar, asked by the openai client: response formats, and calls that a request requires."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal

import httpx2
import openai
import pydantic
import pytest
from transformers import PreTrainedTokenizerFast

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.generation import GenerationEngine
from hybrid_rlhf.generation.batching.grammar import grammar_of, source_of
from hybrid_rlhf.serving.bodies import ChatBody
from hybrid_rlhf.serving.formats import response_format
from hybrid_rlhf.serving.service import Service
from tests.support.messages import user
from tests.support.services import HEADERS, Server, open_service, served_service
from tests.support.tiny import CHATML, SPECIAL, byte_tokenizer, tiny_model, tiny_tokenizer

pytest.importorskip("llguidance")


class Animal(pydantic.BaseModel):
    """An answer of bounded length, as a random model would not end a text."""

    model_config = pydantic.ConfigDict(extra="forbid")
    kind: Literal["cat", "dog"]
    wild: bool


def tool(name: str, *values: str) -> dict[str, Any]:
    """A function of x, or of nothing."""
    schema = {"type": "object", "properties": {"x": {"enum": values}}, "required": ["x"], "additionalProperties": False}
    if not values:
        schema |= {"properties": {}, "required": []}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS: list[Any] = [tool("add", "1", "2"), tool("ask", "why"), tool("end")]
CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['tool_calls'] %}CALLS{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
EACH = "{% for c in m['tool_calls'] %}{% set f = c['function'] %}{{ ONE }}{% endfor %}"
JSON_CALL = "{'name': f['name'], 'arguments': f['arguments']} | tojson"
TEMPLATES = {
    "hermes": EACH.replace("ONE", f"'<tool_call>\n' + {JSON_CALL} + '\n</tool_call>\n'"),
    "llama": EACH.replace("ONE", JSON_CALL.replace("'arguments':", "'parameters':")),
    "mistral": "{{ '[TOOL_CALLS] [' }}" + EACH.replace("ONE", JSON_CALL) + "{{ ']' }}",
    "mistral 11": EACH.replace("ONE", "'[TOOL_CALLS]' + f['name'] + '[ARGS]' + f['arguments'] | tojson"),
}
THINKING = CHATML + "{% if false %}<think></think>{% endif %}"
ANALYSIS, FINAL, NEXT = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|end|><|start|>assistant"
MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]")


def tokenizer_of(template: str, special: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """Of bytes, with further special tokens."""
    if not special:
        return tiny_tokenizer(template)
    tokenizer = byte_tokenizer([*SPECIAL, *special], template, eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": [*special]})
    return tokenizer


@contextmanager
def opened(template: str, special: tuple[str, ...] = ()) -> Iterator[tuple[Server, Service]]:
    """A server of a random model, with a template; some marks are special tokens."""
    tokenizer = tokenizer_of(template, special)
    model = tiny_model(vocab_size=259 + len(special), max_position_embeddings=600)
    engine = GenerationEngine.from_model(model, tokenizer=tokenizer, stop_token_ids=[2])
    with open_service(engine, tokenizer, max_tokens=600, max_new_tokens=400) as service, served_service(service) as url:
        yield Server(url), service


@pytest.fixture(scope="module")
def parts() -> Iterator[tuple[Server, Service]]:
    with opened(CHATML) as found:
        yield found


@pytest.fixture
def server(parts: tuple[Server, Service]) -> Server:
    return parts[0]


@pytest.fixture
def service(parts: tuple[Server, Service]) -> Service:
    return parts[1]


def test_a_schema_gives_the_openai_client_its_typed_answer(server: Server) -> None:
    asked_for: Any = {"model": "m", "messages": [user("hello")], "response_format": Animal}
    for seed in range(3):
        answer = server.client.chat.completions.parse(**asked_for, seed=seed)
        assert isinstance(answer.choices[0].message.parsed, Animal) and answer.choices[0].finish_reason == "stop"
    text = ""
    with server.client.chat.completions.stream(**asked_for, seed=2) as stream:
        for event in stream:
            text += event.delta if event.type == "content.delta" else ""
    assert Animal.model_validate_json(text) == answer.choices[0].message.parsed


def test_a_json_object_is_one_also_where_it_is_cut(server: Server) -> None:
    answer = server.chat(response_format={"type": "json_object"}, seed=1, max_tokens=30, logprobs=True)
    assert answer.choices[0].message.content.startswith("{")
    body = {"response_format": ANIMAL}
    choices = server.complete(["a", "b"], n=2, seed=1, extra_body=body).choices
    assert len([Animal.model_validate_json(choice.text) for choice in choices]) == 4
    lark = {"response_format": {"type": "lark", "lark": 'start: "yes" | "no"'}}
    assert server.complete("a", extra_body=lark).choices[0].text in ("yes", "no")
    plain = server.chat(response_format={"type": "text"}, max_tokens=2)
    assert plain.usage.completion_tokens == 2


@pytest.mark.parametrize("special", [(), MARKS], ids=["text", "special"])
@pytest.mark.parametrize("form", TEMPLATES)
def test_required_calls_have_the_form_of_the_template(form: str, special: tuple[str, ...]) -> None:
    """Calls of Mistral and Hermes, whose marks may be special tokens."""
    with opened(CALLS.replace("CALLS", TEMPLATES[form]), special) as (server, _):
        for seed, choice in enumerate(["required", {"type": "function", "function": {"name": "ask"}}, "required"]):
            settings = {"tool_choice": choice, "seed": seed, "parallel_tool_calls": False}
            (answer,) = server.chat(tools=TOOLS, **settings).choices
            assert answer.finish_reason == "tool_calls", answer
            (call,) = answer.message.tool_calls
            allowed = {"add": [{"x": "1"}, {"x": "2"}], "ask": [{"x": "why"}], "end": [{}]}[call.function.name]
            assert json.loads(call.function.arguments) in allowed
            assert choice == "required" or call.function.name == "ask"


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_that_is_cut_is_no_text(server: Server, stream: bool) -> None:
    """Clients showed its beginning to people."""
    settings: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 20, "stream": stream}
    answer = server.chat(**settings)
    if stream:
        choices = [chunk.choices[0] for chunk in answer if chunk.choices]
        text, reason = "".join(choice.delta.content or "" for choice in choices), choices[-1].finish_reason
    else:
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert (text, reason) == ("", "length")


def test_several_calls_may_be_required(server: Server) -> None:
    counts = set()
    for seed in range(8):
        (answer,) = server.chat(tools=TOOLS, tool_choice="required", seed=seed, max_tokens=500).choices
        counts.add(len(answer.message.tool_calls))
    assert 1 in counts and max(counts) > 1


@pytest.mark.parametrize("special", [(), ("<think>", "</think>")], ids=["text", "special"])
@pytest.mark.parametrize(
    ("prompt", "answer", "is_valid"),
    [
        ("assistant\n<think>\n", 'Well.\n</think>\n\n{"wild": true}', True),
        ("assistant\n<think>\n", '{"wild": true}', False),
        ("assistant\n", '<think>Well.</think>{"wild": true}', True),
        ("assistant\n", '{"wild": true}', True),
        ("<think>\n\n</think>\n\n", '{"wild": true}', True),
        ("<think>\n\n</think>\n\n", '<think>Well.</think>{"wild": true}', False),
        ("assistant\n<think>\n", 'Well.\n</think>\n\n{"wild": 1}', False),
    ],
)
def test_reasoning_is_free_and_the_answer_follows_the_schema(
    prompt: str, answer: str, is_valid: bool, special: tuple[str, ...]
) -> None:
    """A grammar from the first token on would leave a prompt that has opened the reasoning without an answer."""
    assert _follows_schema(tokenizer_of(THINKING, special), prompt, answer) == is_valid


@pytest.mark.parametrize(
    ("prompt", "answer", "is_valid"),
    [
        ("assistant", f'{ANALYSIS}Well.{NEXT}{FINAL}{{"wild": true}}', True),
        ("assistant", f'{FINAL}{{"wild": true}}', True),
        ("assistant", '{"wild": true}', False),
        (f"assistant{ANALYSIS}", f'Well.{NEXT}{FINAL}{{"wild": true}}', True),
        (f"assistant{ANALYSIS}", f'{FINAL}{{"wild": true}}', False),
    ],
)
def test_an_answer_in_its_channel_follows_the_schema(prompt: str, answer: str, is_valid: bool) -> None:
    """gpt-oss: the schema began before the header of the channel."""
    special = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>")
    thought = f"('{ANALYSIS}' + m.reasoning_content + '{NEXT}' if m.reasoning_content else '') + '{FINAL}'"
    template = (
        "{% for m in messages %}{{ '<|start|>' + m.role + "
        f"({thought} if m.role == 'assistant' else '<|message|>') + m.content + '<|end|>' }}}}{{% endfor %}}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
    )
    assert _follows_schema(tokenizer_of(template, special), prompt, answer) == is_valid


def _follows_schema(tokenizer: PreTrainedTokenizerFast, prompt: str, answer: str) -> bool:
    schema = {"type": "object", "properties": {"wild": {"type": "boolean"}}, "required": ["wild"]}
    schema["additionalProperties"] = False
    body = ChatBody(model="m", messages=[user("x")], response_format=_format(schema))
    given = response_format(body, tokenizer, tokenizer(prompt)["input_ids"])
    assert given is not None
    state = grammar_of(source_of(given), tokenizer, vocab_size=len(tokenizer), stop=frozenset({2})).matcher
    ids = tokenizer(answer)["input_ids"]
    return bool(state.try_consume_tokens(ids) == len(ids) and state.is_accepting())


def _format(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema}}


ANIMAL = _format(Animal.model_json_schema())
LARK = {"type": "lark", "lark": "start: /[a-c]{3}/"}


@pytest.mark.parametrize(
    ("more", "key", "rule"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "must be of type text, json_object"),
        ({"response_format": {"type": "lark", "lark": "start: a"}}, "response_format", "a grammar that compiles"),
        ({"response_format": ANIMAL, "extra_body": {"min_tokens": 3}}, "response_format", "decides where"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice", "auto, none, required or a function by name"),
        ({"tool_choice": "required"}, "tool_choice", "must have a function among tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "must have a function among tools",
        ),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": ANIMAL}, "response_format", "leave one out"),
    ],
)
def test_faulty_formats_are_refused_by_key(server: Server, more: dict[str, Any], key: str, rule: str) -> None:
    with pytest.raises(openai.BadRequestError, match=rule) as refused:
        server.chat(**more)
    assert refused.value.param == key


def test_lark_is_for_servers_that_allow_it(server: Server, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its regular expressions may take all of the limits of a compilation."""
    monkeypatch.setattr(service, "allows_lark", False)
    answer = server.post("/v1/completions", {"model": "m", "prompt": "a", "response_format": LARK})
    assert answer.status_code == 400 and "allow_lark" in answer.json()["error"]["message"]


def test_a_grammar_that_is_compiled_holds_no_other_request(
    server: Server, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compilations had the threads that read bodies; a client that leaves ends its own."""
    ended = threading.Event()

    def compile_grammar(params: Any, wanted: Callable[[], bool]) -> object:
        while wanted():
            time.sleep(0.01)
        ended.set()
        raise UserError("its client has left")

    monkeypatch.setattr(service.batch, "compile_grammar", compile_grammar)
    monkeypatch.setattr(service.batch, "compiled_grammar", lambda params: None)
    body = {"model": "m", "prompt": "a", "response_format": LARK}
    with ThreadPoolExecutor(40) as clients:
        asked = [
            clients.submit(httpx2.post, f"{server.url}/v1/completions", json=body, headers=HEADERS, timeout=2)
            for _ in range(40)
        ]
        assert server.complete("hello", max_tokens=1).usage.completion_tokens == 1
        for answer in asked:
            assert isinstance(answer.exception(), httpx2.ReadTimeout)
    assert ended.wait(10)
    assert server.complete("hello", max_tokens=1).usage.completion_tokens == 1
