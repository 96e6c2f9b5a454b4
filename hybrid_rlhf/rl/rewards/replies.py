"""Replies of an endpoint: read up to a size limit, and described without the secrets of the request.

A server may return anything, including the request itself, so API keys are removed from every message.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from hybrid_rlhf.models.pretrained.folders import first_line
from hybrid_rlhf.rl.rewards.components import ComponentScores
from hybrid_rlhf.runtime.observability.logs import shortened
from hybrid_rlhf.runtime.urls import shown_url

if TYPE_CHECKING:
    import httpx2  # endpoint.py imports it where there is an endpoint

MAX_REPLY_BYTES = 16 * 2**20
"""Size limit after decompression; a score takes about twenty bytes."""
_RETRY_STATUSES = (408, 425, 429)
"""4xx statuses after which a retry may succeed; with the others the request itself is wrong."""
_MIN_SECRET_LENGTH = 4
"""Shorter pieces of a URL are not treated as secrets, because they occur in any text."""


@dataclass(frozen=True)
class Address:
    """URL of a replica, with the parts that messages must not show."""

    url: str
    shown: str
    secrets: tuple[str, ...]
    """Longest first."""

    @classmethod
    def of(cls, url: str, *, shown: str | None = None, key: str | None = None) -> Self:
        """Find the secrets in a URL.

        Args:
            url: URL of requests.
            shown: URL in messages; none: the URL without user, password and query.
            key: API key of the endpoint.
        """
        parsed = urlsplit(url)
        user_info = parsed.netloc.rpartition("@")[0]
        pieces = [url, user_info, *user_info.split(":"), parsed.query, *(value for _, value in parse_qsl(parsed.query))]
        if shown is not None and urlsplit(shown).path != parsed.path:
            pieces += [parsed.path, *parsed.path.split("/")]
        pieces += [unquote(piece) for piece in pieces] + [key or ""]
        pieces.append(base64.b64encode(unquote(user_info).encode()).decode())  # as in the Authorization header
        known = {piece for piece in pieces if len(piece) >= _MIN_SECRET_LENGTH}
        return cls(url, shown_url(shown or url), tuple(sorted(known, key=len, reverse=True)))

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
    """Whether a retry may succeed; not if the request itself is wrong."""

    @property
    def failed(self) -> bool:
        """Whether rows failed."""
        return bool(self.scores.failures)


def failed(count: int, reason: str, *, may_retry: bool = True) -> Reply:
    """An attempt without scores."""
    return Reply(ComponentScores.failed(count, reason), may_retry)


async def read_reply(response: httpx2.Response, count: int, address: Address) -> Reply:
    """The scores of `count` rows, checked."""
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
    if not isinstance(reply, dict) or "scores" not in reply:
        return failed(count, f'got {_start(content, address)} in place of {{"scores": [...]}}')
    scores = ComponentScores.read(reply["scores"], count, show=lambda value: address.hide(repr(value)))
    return Reply(scores, may_retry=True)


def describe_connection_error(error: BaseException, address: Address) -> str:
    """A connection error in one line, without secrets."""
    return f"{type(error).__name__}: {address.hide(first_line(error))}"


def _start(content: bytearray, address: Address) -> str:
    text = bytes(content[: 4 * 2**10]).decode(errors="replace")
    return repr(shortened(address.hide(text)))
