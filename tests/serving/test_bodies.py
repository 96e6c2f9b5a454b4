"""Bodies of requests, without a server."""

from __future__ import annotations

import json

import pytest

from hybrid_rlhf.serving.bodies import BodyT, ChatBody, CompletionBody, KeyRejected, RewardBody, TokenizeBody, read_body
from hybrid_rlhf.serving.responses import ResponseBody

OF_OPENAI = (
    *("audio", "best_of", "frequency_penalty", "function_call", "functions", "logit_bias", "logprobs", "metadata"),
    *("max_completion_tokens", "max_tokens", "modalities", "n", "parallel_tool_calls", "prediction", "top_logprobs"),
    *("presence_penalty", "reasoning_effort", "response_format", "seed", "service_tier", "stop", "store", "stream"),
    *("stream_options", "suffix", "temperature", "tool_choice", "tools", "top_p", "user", "web_search_options"),
    *("echo", "ignore_eos", "skip_special_tokens", "add_generation_prompt", "conversation", "previous_response_id"),
)
"""Keys that clients write even where they have no value."""
CHAT = {"model": "m", "messages": [{"role": "user", "content": "q"}]}


def read(kind: type[BodyT], values: object) -> BodyT:
    return read_body(kind, json.dumps(values).encode())


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (ChatBody, CHAT),
        (CompletionBody, {"model": "m", "prompt": "q"}),
        (ResponseBody, {"model": "m", "input": "q"}),
        (TokenizeBody, {"model": "m", "prompt": "q"}),
    ],
)
def test_null_is_as_if_a_key_were_left_out(kind: type[BodyT], values: dict[str, object]) -> None:
    assert read(kind, {**dict.fromkeys(OF_OPENAI), **values}) == read(kind, values)


def test_nulls_inside_of_options_and_tools() -> None:
    """Rows of training have no nulls in tools either, so a template must not write them."""
    function = {"name": "f", "parameters": {"type": "object"}}
    options = {"include_usage": None, "include_obfuscation": False}
    body = read(
        ChatBody,
        {
            **CHAT,
            "stream_options": options,
            "response_format": {"type": "text", "json_schema": None},
            "tools": [{"type": "function", "function": {**function, "strict": None, "description": None}}],
        },
    )
    assert body.stream_options is not None and not body.stream_options.include_usage
    assert body.response_format == {"type": "text"}
    assert body.used_tools == [{"type": "function", "function": function}]


def test_required_keys_are_no_options() -> None:
    with pytest.raises(KeyRejected, match="^messages must be a valid list, got None: change it"):
        read(ChatBody, {**CHAT, "messages": None})
    assert read(RewardBody, {"reward": None}).reward is None  # null is its value
