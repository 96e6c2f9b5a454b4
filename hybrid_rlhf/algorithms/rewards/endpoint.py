"""An HTTP endpoint as a part of the reward: requests to its replicas, with retries, a time-out and a key.

A request is a POST of {"prompts": [...], "completions": [...], "columns": {...}}, its answer {"scores": [...]} with a
number or null for each completion.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx2
import torch

from hybrid_rlhf.algorithms.rewards.answers import Answers
from hybrid_rlhf.algorithms.rewards.background import Background
from hybrid_rlhf.algorithms.rewards.parts import Ratings, RewardPart, Share
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rewards import RewardPartConfig, shown_url
from hybrid_rlhf.models.tokenizers import first_line

REQUESTS_PER_REPLICA = 8
"""In flight at once from a rank."""
FIRST_WAIT_SECONDS = 0.5
"""Before the first retry; it doubles with each."""
LONGEST_WAIT_SECONDS = 30.0
_LATER = (408, 425, 429)
"""Statuses of the 4xx that ask for another try; with the others the request itself is at fault."""


class EndpointPart(RewardPart):
    """Asks an endpoint about this rank's rows, in batches, over all its replicas at once."""

    def __init__(self, config: RewardPartConfig, *, device: torch.device) -> None:
        """Read the key.

        Raises:
            UserError: when the environment has none, or one that no header can carry.
        """
        super().__init__(config)
        self._config = config
        self._device = device
        self._headers = {"Content-Type": "application/json"}
        if config.api_key_env is not None:
            self._headers["Authorization"] = f"Bearer {_read_key(config.api_key_env)}"

    def begin(self, share: Share) -> Callable[[], Ratings]:
        """Start the requests in a thread with an event loop of its own."""
        answers = share.answers
        return Background(lambda: asyncio.run(self._ask_all(answers)), device=self._device).result

    async def _ask_all(self, answers: Answers) -> Ratings:
        size = self._config.batch_size
        batches = [answers.select(range(len(answers))[start : start + size]) for start in range(0, len(answers), size)]
        replicas = _Replicas(self._config.urls)
        # Our own time-out holds for a whole try; the client's would hold for each read.
        async with httpx2.AsyncClient(headers=self._headers, timeout=None) as client:
            return Ratings.join(await asyncio.gather(*(self._ask(client, replicas, batch) for batch in batches)))

    async def _ask(self, client: httpx2.AsyncClient, replicas: _Replicas, answers: Answers) -> Ratings:
        """One request, tried until a replica answers."""
        try:
            body = json.dumps(
                {"prompts": answers.prompts, "completions": answers.completions, "columns": answers.columns},
                allow_nan=False,
            )
        except ValueError as error:
            return Ratings.failed(len(answers), f"a data column does not fit JSON ({first_line(error)})")
        tries: Counter[str] = Counter()
        while True:
            async with replicas.slots:
                replica = replicas.take(tries)
                reply = await self._try(client, replica.url, body)
                replicas.put_back(replica, failed=reply.again)
            tries[replica.url] += 1
            if not reply.again:
                return reply.read(len(answers))
            if tries.total() > self._config.retries:
                return Ratings.failed(len(answers), f"{reply.failure} (try {tries.total()})")
            wait = min(FIRST_WAIT_SECONDS * 2 ** (tries.total() - 1), LONGEST_WAIT_SECONDS)
            await asyncio.sleep(wait * replicas.chance.uniform(0.5, 1.0))

    async def _try(self, client: httpx2.AsyncClient, url: str, body: str) -> _Reply:
        shown = shown_url(url)
        try:
            async with asyncio.timeout(self._config.timeout_seconds):
                response = await client.post(url, content=body)
        except TimeoutError:
            return _Reply(f"{shown} took longer than {self._config.timeout_seconds:g} s", again=True)
        except (httpx2.RequestError, httpx2.InvalidURL) as error:
            return _Reply(f"{shown} cannot be reached ({type(error).__name__}: {first_line(error)})", again=True)
        if response.status_code == httpx2.codes.OK:
            return _Reply(content=response.content)
        status = response.status_code
        return _Reply(f"{shown} answered HTTP {status}", again=status >= 500 or status in _LATER)


@dataclass(frozen=True)
class _Reply:
    """What came of one try."""

    failure: str | None = None
    again: bool = False
    """Another try may help."""
    content: bytes = b""

    def read(self, count: int) -> Ratings:
        """The scores of `count` rows, checked."""
        if self.failure is not None:
            return Ratings.failed(count, self.failure)
        try:
            answer = json.loads(self.content)
        except ValueError:
            return Ratings.failed(count, f"got {self.content[:60]!r} in place of JSON")
        if not isinstance(answer, dict) or "scores" not in answer:
            return Ratings.failed(count, f'got {self.content[:60]!r} in place of {{"scores": [...]}}')
        return Ratings.read(answer["scores"], count)


@dataclass
class _Replica:
    url: str
    in_flight: int = 0
    failures: int = 0
    """Since its last answer."""


@dataclass
class _Replicas:
    """Who takes the next try. It lives for a rollout, so that one that was dead is asked again in the next."""

    urls: Sequence[str]
    chance: random.Random = field(default_factory=random.Random)  # not the seeded stream of the run

    def __post_init__(self) -> None:
        self._all = [_Replica(url) for url in self.urls]
        self.slots = asyncio.Semaphore(REQUESTS_PER_REPLICA * len(self._all))

    def take(self, tries: Counter[str]) -> _Replica:
        """The least loaded of those that had this request least often; a failure counts as a full load."""
        replica = min(
            self._all,
            key=lambda r: (tries[r.url], r.in_flight + REQUESTS_PER_REPLICA * r.failures, self.chance.random()),
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
