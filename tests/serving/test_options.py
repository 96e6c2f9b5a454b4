"""Options of a request, asked by the openai client: its prompt, how tokens are sampled, and what is answered."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx2
import openai
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from hybrid_rlhf.data.chat.template import ChatTemplate
from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.generation.open_batch import StreamedToken
from hybrid_rlhf.serving import tracing
from hybrid_rlhf.serving.answers import _with_sampled
from hybrid_rlhf.serving.app import Access
from hybrid_rlhf.serving.bodies import CompletionBody, KeyRejected, checked
from hybrid_rlhf.serving.conversations import read_messages
from hybrid_rlhf.serving.text_stream import ReasoningSplit
from tests.support.clock import wait_until
from tests.support.messages import assistant, user
from tests.support.services import JSON, Server, open_service, served_service
from tests.support.serving import learn_by_heart
from tests.support.tiny import tiny_model, tiny_tokenizer

THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}"
    "{% else %}{{ '<think>\n' }}{% endif %}{% endif %}"
)
ASK: list[Any] = [user("2 + 2?")]
REASONING, ANSWER = "Two and two.\n", "It is 4."
LEARNED = f"{REASONING}</think>\n\n{ANSWER}"


class Asked(Server):
    """A server, and its model."""

    def __init__(self, url: str, engine: GenerationEngine, model: PreTrainedModel) -> None:
        super().__init__(url, "2 + 2?")
        self.engine, self.model, self.tokenizer = engine, model, tiny_tokenizer(THINKING)

    def chat(self, **settings: Any) -> Any:
        return super().chat(**{"temperature": 0, **settings})

    def text(self, **settings: Any) -> Any:
        return self.complete(**{"seed": 1, "max_tokens": 12, **settings})

    def send(self, path: str, **body: Any) -> Any:
        return self.post(path, {"model": "m", **body})


@pytest.fixture(scope="module")
def asked() -> Iterator[Asked]:
    """A model that has learned one answer, whose reasoning the template opens."""
    tokenizer, model = tiny_tokenizer(THINKING), tiny_model()
    prompt = tokenizer.apply_chat_template(ASK, add_generation_prompt=True, return_dict=False)
    ids = torch.tensor([*prompt, *tokenizer(LEARNED, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id])
    learn_by_heart(model, ids, answer_begins=len(prompt))
    served, engine = (
        GenerationEngine.from_model(model.eval(), tokenizer=tokenizer, stop_token_ids=[tokenizer.eos_token_id])
        for _ in range(2)
    )
    with open_service(served, tokenizer, max_tokens=250, max_new_tokens=60) as service:
        with served_service(service, Access()) as url:
            yield Asked(url, engine, model)


def test_reasoning_is_apart_from_the_content_whole_and_streamed(asked: Asked) -> None:
    message = asked.chat().choices[0].message
    assert (message.content, message.reasoning_content) == (ANSWER, REASONING)
    reasoning, content = "", ""
    for chunk in asked.chat(stream=True):
        delta = chunk.choices[0].delta
        reasoning += getattr(delta, "reasoning_content", None) or ""
        content += delta.content or ""
    assert (content, reasoning) == (ANSWER, REASONING)
    cut = asked.chat(max_tokens=5).choices[0]
    assert (cut.message.content, cut.message.reasoning_content, cut.finish_reason) == ("", "Two a", "length")


def test_variables_of_the_template_are_a_request_s(asked: Asked) -> None:
    off = {"enable_thinking": False}
    answer = asked.chat(max_tokens=2, extra_body={"chat_template_kwargs": off})
    expected = asked.tokenizer.apply_chat_template(ASK, add_generation_prompt=True, return_dict=False, **off)
    assert answer.prompt_token_ids == expected
    assert getattr(answer.choices[0].message, "reasoning_content", None) is None
    plain = asked.chat(max_tokens=2)
    assert plain.prompt_token_ids != expected
    with pytest.raises(openai.BadRequestError, match="chat_template_kwargs"):
        asked.chat(extra_body={"chat_template_kwargs": {"a b": 1}})


def test_a_final_message_is_continued(asked: Asked) -> None:
    """The completion goes on within the turn, also within its reasoning."""
    begun = f"<think>\n{REASONING[:7]}"
    turns = [*ASK, assistant(begun)]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    answer = asked.chat(messages=turns, extra_body=more)
    whole = asked.tokenizer.apply_chat_template(turns, continue_final_message=True, return_dict=False)
    assert answer.prompt_token_ids == whole
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == (REASONING[7:].lstrip(), ANSWER)
    with pytest.raises(openai.BadRequestError, match="needs a last message of the assistant, got role 'user'"):
        asked.chat(extra_body=more)


def test_echo_has_the_prompt_and_its_log_probs(asked: Asked) -> None:
    """As lm-evaluation-harness asks for the likelihood of a text."""
    ids = asked.tokenizer("2 + 2? It is 4.")["input_ids"]
    for prompt in ([ids], ["2 + 2? It is 4."]):
        (choice,) = asked.text(prompt=prompt, max_tokens=1, logprobs=2, echo=True, temperature=0).choices
        assert choice.text.startswith("2 + 2? It is 4.")
        found = choice.logprobs
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        assert len(found.tokens) == len(ids) + 1 and "".join(found.tokens[:-1]) == "2 + 2? It is 4."
        with torch.no_grad():
            expected = asked.model(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
        chosen = [float(expected[place, token]) for place, token in enumerate(ids[1:])]
        assert found.token_logprobs[1:-1] == pytest.approx(chosen, abs=1e-4)
        for place, top in enumerate(found.top_logprobs[1:]):
            assert max(top.values()) == pytest.approx(float(expected[place].max()), abs=1e-4)
    (alone,) = asked.text(max_tokens=0, logprobs=0, echo=True).choices
    assert (alone.text, alone.finish_reason, len(alone.logprobs.tokens)) == ("hello", "length", 5)
    assert asked.text(echo=True, n=2).choices[1].text.startswith("hello")
    first, *rest = asked.text(extra_body={"prompt_logprobs": 3}).choices[0].prompt_logprobs
    assert first is None and all(len(entry) in (3, 4) for entry in rest)
    with pytest.raises(openai.BadRequestError, match="echo needs stream false"):
        asked.text(echo=True, stream=True)


@pytest.mark.parametrize(
    ("more", "params"),
    [
        ({"presence_penalty": 1.5}, {"presence_penalty": 1.5}),
        ({"frequency_penalty": -0.8}, {"frequency_penalty": -0.8}),
        ({"logit_bias": {"70": 9.0, "71": -100}}, {"logit_bias": {70: 9.0, 71: -100.0}}),
        ({"extra_body": {"ignore_eos": True}, "logit_bias": {"2": 30}}, {"ignore_eos": True, "logit_bias": {2: 30.0}}),
    ],
)
def test_sampling_options_are_those_of_the_engine(asked: Asked, more: Any, params: Any) -> None:
    ids = asked.tokenizer("hello")["input_ids"]
    (expected,) = asked.engine.generate([ids], SamplingParams(seed=1, max_new_tokens=12, **params))
    found = asked.text(**more).choices[0]
    assert found.token_ids == expected[0].token_ids
    plain = asked.engine.generate([ids], SamplingParams(seed=1, max_new_tokens=12))[0][0]
    assert plain.token_ids != expected[0].token_ids
    if "ignore_eos" in params:
        assert found.token_ids.count(2) == 12 and found.finish_reason == "length"


def test_special_tokens_are_shown_on_request(asked: Asked) -> None:
    options = ({"ignore_eos": True}, {"ignore_eos": True, "skip_special_tokens": False})
    hidden, shown = (asked.text(logit_bias={"1": 40}, max_tokens=3, extra_body=more).choices[0] for more in options)
    assert hidden.token_ids == shown.token_ids == [1, 1, 1]
    assert (hidden.text, shown.text) == ("", "<|im_start|>" * 3)


def test_text_and_conversations_are_tokenized_and_back(asked: Asked) -> None:
    found = asked.send("/tokenize", prompt="hello", return_token_strs=True).json()
    assert found["tokens"] == asked.tokenizer("hello")["input_ids"] and found["count"] == 5
    assert found["max_model_len"] == 250 and found["token_strs"] == list("hello")
    chat = asked.send("/tokenize", messages=ASK, chat_template_kwargs={"enable_thinking": False}).json()["tokens"]
    expected = asked.tokenizer.apply_chat_template(
        ASK, add_generation_prompt=True, enable_thinking=False, return_dict=False
    )
    assert chat == expected
    assert asked.send("/detokenize", tokens=chat).json() == {"prompt": asked.tokenizer.decode(expected)}
    for path, body, key in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": ASK}, "prompt"),
        ("/detokenize", {"tokens": [9999]}, "tokens"),
    ):
        refused = asked.send(path, **body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, key)
    assert httpx2.post(f"{asked.url}/tokenize", json={"model": "x", "prompt": "a"}).status_code == 404


def test_responses_are_the_chat_s_answers(asked: Asked) -> None:
    response = asked.client.responses.create(model="m", input="2 + 2?", temperature=0)
    assert (response.output_text, response.status) == (ANSWER, "completed")
    reasoning, message = response.output
    assert (reasoning.type, reasoning.content[0].text, message.role) == ("reasoning", REASONING, "assistant")
    chat = asked.chat()
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens
    parts = [user([{"type": "input_text", "text": "2 + 2?"}])]
    cut = asked.client.responses.create(model="m", input=parts, temperature=0, max_output_tokens=25)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
    with pytest.raises(openai.BadRequestError, match="tools must be empty in a response: use /v1/chat/comp"):
        asked.client.responses.create(model="m", input="x", tools=[{"type": "web_search"}])
    with pytest.raises(openai.BadRequestError, match="must be a message with a role"):
        asked.client.responses.create(model="m", input=[{"type": "item_reference", "id": "x"}])
    told = asked.client.responses.create(model="m", input="2 + 2?", instructions="Be kind.", max_output_tokens=1)
    assert told.instructions == "Be kind." and told.usage.input_tokens > response.usage.input_tokens


def test_streamed_responses_end_with_the_whole_one(asked: Asked) -> None:
    text, thought, kinds = "", "", []
    with asked.client.responses.stream(model="m", input="2 + 2?", temperature=0) as stream:
        for event in stream:
            kinds.append(event.type)
            text += event.delta if event.type == "response.output_text.delta" else ""
            thought += event.delta if event.type == "response.reasoning_text.delta" else ""
        final = stream.get_final_response()
    assert (text, thought, final.output_text) == (ANSWER, REASONING, ANSWER)
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 2


def test_each_request_is_logged_in_one_line(
    asked: Asked, log_lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="hybrid_rlhf.access")
    asked.send("/v1/completions", prompt="x", max_tokens=1)
    httpx2.get(f"{asked.url}/v1/a%0Ab")
    wait_until(lambda: len(log_lines) >= 2)  # a line follows its answer
    assert any("POST '/v1/completions': status 200 after" in line for line in log_lines)
    assert any("GET '/v1/a\\nb': status 404 after" in line for line in log_lines), log_lines


def test_spans_continue_the_trace_of_the_client(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing.trace, "get_tracer", provider.get_tracer)
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = {**JSON, "traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    httpx2.post(f"{asked.url}/v1/completions", json={"model": "m", "prompt": "x", "max_tokens": 1}, headers=headers)
    wait_until(lambda: bool(exporter.get_finished_spans()))  # a span ends after its answer
    (span,) = exporter.get_finished_spans()
    assert span.name == "POST /v1/completions" and f"{span.context.trace_id:032x}" == trace
    assert span.attributes["http.response.status_code"] == 200


@settings(deadline=None)
@given(
    text=st.text(alphabet="<think>/ \nab", max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=6),
    is_open=st.booleans(),
)
def test_a_split_does_not_depend_on_the_pieces(text: str, cuts: list[int], is_open: bool) -> None:
    whole = ReasoningSplit("<think>", "</think>", is_open=is_open).add(text, ends=True)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    split = ReasoningSplit("<think>", "</think>", is_open=is_open)
    found = [split.add(text[a:b], ends=False) for a, b in zip(places, places[1:], strict=False)]
    found.append(split.add("", ends=True))
    assert ("".join(reasoning for reasoning, _ in found), "".join(rest for _, rest in found)) == whole
    if "<think>" not in text and "</think>" not in text and not is_open:
        assert whole == ("", text)


@pytest.mark.parametrize(
    ("source", "marks"),
    [
        ("{{ '[THINK]' }}{{ '[/THINK]' }}", ("[THINK]", "[/THINK]")),
        ("{{ '<seed:think>' }}{{ '</seed:think>' }}", ("<seed:think>", "</seed:think>")),
        ("{{ messages }}", None),
    ],
)
def test_marks_of_reasoning_are_those_of_the_template(source: str, marks: tuple[str, str] | None) -> None:
    template = ChatTemplate.of(tiny_tokenizer(source))
    assert template is not None and template.thinking_marks == marks


def test_too_many_biases_are_one_error() -> None:
    """Each of them was one, of two kilobytes."""
    biases = {str(token): "x" for token in range(1025)}
    with pytest.raises(KeyRejected, match="logit_bias must have at most 1024 items"):
        checked(CompletionBody, {"model": "m", "prompt": "a", "logit_bias": biases})


def test_the_log_prob_of_a_token_is_the_same_among_the_likely_ones() -> None:
    """Kernels of the two round differently."""
    token = StreamedToken(0, 0, 5, -1.0, -1.0, None, [(6, -0.5), (5, -1.00001)])
    assert _with_sampled(token) == [(6, -0.5), (5, -1.0)]
    assert _with_sampled(replace(token, top=[(6, -0.5)])) == [(6, -0.5), (5, -1.0)]


def test_an_empty_turn_may_be_text_or_parts_of_text() -> None:
    """smolagents sends a completion of no tokens back as parts, and was refused its next request."""
    asked = {"role": "user", "content": "a"}
    for content in ("", [], [{"type": "text", "text": ""}]):
        read, _ = read_messages("messages", [asked, {"role": "assistant", "content": content}, asked])
        assert read == [asked, {"role": "assistant", "content": ""}, asked]
