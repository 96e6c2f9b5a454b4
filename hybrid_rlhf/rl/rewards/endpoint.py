"""HTTP endpoints as reward components: requests to replicas, with retries, a time-out and an API key.

The client, httpx2, is imported only where an endpoint is configured.

A request is a POST of {"prompts": [...], "completions": [...], "columns": {...}}; the reply is {"scores": [...]} with a
number or null per completion. Messages with images have the content parts of OpenAI's API. Remote reward models of
OpenRLHF (0.11.2, utils/agent.py) get {"query": [...], "prompts": [...], "labels": [...]} and reply {"rewards": [...]}.
A server may return anything, including the request itself, so replies are read up to a size limit, and secrets are
removed from every message.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import importlib
import json
import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import parse_qsl, unquote, urlsplit

import torch

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.rewards import Protocol, RewardComponentConfig
from hybrid_rlhf.data.chat.messages import Message
from hybrid_rlhf.data.images.expansion import WRITTEN
from hybrid_rlhf.data.images.reading import png
from hybrid_rlhf.data.images.references import ImageReference
from hybrid_rlhf.models.pretrained.folders import first_line
from hybrid_rlhf.rl.rewards.components import CompletionTexts, ComponentScores, RewardBatch, RewardComponent
from hybrid_rlhf.rl.rewards.foreign import openrlhf_arguments
from hybrid_rlhf.runtime.background import BackgroundCall, retry_delay_seconds
from hybrid_rlhf.runtime.observability.logs import shortened
from hybrid_rlhf.runtime.urls import expanded_url, shown_url

if TYPE_CHECKING:
    import httpx2  # imported at run time only where there is an endpoint

logging.getLogger("httpx2").setLevel(logging.WARNING)  # at INFO it logs complete URLs
_REPLY_KEYS = {"scores": "scores", "openrlhf": "rewards"}
"""Names of the scores in a reply, by protocol."""
REQUESTS_PER_REPLICA = 8
"""Concurrent requests of a rank per replica."""
MAX_REPLY_BYTES = 16 * 2**20
"""Size limit after decompression; a score takes about twenty bytes."""
_RETRY_STATUSES = (408, 425, 429)
"""4xx statuses after which a retry may succeed; with the others the request itself is wrong."""
_MIN_SECRET_LENGTH = 4
"""Shorter pieces of a URL are not treated as secrets, because they occur in any text."""


class EndpointReward(RewardComponent):
    """Sends this rank's rows to an endpoint in batches, over all of its replicas concurrently."""

    reads_images = True

    def __init__(self, config: RewardComponentConfig, *, device: torch.device) -> None:
        """Read the API key.

        Raises:
            UserError: when its environment variable is not set, or is not valid in a header.
        """
        importlib.import_module("httpx2")  # fail here, not in the thread of a rollout
        super().__init__(config)
        self._config = config
        self._device = device
        self._headers = {"Content-Type": "application/json"}
        key = None if config.api_key_env is None else _read_key(config.api_key_env)
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._addresses = [
            Address.of(expanded_url(url, key="reward.components"), shown=url, key=key) for url in config.urls
        ]

    def begin(self, batch: RewardBatch) -> Callable[[], ComponentScores]:
        """Start the requests in a thread with its own event loop."""
        texts = batch.texts
        return BackgroundCall(lambda: asyncio.run(self._score_all(texts)), device=self._device).result

    async def _score_all(self, texts: CompletionTexts) -> ComponentScores:
        import httpx2

        size = self._config.batch_size
        batches = [texts.select(range(len(texts))[start : start + size]) for start in range(0, len(texts), size)]
        replicas = _Replicas(self._addresses)
        # asyncio's time-out limits an attempt; the client's would limit each read.
        async with httpx2.AsyncClient(headers=self._headers, timeout=None) as client:
            return ComponentScores.join(
                await asyncio.gather(*(self._score(client, replicas, batch) for batch in batches))
            )

    async def _score(self, client: httpx2.AsyncClient, replicas: _Replicas, texts: CompletionTexts) -> ComponentScores:
        """Send one batch, repeatedly while rows fail."""
        try:
            body = json.dumps(_request(texts, self._config.protocol), allow_nan=False)
        except ValueError as error:
            return ComponentScores.failed(len(texts), f"a data column does not fit JSON ({first_line(error)})")
        tries: Counter[str] = Counter()
        scores = ComponentScores.failed(len(texts), "")
        while True:
            async with replicas.slots:
                replica = replicas.take(tries)
                reply = await self._try(client, replica.address, body, len(texts))
                replicas.put_back(replica, failed=bool(reply.scores.failures) and reply.may_retry)
            tries[replica.address.url] += 1
            scores = scores.filled_from(reply.scores)
            if not (scores.failures and reply.may_retry) or tries.total() > self._config.most_retries:
                return scores.with_tries(tries.total())
            await asyncio.sleep(retry_delay_seconds(tries.total()) * replicas.jitter.uniform(0.5, 1.0))

    async def _try(self, client: httpx2.AsyncClient, address: Address, body: str, count: int) -> Reply:
        try:
            async with (
                asyncio.timeout(self._config.timeout_seconds),
                client.stream("POST", address.url, content=body) as response,
            ):
                return await read_reply(response, count, address, _REPLY_KEYS[self._config.protocol])
        except TimeoutError:
            return failed(count, f"{address.shown} took longer than {self._config.timeout_seconds:g} s")
        except Exception as error:  # noqa: BLE001 - if one rank raised alone, the others would wait forever
            reason = f"{type(error).__name__}: {address.hide(first_line(error))}"
            return failed(count, f"{address.shown} cannot be reached ({reason})")


@dataclass
class _Replica:
    address: Address
    in_flight: int = 0
    failures: int = 0
    """Failures since its last successful reply."""


