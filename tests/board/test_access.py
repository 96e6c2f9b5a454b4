"""Who may ask a board, and that nothing that a client sends is an internal error or leads out of the folders."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.board import POST, ServedBoard, served_board, write_run

GETS = (
    "runs/RUN metrics runs/RUN/timeline runs/RUN/samples runs/RUN/prompts runs/RUN/signals preferences/next "
    "preferences/summary form models presets presets/x folders jobs/x prompts/x runs/RUN/samples/1/0"
).split()
POSTS = (
    "runs/RUN/replay runs/RUN/branch runs/RUN/rescore runs/RUN/stop runs/RUN/resume preferences preferences/train runs "
    "form/check form/estimate chat"
).split()
TOKEN = "a-long-token"
HEADERS = {**POST, "Content-Type": "application/json"}


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBoard]:
    folder = tmp_path_factory.mktemp("board") / "output"
    write_run(folder / "run", steps=2, samples=4)
    (folder.parent / "secret.txt").write_text("a secret")
    with served_board(folder) as served:
        yield served


def raw(board: ServedBoard, request: bytes) -> bytes:
    """The answer to bytes."""
    host, port = board.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(request)
        content = b""
        while part := connection.recv(65536):
            content += part
    return content


@pytest.mark.parametrize(("host", "status"), [("localhost:99", 200), ("evil.example", 403)])
def test_a_name_of_another_machine_is_refused(board: ServedBoard, host: str, status: int) -> None:
    """tests/serving/test_access.py has more names."""
    answer = raw(board, f"GET /api/runs HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer[:200]


def test_a_form_of_another_page_changes_nothing(board: ServedBoard) -> None:
    run = board.run("run")["id"]
    for headers, status in (
        ({}, 403),
        ({"X-Board": "0"}, 403),
        ({**POST, "Content-Type": "text/plain"}, 415),
        ({**POST, "Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({**HEADERS, "Origin": "http://evil.example"}, 403),
        ({**HEADERS, "Origin": "null"}, 403),
    ):
        answer = board.client.post(f"/api/runs/{run}/stop", content=b"{}", headers=headers)
        assert (answer.status_code, list(answer.json())) == (status, ["error"])
    own = board.client.post("/api/form/estimate", content=b"{}", headers={**HEADERS, "Origin": board.url})
    assert own.status_code == 400  # of its content
    for method in ("PUT", "DELETE", "OPTIONS", "PATCH"):
        answer = board.client.request(method, "/api/runs")
        assert answer.status_code == 405 and "access-control-allow-origin" not in answer.headers


def test_answers_forbid_foreign_content(board: ServedBoard) -> None:
    for path in ("/health", "/api/runs", "/nowhere"):
        headers = board.ask(path).headers
        assert headers["content-security-policy"].startswith("default-src 'self'")
        assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "path",
    [
        "/static/../../secret.txt",
        "/static/%2e%2e/%2e%2e/server.py",
        "/static//etc/passwd",
        "/api/runs/..%2f..%2fsecret.txt",
        "/api/runs/%2fetc%2fpasswd",
        "/api/runs/.",
        "/static/%00",
        "/api/runs/RUN/samples/..%2f..%2f/0",
        "/../secret.txt",
    ],
)
def test_no_path_leads_out_of_the_folders(board: ServedBoard, path: str) -> None:
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    answer = raw(board, request)
    assert answer.split()[1] in (b"400", b"404") and b"a secret" not in answer and b"root:" not in answer


@pytest.mark.parametrize(
    "output_dir",
    ["x" * 5000, "a/" * 3000 + "x", "run/config.yaml/x", "run/config.yaml"]
    + ["/tmp/elsewhere", "../outside", "a/../../outside", ".", "", "a\0b"],
)
def test_a_folder_outside_or_that_cannot_be_made_is_a_wrong_value(board: ServedBoard, output_dir: str) -> None:
    """A name of 5,000 characters was answered 503."""
    for path, body in (
        ("/api/runs", {"command": "sft", "values": {"output_dir": output_dir, "data.sources": ["x"]}}),
        ("/api/preferences/train", {"model": "m", "output_dir": output_dir, "options": {}}),
    ):
        answer = board.post(path, body)
        assert answer.status_code == 400 and "output_dir" in answer.json()["error"], answer.text
        assert len(answer.json()["error"]) < 500


def test_a_large_body_is_refused(board: ServedBoard) -> None:
    answer = board.post("/api/chat", {"models": ["x"], "messages": [{"role": "user", "content": "x" * 5_000_000}]})
    assert answer.status_code == 413
    for body in (b'{"a": ', b"[1]", b'"x"', b"\xff\xfe", b'{"who": "\\ud800"}', b'{"a": NaN}', b"[" * 100_000):
        answer = board.client.post("/api/preferences", content=body, headers=HEADERS)
        assert answer.status_code == 400 and list(answer.json()) == ["error"], answer.text


def test_a_board_with_a_token_asks_for_it(tmp_path: Path) -> None:
    write_run(tmp_path / "output" / "run", steps=1)
    with served_board(tmp_path / "output", words=["--token", TOKEN]) as board:
        assert board.ask("/api/runs").status_code == 401 and board.ask("/").status_code == 401
        assert board.ask("/", token="wrong").status_code == 401
        assert board.ask("/api/runs", token=TOKEN).status_code == 401  # the page alone takes it from the line
        with httpx2.Client(base_url=board.url) as client:
            assert client.get("/", params={"token": TOKEN}).status_code == 303
            assert len(client.get("/api/runs").json()) == 1


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(
    (
        "step index completion token text samples pair choice who model output_dir options command values models "
        "messages sampling reward run name sort order limit offset"
    ).split()
)
SOME = st.one_of(
    VALUES, st.sampled_from(["rl", "sft", 0, 1, 2, "left", {"lr": 1}, {"algorithm": "ppo", "algorithm.x": 1}])
)
QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


def assert_answered(answer: httpx2.Response, *said: Any) -> None:
    """The answer is good, or an error of one line."""
    assert answer.status_code in (200, 400, 404), (*said, answer.text)
    if answer.status_code != 200:
        assert set(answer.json()) == {"error"} and "\n" not in answer.json()["error"]


@settings(max_examples=60, deadline=None, suppress_health_check=QUIET)
@given(path=st.sampled_from(GETS), query=st.dictionaries(KEYS | st.text(max_size=6), st.text(max_size=12), max_size=4))
def test_any_query_is_answered(board: ServedBoard, path: str, query: dict[str, str]) -> None:
    run = board.run("run")["id"]
    assert_answered(board.ask(f"/api/{path.replace('RUN', run)}", **query), path, query)


@settings(max_examples=60, deadline=None, suppress_health_check=QUIET)
@given(path=st.sampled_from(POSTS), body=st.dictionaries(KEYS, SOME, max_size=6))
def test_any_body_is_answered(board: ServedBoard, path: str, body: dict[str, Any]) -> None:
    if path == "runs" and isinstance(body.get("values"), dict):
        body["values"]["output_dir"] = "/outside"  # no run is started
    run = board.run("run")["id"]
    if {"step", "index"} <= body.keys() and path.startswith("runs/RUN/re"):
        body["step"] = "none"  # no job is started
    text = json.dumps(body).encode()
    answer = board.client.post(f"/api/{path.replace('RUN', run)}", content=text, headers=HEADERS)
    assert_answered(answer, path, body)


@settings(max_examples=25, deadline=None, suppress_health_check=QUIET)
@given(part=st.text(min_size=1, max_size=20))
@example(part="/")
def test_any_path_is_answered(board: ServedBoard, part: str) -> None:
    for place in ("/api/runs/{}", "/api/jobs/{}", "/api/prompts/{}", "/static/{}", "/{}"):
        answer = board.ask(place.format(quote(part, safe="")))
        assert answer.status_code in (400, 404, 405) or part in ("?", "#", ".", "\n"), (place, part, answer.text)
