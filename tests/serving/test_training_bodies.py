"""Bodies that cost a training server far more than their bytes are refused before they are read; none of its other
tests sends one."""

from __future__ import annotations

import asyncio
import io
import json
import re
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.serving.bodies import TokenizeBody
from hybrid_rlhf.serving.bodies import read_body as read_request_body
from hybrid_rlhf.serving.training.bodies import (
    OptimStepBody,
    SampleBody,
    SaveBody,
    SessionBody,
    read_body,
)
from hybrid_rlhf.serving.training.checkpoints import _unzipped
from hybrid_rlhf.serving.training.messages import MESSAGES, read_datum, read_forward_backward
from hybrid_rlhf.serving.training.requests import json_object
from hybrid_rlhf.serving.web import beside
from tests.support.clock import wait_until
from tests.support.training_server import ALICE, BOB, Client, error_of, forward_backward, training_server

SAMPLE = {"prompt": {"chunks": [{"tokens": [3]}]}, "sampling_params": {}}


def sample(**sampling: Any) -> dict[str, Any]:
    return {**SAMPLE, "sampling_params": sampling}


@pytest.mark.parametrize(
    ("kind", "content", "rule"),
    [
        (SampleBody, sample(stop="x" * 1001), "at most 1000 characters"),
        (SampleBody, sample(stop=["x"] * 65), "at most 64 items"),
        (SampleBody, sample(stop=[3] * 129), "at most 128 items"),
        (SampleBody, {**SAMPLE, "prompt": {"chunks": [{"tokens": []}] * 4097}}, "at most 4096 items"),
        (OptimStepBody, {"model_id": "a", "adam_params": {"learning_rate": True}}, "a valid number"),
        (SessionBody, {"user_metadata": {"a": "x" * 2**14}}, "at most 16384 characters"),
        (SaveBody, {"model_id": "a", "user_metadata": {"a": "x" * 2**14}}, "at most 16384 characters"),
    ],
)
def test_what_a_body_keeps_is_bounded(kind: type[BaseModel], content: dict[str, Any], rule: str) -> None:
    with pytest.raises(UserError, match=rule) as caught:
        read_body(content, kind)  # type: ignore[type-var]
    assert re.match(r"[\w.]+ must be as", str(caught.value)), "it names the key alone"


