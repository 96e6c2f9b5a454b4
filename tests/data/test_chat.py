"""Where the loss falls: on what the assistant generates and its end-of-turn token, and on nothing else."""

from __future__ import annotations

import pytest

from hybrid_rlhf.data.chat.conversation import encode_conversation
from tests.data.rows import learned
from tests.support.messages import assistant, user
from tests.support.tiny import CHATML, tiny_tokenizer

SHOWN = "message['content']"


@pytest.mark.parametrize(
    ("shown", "content", "expected"),
    [
        (SHOWN, "<think>a</think>42", "<think>a</think>42<|im_end|>"),
        (SHOWN, "42</think>", "42</think><|im_end|>"),
        (SHOWN, "im_end é", "im_end é<|im_end|>"),
        (f"{SHOWN} | replace('b', '')", "<think>ab</think>42", "<think>a</think>42<|im_end|>"),
        (f"'<think></think>' + {SHOWN}", "think", "<think></think>think<|im_end|>"),
        (f"{SHOWN} + '<|im_end|>' + '<|endoftext|>'", "think", "think<|im_end|>"),
    ],
)
def test_special_tokens_within_an_answer_do_not_end_it(shown: str, content: str, expected: str) -> None:
    tokenizer = tiny_tokenizer(CHATML.replace(SHOWN, f"({shown} if message['role'] == 'assistant' else {SHOWN})"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    for turns in (2, 4):
        messages = [user("q"), assistant(content)] * (turns // 2)
        (encoded,) = encode_conversation(messages, tokenizer)
        assert learned(encoded, tokenizer) == expected * (turns // 2)


def test_an_answer_without_an_end_of_turn_is_learned_whole() -> None:
    tokenizer = tiny_tokenizer(
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
    for content in ("42", "<think>42", "4<think>2", "42<think>"):
        (encoded,) = encode_conversation([user("q"), assistant(content)], tokenizer)
        assert learned(encoded, tokenizer) == content + "\n"
