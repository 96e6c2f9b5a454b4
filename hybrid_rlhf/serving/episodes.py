"""Episodes that programs outside of this process take, play and report, over HTTP.

Why taken by the program: a run need not know how many programs there are, or where. `POST /episodes` gives the next
episode that nobody has; its `base_url` is what the program asks; `POST /episodes/NAME/reward` ends it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from hybrid_rlhf.serving.addresses import url_of
from hybrid_rlhf.serving.bodies import RewardBody, read_request
from hybrid_rlhf.serving.service import UnknownEpisode

_RETRY_SECONDS = 1


class EpisodeQueue:
    """Episodes that wait for a program, and those that are played."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, Mapping[str, Any]]] = deque()
        self._rewards: dict[str, Future[float | None]] = {}

    async def play(self, name: str, content: Mapping[str, Any], end: Callable[[], None]) -> float | None:
        """Offer an episode, and wait for its reward; `content` is what the program is told, and `end` is called as soon
        as the episode has ended, before its report is answered.
        """
        self._rewards[name] = reward = Future[float | None]()
        reward.add_done_callback(lambda _: end())
        self._waiting.append((name, content))
        return await asyncio.wrap_future(reward)

    def take(self) -> tuple[str, Mapping[str, Any]] | None:
        """The episode that waits longest; none: nobody is needed now."""
        return self._waiting.popleft() if self._waiting else None

    def report(self, name: str, reward: float | None) -> None:
        """End an episode.

        Raises:
            UnknownEpisode: when there is none of this name, or it has ended.
        """
        try:
            self._rewards[name].set_result(reward)
        except (KeyError, InvalidStateError):
            raise UnknownEpisode(
                f"an episode is reported once and before its time limit, {name[:40]!r} is not running: take another"
            ) from None


def episode_routes(queue: EpisodeQueue) -> APIRouter:
    """Routes by which programs take and report episodes."""
    router = APIRouter()

    @router.post("/episodes")
    async def take(request: Request) -> Response:
        taken = queue.take()
        if taken is None:
            return Response(status_code=204, headers={"Retry-After": str(_RETRY_SECONDS)})
        name, content = taken
        # where the connection ends, not the Host header, which a client may invent
        root = f"{url_of(*request.scope['server'])}/episodes/{name}"
        return JSONResponse({"base_url": f"{root}/v1", "reward_url": f"{root}/reward", **content})

    @router.post("/episodes/{episode}/reward")
    async def report(request: Request, episode: str) -> dict[str, Any]:
        queue.report(episode, (await read_request(request, RewardBody)).reward)
        return {}

    return router
