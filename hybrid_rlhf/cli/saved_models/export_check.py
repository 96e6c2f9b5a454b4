"""Whether an exported model answers as the model that was exported: greedy tokens on ten prompts.

The exported files are read by the program that they are for: a folder by transformers, a GGUF file by llama.cpp
(llama-cpp-python). With an adapter, the reference is the model with the
adapter beside it, not merged. Both may choose another token where two are nearly as likely, so a difference counts if
the reference prefers its own token by more than the rounding of the exported dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.chat.conversation import encode_prompt, stop_token_ids
from hybrid_rlhf.models.pretrained.folders import load_config
from hybrid_rlhf.models.pretrained.loading import auto_class
from hybrid_rlhf.runtime.observability.progress import ProgressLog

PROMPTS = (
    "Hello, who are you?",
    "What is 12 * 7?",
    "Write a line about the sea.",
    "Name three colours.",
    "Translate to French: good morning.",
    'Return {"a": 1} as it is.',
    "def add(a, b):",
    "The capital of Japan is",
    "Once upon a time, there was",
    "List the days of the week.",
)
NEW_TOKENS = 24
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05, "q8_0": 0.5}
"""Largest difference of log-probs, in nats, at which another token is a matter of rounding."""
_PROMPT_TOKENS = 512
Greedy = Callable[[Sequence[int]], list[int]]
"""Returns the greedy tokens after a prompt."""


@dataclass(frozen=True)
class CheckResult:
    """What a check has found."""

    program: str
    equal: int
    """Number of prompts with the same tokens."""
    rounded: int
    """Number of prompts with another token where two are nearly as likely."""
    faults: list[str]
    """Prompts with other tokens, each with the first difference."""

    @property
    def text(self) -> str:
        """The result in one line."""
        shown = f"{self.program}: {self.equal} of {len(PROMPTS)} prompts have the same tokens"
        shown += f", {self.rounded} differ by rounding" if self.rounded else ""
        return shown + (f", {len(self.faults)} differ: {self.faults[0]}" if self.faults else "")


def require_program(output_format: str) -> None:
    """Raise UserError unless the program that reads a format is installed."""
    if output_format == "gguf" and find_spec("llama_cpp") is None:
        raise UserError("--check of gguf needs llama-cpp-python, it is not installed: pip install llama-cpp-python")


def check_export(
    output: Path,
    reference: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dtype: str,
    trust_remote_code: bool,
) -> CheckResult:
    """Compare an export with its reference.

    Args:
        output: the exported folder or GGUF file.
        reference: the model that was exported, with its adapter beside it.
        tokenizer: its tokenizer.
        dtype: dtype of the export.
        trust_remote_code: run Python code that comes with the model.
    """
    ends = frozenset(stop_token_ids(tokenizer, None))
    if output.suffix == ".gguf":
        return _compared("llama.cpp", _llama(output, ends), tokenizer, reference, tokenizer, dtype=dtype)
    read = AutoTokenizer.from_pretrained(output, trust_remote_code=trust_remote_code)
    build = auto_class(load_config(str(output), trust_remote_code=trust_remote_code), "causal_lm")
    lm = build.from_pretrained(output, trust_remote_code=trust_remote_code).eval()
    return _compared("transformers", _transformers(lm, ends), read, reference, tokenizer, dtype=dtype)


def _compared(
    program: str,
    greedy: Greedy,
    read: PreTrainedTokenizerBase,
    reference: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dtype: str,
) -> CheckResult:
    """Compare the tokens of a program, whose tokenizer is `read`, with those of the reference."""
    ends = frozenset(stop_token_ids(tokenizer, None))
    own = _transformers(reference.eval(), ends)
    equal = 0
    rounded = 0
    faults = list[str]()
    for text in ProgressLog("comparing completions", total=len(PROMPTS), unit="prompts").track(PROMPTS):
        prompt = encode_prompt([{"role": "user", "content": text}], tokenizer)
        expected = own(prompt)
        found = greedy(encode_prompt([{"role": "user", "content": text}], read))
        if found == expected:
            equal += 1
            continue
        place = next((n for n, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), None)
        place = min(len(found), len(expected)) if place is None else place
        pair = [(ids[place] if place < len(ids) else min(ends)) for ids in (expected, found)]
        lost = _preference(reference, [*prompt, *expected[:place]], *pair)
        if lost <= TOLERANCES[dtype]:
            rounded += 1
        else:
            shown = [tokenizer.decode([token]) for token in pair]
            faults.append(f"after {text!r}, token {place} is {shown[1]!r}, not {shown[0]!r} ({lost:.2g} nats)")
    return CheckResult(program, equal, rounded, faults)


@torch.no_grad()
def _preference(lm: PreTrainedModel, ids: Sequence[int], wanted: int, found: int) -> float:
    """By how many nats a model prefers a token to another one."""
    logits = lm(torch.tensor([list(ids)], device=lm.device)).logits[0, -1].float()
    return float(logits[wanted] - logits[found])


def _transformers(lm: PreTrainedModel, ends: frozenset[int]) -> Greedy:
    def greedy(prompt: Sequence[int]) -> list[int]:
        ids = torch.tensor([list(prompt)], device=lm.device)
        whole = lm.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=sorted(ends),
            pad_token_id=min(ends),
        )
        return [int(token) for token in whole[0, len(prompt) :]]

    return greedy


def _llama(file: Path, ends: frozenset[int]) -> Greedy:
    from llama_cpp import Llama

    try:
        model = Llama(str(file), n_ctx=_PROMPT_TOKENS + NEW_TOKENS, verbose=False)
    except ValueError as error:
        raise UserError(f"llama.cpp must read {file}, it does not ({error}): update llama-cpp-python") from error

    def greedy(prompt: Sequence[int]) -> list[int]:
        ids = list[int]()
        model.reset()
        for token in model.generate(list(prompt), temp=0.0, repeat_penalty=1.0):
            ids.append(int(token))
            if token in ends or len(ids) == NEW_TOKENS:
                break
        return ids

    return greedy
