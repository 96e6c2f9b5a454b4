"""How a server ends: by a signal while clients wait, and when decoding has failed for good."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2

from tests.support.clock import wait_until
from tests.support.messages import user
from tests.support.services import HEADERS, post
from tests.support.serving import server_process

LINE = "--model_name tiny --max_batch_rows 6 --max_sequence_tokens 30000"
LONG: dict[str, Any] = {"model": "tiny", "max_tokens": 29000, "min_tokens": 29000}
PATHS = ("/v1/chat/completions", "/v1/completions")


def body_of(path: str, **more: Any) -> dict[str, Any]:
    """A request of many minutes."""
    prompt = {"messages": [user("x")]} if "chat" in path else {"prompt": "x"}
    return {**LONG, **prompt, **more}


def streamed(url: str, path: str, begun: threading.Semaphore, events: list[str]) -> None:
    """Receive a stream to its end."""
    body = body_of(path, stream=True, n=2, stream_options={"include_usage": True})
    with httpx2.Client(timeout=120) as client:
        with client.stream("POST", f"{url}{path}", json=body, headers=HEADERS) as answer:
            for line in answer.iter_lines():
                events += [line.removeprefix("data: ")] if line else []
                begun.release()


def test_sigterm_ends_streams_with_a_last_event(model_folder: Path, tmp_path: Path) -> None:
    """They were cut in the middle, with a traceback for each, and new clients could not connect."""
    begun = [threading.Semaphore(0) for _ in PATHS]
    streams: list[tuple[str, list[str]]] = [(path, []) for path in PATHS]
    with (tmp_path / "errors.txt").open("w") as errors:
        with server_process(f"{model_folder} {LINE} --shutdown_seconds 600", errors=errors) as (process, url):
            threads = [
                threading.Thread(target=streamed, args=(url, path, semaphore, events))
                for (path, events), semaphore in zip(streams, begun, strict=True)
            ]
            body, target = body_of(PATHS[1]), f"{url}{PATHS[1]}"
            asking = ThreadPoolExecutor(1).submit(httpx2.post, target, json=body, headers=HEADERS, timeout=120)
            # a client that never reads what it is sent
            silent = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
            content = json.dumps(body_of(PATHS[1], stream=True)).encode()
            head = "".join(f"{name}: {value}\r\n" for name, value in HEADERS.items())
            head += f"Host: 127.0.0.1\r\nContent-Length: {len(content)}\r\n\r\n"
            silent.sendall(f"POST {PATHS[1]} HTTP/1.1\r\n{head}".encode() + content)
            for thread in threads:
                thread.start()
            for semaphore in begun:
                assert all(semaphore.acquire(timeout=60) for _ in range(10))
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: httpx2.get(f"{url}/health").status_code == 503)
            refused = post(target, body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopped")
            assert refused.headers["Retry-After"]
            process.send_signal(signal.SIGTERM)  # the running requests end now
            for thread in threads:
                thread.join()
            silent.close()
            assert process.wait(timeout=60) == 0
    for path, events in streams:
        assert events[-1] == "[DONE]"
        *_, last, usage = [json.loads(event) for event in events[:-1]]
        assert usage["choices"] == [] and usage["usage"]["completion_tokens"] > 0
        reasons = {
            choice["index"]: choice["finish_reason"]
            for event in events[:-1]
            for choice in json.loads(event)["choices"]
            if choice["finish_reason"]
        }
        assert reasons == {0: "abort", 1: "abort"} and last["object"] == usage["object"], path
    assert asking.result().status_code == 503 and asking.result().json()["error"]["code"] == "stopped"
    log = (tmp_path / "errors.txt").read_text()
    assert "Traceback" not in log
    assert f"loading {model_folder} in float32 on cpu\n" in log
    assert re.search(r"KV cache of \d+\.\d\d GiB for up to 6 completions of up to 30000 tokens\n", log)


BROKEN = """
from hybrid_rlhf.generation.batching.requests import Request
append, Request.count = Request.append, 0
def failing(request, *values):
    Request.count += 1
    if Request.count > 20:
        raise RuntimeError("the device is gone")
    append(request, *values)
Request.append = failing
"""


def test_a_server_whose_decoding_has_failed_says_so_and_exits(model_folder: Path, tmp_path: Path) -> None:
    """It answered 503 for ever, and nothing started it again."""
    events: list[str] = []
    with (tmp_path / "errors.txt").open("w") as errors:
        with server_process(f"{model_folder} {LINE}", before=BROKEN, errors=errors) as (process, url):
            streamed(url, PATHS[0], threading.Semaphore(0), events)
            assert process.wait(timeout=60) == 70
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == "failed"
    assert re.search("RuntimeError: the device is gone", (tmp_path / "errors.txt").read_text())
