"""Mistakes on the line of `hybrid-rlhf serve`: one line, exit code 2, before the model is loaded."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.commands import CommandLine


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("", "a model must be named"),
        ("m --port 70000", "port must be in [0, 65535], got 70000: lower it"),
        ("m --api_key '${SERVE_KEY_X}'", "SERVE_KEY_X is not set: export SERVE_KEY_X=..."),
        ("m --sampling.n 2", "got n 2: leave it out"),
        ("m --host 256.1.1.1 --api_key k", "must be an address that is free here, got 256.1.1.1:8000"),
        ("m --host 0.0.0.0", "needs an api_key, got host 0.0.0.0 without one: give --api_key '${NAME}'"),
        ("absent/folder/x --host localhost --port 0", "absent/folder/x is none: check the path"),
        ("absent/folder/x --port 0", "absent/folder/x is none: check the path"),
    ],
)
def test_mistakes_are_one_line(line: str, rule: str, cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SERVE_KEY_X", raising=False)
    assert rule in cli.refused(f"serve {line}")


def test_a_port_that_is_taken_is_named(model_folder: Path, cli: CommandLine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port} (Address already in use)" in cli.refused(f"serve {model_folder} --port {port}")


def test_with_json_the_address_is_an_event(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server itself is in tests/serving."""

    def served(*_: object, report: Callable[[str], None], **__: object) -> bool:
        report("http://127.0.0.1:8000/v1")
        return True

    monkeypatch.setattr("hybrid_rlhf.serving.server.serve", served)
    event, result = map(json.loads, cli("serve m --json").out.splitlines())
    assert event == {"event": "serving", "model": "m", "url": "http://127.0.0.1:8000/v1"}
    assert result["model"] == "m" and result["seconds"] >= 0


def test_a_missing_package_is_named(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid_rlhf.serving.packages.find_spec", lambda name: None)
    assert "fastapi is not installed: pip install 'hybrid_rlhf[serve]'" in cli.refused("serve m")
