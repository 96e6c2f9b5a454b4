"""Scores of conversations by a reward model, alone or beside a served model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.chat.messages import Message
from hybrid_rlhf.serving.bodies import ScoreBody
from hybrid_rlhf.serving.saved_scorer import SavedScorer, batches
from hybrid_rlhf.serving.service import QueueFull, UnknownModel, read_conversation


class ScoreService:
    """One reward model."""

    def __init__(self, scorer: SavedScorer, *, max_queue: int, name: str | None = None) -> None:
        """Take what scores.

        Args:
            scorer: the model.
            max_queue: most requests that wait for another one.
            name: that requests give; none: that of the model.
        """
        self.name, self._scorer = name or scorer.name, scorer
        self._max_queue, self._unfinished = max_queue, 0

    def check_name(self, name: str) -> None:
        """Raise UnknownModel unless this is the name of the reward model."""
        if name != self.name:
            raise UnknownModel(f"the reward model of this server is {self.name}, got {name[:100]!r}: name it")

    async def answer(self, body: ScoreBody, call: Callable[[Callable[[], Tensor]], Future[Tensor]]) -> dict[str, Any]:
        """The scores of a request, in its order.

        Args:
            body: the request.
            call: has the thread that uses the device call a function.

        Raises:
            QueueFull: when too many wait.
            UserError: for a conversation that is none, does not end with the assistant, or is too long.
        """
        if self._unfinished > self._max_queue:
            raise QueueFull(
                f"{self._unfinished} requests for scores run or wait, the limit is {self._max_queue + 1}: try again "
                "later"
            )
        self._unfinished += 1
        try:
            return await self._scored(body, call)
        finally:
            self._unfinished -= 1

    async def _scored(self, body: ScoreBody, call: Callable[[Callable[[], Tensor]], Future[Tensor]]) -> dict[str, Any]:
        given, heads = body.conversations(), self._scorer.heads
        rows = [self._encode(f"conversation {place}", messages) for place, messages in enumerate(given)]
        shown: list[dict[str, Any]] = [{} for _ in rows]
        for places in batches(rows):
            ids = [rows[place] for place in places]
            scores = await asyncio.wrap_future(call(lambda ids=ids: self._scorer.scores(ids)))  # type: ignore[misc]
            for place, score in zip(places, scores.tolist(), strict=True):
                value = dict(zip(heads, score, strict=True)) if heads else score
                shown[place] = {"object": "score", "index": place, "score": value}
        tokens = sum(map(len, rows))
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "model": self.name, "data": shown, "usage": usage}

    def _encode(self, name: str, conversation: Sequence[dict[str, Any]]) -> list[int]:
        messages: list[Message] = read_conversation(name, conversation)
        if messages[-1]["role"] != "assistant":
            raise UserError(f"{name} must end with a turn of the assistant, got {messages[-1]['role']}: add the answer")
        return self._scorer.encode(messages[:-1], messages[-1:], shown=name)
