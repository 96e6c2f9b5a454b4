"""Requests to an HTTP endpoint: to the replicas that share its load, with retries, a time-out and an API key.

The client, httpx2, is imported only where an endpoint is configured. A server may return anything, including the
request itself, so replies are read up to a size limit, and secrets are removed from every message.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import json
import logging
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.models.pretrained.folders import first_line
from hybrid_rlhf.runtime.background import retry_delay_seconds
from hybrid_rlhf.runtime.observability.logs import shortened
from hybrid_rlhf.runtime.urls import expanded_url, shown_url

if TYPE_CHECKING:
    import httpx2  # imported at run time only where there is an endpoint

logging.getLogger("httpx2").setLevel(logging.WARNING)  # at INFO it logs complete URLs
MAX_REPLY_BYTES = 16 * 2**20
"""Size limit after decompression; a score takes about twenty bytes."""
_RETRY_STATUSES = (408, 425, 429)
"""4xx statuses after which a retry may succeed; with the others the request itself is wrong."""
_MIN_SECRET_LENGTH = 4
"""Shorter pieces of a URL are not treated as secrets, because they occur in any text."""
K = TypeVar("K")
Body = str | Callable[[], str] | None


class Unusable(ValueError):
    """A reply does not contain what was asked for."""


class Rejected(Unusable):
    """The request itself is wrong, so no retry may succeed."""


Show = Callable[[object], str]
"""A part of a reply for messages, without secrets."""


class Endpoint:
    """Replicas of an endpoint, and how they are asked."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        key: str,
        api_key_env: str | None,
        timeout_seconds: float,
        retries: int,
        concurrent: int,
    ) -> None:
        """Read the API key.

        Args:
            urls: URLs of the config, with their placeholders.
            key: name of the setting, for messages.
            api_key_env: environment variable of the API key.
            timeout_seconds: limit of an attempt.
            retries: attempts after the first.
            concurrent: requests at a time to each replica.

        Raises:
            UserError: when a variable is not set, or the key is not valid in a header.
        """
        importlib.import_module("httpx2")  # fail here, not in the thread of a rollout
        self.timeout_seconds = timeout_seconds
        self.retries = retries
        self.concurrent = concurrent
        self._headers = {"Content-Type": "application/json"}
        api_key = None if api_key_env is None else _read_key(api_key_env, key)
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.addresses = [Address.of(expanded_url(url, key=key), shown=url, key=api_key) for url in urls]

    def send(
        self,
        bodies: Mapping[K, Body],
        read: Callable[[K, Any, Show], None],
        *,
        path: str = "",
        most_failures: float = math.inf,
    ) -> dict[K, str]:
        """Send requests at the same time, each until `read` accepts a reply or its attempts end.

        Args:
            bodies: by any key, JSON of a POST, what makes it when it is sent, or None for a GET.
            read: takes the key and a reply, parsed from JSON; raises Unusable.
            path: end of the URL.
            most_failures: if more requests fail, those that wait are not sent.

        Returns:
            by key, why the last attempt of a request has failed, if none succeeded.
        """
        if not bodies:
            return {}
        import httpx2

        async def send_all() -> list[str | None]:
            limits = httpx2.Limits(max_connections=None)
            # asyncio's time-out limits an attempt; the client's would limit each read.
            async with httpx2.AsyncClient(headers=self._headers, timeout=None, limits=limits) as client:
                requests = _Requests(self, client, most_failures)
                return await asyncio.gather(
                    *(requests.send(body, partial(read, key), path) for key, body in bodies.items())
                )

        reasons = zip(bodies, asyncio.run(send_all()), strict=True)
        return {key: reason for key, reason in reasons if reason is not None}


@dataclass
class _Replica:
    address: Address
    in_flight: int = 0
    failures: int = 0
    """Failures since its last successful reply."""


