"""Steps of an answer end where their text does, whatever the tokenizer merges; the last with the conversation."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hybrid_rlhf.data.collation import collate_reward_labels
from hybrid_rlhf.data.rows.stepwise import encode_stepwise_row
from tests.support.errors import user_error
from tests.support.tiny import CHATML, tiny_tokenizer

ROW: dict[str, Any] = {"prompt": "2+2*2?", "completions": ["2*2 = 4.", "Zwölf ✓ ", "= 6"], "labels": [True, 0, 0.75]}


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE whose merges know the row, line breaks included."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Split("<|im_end|>", "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [backend.pre_tokenizer, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator([".\n"] * 50 + ["2*2 =", "Zwölf", "= 6"] * 9, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    return tokenizer


def encode(tokenizer: Any, row: dict[str, Any] = ROW, limit: int = 256, separator: str = "\n") -> dict[str, Any]:
    (columns,) = encode_stepwise_row("rows.jsonl:1", row, tokenizer, limit, separator=separator)
    return columns


@pytest.mark.parametrize("make", [tiny_tokenizer, merging_tokenizer, lambda: tiny_tokenizer(None)])
@pytest.mark.parametrize("separator", ["\n", "\n\n", " ки\n"])
def test_steps_end_with_their_text(make: Any, separator: str) -> None:
    tokenizer = make()
    columns = encode(tokenizer, separator=separator)
    (ids,), ends = columns["responses"], columns["ends"]
    text = separator.join(ROW["completions"])
    for number in range(1, 3):
        read = tokenizer.decode(ids[: ends[number - 1] + 1])
        whole = separator.join(ROW["completions"][:number])
        shown = read[read.index(text[:3], read.index("2+2*2?") + 6) :]
        assert shown.startswith(whole) and (whole + separator).startswith(shown), "no character of the next step"
        before = tokenizer.decode(ids[: ends[number - 1]])
        assert whole not in before, "and no token too many"
    assert ends[-1] == len(ids) - 1 and columns["labels"] == [1.0, 0.0, 0.75]


def test_what_is_too_long_loses_prompt_then_steps() -> None:
    tokenizer = tiny_tokenizer()
    whole = encode(tokenizer)
    (ids,) = whole["responses"]
    assert not whole["cut"]
    shorter = encode(tokenizer, limit=len(ids) - 5)
    assert shorter["cut"] and shorter["responses"] == [ids[5:]]
    assert shorter["ends"] == [end - 5 for end in whole["ends"]] and len(shorter["labels"]) == 3
    answer = len(ids) - whole["masks"][0].index(True)
    last_gone = encode(tokenizer, limit=answer - 2)
    assert last_gone["labels"] == [1.0, 0.0] and last_gone["usable"]
    assert not encode(tokenizer, limit=3)["usable"]


def test_a_batch_has_a_label_at_each_end() -> None:
    rows = [encode(tiny_tokenizer()), None, encode(tiny_tokenizer(), {**ROW, "completions": ["a", "b", "c"]})]
    batch = collate_reward_labels(rows, 2)
    assert batch.sequence_index.tolist() == [0, 0, 0, 2, 2, 2]
    assert batch.token_index.tolist() == [*rows[0]["ends"], *rows[2]["ends"]]  # type: ignore[index]
    assert bool(batch.attention_mask[batch.sequence_index, batch.token_index].all())
    whole = collate_reward_labels(
        [{"responses": [[5, 6], [7]], "masks": [[0, 1], [1]], "labels": [True, False], "head": 1}], 2
    )
    assert whole.token_index.tolist() == [1, 0] and whole.head.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("make", "row", "expected"),
    [
        (tiny_tokenizer, ROW, r".* need a fast tokenizer, .* got \w+: "),
        (
            lambda: tiny_tokenizer(CHATML.replace("message['content']", "(message['content'] | trim)")),
            {**ROW, "completions": [" a", "b", "c"]},
            "the chat template must render .* unchanged, got 'a.*: strip ",
        ),
        (
            tiny_tokenizer,
            {**ROW, "completions": ["a\nb", "b", "c"]},
            r"a step must not contain objective.step_separator '\\n', .*: set another separator",
        ),
        (
            merging_tokenizer,
            {**ROW, "completions": ["2*", "2 =", "4"]},
            r"objective.step_separator .* '\|' a token spans step 1 and the next: set another separator",
        ),
    ],
)
def test_hidden_step_ends_are_rejected(
    make: Any, row: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make()
    monkeypatch.setattr(type(tokenizer), "is_fast", "fast" not in expected)
    separator = "\n"
    if "spans" in expected:  # a tokenizer that knows "2*|2 =" as one
        separator = "|"
        tokenizer.add_tokens(["2*|2"])
    with user_error(f"^rows.jsonl:1: {expected}"):
        encode(tokenizer, row, separator=separator)
