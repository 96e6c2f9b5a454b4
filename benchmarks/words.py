"""Text of random words for the embedded model, of a given number of tokens, and its tokenizer for whole steps."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.data.chat.conversation import encode_prompt
from hybrid_rlhf.models.pretrained.sources import resolve_model
from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
from hybrid_rlhf.runtime.world import solo_world

STOP_TOKEN, PAD_TOKEN = "<repo_name>", "<|endoftext|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def embedded() -> tuple[str, PreTrainedTokenizerBase]:
    """Folder of the embedded model, and its tokenizer with an end that text never holds."""
    path = resolve_model("embedded", world=solo_world(torch.device("cpu")))
    tokenizer = load_tokenizer(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.eos_token, tokenizer.pad_token = STOP_TOKEN, PAD_TOKEN
    return path, tokenizer


def plain_words(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Words of small letters that are one token behind a space."""
    return sorted(w[1:] for w in tokenizer.get_vocab() if w[0] == "Ġ" and w[1:].isascii() and w[1:].islower())


def make_prompts(
    tokenizer: PreTrainedTokenizerBase, rows: int, *, tokens: int, generator: torch.Generator
) -> list[dict[str, Any]]:
    """Random words in a user's turn, `tokens` long with the template: as messages and as token ids."""
    words = plain_words(tokenizer)
    count = tokens - len(encode_prompt([{"role": "user", "content": ""}], tokenizer))
    if count < 1:
        raise SystemExit(f"--prompt_tokens {tokens} leaves no room for a word: raise it by {1 - count}")
    found: list[dict[str, Any]] = []
    while len(found) < rows:
        chosen = torch.randint(len(words), (count,), generator=generator).tolist()
        messages = [{"role": "user", "content": " ".join(words[i] for i in chosen)}]
        ids = encode_prompt(messages, tokenizer)
        if len(ids) == tokens:
            found.append({"prompt": messages, "input_ids": ids})
    return found
