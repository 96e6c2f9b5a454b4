"""Functions and servers that raise, hang, lie or talk too much: tried again, then handled as configured, everywhere."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.rewards import RewardComponentConfig
from hybrid_rlhf.rl.rewards import Reward, endpoint
from hybrid_rlhf.rl.rewards import functions as functions_module
from hybrid_rlhf.rl.rewards.endpoint import EndpointReward
from hybrid_rlhf.rl.rewards.functions import MAX_HANGING_CALLS
from hybrid_rlhf.runtime import background as waits
from hybrid_rlhf.runtime.world import World, solo_world
from tests.support.clock import wait_until
from tests.support.errors import refused, user_error
from tests.support.ranks import run_ranks
from tests.support.rewards import CPU, calls, function_reward, score_completions
from tests.support.rl import COMPLETIONS, rewarded, rollout_of_rows

RIGHT = {"scores": [1.0, 2.0, 3.0, 0.0, 5.0]}
IN_ORDER: list[list[int | None]] = [[0, 1, 2, 3, 4]]
score_in_order = partial(score_completions, micro=IN_ORDER)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(functions_module, "_CANCELLED_SECONDS", 10.0)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


ONCE = "if calls == 1:\n    {}\nreturn [float(len(text)) for text in completions]"


@pytest.mark.parametrize(
    ("fault", "prefix", "reason", "rows"),
    [
        ("raise ValueError('no such thing')", "", r"raised ValueError: no such thing \(rewards_0.py:8\)", 5),
        ("raise TimeoutError('mine')", "async ", "raised TimeoutError: mine", 5),
        ("sys.exit(3)", "", "raised SystemExit: 3", 5),
        ("raise asyncio.CancelledError", "async ", "raised CancelledError", 5),
        ("return [1.0, 2.0]", "", "got 2 values for 5 completions", 5),
        ("return None", "", "got a NoneType in place of a list", 5),
        ("return 'high'", "", "got a str in place of a list", 5),
        ("return [1, 'high', 3, 0, 5]", "", "got 'high' for a completion", 1),
        ("return [1, 2, float('nan'), 0, 10 ** 400]", "", "got (nan|10+)", 2),
        ("return [c[0]['content'] for c in completions]", "", "a completion is its text, not a list of messages", 5),
        ("await asyncio.sleep(30)", "async ", "took longer than 1 s", 5),
        ("completions.clear()\n    prompts.clear()\n    raise KeyError('gone')", "", "raised KeyError", 5),
    ],
)
def test_a_function_that_fails_is_called_again_and_then_stops_the_run_or_scores_0(
    fault: str, prefix: str, reason: str, rows: int, tmp_path: Path, log_lines: list[str]
) -> None:
    settings: dict[str, Any] = {"prefix": prefix, "timeout_seconds": 1.0 if "1 s" in reason else 30.0}
    always = f"if True:\n    {fault}"
    with user_error(f"reward component mine must give .* for {rows} of 5 completions: .*{reason}") as told:
        score_in_order(function_reward(tmp_path, always, **settings))
    assert "\n" not in str(told.value) and "on_failure" in str(told.value)
    part = function_reward(tmp_path, ONCE.format(fault), **settings)
    assert score_in_order(part).scores.tolist() == RIGHT["scores"] and calls(part) == 2
    none = function_reward(tmp_path, ONCE.format(fault), **settings, retries=0)
    with user_error("reward component mine"):
        score_in_order(none)
    assert calls(none) == 1
    zero = function_reward(tmp_path, always, **settings, on_failure="zero")
    lengths = function_reward(tmp_path, ONCE.format("pass"), name="lengths", weight=0.5)
    report = score_in_order(zero, lengths)
    assert report.metrics["reward/mine/failures"] == rows
    scored_0 = int((report.scores == 0.5 * torch.tensor(RIGHT["scores"])).sum())
    assert scored_0 == min(rows + 1, 5), "and the empty text"
    assert ("reward/mine/mean" in report.metrics) == (rows < 5), "no mean of nothing"
    assert sum("reward component mine is scored 0" in line for line in log_lines) == 1


def test_a_function_that_succeeds_is_called_once_and_its_numbers_may_be_tensors(tmp_path: Path) -> None:
    for value in (
        "torch.tensor([1.0, 2.0, 3.0, 0.0, 5.0], requires_grad=True)",
        "numpy.array([1, 2, 3, 0, 5])",
        "[torch.tensor(1), numpy.float16(2), torch.tensor(3.0, dtype=torch.bfloat16), 0, 5]",
    ):
        part = function_reward(tmp_path, f"return {value}")
        assert score_in_order(part).scores.tolist() == RIGHT["scores"] and calls(part) == 1


def test_the_rows_that_were_scored_once_keep_their_scores(tmp_path: Path) -> None:
    part = function_reward(tmp_path, "return [1.0, 2.0, 3.0, None, 5.0] if calls == 2 else [9.0, 9.0, 'x', 9.0, 9.0]")
    assert score_in_order(part).scores.tolist() == [9, 9, 3, 9, 9]


def test_what_always_fails_says_the_last_reason_and_the_tries(tmp_path: Path) -> None:
    part = function_reward(tmp_path, "raise ValueError(f'call {calls}')", retries=2)
    with user_error(r"for 5 of 5 completions: it raised ValueError: call 3 .* \(try 3\)"):
        score_in_order(part)
    body = "class Mute(Exception):\n    def __str__(self):\n        raise TypeError('no')\nraise Mute"
    with user_error(r"it raised Mute: \(no message"):
        score_in_order(function_reward(tmp_path, body, retries=0))
    body = "class Odd:\n    def __repr__(self):\n        raise TypeError('no')\nreturn [Odd()] * 5"
    with user_error("it raised TypeError: no"):
        score_in_order(function_reward(tmp_path, body, retries=0))


def test_a_function_that_hangs_is_not_called_beside_itself_nor_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functions_module, "_CANCELLED_SECONDS", 0.1)
    part = function_reward(tmp_path, "time.sleep(600)", timeout_seconds=0.05, on_failure="zero")
    for call in range(1, MAX_HANGING_CALLS + 1):
        score_in_order(part)
        wait_until(lambda call=call: calls(part) >= call, "the start of its thread")
        assert calls(part) == call, "one call a rollout, no retry beside it"
    part._timeout_seconds = 600.0
    start = time.perf_counter()
    assert score_in_order(part).metrics["reward/mine/failures"] == 5
    assert calls(part) == MAX_HANGING_CALLS and time.perf_counter() - start < 60, "none is waited for"
    stops = function_reward(tmp_path, "time.sleep(600)", timeout_seconds=0.05)
    with user_error("took longer than 0.05 s"):
        score_in_order(stops)
    stops._hanging = part._hanging
    with user_error("4 earlier calls of it still hang"):
        score_in_order(stops)


def test_a_dropped_row_is_in_no_figure(tmp_path: Path, log_lines: list[str]) -> None:
    first = function_reward(tmp_path, "return [1.0, 2.0, 'x', 4.0, 5.0]", on_failure="drop")
    other = function_reward(tmp_path, "return [10.0, 20.0, 60.0, 30.0, 40.0]", name="other")
    report = score_in_order(first, other)
    assert report.dropped == [2]
    assert report.metrics["reward/mine/dropped"] == 1 and report.metrics["reward/mine/mean"] == 3
    assert report.metrics["reward/other/mean"] == 25, "nor in the other parts' figures"
    assert sum("reward component mine drops its rows for 1 of 5" in line for line in log_lines) == 1
    halves = [
        function_reward(tmp_path, f"return {rows}", on_failure="drop")
        for rows in ("[1, 1, 'x', 'x', 1]", "['x', 'x', 1, 1, 'x']")
    ]
    with user_error("must leave completions to learn from, all 5 of a rollout are dropped, 2 by"):
        score_in_order(*halves)


Behaviour = Callable[[Any, int], None]
"""What a handler, which has the `content` of the request, does with the request of a number."""


class Server:
    """A local server that follows instructions, request by request."""

    def __init__(self, behave: Behaviour) -> None:
        self.requests: list[str] = []
        self.contents: list[dict[str, Any]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:  # noqa: N802 - the name that http.server calls
                self.content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.contents.append(self.content)
                server.requests.append(str(self.headers))
                try:
                    behave(self, len(server.requests))
                except OSError:
                    pass  # the client had enough

            def log_message(self, *words: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        self.place = f"127.0.0.1:{self.http.server_port}/score"
        self.url = f"http://{self.place}"


Serve = Callable[[Behaviour], Server]


@pytest.fixture
def serve() -> Iterator[Serve]:
    running: list[Server] = []

    def start(behave: Behaviour) -> Server:
        running.append(Server(behave))
        return running[-1]

    yield start
    for server in running:
        server.http.shutdown()
        server.http.server_close()


def say(content: Any, status: int = 200, **headers: str) -> Behaviour:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()

    def behave(handler: Any, request: int) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    return behave


def lengths(handler: Any, request: int) -> None:
    say({"scores": [float(len(text)) for text in handler.content["completions"]]})(handler, request)


def hang(handler: Any, request: int) -> None:
    time.sleep(5)


def drip(handler: Any, request: int) -> None:
    handler.send_response(200)
    handler.end_headers()
    for _ in range(50):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.1)


def break_off(handler: Any, request: int) -> None:
    say(b'{"scores": [1.0,', **{"Content-Length": "999"})(handler, request)
    handler.close_connection = True


def flood(handler: Any, request: int) -> None:
    handler.send_response(200)
    handler.end_headers()
    for _ in range(1000):
        handler.wfile.write(b"1" * 2**20)


FAULTS: dict[str, tuple[Behaviour, str]] = {
    "never": (hang, "took longer than 1 s"),
    "slow bytes": (drip, "took longer than 1 s"),
    "no JSON": (say(b"<html>"), "got '<html>' in place of JSON"),
    "deep JSON": (say(b"[" * 200_000), "in place of JSON"),
    "no scores": (say({"score": [1.0] * 5}), 'in place of {"scores"'),
    "NaN": (say(b'{"scores": [NaN, 1, 2, 3, 4]}'), "got nan for a completion"),
    "HTTP 500": (say(RIGHT, 500), "answered HTTP 500"),
    "HTTP 429": (say(RIGHT, 429), "answered HTTP 429"),
    "breaks off": (break_off, "cannot be reached .RemoteProtocolError"),
    "floods": (flood, "answered with more than 16 MiB"),
}


def remote(*urls: str, **settings: Any) -> EndpointReward:
    return EndpointReward(
        RewardComponentConfig(**{"urls": urls, "name": "far", "timeout_seconds": 20.0, "retries": 1} | settings),
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_fails_once_is_asked_again_and_one_that_always_fails_is_told(
    fault: str, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_PASSWORD", "s3cretive")
    monkeypatch.setenv("MY_TOKEN", "hushhush")
    behave, reason = FAULTS[fault]
    limit = 1.0 if reason == "took longer than 1 s" else 20.0  # a loaded machine is no fault of the others
    once = serve(lambda handler, request: (behave if request == 1 else say(RIGHT))(handler, request))
    report = score_in_order(remote(once.url, timeout_seconds=limit))
    wrong = [place for place, value in enumerate(report.scores.tolist()) if value != RIGHT["scores"][place]]
    assert (wrong == [1, 2, 3, 4] if fault == "NaN" else not wrong) and len(once.requests) == 2
    always = serve(behave)
    with user_error(f"reward component far must give .* completions: .*{reason}.*try 2") as raised:
        score_in_order(
            remote(f"http://user:${{MY_PASSWORD}}@{always.place}?token=${{MY_TOKEN}}", timeout_seconds=limit)
        )
    assert len(always.requests) == 2
    assert (
        "s3cretive" not in str(raised.value) and "hushhush" not in str(raised.value) and "\n" not in str(raised.value)
    )


def test_a_redirect_is_not_followed_and_no_other_host_sees_the_key(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "s3cretive")
    other = serve(say(RIGHT))
    for status in (307, 404):
        server = serve(say(b"", status, Location=other.url))
        why = "" if status == 404 else ", a redirect: give the final URL"
        with user_error(f"answered HTTP {status}{why}"):
            score_in_order(remote(server.url, api_key_env="MY_KEY"))
        assert len(server.requests) == 1 and "Bearer s3cretive" in server.requests[0]
    assert not other.requests


def test_a_server_that_echoes_what_it_was_sent_brings_no_secret_into_a_message(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MY_KEY", "s3cretive-key-of-forty-characters-or-more")
    monkeypatch.setenv("MY_PASSWORD", "s3cretive")
    monkeypatch.setenv("MY_TOKEN", "hushhush")
    monkeypatch.setenv("MY_PATH", "s3cretive/hook")

    def echo(handler: Any, request: int) -> None:
        key = str(handler.headers["Authorization"])
        say(key.encode() if request == 1 else {"scores": [key + handler.path] * 5})(handler, request)

    with caplog.at_level(logging.INFO):
        for retries in (0, 1):
            server = serve(echo)
            told = refused(
                score_in_order,
                remote(
                    f"http://{server.place}/${{MY_PATH}}?token=${{MY_TOKEN}}", api_key_env="MY_KEY", retries=retries
                ),
            )
            assert "***" in told and "s3cretive" not in told and "hushhush" not in told
        server = serve(echo)
        assert "Basic ***" in refused(score_in_order, remote(f"http://hugo:${{MY_PASSWORD}}@{server.place}", retries=0))
    assert "s3cretive" not in caplog.text and "hushhush" not in caplog.text


def test_an_endpoint_is_asked_in_batches_with_the_key_and_its_nulls_are_no_opinions(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MY_KEY", "s3cret")
    server = serve(lambda handler, request: say({"scores": handler.content["columns"]["target"]})(handler, request))
    with caplog.at_level(logging.DEBUG):
        report = score_in_order(remote(server.url, batch_size=2, api_key_env="MY_KEY"))
    assert report.scores.tolist() == [1, 2, 0, 4, 5] and report.metrics["reward/far/mean"] == 3.0
    assert sorted(len(content["completions"]) for content in server.contents) == [1, 2, 2]
    assert server.contents[0].keys() == {"prompts", "completions", "columns"}
    assert all("Bearer s3cret\n" in headers for headers in server.requests)
    assert "s3cret" not in caplog.text
    for value, rule in (("", "is not set"), ("s3cret\n", "line break")):
        monkeypatch.setenv("MY_KEY", value)
        with user_error(rule) as told:
            remote(server.url, api_key_env="MY_KEY")
        assert "s3cret" not in str(told.value)


def test_replicas_share_the_work_and_a_dead_one_is_left_out(serve: Serve) -> None:
    replicas = [serve(lambda handler, request: (time.sleep(0.02), lengths(handler, request))[1]) for _ in range(2)]
    part = remote(*(server.url for server in replicas), batch_size=1)
    assert score_in_order(part).scores.tolist() == RIGHT["scores"]
    assert {len(server.requests) for server in replicas} == {2, 3}, "the least loaded is asked"
    with_dead = remote("http://127.0.0.1:9/", replicas[0].url, batch_size=1)
    assert score_in_order(with_dead).scores.tolist() == RIGHT["scores"], "a failed request goes to another replica"
    with user_error("http://127.0.0.1:9/ cannot be reached .ConnectError"):
        score_in_order(remote("http://127.0.0.1:9/"))


def test_requests_wait_without_their_bodies(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2,048 prompts with a photograph each they filled 7 GB at once."""
    made: list[str] = []
    ahead: list[int] = []
    body = endpoint._body
    monkeypatch.setattr(endpoint, "_body", lambda *given: (made.append(""), body(*given))[1])

    def answer(handler: Any, request: int) -> None:
        ahead.append(len(made) - len(server.requests))
        lengths(handler, request)

    server = serve(answer)
    texts = COMPLETIONS.select([number % 5 for number in range(40)])
    part = remote(server.url, batch_size=1)
    assert part.score(texts).values == [float(len(text)) for text in texts.completions]
    assert len(made) == 40 and max(ahead) <= endpoint.REQUESTS_PER_REPLICA


