"""A conversation with a model: turns in, text out piece by piece.

Why here: the command line of chat is one front of it; the conversation itself can be tested without a terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.generation.engine import GenerationEngine
from hybrid_rlhf.generation.sampling import SamplingParams

Encoder = Callable[[list[dict[str, str]]], list[int]]


class Conversation:
    """The messages so far, and an engine that continues them."""

    def __init__(
        self,
        engine: GenerationEngine,
        tokenizer: PreTrainedTokenizerBase,
        encode: Encoder,
        *,
        system: str | None = None,
    ) -> None:
        """Start a conversation.

        Args:
            engine: that answers.
            tokenizer: decodes its tokens.
            encode: messages to the token ids of a prompt.
            system: first message; none: whatever the chat template says by itself.
        """
        self._engine, self._tokenizer, self._encode = engine, tokenizer, encode
        self.system = system
        self.messages: list[dict[str, str]] = []

    def clear(self) -> None:
        """Forget what was said; the system prompt stays."""
        self.messages = []

    def say(self, text: str, sampling: SamplingParams) -> Iterator[str]:
        """Say something; the answer comes in pieces of text that are whole characters.

        Raises:
            UserError: when it cannot be answered; it is then not said.
        """
        before = list(self.messages)
        self.messages.append({"role": "user", "content": text})
        try:
            yield from self._answer(sampling)
        except UserError:
            self.messages = before
            raise

    def _answer(self, sampling: SamplingParams) -> Iterator[str]:
        tokens: list[int] = []
        shown = ""
        try:
            for token in self._engine.stream(self._encode(self.transcript()), sampling):
                tokens.append(token)
                decoded = self._tokenizer.decode(tokens, skip_special_tokens=True)
                if not decoded.endswith("\ufffd") and len(decoded) > len(shown):  # half a character waits
                    yield decoded[len(shown) :]
                    shown = decoded
        finally:
            answer = self._tokenizer.decode(tokens, skip_special_tokens=True).strip()
            self.messages.append({"role": "assistant", "content": answer})

    def transcript(self) -> list[dict[str, str]]:
        """All messages, the system prompt first."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.messages
