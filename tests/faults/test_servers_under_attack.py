"""Servers under attack: bodies that cost far more than their bytes, floods, and clients that never finish. Nobody else
waits for more than a second, memory comes back, and disk and log stay within their limits.

A second is the rule on an idle machine; on a shared one others wait without an attack too, so they may wait for four
times what they have waited for just before. The table of each server goes to build/servers_under_attack/.
"""

from __future__ import annotations

import contextlib
import io
import json
import socket
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow
import pytest

from tests.support.attack import Asks, Target, ask, target, write_table
from tests.support.board import WORDS, write_run
from tests.support.runs import ROOT
from tests.support.serving import KEY
from tests.support.training_server import ALICE, BASE, BOB, MESSAGES, Client, forward_backward

pytestmark = pytest.mark.faults
JSON = "application/json"
PROTOBUF = "application/x-protobuf"
QUOTA_MIB = 10
Attack = Callable[[], object]
TRAIN_WORDS = (
    "--port 0 --model_name tiny --max_sequence_tokens 256 --micro_batch_tokens 512 --max_batch_rows 8 "
    f"--max_stored_gib {QUOTA_MIB / 1024} --max_queued_mib 128"
).split()
SERVE_WORDS = (
    "--port 0 --model_name tiny --max_sequence_tokens 256 --max_batch_rows 8 --allow_lark true --api_key ${SERVE_KEY}"
).split()
BOARD_STEPS = 60_000
KEPT_MIB = {"20: 40 schemas of 4,000 texts": 256, "22: signals of 60,000 steps": 128}
"""Memory that an attack may leave: compiled grammars are kept up to that, and the metrics of runs that were opened."""


def check(server: Target, name: str, attack: Attack) -> None:
    row = server.measured(name, attack)
    assert not row.problems
    for who, seconds in row.waits.items():
        assert seconds <= max(1.0, 4 * row.before[who]), row
    assert row.left_mib < KEPT_MIB.get(name, 64) and row.disk_mib < QUOTA_MIB + 0.1 and row.log_bytes < 10 * 2**20, row


def compact(**content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def head(path: str, size: int) -> bytes:
    """The headers of a body of Alice's."""
    line = f"POST /api/v1/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: {ALICE}\r\n"
    return f"{line}Content-Type: {JSON}\r\nContent-Length: {size}\r\n\r\n".encode()


def connections(server: Target, content: bytes, count: int, seconds: float) -> None:
    """Connections that send something and wait, at most 200 new ones a second; the oldest are closed for new ones."""
    address = urlsplit(server.url)
    end = time.monotonic() + seconds
    held: list[socket.socket] = []
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            connection = socket.create_connection((address.hostname, address.port), timeout=3)
            connection.sendall(content)
            held.append(connection)
        time.sleep(0.005)
        while len(held) > count:
            held.pop(0).close()
    for connection in held:
        connection.close()


def at_once(attack: Attack, count: int, seconds: float = 0.0) -> None:
    """An attack by so many threads, repeated for so many seconds."""
    end = time.monotonic() + seconds

    def repeat() -> None:
        attack()
        while time.monotonic() < end:
            attack()

    threads = [threading.Thread(target=repeat) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# -- train-server


def others_train(url: str) -> Asks:
    """What another key asks."""
    client = Client(url, BOB)
    model = client.model()
    seq = 1

    def step() -> None:
        nonlocal model, seq
        try:
            client.train(model, seq, 1)
            seq += 2
        except Exception:  # commands after a lost one would wait for it
            model, seq = client.model(), 1
            raise

    return {
        "health": lambda: ask(url, "/api/v1/healthz"),
        "8 tokens": lambda: client.result(client.asample([3, 4], {"max_tokens": 8}, base_model=BASE)),
        "step": step,
    }


@pytest.fixture(scope="module")
def trained(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("train") / "server"
    words = ["train-server", str(model_folder), "--output_dir", str(folder), *TRAIN_WORDS]
    words += ["--api_keys", "{alice: '${ALICE}', bob: '${BOB}'}"]
    with target(words, folder, others_train, ("health", "8 tokens", "step"), ALICE=ALICE, BOB=BOB) as server:
        yield server
        write_table(server.rows, ROOT / "build" / "servers_under_attack" / "train_server.md")


def sent(server: Target, path: str, raw: bytes, kind: str = JSON) -> Attack:
    """Sends a body of Alice's, compressed, and waits for the result of a command."""
    body = pyarrow.compress(raw, codec="zstd", asbytes=True)

    def send() -> tuple[int, Any]:
        headers = {"Content-Type": kind, "Content-Encoding": "zstd", "X-API-Key": ALICE}
        status, content = ask(server.url, f"/api/v1/{path}", body, headers)
        answer = json.loads(content)
        if status == 200 and "request_id" in answer:
            return status, Client(server.url).result(answer["request_id"])
        return status, answer

    return send


def sampling(server: Target, **content: Any) -> Attack:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [3, 4]}]}
    body = {"prompt": prompt, "sampling_params": {"max_tokens": 20}, "base_model": BASE, **content}
    return sent(server, "asample", compact(**body))


