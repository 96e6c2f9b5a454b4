"""Where the loss falls: on what the assistant generates and its end-of-turn token, and on nothing else."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from hybrid_rlhf.data.chat.conversation import EncodedSequence, encode_conversation
from tests.support.messages import assistant, user
from tests.support.tiny import CHATML, tiny_tokenizer

TURNS = [
    {"role": "system", "content": "be kind"},
    user("hi <b>"),
    assistant("hello"),
    user("more"),
    assistant("bye é"),
]


def with_loss(encoded: EncodedSequence, tokenizer: PreTrainedTokenizerFast) -> str:
    return tokenizer.decode([token for token, loss in zip(encoded.input_ids, encoded.loss_mask, strict=True) if loss])


@pytest.mark.parametrize("turns", [3, 5])
def test_loss_is_on_answers_and_their_end(turns: int, tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.pad_token_id == tokenizer.eos_token_id, "which hides no end of a turn"
    (encoded,) = encode_conversation(TURNS[:turns], tokenizer)
    assert with_loss(encoded, tokenizer) == "hello<|im_end|>" + "bye é<|im_end|>" * (turns == 5)
    assert tokenizer.decode(encoded.input_ids).endswith("<|im_end|>\n")
    assert not encoded.loss_mask[-1], "what the template adds after the end of the turn is not the assistant's"


SHOWN = "message['content']"


@pytest.mark.parametrize(
    ("shown", "content", "learned"),
    [
        (SHOWN, "<think>a</think>42", "<think>a</think>42<|im_end|>"),
        (SHOWN, "42</think>", "42</think><|im_end|>"),
        (SHOWN, "im_end é", "im_end é<|im_end|>"),
        (f"{SHOWN} | replace('b', '')", "<think>ab</think>42", "<think>a</think>42<|im_end|>"),
        (f"'<think></think>' + {SHOWN}", "think", "<think></think>think<|im_end|>"),
        (f"{SHOWN} + '<|im_end|>' + '<|endoftext|>'", "think", "think<|im_end|>"),
    ],
)
@pytest.mark.parametrize("fast", [True, False])
def test_special_tokens_within_an_answer_do_not_end_it(
    shown: str, content: str, learned: str, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tiny_tokenizer(CHATML.replace(SHOWN, f"({shown} if message['role'] == 'assistant' else {SHOWN})"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    monkeypatch.setattr(type(tokenizer), "is_fast", fast)
    for turns in (2, 4):
        messages = [user("q"), assistant(content)] * (turns // 2)
        (encoded,) = encode_conversation(messages, tokenizer)
        assert with_loss(encoded, tokenizer) == learned * (turns // 2)


def test_an_answer_without_an_end_of_turn_is_learned_whole() -> None:
    tokenizer = tiny_tokenizer(
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
    for content in ("42", "<think>42", "4<think>2", "42<think>"):
        (encoded,) = encode_conversation([user("q"), assistant(content)], tokenizer)
        assert with_loss(encoded, tokenizer) == content + "\n"
