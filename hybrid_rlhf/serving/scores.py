"""Scores of conversations by a reward model, beside the served model.

A conversation is rendered and tokenised as in the reward model's training, and its score is read at the last token, as
RL does for a reward model with a tokenizer of its own (rl/rewards/models.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.chat.conversation import encode_completion
from hybrid_rlhf.data.chat.messages import Message
from hybrid_rlhf.models.policy import Scorer, scores_at_end
from hybrid_rlhf.models.pretrained.loading import stored_heads
from hybrid_rlhf.serving.bodies import ScoreBody
from hybrid_rlhf.serving.service import read_conversation

_MOST_BATCH_TOKENS = 8192
"""Of one forward, unless one conversation alone is longer."""


class ScoreService:
    """One reward model."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        """Args: a scorer with its tokenizer, and the name that requests give."""
        self.name = name
        self._scorer, self._tokenizer = Scorer(model), tokenizer
        self._device, self._heads = model.device, stored_heads(model.config)
        self._limit: int | None = getattr(model.config, "max_position_embeddings", None)

    async def answer(self, body: ScoreBody, call: Callable[[Callable[[], Tensor]], Future[Tensor]]) -> dict[str, Any]:
        """The scores of a request, in its order.

        Args:
            body: the request.
            call: has the thread that uses the device call a function.

        Raises:
            UserError: for a conversation that is none, does not end with the assistant, or is too long.
        """
        given = body.conversations()
        rows = [self._encode(f"conversation {place}", messages) for place, messages in enumerate(given)]
        shown: list[dict[str, Any]] = [{} for _ in rows]
        for places in _batches([len(row) for row in rows]):
            ids = [rows[place] for place in places]
            scores = await asyncio.wrap_future(call(lambda ids=ids: self.scores(ids)))  # type: ignore[misc]
            for place, score in zip(places, scores.tolist(), strict=True):
                value = dict(zip(self._heads, score, strict=True)) if self._heads else score
                shown[place] = {"object": "score", "index": place, "score": value}
        tokens = sum(map(len, rows))
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "model": self.name, "data": shown, "usage": usage}

    @torch.no_grad()
    def scores(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Scores [n] float32 of token rows, or [n, heads] of a model with several."""
        ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(self._device)
        lengths = torch.tensor([len(row) for row in rows], device=self._device)
        mask = torch.arange(ids.shape[1], device=self._device) < lengths[:, None]
        return scores_at_end(self._scorer(ids, mask), mask).cpu()

    def _encode(self, name: str, conversation: Sequence[dict[str, Any]]) -> list[int]:
        messages: list[Message] = read_conversation(name, conversation)
        if messages[-1]["role"] != "assistant":
            raise UserError(f"{name} must end with a turn of the assistant, got {messages[-1]['role']}: add the answer")
        ids = encode_completion(messages[:-1], messages[-1:], self._tokenizer).input_ids
        if self._limit is not None and len(ids) > self._limit:
            raise UserError(f"{name} must have at most {self._limit} tokens, got {len(ids)}: shorten it")
        return ids


def _batches(lengths: Sequence[int]) -> list[list[int]]:
    """Places of rows that are computed together: of similar lengths, within the limit."""
    batches: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if not batches or (len(batches[-1]) + 1) * lengths[batches[-1][0]] > _MOST_BATCH_TOKENS:
            batches.append([])
        batches[-1].append(place)
    return batches