def command(server: Target, fill: Callable[[Any], object]) -> Attack:
    """A command with one datum of one token, into which something more is filled."""
    body = MESSAGES["ForwardBackwardRequest"](model_id=Client(server.url).model(), seq_id=1, loss_fn="cross_entropy")
    datum = body.data.add()
    datum.model_input.add().encoded_text.tokens = np.asarray([3], "<i4").tobytes()
    tensor = datum.loss_fn_inputs.add(key="target_tokens").value
    tensor.dense = np.asarray([4], "<i8").tobytes()
    tensor.dtype = 2
    fill(body)
    return sent(server, "forward_backward", body.SerializeToString(), PROTOBUF)


def steps(server: Target, first: bytes, *more: bytes) -> Any:
    """The result of an update after commands of a new model."""
    client = Client(server.url)
    model = client.model()
    for seq, body in enumerate((first, *more), 1):
        message = MESSAGES["ForwardBackwardRequest"].FromString(body)
        message.model_id, message.seq_id = model, seq
        client.request("forward_backward", message.SerializeToString())
    return client.result(client.step(model, len(more) + 2))


def step_without_an_end(server: Target) -> None:
    step = steps(server, forward_backward("", 1, [list(range(3, 12))], inputs=[{"weights": [3e38] * 8}]))
    assert step["metrics"]["skipped"] == 1


def step_on_half_a_batch(server: Target) -> None:
    step = steps(server, forward_backward("", 1), forward_backward("", 2, [[3, 9999]]))
    assert "the step is left out" in step["error"]


def many_samples(server: Target) -> None:
    client = Client(server.url)
    request = client.asample([3, 4], {"max_tokens": 250, "temperature": 100.0}, num_samples=1024, base_model=BASE)
    time.sleep(10)
    client.post("cancel_future", request_id=request)


def archive(server: Target) -> Attack:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as members:
        for number in range(60_000):
            members.writestr(zipfile.ZipInfo(str(number)), b"")
    return sent(server, "import_adapter/x", data.getvalue(), "application/zip")


def small_records(server: Target) -> None:
    """Sessions with as much metadata as they may have, until they are refused."""
    create = sent(server, "create_session", compact(user_metadata={"a": "x" * 16_000}))
    answers = []
    while not answers or answers[-1][0] == 200:
        answers.append(create())
    assert answers[-1][0] == 400 and "max_stored_gib" in answers[-1][1]["error"]
    client = Client(server.url)
    for session in client.get("sessions", limit=1).json()["sessions"]:  # what is there can be used
        assert client.request("session_heartbeat", {"session_id": session}).status_code == 200


def half_sent(server: Target) -> None:
    """60 MiB each, without the last one."""
    address = urlsplit(server.url)
    held: list[socket.socket] = []

    def send() -> None:
        held.append(connection := socket.create_connection((address.hostname, address.port), timeout=20))
        with contextlib.suppress(OSError):
            connection.sendall(head("asample", 60 * 2**20))
            for _ in range(59):
                connection.sendall(bytes(2**20))

    at_once(send, 40)
    time.sleep(2)
    for connection in held:
        connection.close()


def waiting_polls(server: Target) -> Attack:
    """Requests for a result that does not come, which hold their connections for 20 s."""
    client = Client(server.url)
    body = compact(request_id=client.forward_backward(client.model(), 5))
    content = head("retrieve_future", len(body)) + body
    return partial(connections, server, content, 1200, 10)


