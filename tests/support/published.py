"""Chat templates that installed packages publish, and conversations as users write them."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.metadata import distributions
from typing import Any

from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = re.compile(
    r"<[|｜][^\s<>'\"{}]{1,40}?>|<[^\s<>'\"{}/=]{1,40}?[|｜]>|</?s>|<(?:bos|eos|\w+_of_\w+)>|\[/?[A-Z][A-Z_]{2,30}\]"
)
"""What template writers use as special tokens."""
OTHERS = (
    "<|endoftext|>",
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<|python_tag|>",
    "<eos>",
    "<bos>",
    "<|image>",
    "<image|>",
    "<|image|>",
    "<|audio>",
    "<audio|>",
    "<|audio|>",
    "<|video|>",
    "<｜begin▁of▁sentence｜>",
    "[gMASK]",
)
"""Special tokens that families have without a word of them in their templates."""
TAG = re.compile(r"</?[a-z_]+>")
"""Marks of reasoning and calls: tokens that decoding keeps."""
KINDS = ("bytes", "spaces")
WORD = re.compile(r"w\d+x")


@cache
def published_templates() -> dict[str, str]:
    """Name and source of every chat template in a package's folder of chat templates, each source once."""
    files = [file for package in distributions() for file in package.files or () if file.suffix == ".jinja"]
    found: dict[str, str] = {}
    for file in sorted(files, key=str):
        if any("chat_template" in part for part in file.parts[:-1]):
            source = file.read_text(encoding="utf-8")
            found.setdefault(source, f"{file.parts[0]}/{file.stem}")
    return {name: source for source, name in found.items()}


@cache
def published_tokenizer(name: str, kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer with a published template: of bytes, or of characters with a mark before the text and for spaces, as
    SentencePiece has it. Line breaks, spaces and letters join."""
    source = published_templates()[name]
    special = ["<pad>", "<s>", "</s>"]
    special += sorted({*SPECIAL.findall(source), *OTHERS} - {*special})
    if kind == "bytes":
        newline, space, letters = "\u010a", "\u0120", sorted(pre_tokenizers.ByteLevel.alphabet())
    else:
        newline, space = "\n", "\u2581"
        letters = [*(chr(code) for code in (10, *range(33, 127), 0x2581)), *(f"<0x{code:02X}>" for code in range(256))]
    pairs = [(newline, newline), (space, space), (newline, space), (space, "w"), (newline, "w"), (":", newline)]
    pairs += [(">", newline), ('"', "}"), ("t", "w")]
    vocabulary = [*special, *letters, *("".join(pair) for pair in pairs)]
    backend = Tokenizer(
        models.BPE({token: index for index, token in enumerate(vocabulary)}, pairs, byte_fallback=kind == "spaces")
    )
    if kind == "bytes":
        words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(words, "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        backend.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
    )
    tokenizer.add_special_tokens({"additional_special_tokens": special[3:]})
    tokenizer.add_tokens(
        [AddedToken(tag, special=False) for tag in sorted({*TAG.findall(source), "<think>", "</think>"} - {*special})]
    )
    tokenizer.chat_template = source
    return tokenizer


_ODD = (
    *(
        "{}",
        "{}\n",
        "\n\n{}",
        "  {} ",
        "é{}",
        '{} "q"',
        "<b>{}</b>",
        "{}\n\n  y",
        "\\n{}",
        "{}'s",
        "{}%}}",
        "{{{{{}",
        "{}:",
    ),
)
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"does {name}",
            "parameters": {
                "type": "object",
                "properties": {"k": {"type": "string", "description": "p"}},
                "required": ["k"],
            },
        },
    }
    for name in ("f1", "f2")
]


class _Writer:
    """Draws the parts of a conversation; each text has a word of its own: `w1x`, `w2x`."""

    def __init__(self, draw: st.DrawFn, usual: bool) -> None:
        self._draw = draw
        self.usual = usual
        self._words = 0
        self._calls = 0

    def some(self, *chances: Any) -> Any:
        return self._draw(st.sampled_from(chances))

    def text(self) -> str:
        self._words += 1
        return str(self.some(*_ODD)).format(f"w{self._words}x")

    def answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = {"role": "assistant", "content": self.text()}
        place = self.some(None, None, "reasoning_content", *(() if self.usual else ("thinking", "inline")))
        if place == "inline":
            answer["content"] = f"<think>\n{self.text()}\n</think>\n\n{answer['content']}"
        elif place:
            answer[place] = self.text()
        return answer | ({"weight": self.some(0, 1)} if self.some(False, False, False, True) else {})

    def with_calls(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """The answer with calls, beside text or alone, and their results in any order."""
        calls = [self._call() for _ in range(self.some(1, 1, 2, 3))]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": text}
            for call, text in zip(calls, [self.some(self.text(), "") for _ in calls], strict=True)
        ]
        content = {"content": self.some(None, "")} if self.some(True, True, False) else {}
        return [answer | content | {"tool_calls": calls}, *self._draw(st.permutations(results))]

    def _call(self) -> dict[str, Any]:
        self._calls += 1
        arguments = self.some({}, {"k": self.text()}, {"k": self.text(), "n": 1, "deep": {"l": [self.text(), None]}})
        function = {"name": f"f{self.some(1, 2)}", "arguments": self.some(arguments, json.dumps(arguments))}
        return {"id": f"callid{self._calls:03}", "type": "function", "function": function}


@st.composite
def conversations(draw: st.DrawFn, *, usual: bool = False) -> dict[str, Any]:
    """A row: several system turns, calls alone, several and beside text, results in any order, reasoning under its keys
    or in the content, empty and odd texts, weights, tools.

    Args:
        draw: draws values.
        usual: leave out what many templates refuse: several turns of one role, reasoning in the content.
    """
    writer = _Writer(draw, usual)
    roles = writer.some((), ("system",), *(() if usual else (("developer",), ("system", "system"))))
    messages = [{"role": role, "content": writer.text()} for role in roles]
    for _ in range(writer.some(1, 1, 2, 3)):
        messages += [{"role": "user", "content": writer.text()} for _ in range(1 if usual else writer.some(1, 1, 2))]
        for _ in range(writer.some(0, 0, 1, 2)):
            messages += writer.with_calls(writer.answer())
        messages += [writer.answer() for _ in range(1 if usual else writer.some(1, 1, 1, 0, 2))]
    messages += [{"role": "user", "content": writer.text()}] if writer.some(False, False, False, True) else []
    return {"messages": messages, **({"tools": _TOOLS} if "tool_calls" in str(messages) else {})}