class _Replicas:
    """Chooses the replica of each attempt; new for every rollout, so that failed replicas are used again."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._all = [_Replica(address) for address in addresses]
        self.jitter = random.Random()  # independent of the run's seed  # nosec B311
        self.slots = asyncio.Semaphore(REQUESTS_PER_REPLICA * len(self._all))

    def take(self, tries: Counter[str]) -> _Replica:
        """Take the least loaded replica of those that had this request least often; a failure counts as a full load."""
        replica = min(
            self._all,
            key=lambda r: (tries[r.address.url], r.in_flight + REQUESTS_PER_REPLICA * r.failures, self.jitter.random()),
        )
        replica.in_flight += 1
        return replica

    def put_back(self, replica: _Replica, *, failed: bool) -> None:
        """Return a replica after an attempt."""
        replica.in_flight -= 1
        replica.failures = replica.failures + 1 if failed else 0


def _read_key(variable: str) -> str:
    key = os.environ.get(variable, "")
    if not key:
        raise UserError(
            f"reward.components: api_key_env must name a variable, {variable} is not set: export {variable}=..."
        )
    if not (key.isascii() and key.isprintable()):
        raise UserError(
            f"reward.components: an API key must be printable ASCII, that in {variable} is not: check for line breaks"
        )
    return key


@dataclass(frozen=True)
class Address:
    """URL of a replica, with the parts that messages must not show."""

    url: str
    shown: str
    secrets: tuple[str, ...]
    """Longest first, so that a secret that contains another is replaced as a whole."""

    @classmethod
    def of(cls, url: str, *, shown: str, key: str | None) -> Self:
        """Find the secrets in a URL.

        Args:
            url: URL of requests.
            shown: URL of the config, which messages show without user, password and query.
            key: API key of the endpoint, if any.
        """
        parsed = urlsplit(url)
        user_info = parsed.netloc.rpartition("@")[0]
        pieces = [url, user_info, *user_info.split(":"), parsed.query, *(value for _, value in parse_qsl(parsed.query))]
        if urlsplit(shown).path != parsed.path:
            pieces += [parsed.path, *parsed.path.split("/")]
        pieces += [unquote(piece) for piece in pieces] + [key or ""]
        pieces.append(base64.b64encode(unquote(user_info).encode()).decode())  # as in the Authorization header
        known = {piece for piece in pieces if len(piece) >= _MIN_SECRET_LENGTH}
        return cls(url, shown_url(shown), tuple(sorted(known, key=len, reverse=True)))

    def hide(self, text: str) -> str:
        """A text with the secrets replaced."""
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text


@dataclass(frozen=True)
class Reply:
    """Result of one attempt."""

    scores: ComponentScores
    may_retry: bool = False
    """True if a retry may succeed, false if the request itself is wrong."""


def failed(count: int, reason: str, *, may_retry: bool = True) -> Reply:
    """An attempt without scores."""
    return Reply(ComponentScores.failed(count, reason), may_retry)


def _request(texts: CompletionTexts, protocol: Protocol) -> dict[str, object]:
    """The body of a request."""
    if protocol == "scores":
        prompts = texts.prompts
        if texts.images is not None:
            uri = functools.cache(_data_uri)
            prompts = [
                _with_parts(prompt, map(uri, images)) for prompt, images in zip(prompts, texts.images, strict=True)
            ]
        return {"prompts": prompts, "completions": texts.completions, "columns": texts.columns}
    given = openrlhf_arguments(texts.prompts, texts.completions, texts.columns)
    return {"query": given.pop("queries"), **given}


def _with_parts(prompt: Sequence[Message], uris: Iterable[str]) -> list[Message]:
    """A conversation whose contents with images are the parts of OpenAI's messages."""
    left = list(uris)
    if len(left) < sum(str(message.get("content")).count(WRITTEN) for message in prompt):
        return [*prompt]
    messages = []
    for message in prompt:
        first, *rest = str(message.get("content") or "").split(WRITTEN)
        parts: list[dict[str, Any]] = [{"type": "text", "text": first}] * bool(first)
        for text in rest:
            parts.append({"type": "image_url", "image_url": {"url": left.pop(0)}})
            parts += [{"type": "text", "text": text}] * bool(text)
        messages.append({**message, "content": parts} if rest else message)
    return messages


def _data_uri(image: ImageReference) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(image.image())).decode()}"


async def read_reply(response: httpx2.Response, count: int, address: Address, key: str) -> Reply:
    """The scores of `count` rows, checked; `key` is their name in the reply."""
    status = response.status_code
    if response.is_redirect:
        # Not followed, because the key would be sent to a host that the user did not name.
        return failed(count, f"{address.shown} answered HTTP {status}, a redirect: give the final URL", may_retry=False)
    if status != HTTPStatus.OK:
        return failed(
            count, f"{address.shown} answered HTTP {status}", may_retry=status >= 500 or status in _RETRY_STATUSES
        )
    content = bytearray()
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > MAX_REPLY_BYTES:
            limit = MAX_REPLY_BYTES // 2**20
            return failed(count, f"{address.shown} answered with more than {limit} MiB for {count} completions")
    try:
        reply = json.loads(content)
    except (ValueError, RecursionError):
        return failed(count, f"got {_start(content, address)} in place of JSON")
    if not isinstance(reply, dict) or key not in reply:
        return failed(count, f'got {_start(content, address)} in place of {{"{key}": [...]}}')
    scores = ComponentScores.read(reply[key], count, show=lambda value: address.hide(repr(value)))
    return Reply(scores, may_retry=True)


def _start(content: bytearray, address: Address) -> str:
    text = bytes(content[: 4 * 2**10]).decode(errors="replace")
    return repr(shortened(address.hide(text)))
