"""URLs of settings as they are requested, with their secrets, and as they may be logged, without."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from hybrid_rlhf.configs.credentials import expanded, host_of, is_url
from hybrid_rlhf.configs.errors import UserError


def expanded_url(url: str, *, key: str) -> str:
    """A URL as it is requested, `${NAME}` replaced by what the environment holds; never log this one.

    Raises:
        UserError: when a variable is not set, or the URL is none with its value.
    """
    whole = expanded(url, key=key, rule="in a URL is")
    if not is_url(whole):
        names = ", ".join(re.findall(r"\$\{(\w+)\}", url))
        raise UserError(
            f"{key}: a URL is http://HOST:PORT/PATH or https, {shown_url(url)} is none with the value of "
            f"{names}: look for a space or line break in it"
        )
    return whole


def shown_url(url: str) -> str:
    """A URL as it may be logged: without user, password and query; one that is a single placeholder as it is."""
    parsed = urlsplit(url)
    return f"{parsed.scheme}://{host_of(url)}{parsed.path}" if parsed.scheme else url