def refused(server: Target) -> None:
    """Faulty requests, by HTTP and by their content."""
    for path, kind in (("asample", JSON), ("import_adapter/x", "application/zip"), ("create_model", JSON)):
        send = sent(server, path, b"{", kind)
        for _ in range(200):
            assert send()[0] == 400
    connections(server, b"\0 \r\n\r\n", 100, 3)


HEADERS = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: "
LISTS = b'{"events":[' + b"[]," * 300_000 + b"[]]}"
TRAIN: dict[str, Callable[[Target], Attack]] = {
    "1: a stop string of 200,000 characters": lambda s: sampling(s, sampling_params={"stop": "ab" * 100_000}),
    "2: 2 million bad stop tokens": lambda s: sampling(s, sampling_params={"stop": [-1] * 2_000_000}),
    "2: a million bad stop tokens": lambda s: sampling(s, sampling_params={"stop": [-1] * 1_000_000}),
    "3: a tensor of 60,000 dimensions": lambda s: command(
        s, lambda body: body.data[0].loss_fn_inputs[0].value.shape.extend([2**62] * 60_000)
    ),
    "9: an update that is not finite": lambda s: partial(step_without_an_end, s),
    "10: an update after a refused pass": lambda s: partial(step_on_half_a_batch, s),
    "11: 1,024 samples of 250 tokens": lambda s: partial(many_samples, s),
    "12: 2 million empty chunks": lambda s: sampling(s, prompt={"chunks": [{"tokens": []}] * 2_000_000}),
    "12: 100,000 datums": lambda s: command(s, lambda body: body.data.extend([body.data[0]] * 100_000)),
    "12: 3 million chunks of a datum": lambda s: command(
        s, lambda body: body.data[0].MergeFromString(b"\x0a\x00" * 3_000_000)
    ),
    "12: a million inputs of a datum": lambda s: command(
        s, lambda body: body.data[0].MergeFromString(b"\x12\x00" * 1_000_000)
    ),
    "12: 15 million empty lists": lambda s: sent(s, "telemetry", b'{"events":[' + b"[]," * 15_000_000 + b"[]]}"),
    "12: a million levels": lambda s: sent(s, "telemetry", b'{"events":' + b"[" * 1_000_000),
    "12: an archive of 60,000 members": archive,
    "a key twice after 90,000 others": lambda s: sent(
        s, "telemetry", b"{" + b"".join(b'"%d":0,' % number for number in range(90_000)) + b'"89999":0}'
    ),
    "13: 60 MiB of metadata, five times": lambda s: partial(
        at_once, sent(s, "create_session", compact(user_metadata={"a": "x" * 60 * 2**20})), 5
    ),
    "15: connections without headers, for 15 s": lambda s: partial(connections, s, HEADERS, 1500, 15),
    "15: connections without a body, for 10 s": lambda s: partial(connections, s, head("asample", 10) + b"{", 1200, 10),
    "15: connections that wait for a result, for 10 s": waiting_polls,
    "15: faulty requests": lambda s: partial(refused, s),
    "17: 40 bodies of 60 MiB, half sent": lambda s: partial(half_sent, s),
    "flood of 8, 5 s: 300,000 empty lists": lambda s: partial(at_once, sent(s, "telemetry", LISTS), 8, 5.0),
    "flood of 8, 5 s: a million bad tokens": lambda s: partial(
        at_once, sampling(s, prompt={"chunks": [{"tokens": [-1] * 1_000_000}]}), 8, 5.0
    ),
    "flood of 4: 4,096 datums": lambda s: partial(
        at_once, command(s, lambda body: body.data.extend([body.data[0]] * 4095)), 4
    ),
    # the last one, as nothing can be made afterwards
    "13: sessions until the quota": lambda s: partial(small_records, s),
}


@pytest.mark.parametrize("name", TRAIN)
def test_training(trained: Target, name: str) -> None:
    check(trained, name, TRAIN[name](trained))


# -- serve


def others_complete(url: str) -> Asks:
    """What another client asks."""
    body = compact(model="tiny", prompt="hello", max_tokens=8)
    headers = {"Content-Type": JSON, "Authorization": f"Bearer {KEY}"}

    def complete() -> None:
        status, content = ask(url, "/v1/completions", body, headers)
        assert status == 200, content

    return {"health": lambda: ask(url, "/health"), "8 tokens": complete}


