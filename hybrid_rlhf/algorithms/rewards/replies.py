"""What comes back from an endpoint: read within bounds, and told without the secrets that the request carried.

A server may say anything at any length, what it was sent included: a key must not come into a log that way.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from hybrid_rlhf.algorithms.rewards.parts import Ratings
from hybrid_rlhf.configs.rewards import shown_url
from hybrid_rlhf.models.folders import first_line
from hybrid_rlhf.runtime.logs import shortened

if TYPE_CHECKING:
    import httpx2  # endpoint.py imports it where there is an endpoint

MOST_ANSWER_BYTES = 16 * 2**20
"""Unpacked. A score takes some twenty bytes, so this is plenty; what is longer is no answer."""
_LATER = (408, 425, 429)
"""Statuses of the 4xx that ask for another try; with the others the request itself is at fault."""
_SHORTEST_SECRET = 4
"""Shorter pieces of a URL are no secrets, and are in any text by chance."""


@dataclass(frozen=True)
class Address:
    """Where a request goes, and what of it no message may show."""

    url: str
    shown: str
    secrets: tuple[str, ...]
    """Longest first."""

    @classmethod
    def of(cls, url: str, *, shown: str | None = None, key: str | None = None) -> Self:
        """Take the secrets from a URL.

        Args:
            url: that is asked.
            shown: as messages have it; none: without user, password and query.
            key: the endpoint's.
        """
        parsed = urlsplit(url)
        user_info = parsed.netloc.rpartition("@")[0]
        pieces = [url, user_info, *user_info.split(":"), parsed.query, *(value for _, value in parse_qsl(parsed.query))]
        if shown is not None and urlsplit(shown).path != parsed.path:
            pieces += [parsed.path, *parsed.path.split("/")]
        pieces += [unquote(piece) for piece in pieces] + [key or ""]
        pieces.append(base64.b64encode(unquote(user_info).encode()).decode())  # as the Authorization header has it
        known = {piece for piece in pieces if len(piece) >= _SHORTEST_SECRET}
        return cls(url, shown_url(shown or url), tuple(sorted(known, key=len, reverse=True)))

    def hide(self, text: str) -> str:
        """A text without the secrets."""
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text


@dataclass(frozen=True)
class Reply:
    """What came of one try."""

    ratings: Ratings
    again: bool = False
    """Whether another try may help: not where the request itself is at fault."""

    @property
    def failed(self) -> bool:
        """Whether there are rows without a usable score."""
        return bool(self.ratings.failures)


def failed(count: int, reason: str, *, again: bool = True) -> Reply:
    """A try that gave no scores."""
    return Reply(Ratings.failed(count, reason), again)


async def read_reply(response: httpx2.Response, count: int, address: Address) -> Reply:
    """The scores of `count` rows, checked."""
    status = response.status_code
    if response.is_redirect:
        # Not followed: the key would go to a host that the user did not name.
        return failed(count, f"{address.shown} answered HTTP {status}, a redirect: give the final URL", again=False)
    if status != HTTPStatus.OK:
        return failed(count, f"{address.shown} answered HTTP {status}", again=status >= 500 or status in _LATER)
    content = bytearray()
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > MOST_ANSWER_BYTES:
            limit = MOST_ANSWER_BYTES // 2**20
            return failed(count, f"{address.shown} answered with more than {limit} MiB for {count} completions")
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        return failed(count, f"got {_start(content, address)} in place of JSON")
    if not isinstance(answer, dict) or "scores" not in answer:
        return failed(count, f'got {_start(content, address)} in place of {{"scores": [...]}}')
    ratings = Ratings.read(answer["scores"], count, show=lambda value: address.hide(repr(value)))
    return Reply(ratings, again=True)


def told(error: BaseException, address: Address) -> str:
    """An error of the connection on one line."""
    return f"{type(error).__name__}: {address.hide(first_line(error))}"


def _start(content: bytearray, address: Address) -> str:
    text = bytes(content[: 4 * 2**10]).decode(errors="replace")
    return repr(shortened(address.hide(text)))
