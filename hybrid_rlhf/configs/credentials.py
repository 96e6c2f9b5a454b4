"""Passwords, keys and URLs in settings: a config is written to disk and shown, so it must not contain a secret.

A setting contains `${NAME}` instead. The name is stored and shown; the variable's value is read from the environment
when it is used, and never written.
"""

from __future__ import annotations

import ipaddress
import os
import re
from urllib.parse import urlsplit

from hybrid_rlhf.configs.errors import UserError

_SECRET_NAME = re.compile(
    r"(^|[_.-])((api|access|auth)?_?(key|token)|secret|passwd|password|pwd|sig|signature|auth|credential)$"
)
_PLACEHOLDER = re.compile(r"\$\{(\w+)\}")
_USER_AND_PASSWORD = re.compile(r"(\w://)([^/\s@'\"]*)@")
_QUERY_PAIR = re.compile(r"([?&;])([\w.%-]+)=([^&;#\s'\"]+)")
_TOKEN = re.compile(r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16})")
_WEBHOOK = re.compile(
    r"((?:hooks\.slack\.com/(?:services|workflows|triggers)|discord(?:app)?\.com/api/webhooks)/)"
    r"((?!\$\{)[^\s?#'\"]+)"
)
"""Webhook addresses of Slack and Discord, which give access to a channel by themselves."""
_PLACEHOLDER_PORT = re.compile(r":\$\{\w+\}(?=[/?]|$)")


def found_credential(text: str) -> str | None:
    """The kind of credential in a text, or None; `${NAME}`, which refers to a variable, is no credential."""
    if _TOKEN.search(text):
        return "an access token"
    if any(not is_placeholder(match[2].rpartition(":")[2]) for match in _USER_AND_PASSWORD.finditer(text)):
        return "a user or a password"
    if _WEBHOOK.search(text):
        return "the key of a webhook"
    for match in _QUERY_PAIR.finditer(text):
        if _is_secret(match[2]) and not is_placeholder(match[3]):
            return f"a value for {match[2]!r}"
    return None


def redacted(text: str) -> str:
    """A text without the credentials in it."""
    text = _TOKEN.sub("***", text)
    text = _WEBHOOK.sub(r"\1***", text)
    text = _USER_AND_PASSWORD.sub(r"\1***@", text)
    return _QUERY_PAIR.sub(lambda m: f"{m[1]}{m[2]}={'***' if _is_secret(m[2]) else m[3]}", text)


def expanded(text: str, *, key: str, rule: str = "must be") -> str:
    """The value of a key with its environment variables replaced; it must not be logged.

    Raises:
        UserError: when a variable is not set, or is empty.
    """

    def value_of(match: re.Match[str]) -> str:
        value = os.environ.get(match[1])
        if not value:
            raise UserError(f"{key}: ${{NAME}} {rule} a set variable, {match[1]} is not set: export {match[1]}=...")
        return value

    return _PLACEHOLDER.sub(value_of, text)


def expanded_key(value: str | None, *, key: str) -> str | None:
    """As `expanded`, for a key that may be left out."""
    return None if value is None else expanded(value, key=key)


def require_placeholder(value: str | None, *, key: str) -> None:
    """Refuse a secret that is written into a config."""
    if value is not None and not is_placeholder(value):
        raise UserError(
            f"{key} must be ${{NAME}} of an environment variable, since configs are saved, got a text: export the key "
            "and give its name"
        )


def is_placeholder(value: str) -> bool:
    """Return True if a text consists of a single `${NAME}`."""
    return _PLACEHOLDER.fullmatch(value) is not None


def _is_secret(name: str) -> bool:
    """Return True if the last word of a name denotes a secret: api_key, X-Amz-Signature, accessToken."""
    return _SECRET_NAME.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()) is not None


def is_own_host(host: str) -> bool:
    """Return True if an address can be reached only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_url(url: str, *, key: str, remedy: str) -> None:
    """Refuse an invalid URL, and a URL that would write a secret into config.yaml.

    Args:
        url: URL with its placeholders.
        key: name of the setting, for messages.
        remedy: the right place for the secret, for messages.

    Raises:
        UserError: when it is not a URL, or contains a secret.
    """
    if not is_url(_PLACEHOLDER_PORT.sub(":1", url)):
        raise UserError(f"{key}: a URL is http://HOST:PORT/PATH or https, got {redacted(url)}: write it out")
    kind = found_credential(url)
    if kind is not None:
        raise UserError(f"{key}: a URL may not carry {kind}, got {redacted(url)}: {remedy}")


def host_of(url: str) -> str:
    """Host and port, without user and password."""
    return urlsplit(url).netloc.rpartition("@")[2]


def is_url(url: str) -> bool:
    """Return True for http://HOST:PORT/PATH and https, without spaces, and without placeholders in the port."""
    try:
        parsed = urlsplit(url)
        whole = parsed.scheme in ("http", "https") and bool(parsed.hostname) and parsed.port != 0
    except ValueError:  # unclosed brackets, or a port that is not a number
        return False
    return whole and url.isprintable() and " " not in url
