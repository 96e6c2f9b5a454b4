"""Passwords and keys where they do not belong: in a config, which is written to disk and shown.

They belong into the environment, which is read when they are used and never written anywhere.
"""

from __future__ import annotations

import os
import re

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


def placeholders(text: str) -> list[str]:
    """Names of the variables that stand in a text as `${NAME}`."""
    return _PLACEHOLDER.findall(text)


def fill_placeholders(text: str, values: dict[str, str]) -> str:
    """The text with values in their place."""
    return _PLACEHOLDER.sub(lambda match: values[match[1]], text)


def expanded(text: str, *, key: str) -> str:
    """The text of a config's key with the values of its environment variables; never log it.

    Raises:
        UserError: when one is not set, or is empty.
    """
    values = {name: os.environ.get(name, "") for name in placeholders(text)}
    for name, value in values.items():
        if not value:
            raise UserError(f"{key}: ${{NAME}} must be a set variable, {name} is not set: export {name}=...")
    return fill_placeholders(text, values)


def is_placeholder(value: str) -> bool:
    """Whether a text is one `${NAME}` and nothing else."""
    return _PLACEHOLDER.fullmatch(value) is not None


def _is_secret(name: str) -> bool:
    """By the last word of a name: api_key, X-Amz-Signature, accessToken."""
    return _SECRET_NAME.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()) is not None