@pytest.fixture(scope="module")
def served(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("serve") / "server"
    words = ["serve", str(model_folder), *SERVE_WORDS]
    with target(words, folder, others_complete, ("health", "8 tokens"), SERVE_KEY=KEY) as server:
        yield server
        write_table(server.rows, ROOT / "build" / "servers_under_attack" / "serve.md")


def asked(server: Target, raw: bytes, statuses: Sequence[int] = (200, 400), timeout: float = 120.0) -> Attack:
    """Asks for a completion; a client that leaves before has no answer."""
    headers = {"Content-Type": JSON, "Authorization": f"Bearer {KEY}"}

    def send() -> None:
        with contextlib.suppress(TimeoutError):
            status, content = ask(server.url, "/v1/completions", raw, headers, timeout)
            assert status in statuses, (status, content)

    return send


def formatted(server: Target, timeout: float = 120.0, **response_format: Any) -> Attack:
    body = compact(model="tiny", prompt="x", max_tokens=2, response_format=response_format)
    return asked(server, body, timeout=timeout)


def schema(content: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": content}}


def many_schemas(server: Target) -> None:
    for number in range(40):
        texts = [f"{number} {index} {'x' * 20}" for index in range(4000)]
        formatted(server, **schema({"enum": texts}))()


def prompts(server: Target, prompt: Any) -> Attack:
    return asked(server, compact(model="tiny", prompt=prompt, max_tokens=2))


LARK = "start: A\nA: /(.*a.{30}.*)/ & /(.*b.{31}.*)/ & ~/(.*d.{33}.*)/"
WORDS_OF_LARK = "start: " + " | ".join(f'"w{number}"' for number in range(200_000))
SERVE: dict[str, Callable[[Target], Attack]] = {
    "4: a grammar that takes gigabytes": lambda s: formatted(s, type="lark", lark=LARK),
    "4: the same, its client leaves": lambda s: formatted(s, 3.0, type="lark", lark=LARK),
    "12: 500,000 empty prompts": lambda s: prompts(s, [[]] * 500_000),
    "12: a text of 30 MiB": lambda s: prompts(s, "a" * 30 * 2**20),
    "12: 4,096 prompts of 250 tokens": lambda s: prompts(s, [[3] * 250] * 4096),
    "11: 128 completions of 250 tokens": lambda s: asked(
        s, compact(model="tiny", prompt="x", n=128, max_tokens=250, temperature=100.0, ignore_eos=True)
    ),
    "14: 8 grammars of 200,000 words, clients leave": lambda s: partial(
        at_once, formatted(s, 5.0, type="lark", lark=WORDS_OF_LARK), 8
    ),
    "20: 40 schemas of 4,000 texts": lambda s: partial(many_schemas, s),
    "21: schemas without a finite text": lambda s: partial(
        at_once, formatted(s, **schema({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"})), 4
    ),
    "flood of 8, 5 s: a million bad tokens": lambda s: partial(at_once, prompts(s, [-1] * 1_000_000), 8, 5.0),
}


@pytest.mark.parametrize("name", SERVE)
def test_completions(served: Target, name: str) -> None:
    check(served, name, SERVE[name](served))


# -- board


def others_look(url: str) -> Asks:
    return {"health": lambda: ask(url, "/health"), "runs": lambda: ask(url, "/api/runs")}


def test_board(tmp_path: Path) -> None:
    """The signals of a run with a long metrics.jsonl."""
    run = write_run(tmp_path / "runs" / "long")
    with (run / "metrics.jsonl").open("w") as lines:
        for step in range(1, BOARD_STEPS):
            values = {f"loss/{word}": step % 97 / 97 for word in WORDS}
            lines.write(json.dumps({"step": step, "time_seconds": float(step), **values}) + "\n")
    with target(["board", str(run.parent), "--port", "0"], run.parent, others_look, ("health", "runs")) as server:
        found = json.loads(ask(server.url, "/api/runs")[1])
        path = f"/api/runs/{found[0]['id']}/signals"
        check(server, "22: signals of 60,000 steps", lambda: at_once(lambda: ask(server.url, path), 4))
        write_table(server.rows, ROOT / "build" / "servers_under_attack" / "board.md")
