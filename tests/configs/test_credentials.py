"""Passwords and keys: found in texts, blanked out, and filled in from the environment when a URL is asked for."""

from __future__ import annotations

import pytest

from hybrid_rlhf.configs.credentials import found_credential, redacted
from hybrid_rlhf.configs.sections.rewards import RewardComponentConfig
from hybrid_rlhf.runtime.urls import expanded_url
from tests.support.errors import refused

CARRIERS = [
    ("http://me:pass@host/score", "a user or a password", "http://***@host/score"),
    ("http://t0ken@host/score", "a user or a password", "http://***@host/score"),
    ("http://host/?api_key=abc&x=1", "a value for 'api_key'", "http://host/?api_key=***&x=1"),
    ("http://host/?x=1&accessToken=abc", "a value for 'accessToken'", "http://host/?x=1&accessToken=***"),
    ("http://host/?X-Amz-Signature=abc", "a value for 'X-Amz-Signature'", "http://host/?X-Amz-Signature=***"),
    ("s3/hf_abcdefghijklmnopqrst/x", "an access token", "s3/***/x"),
]


@pytest.mark.parametrize(("text", "kind", "shown"), CARRIERS)
def test_a_credential_is_found_and_blanked_out(text: str, kind: str, shown: str) -> None:
    assert (found_credential(text), redacted(text)) == (kind, shown)
    assert redacted(f"cannot reach '{text}': look") == f"cannot reach '{shown}': look"


@pytest.mark.parametrize(
    "text",
    [
        "org/model",
        "me@host:models/x",
        "http://host:80/score?max_tokens=5&monkey=1",
        "http://me:${PASSWORD}@host/",
        "http://host/?token=${TOKEN}",
        "data/hf_rows.jsonl",
        "user@example.org/a:b",
    ],
)
def test_what_is_none_is_left_alone(text: str) -> None:
    assert found_credential(text) is None


def test_a_url_is_filled_in_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "http://me:${PASS_WORD}@host:${PORT}/score?token=${TOKEN}"
    part = RewardComponentConfig(name="far", urls=(url,))
    assert part.urls == (url,)
    for name, value in (("PASS_WORD", "p"), ("PORT", "8000"), ("TOKEN", "t")):
        monkeypatch.setenv(name, value)
    assert expanded_url(url, key="reward.components") == "http://me:p@host:8000/score?token=t"
    assert expanded_url("http://host/score", key="reward.components") == "http://host/score"


def test_a_variable_that_is_not_set_or_breaks_the_url_is_named_without_its_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TOKEN", raising=False)
    assert refused(expanded_url, "http://host/?token=${TOKEN}", key="reward.components") == (
        "reward.components: ${NAME} in a URL is a set variable, TOKEN is not set: export TOKEN=..."
    )
    monkeypatch.setenv("TOKEN", "s3cret\n")
    assert refused(expanded_url, "http://host/?token=${TOKEN}", key="reward.components") == (
        "reward.components: a URL is http://HOST:PORT/PATH or https, http://host/ is none with the value of "
        "TOKEN: look for "
        "a space or line break in it"
    )
