"""Messages to a webhook, from runs that end in every way, to servers that answer, are slow, or are dead."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.run import LoggingConfig
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.observability import alerts as alerts_module
from hybrid_rlhf.runtime.observability.alerts import Alerts
from hybrid_rlhf.runtime.run import start_run
from tests.support.errors import user_error
from tests.support.runs import run_python, sft_config
from tests.support.servers import json_server


@dataclass
class WebhookServer:
    """A running server."""

    url: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    delay: threading.Event | None = None
    """Answers are sent once it is set; None: at once."""
    status: int = 200


@contextlib.contextmanager
def webhook_server() -> Iterator[WebhookServer]:
    """A server on this host."""
    state = WebhookServer("")

    def answer(method: str, path: str, body: bytes) -> tuple[int, Any]:
        state.messages.append(json.loads(body))
        if state.delay is not None:
            state.delay.wait(30)
        return state.status, None

    with json_server(answer) as url:
        state.url = f"{url}/hook/s3cret-path"
        yield state


def with_webhook(folder: Path) -> SFTConfig:
    """Settings of a run whose webhook is in a variable."""
    return replace(sft_config(folder), logging=LoggingConfig(sinks=[], webhook="${HOOK}"))


def ended_with(error: BaseException | None, folder: Path) -> None:
    """A run that ends with an error, or without."""
    with start_run(with_webhook(folder)) as run:
        run.open_metrics(None)
        run.log(6, {"sft/loss": 1.0})
        if error is not None:
            raise error


@pytest.mark.parametrize(
    ("error", "event", "text"),
    [
        (None, "finished", "run: finished after step 6"),
        (UserError("rows must have a prompt"), "failed", "run: failed after step 6: rows must have a prompt"),
        (
            ValueError("bad key sk-abcdefghijklmnopqrstuv"),
            "failed",
            "run: failed after step 6: ValueError: bad key ***",
        ),
        (SystemExit(143), "stopped", "run: stopped after step 6: by a signal, after a checkpoint"),
        (KeyboardInterrupt(), "stopped", "run: stopped after step 6: by Ctrl-C"),
    ],
)
def test_the_end_of_a_run_is_one_message(
    error: BaseException | None, event: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with webhook_server() as server:
        monkeypatch.setenv("HOOK", server.url)
        if error is None:
            ended_with(None, tmp_path / "run")
        else:
            with pytest.raises(type(error)):
                ended_with(error, tmp_path / "run")
    assert server.messages == [{"text": text, "content": text, "event": event, "run": "run", "step": 6}]


STALL = """
import sys, time
from dataclasses import replace
from pathlib import Path
from hybrid_rlhf.configs.sections.run import LoggingConfig
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.runtime.run import start_run
config = replace(
    SFTConfig(),
    output_dir=sys.argv[1],
    logging=LoggingConfig(sinks=["csv"], webhook="${HOOK}"),
)
with start_run(config) as run:
    run.open_metrics(None)
    run.log(1, {"sft/loss": 1.0})
    run.watchdog._limit = 1.0  # from here on: what came before may take longer
    time.sleep(60)
"""


def test_a_stalled_run_says_so_before_the_watchdog_ends_it(tmp_path: Path) -> None:
    with webhook_server() as server:
        done = run_python(["-c", STALL, str(tmp_path / "run")], HOOK=server.url)
    assert done.returncode == 70, done.stderr[-2000:]
    (message,) = server.messages
    assert message["event"] == "stalled" and message["step"] == 1
    assert "run: stalled after step 1: rank 0 is stalled: in step 2 since" in message["text"]
    assert server.url not in done.stdout + done.stderr


def test_a_slow_server_delays_no_step_and_the_end_by_a_limited_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    monkeypatch.setattr(alerts_module, "REQUEST_SECONDS", 1.0)
    with webhook_server() as server:
        server.delay = threading.Event()
        alerts = Alerts(server.url, run="run")
        start = time.monotonic()
        for step in range(3):
            alerts.send("advice", "KL explosion", step=step)
        alerts.close()
        assert 0.5 < time.monotonic() - start < 20, "the server answers after 30 seconds"
        server.delay.set()
    assert any("does not answer" in line or "could not be sent" in line for line in log_lines)
    assert not [line for line in log_lines if "Traceback" in line]


def test_a_dead_server_and_a_refusal_are_a_line_each(monkeypatch: pytest.MonkeyPatch, log_lines: list[str]) -> None:
    monkeypatch.setenv("PORT", "9")  # where nothing listens
    alerts = Alerts("http://127.0.0.1:${PORT}/hook", run="run")
    alerts.send("finished", "", step=3)
    alerts.close()
    assert log_lines[-1:] == ["a message could not be sent to http://127.0.0.1:${PORT}/hook (ConnectError)"]
    with webhook_server() as server:
        server.status = 404
        monkeypatch.setenv("HOOK", server.url)
        alerts = Alerts("${HOOK}", run="run")
        alerts.send("finished", "", step=3)
        alerts.close()
    assert log_lines[-1:] == ["a message could not be sent to ${HOOK} (status 404)"]
    assert server.messages[0]["text"] == "run: finished after step 3"


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("https://hooks.slack.com/services/T0/B0/abcdef", "a URL may not carry the key of a webhook"),
        ("https://discord.com/api/webhooks/123/abc", "a URL may not carry the key of a webhook"),
        ("https://host/?token=abc", "a URL may not carry a value for 'token'"),
        ("host/hook", "a URL is http://HOST:PORT/PATH or https"),
    ],
)
def test_a_secret_in_the_config_is_refused(url: str, text: str) -> None:
    with user_error(text) as refused:
        parse_config(SFTConfig, ["--logging.webhook", url])
    assert "abc" not in str(refused.value)
    for good in ("${HOOK}", "https://hooks.slack.com/services/${KEY}", "http://127.0.0.1:9000/hook"):
        assert parse_config(SFTConfig, ["--logging.webhook", good]).logging.webhook == good


def test_a_variable_that_is_not_set_is_named_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOOK", raising=False)
    with user_error("HOOK is not set: export HOOK=..."), start_run(with_webhook(tmp_path / "run")):
        pass
