"""Serves episodes to programs outside of this process, which take, play and report them over HTTP.

Programs take episodes, so that a run need not know their number and addresses. `POST /episodes` returns the next free
episode, whose `base_url` is the API for the program; `POST /episodes/NAME/reward` ends it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from hybrid_rlhf.serving.bodies import RewardBody, read_request
from hybrid_rlhf.serving.service import UnknownEpisode
from hybrid_rlhf.serving.web import url_of

_RETRY_SECONDS = 1


class EpisodeQueue:
    """Episodes that wait for a program, and those that are being played."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, Mapping[str, Any]]] = deque()
        self._rewards: dict[str, Future[float | None]] = {}

    async def play(self, name: str, content: Mapping[str, Any], end: Callable[[], None]) -> float | None:
        """Offer an episode, and wait for its reward. `content` is sent to the program; `end` is called as soon as the
        episode has ended, before its report is answered.
        """
        self._rewards[name] = reward = Future[float | None]()
        reward.add_done_callback(lambda _: end())
        self._waiting.append((name, content))
        try:
            return await asyncio.wrap_future(reward)
        finally:
            del self._rewards[name]

    def take(self) -> tuple[str, Mapping[str, Any]] | None:
        """The episode that has waited longest, of those that have not ended meanwhile; None if none waits."""
        while self._waiting:
            name, content = self._waiting.popleft()
            if name in self._rewards:
                return name, content
        return None

    def report(self, name: str, reward: float | None) -> None:
        """End an episode.

        Raises:
            UnknownEpisode: when there is no such episode, or it has ended.
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
        # the address of the connection, not the Host header, which a client can invent
        root = f"{url_of(*request.scope['server'])}/episodes/{name}"
        return JSONResponse({"base_url": f"{root}/v1", "reward_url": f"{root}/reward", **content})

    @router.post("/episodes/{episode}/reward")
    async def report(request: Request, episode: str) -> dict[str, Any]:
        queue.report(episode, (await read_request(request, RewardBody)).reward)
        return {}

    return router
