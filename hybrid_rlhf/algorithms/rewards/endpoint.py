"""An HTTP endpoint as a part of the reward: requests to its replicas, with retries, a time-out and a key.

The client, httpx2, is imported by the first part that needs it: without an endpoint step 3 runs where it is not
installed.

A request is a POST of {"prompts": [...], "completions": [...], "columns": {...}}, its answer {"scores": [...]} with a
number or null for each completion.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from hybrid_rlhf.algorithms.rewards.answers import Answers
from hybrid_rlhf.algorithms.rewards.background import Background
from hybrid_rlhf.algorithms.rewards.parts import Ratings, RewardPart, Share
from hybrid_rlhf.algorithms.rewards.replies import Address, Reply, failed, read_reply, told
from hybrid_rlhf.algorithms.rewards.waits import wait_seconds
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rewards import RewardPartConfig, expanded_url
from hybrid_rlhf.models.folders import first_line

if TYPE_CHECKING:
    import httpx2

logging.getLogger("httpx2").setLevel(logging.WARNING)  # at INFO it tells whole URLs
REQUESTS_PER_REPLICA = 8
"""In flight at once from a rank."""


class EndpointPart(RewardPart):
    """Asks an endpoint about this rank's rows, in batches, over all its replicas at once."""

    def __init__(self, config: RewardPartConfig, *, device: torch.device) -> None:
        """Read the key.

        Raises:
            UserError: when the environment has none, or one that no header can carry.
        """
        importlib.import_module("httpx2")  # not first in the thread of a rollout
        super().__init__(config)
        self._config = config
        self._device = device
        self._headers = {"Content-Type": "application/json"}
        key = None if config.api_key_env is None else _read_key(config.api_key_env)
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._addresses = [Address.of(expanded_url(url), shown=url, key=key) for url in config.urls]

    def begin(self, share: Share) -> Callable[[], Ratings]:
        """Start the requests in a thread with an event loop of its own."""
        answers = share.answers
        return Background(lambda: asyncio.run(self._ask_all(answers)), device=self._device).result

    async def _ask_all(self, answers: Answers) -> Ratings:
        import httpx2

        size = self._config.batch_size
        batches = [answers.select(range(len(answers))[start : start + size]) for start in range(0, len(answers), size)]
        replicas = _Replicas(self._addresses)
        # Our own time-out holds for a whole try; the client's would hold for each read.
        async with httpx2.AsyncClient(headers=self._headers, timeout=None) as client:
            return Ratings.join(await asyncio.gather(*(self._ask(client, replicas, batch) for batch in batches)))

    async def _ask(self, client: httpx2.AsyncClient, replicas: _Replicas, answers: Answers) -> Ratings:
        """One request, tried until every row has a usable score."""
        try:
            body = json.dumps(
                {"prompts": answers.prompts, "completions": answers.completions, "columns": answers.columns},
                allow_nan=False,
            )
        except ValueError as error:
            return Ratings.failed(len(answers), f"a data column does not fit JSON ({first_line(error)})")
        tries: Counter[str] = Counter()
        ratings = Ratings.failed(len(answers), "")
        while True:
            async with replicas.slots:
                replica = replicas.take(tries)
                reply = await self._try(client, replica.address, body, len(answers))
                replicas.put_back(replica, failed=reply.failed and reply.again)
            tries[replica.address.url] += 1
            ratings = ratings.mended(reply.ratings)
            if not (ratings.failures and reply.again) or tries.total() > self._config.most_retries:
                return ratings.after(tries.total())
            await asyncio.sleep(wait_seconds(tries.total()) * replicas.chance.uniform(0.5, 1.0))

    async def _try(self, client: httpx2.AsyncClient, address: Address, body: str, count: int) -> Reply:
        try:
            async with (
                asyncio.timeout(self._config.timeout_seconds),
                client.stream("POST", address.url, content=body) as response,
            ):
                return await read_reply(response, count, address)
        except TimeoutError:
            return failed(count, f"{address.shown} took longer than {self._config.timeout_seconds:g} s")
        except Exception as error:  # noqa: BLE001 - a rank that raised alone would leave the others waiting
            return failed(count, f"{address.shown} cannot be reached ({told(error, address)})")


@dataclass
class _Replica:
    address: Address
    in_flight: int = 0
    failures: int = 0
    """Since its last answer."""


@dataclass
class _Replicas:
    """Who takes the next try. It lives for a rollout, so that one that was dead is asked again in the next."""

    addresses: Sequence[Address]
    chance: random.Random = field(default_factory=random.Random)  # not the seeded stream of the run

    def __post_init__(self) -> None:
        self._all = [_Replica(address) for address in self.addresses]
        self.slots = asyncio.Semaphore(REQUESTS_PER_REPLICA * len(self._all))

    def take(self, tries: Counter[str]) -> _Replica:
        """The least loaded of those that had this request least often; a failure counts as a full load."""
        replica = min(
            self._all,
            key=lambda r: (tries[r.address.url], r.in_flight + REQUESTS_PER_REPLICA * r.failures, self.chance.random()),
        )
        replica.in_flight += 1
        return replica

    def put_back(self, replica: _Replica, *, failed: bool) -> None:
        """After a try."""
        replica.in_flight -= 1
        replica.failures = replica.failures + 1 if failed else 0


def _read_key(variable: str) -> str:
    key = os.environ.get(variable, "")
    if not key:
        raise UserError(f"reward.parts: api_key_env names a set variable, {variable} is not set: export {variable}=...")
    if not (key.isascii() and key.isprintable()):
        raise UserError(
            f"reward.parts: a key is printable ASCII, that in {variable} has other characters: look for a line break"
        )
    return key
