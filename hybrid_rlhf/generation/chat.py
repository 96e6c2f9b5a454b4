"""A conversation with a model: takes user messages, streams the text of replies.

Why here and not in the chat command: the conversation can be tested without a terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.chat.reasoning import text_decoder
from hybrid_rlhf.generation.batching.images import PromptImages
from hybrid_rlhf.generation.engine import GenerationEngine
from hybrid_rlhf.generation.sampling import SamplingParams

Encoder = Callable[[list[dict[str, Any]]], tuple[list[int], PromptImages | None]]


class ChatSession:
    """Messages of a conversation, and the engine that replies."""

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
            engine: generates the replies.
            tokenizer: decodes their tokens.
            encode: turns messages into the token ids and images of a prompt.
            system: the system prompt; none: that of the chat template.
        """
        self._engine = engine
        self._encode = encode
        self._text = text_decoder(tokenizer)
        self.system = system
        self.messages: list[dict[str, Any]] = []

    def clear(self) -> None:
        """Remove all messages except the system prompt."""
        self.messages = []

    def close(self) -> None:
        """Close the engine, which frees the memory of the model."""
        self._engine.close()

    def say(self, text: str, sampling: SamplingParams, *, images: Sequence[str] = ()) -> Generator[str, None, None]:
        """Add a user message, with names of images before its text, and stream the reply, in pieces of text that end at
        character boundaries.

        Raises:
            UserError: when the prompt is too long or otherwise invalid; the message is then removed again.
        """
        before = list(self.messages)
        parts = [*({"type": "image", "image": name} for name in images), {"type": "text", "text": text}]
        self.messages.append({"role": "user", "content": parts if images else text})
        try:
            yield from self._reply(sampling)
        except UserError:
            self.messages = before
            raise

    def again(self, sampling: SamplingParams) -> Generator[str, None, None]:
        """Replace the last reply by a new one, streamed as in `say`.

        Raises:
            UserError: when there is no message, or the prompt is invalid; the messages are then unchanged.
        """
        if not self.messages:
            raise UserError("another reply needs a message, got none: say something first")
        before = self.messages
        self.messages = self.messages[:-1]
        try:
            yield from self._reply(sampling)
        except UserError:
            self.messages = before
            raise

    def _reply(self, sampling: SamplingParams) -> Generator[str, None, None]:
        prompt, images = self._encode(self.transcript())
        limit = self._engine.max_positions
        if limit is not None and len(prompt) >= limit:
            raise UserError(
                f"the model has {limit} positions, the conversation has {len(prompt)} tokens: write less, or /clear"
            )
        tokens: list[int] = []
        shown = ""
        try:
            for token in self._engine.stream(prompt, sampling, images=images):
                tokens.append(token)
                decoded = self._text(tokens)
                if not decoded.endswith("\ufffd") and len(decoded) > len(shown):  # wait for the rest of a character
                    yield decoded[len(shown) :]
                    shown = decoded
        finally:
            reply = self._text(tokens).strip()
            self.messages.append({"role": "assistant", "content": reply})

    def transcript(self) -> list[dict[str, Any]]:
        """Return all messages, beginning with the system prompt if there is one."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.messages
