"""Scores of conversations by a reward model, alone or beside a served model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.serving.bodies import KeyRejected, ScoreBody
from hybrid_rlhf.serving.conversations import NOT_READ, read_messages, request_errors, take_images
from hybrid_rlhf.serving.saved_scorer import NotWanted, SavedScorer, ScoredRow, batches
from hybrid_rlhf.serving.service import BatchEnded, QueueFull, UnknownModel


class ScoreService:
    """One reward model."""

    def __init__(self, scorer: SavedScorer, *, max_queue: int, name: str | None = None) -> None:
        """Take the reward model.

        Args:
            scorer: the model.
            max_queue: largest number of waiting requests.
            name: name of the model in requests; None: the model's name.
        """
        self.name = name or scorer.name
        self._scorer = scorer
        self._max_queue = max_queue
        self._unfinished = 0
        self.closed = False
        """True if requests end without their scores, as the server stops."""

    def check_name(self, name: str) -> None:
        """Raise UnknownModel unless this is the name of the reward model."""
        if name != self.name:
            raise UnknownModel(f"the reward model of this server is {self.name}, got {name[:100]!r}: name it")

    async def answer(self, body: ScoreBody, call: Callable[[Callable[[], Tensor]], Future[Tensor]]) -> dict[str, Any]:
        """The scores of a request, in its order.

        Args:
            body: the request.
            call: runs a function on the thread that uses the device.

        Raises:
            QueueFull: when too many requests wait.
            BatchEnded: when the server stops.
            UserError: for a conversation that is invalid, does not end with the assistant, or is too long.
        """
        if self._unfinished > self._max_queue:
            raise QueueFull(
                f"{self._unfinished} requests for scores run or wait, the limit is {self._max_queue + 1}: try again "
                "later"
            )
        heads = self._scorer.heads
        left = threading.Event()
        self._unfinished += 1
        try:
            rows = await asyncio.to_thread(self._rows, body)
            shown: list[dict[str, Any]] = [{} for _ in rows]
            for places in batches(rows):
                batch = [rows[place] for place in places]

                def score(batch: list[ScoredRow] = batch) -> Tensor:
                    return self._scorer.scores(batch, lambda: not (left.is_set() or self.closed))

                scores = await asyncio.wrap_future(call(score))
                for place, value in zip(places, scores.tolist(), strict=True):
                    named = dict(zip(heads, value, strict=True)) if heads else value
                    shown[place] = {"object": "score", "index": place, "score": named}
        except NotWanted as error:
            raise BatchEnded("the server stops: send the request again later") from error
        finally:
            left.set()
            self._unfinished -= 1
        tokens = sum(map(len, rows))
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "model": self.name, "data": shown, "usage": usage}

    def _rows(self, body: ScoreBody) -> list[ScoredRow]:
        """The tokens and images of each conversation."""
        rows = []
        refusal = "" if self._scorer.reads_images else NOT_READ
        for place, conversation in enumerate(body.conversations()):
            name = body.key_of(place)
            taken, uris = take_images(name, conversation, refusal=refusal)
            (*prompt, last), keys = read_messages(name, taken)
            if last["role"] != "assistant":
                raise KeyRejected(name, f"must end with a turn of the assistant, got {last['role']}: add the answer")
            with request_errors(name):
                images = self._scorer.read_images(name, [uris[key] for key in keys])
            try:
                rows.append(self._scorer.encode(prompt, [last], images=images, shown=name))
            except UserError as error:
                raise KeyRejected(name, str(error).removeprefix(f"{name} ")) from error
        return rows
