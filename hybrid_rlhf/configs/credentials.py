"""Passwords, keys and URLs in settings: a config is written to disk and shown, so it may not carry a secret.

A setting has `${NAME}` in its place. The name is stored and shown; the variable's value is read from the environment
when it is used, and never written anywhere.
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
"""Addresses of Slack and Discord are themselves the key to a channel."""
_PLACEHOLDER_PORT = re.compile(r":\$\{\w+\}(?=[/?]|$)")


def found_credential(text: str) -> str | None:
    """What kind of credential a text carries, if any; `${NAME}`, which stands for a variable, is none."""
    if _TOKEN.search(text):
        return "an access token"
    if any(not is_placeholder(match[2].rpartition(":")[2]) for match in _USER_AND_PASSWORD.finditer(text)):
        return "a user or a password"
    if _WEBHOOK.search(text):
        return "the key of a webhook"
    named = next((m[2] for m in _QUERY_PAIR.finditer(text) if _is_secret(m[2]) and not is_placeholder(m[3])), None)
    return None if named is None else f"a value for {named!r}"


def redacted(text: str) -> str:
    """A text without the credentials in it."""
    text = _TOKEN.sub("***", text)
    text = _WEBHOOK.sub(r"\1***", text)
    text = _USER_AND_PASSWORD.sub(r"\1***@", text)
    return _QUERY_PAIR.sub(lambda m: f"{m[1]}{m[2]}={'***' if _is_secret(m[2]) else m[3]}", text)


def expanded(text: str, *, key: str, rule: str = "must be") -> str:
    """The text of a config's key with the values of its environment variables; never log it.

    Raises:
        UserError: when one is not set, or is empty.
    """

    def value_of(match: re.Match[str]) -> str:
        value = os.environ.get(match[1])
        if not value:
            raise UserError(f"{key}: ${{NAME}} {rule} a set variable, {match[1]} is not set: export {match[1]}=...")
        return value

    return _PLACEHOLDER.sub(value_of, text)


def is_placeholder(value: str) -> bool:
    """Whether a text is one `${NAME}` and nothing else."""
    return _PLACEHOLDER.fullmatch(value) is not None


def _is_secret(name: str) -> bool:
    """By the last word of a name: api_key, X-Amz-Signature, accessToken."""
    return _SECRET_NAME.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()) is not None


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
    if not is_url(_PLACEHOLDER_PORT.sub(":1", url)):
        raise UserError(f"{key}: a URL is http://HOST:PORT/PATH or https, got {redacted(url)}: write it out")
    kind = found_credential(url)
    if kind is not None:
        raise UserError(f"{key}: a URL may not carry {kind}, got {redacted(url)}: {remedy}")


def host_of(url: str) -> str:
    """Host and port, without user and password."""
    return urlsplit(url).netloc.rpartition("@")[2]


def is_url(url: str) -> bool:
    """True for http://HOST:PORT/PATH and https, without spaces and placeholders in the port."""
    try:
        parsed = urlsplit(url)
        whole = parsed.scheme in ("http", "https") and bool(parsed.hostname) and parsed.port != 0
    except ValueError:  # brackets that do not close, a port that is no number
        return False
    return whole and url.isprintable() and " " not in url
