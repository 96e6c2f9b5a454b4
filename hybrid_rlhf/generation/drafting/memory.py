"""Completions of earlier calls by prompt, in host memory, as drafts for the next ones.

It belongs to one engine: another run, and so another model or tokenizer, begins with an empty one, and so does a run
that resumes. A lock guards it, since completions may be sampled in a thread while those of an earlier step are stored.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

MOST_TOKENS = 2**24
"""Prompt and completion tokens that are kept by default, 4 bytes each; the least recently sampled prompts go first."""


class CompletionMemory:
    """The latest completions of each prompt."""

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        """Take the bound on its size, in tokens of prompts and completions."""
        self._most_tokens = most_tokens
        self.tokens = 0
        """Tokens that it holds."""
        self._completions: OrderedDict[bytes, list[np.ndarray]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Prompts with completions."""
        return len(self._completions)

    def store(self, prompt: Sequence[int], completions: Sequence[Sequence[int]]) -> None:
        """Replace the completions of a prompt; forget those of other prompts if there is no room."""
        key, held = _key(prompt), [np.asarray(tokens, dtype=np.int32) for tokens in completions]
        with self._lock:
            self.tokens -= _size(key, self._completions.pop(key, []))
            self._completions[key] = held
            self.tokens += _size(key, held)
            while self.tokens > self._most_tokens:
                self.tokens -= _size(*self._completions.popitem(last=False))

    def recall(self, prompt: Sequence[int]) -> list[list[int]]:
        """The completions of a prompt; [] if there are none."""
        with self._lock:
            return [tokens.tolist() for tokens in self._completions.get(_key(prompt), ())]


def _key(prompt: Sequence[int]) -> bytes:
    return np.asarray(prompt, dtype=np.int32).tobytes()


def _size(key: bytes, completions: Sequence[np.ndarray]) -> int:
    return len(key) // 4 + sum(map(len, completions)) if completions else 0