@pytest.mark.parametrize(
    "content",
    [sample(stop=[-1] * 1000), {**SAMPLE, "prompt": {"chunks": [{"tokens": [-1] * 1000}]}}],
)
def test_a_list_of_bad_values_is_one_error(content: dict[str, Any]) -> None:
    """An error per item takes kilobytes each."""
    with pytest.raises(UserError) as caught:
        read_body(content, SampleBody)
    cause: Any = caught.value.__cause__
    assert cause.error_count() <= 4 and len(str(caught.value)) < 400  # stop: one for each kind of its union


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ('{"a": [' + "[]," * 2**19 + "[]]}", "at most 1048576 values"),
        ('""' * 2**23, "at most 1048576 values"),
        ("[" * 257 + "]" * 257, "at most 256 levels, got 257"),
        ('{"a": "]\\"]\\\\", "b": ' + "[" * 256 + "]" * 256 + "}", "at most 256 levels, got 257"),
    ],
    ids=["values", "texts", "levels", "closing brackets in text"],
)
def test_values_and_levels_of_json_are_bounded_before_it_is_parsed(
    text: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of both servers: parsing holds up the interpreter, and recurses."""
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("parsed"))
    for reader in (json_object, partial(read_request_body, TokenizeBody)):
        with pytest.raises(UserError, match=rule):
            reader(text.encode())


def test_brackets_and_commas_of_text_are_no_values() -> None:
    text = {"a": '["\\' * 1000, "b": "," * 2**21, "\\": [[]] * 2}
    assert json_object(json.dumps(text).encode()) == text


def test_a_key_that_comes_twice_after_many_others_is_found_in_time() -> None:
    """Counting each key among all took minutes for a body of a megabyte."""
    keys = ",".join(f'"{number}":0' for number in range(100_000))
    start = time.thread_time()
    with pytest.raises(UserError, match="'99999' is repeated"):
        json_object(f'{{{keys},"99999":0}}'.encode())
    assert time.thread_time() - start < 30


def test_datums_and_their_parts_are_counted_before_they_are_objects() -> None:
    """Two bytes are a datum or a chunk, which takes a hundred in memory; eight are a number of a shape."""
    datum = b"\x1a\x00"
    chunks = b"\x0a\x00" * 2**18
    shape = MESSAGES["ForwardBackwardRequest"](model_id="m")
    shape.data.add().loss_fn_inputs.add().value.shape.extend([0] * 2**18)
    nested = MESSAGES["ForwardBackwardRequest"](model_id="m")
    nested.data.add().MergeFromString(chunks)
    for body in (datum * (2**18 + 1), shape.SerializeToString(), nested.SerializeToString()):
        with pytest.raises(UserError, match="at most 262144 fields"):
            read_forward_backward(body)
    assert len(read_forward_backward(forward_backward("m", 1, [[3, 4]] * 4096)).data) == 4096


def test_the_product_of_a_shape_is_that_of_two_numbers() -> None:
    """A product of many large integers takes minutes."""
    message = MESSAGES["ForwardBackwardRequest"].FromString(forward_backward("m", 1))
    message.data[0].loss_fn_inputs[0].value.shape[:] = [2**62] * 60
    with pytest.raises(UserError, match="one or two dimensions, got 60"):
        read_datum(message.data[0], 0)


def test_members_of_an_archive_are_counted_before_they_are_listed() -> None:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for number in range(1025):
            archive.writestr(str(number), b"")
    with pytest.raises(UserError, match="at most 1024 members"):
        _unzipped(data.getvalue(), most=100)


def test_bodies_of_a_key_are_read_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large ones of one key held all threads."""
    from hybrid_rlhf.serving.training import requests

    opened = threading.Event()
    decompressed = requests._decompressed

    def held(content: bytes, *more: Any) -> bytes:
        assert b"slow" not in content or opened.wait(60)
        return decompressed(content, *more)

    monkeypatch.setattr(requests, "_decompressed", held)
    with training_server(tmp_path) as (url, service), ThreadPoolExecutor(40) as threads:
        alice = Client(url)
        sent = [threads.submit(alice.request, "telemetry", {"a": "slow"}) for _ in range(40)]
        sender: Any = service.tenants.of_key(ALICE)
        wait_until(lambda: sender.arriving.requests == 40, "all requests")
        try:
            assert Client(url, BOB).session()
        finally:
            opened.set()
        assert {entry.result().status_code for entry in sent} == {200}


def test_large_bodies_of_serve_are_read_one_after_another() -> None:
    """They held the threads that small ones need."""
    running: list[int] = []
    opened = threading.Event()

    def read(number: int) -> int:
        running.append(number)
        assert opened.wait(60)
        return number

    class Sent:
        def __init__(self, size: int) -> None:
            self.size = size

        async def body(self) -> bytes:
            return b"x" * self.size

    async def check() -> None:
        large = [asyncio.create_task(beside(Sent(2**20 + 1), read, number)) for number in range(3)]  # type: ignore[arg-type]
        assert await beside(Sent(10), str, 7) == "7"  # type: ignore[arg-type]
        assert running in ([], [0])
        opened.set()
        assert await asyncio.gather(*large) == [0, 1, 2]

    asyncio.run(check())


def test_bodies_are_read_on_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other clients are answered while a body is read, of each route that takes one."""
    from hybrid_rlhf.serving.training import checkpoints, requests, routes, service

    threads: dict[str, threading.Thread] = {}
    for module, name in (
        (requests, "json_object"),
        (routes, "json_object"),
        (service, "packed_rows"),
        (checkpoints, "_unzipped"),
    ):
        reader = getattr(module, name)

        def noted(*given: Any, reader: Any = reader, key: str = f"{module.__name__}.{name}", **named: Any) -> Any:
            threads[key] = threading.current_thread()
            return reader(*given, **named)

        monkeypatch.setattr(module, name, noted)
    with training_server(tmp_path) as (url, _):
        client = Client(url)
        client.loss(client.model(), 1)
        error_of(client.request("import_adapter/a", b"x", **{"Content-Type": "application/zip"}), 400)
        assert client.request("retrieve_future", json.loads('{"request_id": "a"}')).status_code == 410
    assert len(threads) == 4
    assert not [key for key, thread in threads.items() if thread.name == "server"]
