"""A tokenizer as the metadata of a GGUF file: tokens, merges, kinds of tokens, chat template.

Two kinds of tokenizers are written: byte-level BPE ("gpt2") and BPE of SentencePiece with byte fallback ("llama").
Byte-level tokenizers also differ in how they split text before merging; llama.cpp has a name for each way.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from hybrid_rlhf.configs.errors import UserError

if TYPE_CHECKING:
    from gguf import GGUFWriter

_CANONICAL = ("llama-bpe", "qwen2", "tekken", "gpt-4o")
"""Preferred names for ways of splitting to which llama.cpp gives several names."""
_FIX = "set --format safetensors"


def write_vocabulary(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase, size: int) -> None:
    """Write a tokenizer.

    Args:
        writer: writer of the file.
        tokenizer: tokenizer with a fast implementation.
        size: number of rows of the model's embedding; ids beyond the tokenizer's are filled with unused tokens.

    Raises:
        UserError: for another kind of tokenizer.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = json.loads(backend.to_str()) if backend is not None else {}
    model = content.get("model", {})
    if model.get("type") != "BPE":
        raise UserError(
            f"format gguf writes BPE tokenizers, got {model.get('type') or type(tokenizer).__name__}: {_FIX}"
        )
    added = {token["id"]: token for token in content["added_tokens"]}
    tokens = {index: token for token, index in model["vocab"].items()} | {i: t["content"] for i, t in added.items()}
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    listed = [tokens.get(index, f"[PAD{index}]") for index in range(size)]
    if model.get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_add_space_prefix(_adds_space(content))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_split_name(content["pre_tokenizer"]))
    writer.add_token_list(listed)
    writer.add_token_types([_kind(index, token, tokens, added, model) for index, token in enumerate(listed)])
    # llama.cpp merges SentencePiece's pieces by score; transformers merges by the list, or by score if it is empty.
    ranks = {merge.replace(" ", ""): -float(rank) for rank, merge in reversed(list(enumerate(merges)))}
    writer.add_token_scores([ranks.get(token, 0.0) for token in listed])
    writer.add_token_merges(merges)
    _write_special(writer, tokenizer)


def _write_special(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase) -> None:
    for token, add in (
        (tokenizer.bos_token_id, writer.add_bos_token_id),
        (tokenizer.eos_token_id, writer.add_eos_token_id),
        (tokenizer.pad_token_id, writer.add_pad_token_id),
        (tokenizer.unk_token_id, writer.add_unk_token_id),
    ):
        if isinstance(token, int):
            add(token)
    ids: list[int] = tokenizer("a")["input_ids"]  # type: ignore[assignment]
    writer.add_add_bos_token(ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(len(ids) > 1 and ids[-1] == tokenizer.eos_token_id)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        writer.add_chat_template([{"name": name, "template": text} for name, text in template.items()])
    elif template is not None:
        writer.add_chat_template(template)


def _kind(index: int, token: str, tokens: dict[int, str], added: dict[int, Any], model: dict[str, Any]) -> int:
    from gguf import TokenType

    if index not in tokens:
        return int(TokenType.UNUSED)
    if index in added:
        return int(TokenType.CONTROL if added[index]["special"] else TokenType.USER_DEFINED)
    if token == model.get("unk_token") and model.get("byte_fallback"):
        return int(TokenType.UNKNOWN)
    is_byte = model.get("byte_fallback") and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
    return int(TokenType.BYTE if is_byte else TokenType.NORMAL)


def _split_name(pre_tokenizer: dict[str, Any] | None) -> str:
    """llama.cpp's name of a way to split text.

    Raises:
        UserError: for a way that transformers cannot read back.
    """
    parts = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer or {}])
    if len(parts) == 1 and parts[0].get("type") == "ByteLevel" and parts[0].get("use_regex", True):
        return "gpt-2"
    if [part.get("type") for part in parts] == ["Split", "ByteLevel"] and parts[0]["behavior"] == "Isolated":
        split = parts[0]["pattern"].get("Regex")
        names = [name for name, known in GGUF_PRE_TOKENIZER_SPLITS.items() if known == split]
        if names:
            return next((name for name in _CANONICAL if name in names), names[0])
    kinds = " and ".join(str(part.get("type")) for part in parts)
    raise UserError(f"format gguf writes tokenizers that split text as GPT-2, Llama 3, Qwen, ..., got {kinds}: {_FIX}")


def _adds_space(content: dict[str, Any]) -> bool:
    """Return True if the tokenizer puts a space before a text."""
    pre = content.get("pre_tokenizer") or {}
    normalizers = (content.get("normalizer") or {}).get("normalizers", [])
    return pre.get("prepend_scheme", "never") != "never" or any(part["type"] == "Prepend" for part in normalizers)