def test_columns_that_json_cannot_represent_are_logged(serve: Serve) -> None:
    odd = replace(COMPLETIONS, columns={"x": [float("nan")] * 5})
    with user_error("does not fit JSON"):
        rewarded(Reward([remote(serve(lengths).url)], solo_world(CPU)), rollout_of_rows(), IN_ORDER, odd)


def on_two_ranks(world: World, folder: Path) -> dict[str, Any]:
    """Rank 0 has rows 0, 3 and 4, rank 1 rows 1 and 2; what fails, fails on rank 1 alone."""
    waits.FIRST_DELAY_SECONDS = 0.01
    micro: list[list[int | None]] = [[0, 3, 4]] if world.rank == 0 else [[2, 1]]
    mine = folder / str(world.rank)
    mine.mkdir()
    result: dict[str, Any] = {}
    right = "return [float(len(text)) for text in completions]"
    for name, fault in {"raises": "raise ValueError('boo')", "lies": "return [1.0, 'x']"}.items():
        for on_failure in ("stop", "drop", "zero"):
            part = function_reward(mine, fault if world.rank == 1 else right, on_failure=on_failure)
            try:
                report = score_in_order(part, world=world, micro=micro)
                result[f"{name} {on_failure}"] = report.scores.tolist(), report.dropped, report.metrics
            except UserError as error:
                result[f"{name} {on_failure}"] = str(error)
    return result


def test_what_fails_on_one_rank_is_handled_alike_on_both(tmp_path: Path) -> None:
    first, second = run_ranks(on_two_ranks, 2, tmp_path, tmp_path)
    assert first == second
    assert first["raises zero"][2]["reward/mine/mean"] == pytest.approx((1 + 0 + 5) / 3)
    for name, dropped in {"raises": [1, 2], "lies": [1]}.items():
        stop, drop, zero = (first[f"{name} {how}"] for how in ("stop", "drop", "zero"))
        assert drop[1] == dropped and drop[2]["reward/mine/dropped"] == len(dropped)
        assert zero[1] == [] and zero[2]["reward/mine/failures"] == len(dropped)
        assert f"for {len(dropped)} of 5 completions" in stop
