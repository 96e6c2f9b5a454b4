"""URLs of settings: checked without their secrets, shown without them, and expanded when they are requested.

A setting may have `${NAME}` in its URL. The name is stored and shown; the variable's value is read from the environment
at the request.
"""

from __future__ import annotations

import ipaddress
import os
import re
from urllib.parse import urlsplit

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.files.credentials import fill_placeholders, found_credential, placeholders, redacted

_PLACEHOLDER_PORT = re.compile(r":\$\{\w+\}(?=[/?]|$)")


def is_own_host(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_url(url: str, *, key: str, remedy: str) -> None:
    """Refuse what is not a URL, and a URL that would write a secret into config.yaml.

    Args:
        url: with its placeholders.
        key: the setting, for messages.
        remedy: where the secret belongs.

    Raises:
        UserError: for either.
    """
    if not _is_url(_PLACEHOLDER_PORT.sub(":1", url)):
        raise UserError(f"{key}: a URL is http://HOST:PORT/PATH or https, got {redacted(url)}: write it out")
    kind = found_credential(url)
    if kind is not None:
        raise UserError(f"{key}: a URL may not carry {kind}, got {redacted(url)}: {remedy}")


def expanded_url(url: str, *, key: str) -> str:
    """A URL as it is requested, `${NAME}` replaced by what the environment holds; never log this one.

    Raises:
        UserError: when a variable is not set, or the URL is none with its value.
    """
    values = {name: os.environ.get(name, "") for name in placeholders(url)}
    for name, value in values.items():
        if not value:
            raise UserError(f"{key}: ${{NAME}} in a URL is a set variable, {name} is not set: export {name}=...")
    expanded = fill_placeholders(url, values)
    if not _is_url(expanded):
        raise UserError(
            f"{key}: a URL is http://HOST:PORT/PATH or https, {shown_url(url)} is none with the value of "
            f"{', '.join(values)}: look for a space or line break in it"
        )
    return expanded


def shown_url(url: str) -> str:
    """A URL as it may be logged: without user, password and query; one that is a single placeholder as it is."""
    parsed = urlsplit(url)
    return f"{parsed.scheme}://{host_of(url)}{parsed.path}" if parsed.scheme else url


def host_of(url: str) -> str:
    """Host and port, without user and password."""
    return urlsplit(url).netloc.rpartition("@")[2]


def _is_url(url: str) -> bool:
    try:
        parsed = urlsplit(url)
        whole = parsed.scheme in ("http", "https") and bool(parsed.hostname) and parsed.port != 0
    except ValueError:  # brackets that do not close, a port that is no number
        return False
    return whole and url.isprintable() and " " not in url
