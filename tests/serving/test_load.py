"""A server under load: many streams at once, many of which are abandoned, and what it holds afterwards."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tests.support.clock import wait_until
from tests.support.services import HEADERS, metric
from tests.support.serving import server_process

STREAMS = 400
CANCELLED_PER_ROUND = 200
WARM_UP_ROUNDS = 6
"""Until then memory grows by what oneDNN keeps for each shape of a product, and by the allocator's arenas."""
ROUNDS = 10
MOST_GROWTH = 0.02


async def stream(client: httpx2.AsyncClient, url: str, seed: int, tokens: int, leave_after: int | None) -> list[int]:
    """The tokens of a stream, which the client may leave."""
    body = {"model": "m", "prompt": "hello", "seed": seed, "max_tokens": tokens, "min_tokens": tokens}
    body |= {"stream": True, "return_token_ids": True}
    ids = list[int]()
    async with client.stream("POST", f"{url}/v1/completions", json=body, headers=HEADERS) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                ids += [token for choice in json.loads(line[6:])["choices"] for token in choice["token_ids"]]
            if leave_after is not None and len(ids) >= leave_after:
                break
    return ids


async def together(url: str, requests: list[dict[str, Any]], at_once: int) -> list[list[int]]:
    """The tokens of streams, of which a number run at once."""
    places = asyncio.Semaphore(at_once)
    limits = httpx2.Limits(max_connections=at_once)
    async with httpx2.AsyncClient(timeout=300, limits=limits) as client:

        async def one(request: dict[str, Any]) -> list[int]:
            async with places:
                return await stream(client, url, **request)

        return await asyncio.gather(*map(one, requests))


def resident(process: psutil.Process) -> float:
    return process.memory_info().rss / 2**20


@pytest.mark.slow
def test_many_streams_and_abandoned_ones_leave_nothing_behind(model_folder: Path) -> None:
    """400 streams at once have the tokens that they have alone; abandoned ones leave no memory behind."""
    with server_process(f"{model_folder} --model_name m --max_queue 1000 --max_sequence_tokens 256") as (server, url):
        process = psutil.Process(server.pid)
        whole = [{"seed": seed % 40, "tokens": 12, "leave_after": None} for seed in range(STREAMS)]
        found = asyncio.run(together(url, whole, STREAMS))
        alone = asyncio.run(together(url, whole[:40], 1))
        assert found == [alone[seed % 40] for seed in range(STREAMS)]
        left = [{"seed": seed, "tokens": 200, "leave_after": 1 + seed % 5} for seed in range(CANCELLED_PER_ROUND)]
        sizes = list[float]()
        for _ in range(ROUNDS):
            asyncio.run(together(url, left, 50))
            wait_until(lambda: metric(url, "rows_running") + metric(url, "rows_waiting") == 0)
            sizes.append(resident(process))
        assert metric(url, "kv_cache_used_ratio") == 0
        assert sizes[-1] < (1 + MOST_GROWTH) * sizes[WARM_UP_ROUNDS - 1], sizes
        print("MiB after each round of abandoned streams:", sizes)