class _Requests:
    """Requests of a rollout, and the load of the replicas; failed replicas are used again in the next rollout."""

    def __init__(self, endpoint: Endpoint, client: httpx2.AsyncClient, most_failures: float) -> None:
        self._endpoint = endpoint
        self._client = client
        self._all = [_Replica(address) for address in endpoint.addresses]
        self._jitter = random.Random()  # independent of the run's seed  # nosec B311
        self._failures: list[str] = []
        self._most_failures = most_failures
        self._slots = asyncio.Semaphore(endpoint.concurrent * len(self._all))

    async def send(self, body: Body, read: Callable[[Any, Show], None], path: str) -> str | None:
        """Send a request, repeatedly while it fails; the reason of its failure, or None."""
        tries: Counter[str] = Counter()
        while True:
            reason: str | None = None
            may_retry = True
            async with self._slots:
                if len(self._failures) > self._most_failures:
                    return f"{self._failures[-1]}, after {len(self._failures)} failures of others"
                replica = self._take(tries)
                try:
                    await self._try(replica.address, body, read, path)
                except Exception as error:  # noqa: BLE001 - if one rank raised alone, the others would wait forever
                    reason = self._explained(error, replica.address)
                    may_retry = not isinstance(error, Rejected)
                replica.in_flight -= 1
                replica.failures = replica.failures + 1 if reason and may_retry else 0
            tries[replica.address.url] += 1
            number = tries.total()
            if reason is None:
                return None
            if not may_retry or number > self._endpoint.retries:
                self._failures.append(f"{reason} (try {number})" if number > 1 else reason)
                return self._failures[-1]
            await asyncio.sleep(retry_delay_seconds(number) * self._jitter.uniform(0.5, 1.0))

    def _take(self, tries: Counter[str]) -> _Replica:
        """Take the least loaded replica of those that had this request least often; a failure counts as a full load."""
        full = self._endpoint.concurrent
        replica = min(
            self._all,
            key=lambda r: (tries[r.address.url], r.in_flight + full * r.failures, self._jitter.random()),
        )
        replica.in_flight += 1
        return replica

    async def _try(self, address: Address, body: Body, read: Callable[[Any, Show], None], path: str) -> None:
        content = await asyncio.to_thread(body) if callable(body) else body
        async with (
            asyncio.timeout(self._endpoint.timeout_seconds),
            self._client.stream("GET" if body is None else "POST", address.url + path, content=content) as response,
        ):
            received = await _content(response, address)
        try:
            reply = json.loads(received)
        except (ValueError, RecursionError) as error:
            shown = repr(shortened(address.hide(bytes(received[: 4 * 2**10]).decode(errors="replace"))))
            raise Unusable(f"got {shown} in place of JSON") from error
        read(reply, lambda part: shortened(address.hide(repr(part))))

    def _explained(self, error: Exception, address: Address) -> str:
        if isinstance(error, Unusable):
            return str(error)
        if isinstance(error, TimeoutError):
            return f"{address.shown} took longer than {self._endpoint.timeout_seconds:g} s"
        return f"{address.shown} cannot be reached ({type(error).__name__}: {address.hide(first_line(error))})"


async def _content(response: httpx2.Response, address: Address) -> bytearray:
    """The body of a reply with status 200.

    Raises:
        Rejected: for a status after which no retry may succeed.
        Unusable: for another status, or a body above the size limit.
    """
    status = response.status_code
    told = f"{address.shown} answered HTTP {status}"
    if response.is_redirect:
        # Not followed, because the key would be sent to a host that the user did not name.
        raise Rejected(f"{told}, a redirect: give the final URL")
    if status != HTTPStatus.OK:
        raise (Unusable if status >= 500 or status in _RETRY_STATUSES else Rejected)(told)
    content = bytearray()
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > MAX_REPLY_BYTES:
            raise Unusable(f"{address.shown} answered with more than {MAX_REPLY_BYTES // 2**20} MiB")
    return content


def _read_key(variable: str, key: str) -> str:
    value = os.environ.get(variable, "")
    if not value:
        raise UserError(f"{key}: api_key_env must name a variable, {variable} is not set: export {variable}=...")
    if not (value.isascii() and value.isprintable()):
        raise UserError(f"{key}: an API key must be printable ASCII, that in {variable} is not: check for line breaks")
    return value


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
