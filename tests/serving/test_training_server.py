"""The training service in plain HTTP, on the real engine: order, retries, tenants, quotas, checkpoints, failures.

tests/tinker asks it with Tinker's client.
"""

from __future__ import annotations

import errno
import io
import json
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx2
import numpy as np
import pyarrow
import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from hybrid_rlhf.configs.inference import TrainServerConfig
from hybrid_rlhf.models.head_check import module_logprobs
from hybrid_rlhf.serving.training import app, record, store
from hybrid_rlhf.serving.training.messages import MESSAGES
from hybrid_rlhf.serving.training.record import write_settings
from hybrid_rlhf.serving.training.service import TrainingService
from tests.support.clock import Gate, wait_until
from tests.support.models import random_adapter
from tests.support.tiny import tiny_model
from tests.support.training_server import (
    ALICE,
    BASE,
    BOB,
    SEQUENCE,
    Client,
    error_of,
    forward_backward,
    logprobs_of,
    loss_of,
    samples_of,
    training_server,
)

OTHER = SEQUENCE[::-1]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, TrainingService]]:
    folder = tmp_path_factory.mktemp("server")
    adapter = random_adapter(tiny_model(), tmp_path_factory.mktemp("adapter"), 0, ["q_proj", "down_proj"])
    with training_server(folder, adapters={"given": adapter}, max_models=6, max_resident_adapters=2) as (url, service):
        yield url, service


@pytest.fixture
def url(served: tuple[str, TrainingService]) -> str:
    return served[0]


@pytest.fixture
def service(served: tuple[str, TrainingService]) -> TrainingService:
    return served[1]


@pytest.fixture
def engine(service: TrainingService) -> Any:
    return service.base.engine


@pytest.fixture
def alice(url: str) -> Iterator[Client]:
    """A client whose sessions are finished afterwards, so that their models leave."""
    yield from _client(url, ALICE)


@pytest.fixture
def bob(url: str) -> Iterator[Client]:
    """Another one, with another key."""
    yield from _client(url, BOB)


def _client(url: str, key: str) -> Iterator[Client]:
    client = Client(url, key)
    yield client
    for session in client.get("sessions").json()["sessions"]:
        client.post(f"sessions/{session}/finish")


@pytest.fixture
def batches(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The models of each batch that is computed."""
    found: list[set[str]] = []
    compute = engine.forward_backward

    def observed(rows: Any) -> Any:
        found.append({row.adapter for row in rows})
        return compute(rows)

    monkeypatch.setattr(engine, "forward_backward", observed)
    return found


def mistake(result: Any) -> str:
    """The error of a result that its client has caused."""
    assert result["category"] == "user", result
    error: str = result["error"]
    return error


def logprobs(client: Client, model: str, seq: int) -> np.ndarray:
    """Log-probs of the sequence by a model."""
    result: np.ndarray = logprobs_of(client.result(client.forward_backward(model, seq, forward_only=True)))[0]
    return result


@contextmanager
def hold(service: TrainingService) -> Iterator[None]:
    """Context in which the engine's thread is busy, so that requests wait."""
    busy = Gate(lambda: None)
    service.worker._thread.submit(busy)
    with busy.held():
        yield


# -- order and retries


def test_a_request_that_is_sent_again_is_done_once(alice: Client) -> None:
    """And commands run in their order, whatever the order in which they arrive."""
    wanted = alice.train(alice.model(seed=5), 1, 3)
    model = alice.model(seed=5)
    for seq in (6, 4, 2, 4):
        alice.step(model, seq)
    requests = [alice.forward_backward(model, seq) for seq in (5, 5, 3, 1)]
    assert [loss_of(alice.result(request)) for request in requests] == [wanted[2], *wanted[::-1]]
    assert alice.step(model, 6) == f"{model}:6" and alice.loss(model, 1) == wanted[0]
    assert "must be the same" in error_of(alice.send(model, 1, [OTHER]), 400)
    body = {"session_id": alice.session(), "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 2}}
    assert alice.post("create_model", **body) == alice.post("create_model", **body)


def test_commands_without_a_number_follow_the_last_one(alice: Client) -> None:
    model = alice.model()
    first = alice.forward_backward(model, None)
    alice.result(first)
    step = alice.done("optim_step", model_id=model, adam_params={"learning_rate": 0.02})
    assert step["type"] == "optim_step" and first == f"{model}:1"


def test_a_faulty_command_fails_in_its_place_and_later_ones_go_on(alice: Client) -> None:
    """The client sends a large batch as several commands and the step behind them: the step would learn from a part."""
    model = alice.model()
    odd = MESSAGES["ForwardBackwardRequest"].FromString(forward_backward(model, 10))
    odd.data[0].loss_fn_inputs[0].value.shape[:] = [-2, -4]
    save = {"model_id": model, "path": "x"}
    good = alice.forward_backward(model, 1)
    faulty = {
        alice.forward_backward(model, 2, loss="unknown"): "loss_fn must be",
        alice.forward_backward(model, 3, [[1] * 66]): "1 to 64 tokens",
        alice.forward_backward(model, 4, []): "1 to 4096 datums",
        alice.forward_backward(model, 5, inputs=[{"weights": [float("nan")] * 8}]): "weights must be finite",
        alice.step(model, 6, -1): "adam_params.learning_rate must",
    }
    for seq, (change, reason) in enumerate(
        (
            ({"path": "../x"}, "a checkpoint's name is"),
            ({"path": "ä" * 128}, "a checkpoint's name is"),
            ({"ttl_seconds": 10**12}, "ttl_seconds must"),
        ),
        7,
    ):
        faulty[alice.post("save_weights", seq_id=seq, **save | change)["request_id"]] = reason
    request = alice.request("forward_backward", odd.SerializeToString()).json()["request_id"]
    faulty[request] = "must have the shape [-2, -4]"
    long = alice.post("load_weights", model_id=model, seq_id=11, path="x" * 501, optimizer=True)
    faulty[long["request_id"]] = "path must be as"
    faulty[alice.step(model, 12)] = "a backward pass of this step has failed"
    for request, reason in faulty.items():
        assert reason in mistake(alice.result(request))
    assert alice.loss(model, 13) == loss_of(alice.result(good))  # no step was made, and the first gradient is gone
    bad = alice.forward_backward(model, 14, [[1, 2, 300]], forward_only=True)  # has no part in a gradient
    assert "must be token ids" in alice.result(bad)["error"]
    assert alice.result(alice.step(model, 15))["metrics"]["skipped"] == 0
    assert alice.loss(model, 16) == alice.train(alice.model(), 1, 2)[1]


def test_several_commands_before_a_step_add_their_gradients(alice: Client) -> None:
    together = alice.model()
    alice.train(together, 1, 1, [SEQUENCE, OTHER])
    apart = alice.model()
    alice.forward_backward(apart, 1)
    alice.forward_backward(apart, 2, [OTHER])
    alice.step(apart, 3)
    np.testing.assert_allclose(logprobs(alice, apart, 4), logprobs(alice, together, 3), atol=1e-5)


def test_a_step_that_is_not_finite_is_answered(alice: Client, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON has no infinity: the client asked for ever for an answer that could not be written."""
    model = alice.model()
    alice.loss(model, 1)
    monkeypatch.setattr(engine, "step", lambda *_: {"grad_norm": float("inf"), "step": 0, "skipped": 1.0})
    assert alice.result(alice.step(model, 2))["metrics"] == {"skipped": 1.0}


# -- tenants


def test_a_key_is_needed_and_others_things_are_not_there(url: str, alice: Client, bob: Client) -> None:
    for key in ("", "tml-wrong-key", "Bearer x"):
        assert "TINKER_API_KEY" in error_of(Client(url, key).get("get_server_capabilities"), 401)
    assert Client(url, "").get("healthz").json() == {"status": "ok"}
    session = alice.session()
    model = alice.model(session)
    path = alice.save(model, 1, "mine")["path"]
    sampler = {"sampling_session_seq_id": 0, "model_path": path}
    sampler_id = alice.post("create_sampling_session", session_id=session, **sampler)["sampling_session_id"]
    prompt = {"prompt": {"chunks": [{"tokens": [3]}]}, "sampling_params": {"max_tokens": 1}}
    for path_of, content in (
        ("get_info", {"model_id": model}),
        ("forward_backward", forward_backward(model, 2)),
        ("optim_step", {"model_id": model, "adam_params": {}}),
        ("save_weights", {"model_id": model, "path": "theirs"}),
        ("unload_model", {"model_id": model}),
        ("retrieve_future", {"request_id": f"{model}:1"}),
        ("cancel_future", {"request_id": f"{model}:1"}),
        ("session_heartbeat", {"session_id": session}),
        ("create_model", {"session_id": session, "model_seq_id": 1, "base_model": BASE}),
        ("weights_info", {"tinker_path": path}),
        ("asample", {**prompt, "model_path": path}),
        ("asample", {**prompt, "sampling_session_id": sampler_id, "seq_id": 0}),
        ("create_sampling_session", {"session_id": bob.session(), **sampler}),
    ):
        answer = bob.request(path_of, content)
        assert answer.status_code == (410 if path_of.endswith("future") else 404), (path_of, answer.text)
    assert bob.delete(f"training_runs/{model}/checkpoints/weights/mine").status_code == 404
    assert bob.get(f"training_runs/{model}").status_code == 404
    assert "there is no checkpoint" in mistake(bob.load(path))
    assert model not in json.dumps([bob.get(place).json() for place in ("training_runs", "checkpoints", "sessions")])
    assert alice.get(f"training_runs/{model}").json()["last_checkpoint"]["tinker_path"] == path


def test_neighbours_in_a_batch_change_nothing(
    service: TrainingService, batches: list[set[str]], alice: Client, bob: Client
) -> None:
    """Commands that wait together go into one packed batch."""
    wanted = {client: client.train(client.model(seed=seed), 1, 4) for client, seed in ((alice, 1), (bob, 2))}
    models = {alice: alice.model(seed=1), bob: bob.model(seed=2)}
    batches.clear()
    requests: dict[Client, list[str]] = {client: [] for client in models}
    with hold(service):
        for client, model in models.items():
            for step in range(4):
                requests[client].append(client.forward_backward(model, 2 * step + 1))
                client.step(model, 2 * step + 2)
    for client, values in wanted.items():
        losses = [loss_of(client.result(request)) for request in requests[client]]
        np.testing.assert_allclose(losses, values, rtol=1e-5)
    assert batches[1:-1] == [set(models.values())] * 3, "the first command of the first client is alone"


def test_weights_beside_others_are_bit_for_bit_those_of_training_alone(tmp_path: Path) -> None:
    """A packed batch with the rows of others rounds differently, which Adam enlarges."""
    rows = {ALICE: [list(range(3, 3 + size)) for size in (30, 17, 25)], BOB: [list(range(5, 28))] * 2}

    def trained(*keys: str) -> list[bytes]:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        with training_server(folder, deterministic=True) as (url, service):
            clients = [Client(url, key) for key in keys]
            models = [client.model(seed=3) for client in clients]
            with hold(service):
                for step in range(3):
                    for key, client, model in zip(keys, clients, models, strict=True):
                        client.forward_backward(model, 2 * step + 1, rows[key])
                        client.step(model, 2 * step + 2)
            for client, model in zip(clients, models, strict=True):
                client.save(model, 7, "end")
            found = [folder / "runs" / model / "weights" / "end" / "adapter_model.safetensors" for model in models]
            return [file.read_bytes() for file in found]

    assert trained(ALICE, BOB) == trained(ALICE) + trained(BOB)


# -- failures of the engine


def test_a_batch_that_fails_is_computed_one_by_one_and_only_the_cause_fails(
    service: TrainingService, engine: Any, alice: Client, bob: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = alice.train(alice.model(seed=1), 1, 1)
    good = alice.model(seed=1)
    bad = bob.model(seed=2)
    compute = engine.forward_backward

    def failing(rows: Any) -> Any:
        if any(row.adapter == bad for row in rows):
            raise RuntimeError("out of memory")
        return compute(rows)

    monkeypatch.setattr(engine, "forward_backward", failing)
    with hold(service):
        request = alice.forward_backward(good, 1)
        failed = [bob.forward_backward(bad, 1), bob.step(bad, 2)]
    assert loss_of(alice.result(request)) == wanted[0]
    for result in map(bob.result, failed):
        assert result["category"] == "server" and "RuntimeError: the log of the server tells why" in result["error"]
        assert "out of memory" not in result["error"], "what failed may contain other clients' data"
    monkeypatch.undo()
    assert bob.train(bad, 3, 2) == bob.train(bob.model(seed=2), 1, 2), "the step without its gradient was left out"


def test_a_command_that_cannot_be_read_fails_in_its_place_too(alice: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected error was status 500; sent again, the command had no result, and later ones waited for it."""
    model = alice.model()
    with monkeypatch.context() as patch:
        patch.setattr("hybrid_rlhf.serving.training.rows.read_datum", lambda *_: 1 / 0)
        request = alice.forward_backward(model, 1)
    assert alice.result(request)["category"] == "server"
    assert alice.loss(model, 2) > 0


def test_an_answer_that_fails_is_not_computed_again(
    service: TrainingService, batches: list[set[str]], alice: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradient, and those of the others in its batch, would count twice."""
    first, second = (alice.model() for _ in range(2))
    with monkeypatch.context() as patch:
        patch.setattr("hybrid_rlhf.serving.training.rows.forward_backward_output", lambda *_: 1 / 0)
        with hold(service):
            requests = [alice.forward_backward(first, 1, forward_only=True)]
            wait_until(lambda: service.worker._thread._work_queue.qsize() == 1)
            requests += [alice.forward_backward(first, 2), alice.forward_backward(second, 1)]
        assert [alice.result(request)["category"] for request in requests] == ["server"] * 3
    assert batches == [{first}, {first, second}]
    assert "the step is left out" in alice.result(alice.step(first, 3))["error"]
    assert alice.train(first, 4, 2) == alice.train(alice.model(), 1, 2)


def test_a_forward_pass_that_fails_leaves_the_step_alone(
    engine: Any, alice: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of an earlier command is whole: the step was left out."""
    model = alice.model()
    alice.loss(model, 1)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "forward_backward", lambda rows: 1 / 0)
        assert alice.result(alice.forward_backward(model, 2, forward_only=True))["category"] == "server"
    assert alice.result(alice.step(model, 3))["metrics"]["skipped"] == 0


# -- quotas


def test_what_a_key_has_too_much_of_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But a command is accepted that those wait for which have used up the quota: none of them would ever end."""
    limits = {"max_requests": 3, "max_models": 2, "max_stored_gib": 7e-5, "max_body_mib": 0.05}
    with training_server(tmp_path, **limits) as (url, service):
        alice = Client(url)
        session = alice.session()
        first, second = (alice.model(session, number) for number in range(2))
        third = alice.done("create_model", session_id=session, model_seq_id=2, base_model=BASE)
        assert "may have 2 models in training" in mistake(third)
        waiting = [alice.forward_backward(first, seq, forward_only=True) for seq in (2, 3, 4)]
        for model, seq in ((first, 5), (second, 1)):
            answer = alice.send(model, seq)
            assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        sender: Any = service.tenants.of_key(ALICE)
        assert sender.queued_bytes > 3 * 4096, "rows take more than their bytes"
        Client(url, BOB).session()  # another key is not concerned
        for request in (alice.forward_backward(first, 1, forward_only=True), *waiting):
            assert loss_of(alice.result(request)) > 0
        assert alice.loss(second, 1) > 0
        assert alice.save(first, 5, "a")["path"]
        assert "may have 75161 bytes (max_stored_gib)" in alice.save(second, 2, "b")["error"]
        assert alice.request("create_session", {"user_metadata": {"x": "y" * 60_000}}).status_code == 413
        assert alice.unload(first)["type"] == "unload_model"
        fourth = alice.model(session, 3)
        assert "may have 2 models in training" in mistake(alice.result(alice.forward_backward(first, 6)))
        assert set(service.models) == {second, fourth}, "a model that goes on counts again"
        monkeypatch.setattr(store, "MOST_RECORDS", 5)  # a session, three models and a checkpoint
        new_model = {"session_id": session, "model_seq_id": 4, "base_model": BASE}
        for path, body in (("create_session", {}), ("create_model", new_model)):
            assert "and 5 sessions, sampling sessions, runs" in error_of(alice.request(path, body), 400)


def test_a_key_holds_half_of_the_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request for a result holds one for 20 s; those of others were closed."""
    monkeypatch.setattr(app, "connections_that_fit", lambda: 4)
    with training_server(tmp_path, poll_seconds=600.0) as (url, service), ThreadPoolExecutor(2) as threads:
        alice = Client(url)
        model = alice.model()
        sender: Any = service.tenants.of_key(ALICE)
        with hold(service):
            request = alice.forward_backward(model, 1)
            wait_until(lambda: sender.arriving.requests == 0)  # a request leaves the count after its answer
            polls = [threads.submit(Client(url).result, request) for _ in range(2)]
            wait_until(lambda: sender.arriving.requests == 2, "the second request")
            assert alice.get("sessions").status_code == 429
            assert Client(url, BOB).session()
        assert all(loss_of(poll.result()) > 0 for poll in polls)
        wait_until(lambda: sender.arriving.requests == 0)
        assert alice.get("sessions").status_code == 200


# -- checkpoints


def test_a_checkpoint_that_is_deleted_twice_at_once_is_not_there(
    url: str, service: TrainingService, alice: Client
) -> None:
    """The second request, and one that sets its time meanwhile, failed the server's way."""
    model = alice.model()
    alice.save(model, 1, "a")
    place = f"training_runs/{model}/checkpoints/weights/a"
    others = [Client(url) for _ in range(3)]
    with ThreadPoolExecutor(3) as threads:
        with hold(service):
            answers = [threads.submit(client.delete, place) for client in others[:2]]
            wait_until(lambda: service.worker._thread._work_queue.qsize() == 2)
            answers.append(threads.submit(others[2].put, f"{place}/ttl", ttl_seconds=60))
            wait_until(lambda: service.worker._thread._work_queue.qsize() == 3)
        statuses = [answer.result().status_code for answer in answers]
    assert sorted(statuses[:2]) == [200, 404] and statuses[2] == 404


def test_a_checkpoint_never_changes(service: TrainingService, alice: Client) -> None:
    """test_training_restart.py has writers that fail or are killed."""
    model = alice.model()
    path = alice.save(model, 1, "a")["path"]
    folder = service.store.find(path, "alice").folder
    files = contents(folder)
    alice.train(model, 2, 1)
    assert "a checkpoint never changes" in alice.save(model, 4, "a")["error"]
    assert contents(folder) == files
    assert alice.save(model, 5, "a", overwrite=True)["path"] == path
    assert contents(folder)["adapter_model.safetensors"] != files["adapter_model.safetensors"]


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_saved_state_continues_exactly(alice: Client) -> None:
    model = alice.model()
    alice.train(model, 1, 3)
    path = alice.save(model, 7, "state")["path"]
    wanted = alice.train(model, 8, 3)
    session = alice.session()
    loaded = alice.load(path, session, optimizer=True)["model_id"]
    assert loaded == f"{session}:train:0"
    assert alice.train(loaded, 1, 3) == wanted
    weights_only = alice.load(path, session, 1)["model_id"]
    losses = alice.train(weights_only, 1, 3)
    assert losses[0] == wanted[0] and losses[1:] != wanted[1:]
    alice.done("load_weights", model_id=weights_only, seq_id=7, path=path, optimizer=True)
    assert alice.train(weights_only, 8, 3) == wanted
    assert alice.post("get_info", model_id=weights_only)["lora_rank"] == 4


def test_checkpoints_are_listed_deleted_and_expire(service: TrainingService, alice: Client) -> None:
    model = alice.model()
    for seq, name in enumerate("abc", 1):
        route = "save_weights_for_sampler" if name == "c" else "save_weights"
        alice.done(route, model_id=model, seq_id=seq, path=name, ttl_seconds=3600, user_metadata={"n": name})
    runs = f"training_runs/{model}/checkpoints"
    listed = alice.get(runs).json()["checkpoints"]
    assert [entry["checkpoint_id"] for entry in listed] == ["weights/a", "weights/b", "sampler_weights/c"]
    assert listed[0]["user_metadata"] == {"n": "a"} and listed[0]["expires_at"] is not None
    assert listed[0]["size_bytes"] > 1000 and listed[2]["checkpoint_type"] == "sampler"
    assert [alice.delete(f"{runs}/weights/a").status_code for _ in range(2)] == [200, 404]
    assert alice.put(f"{runs}/weights/b/ttl", ttl_seconds=None).status_code == 200
    for checkpoint in service.store.checkpoints("alice", model):
        checkpoint.expires = None if checkpoint.expires is None else time.time() - 1
    service.store.expire()
    assert [entry["checkpoint_id"] for entry in alice.get(runs).json()["checkpoints"]] == ["weights/b"]
    assert alice.get("checkpoints", limit=1).json()["cursor"]["limit"] == 1
    assert alice.get("checkpoints", limit="x").status_code == 400


def test_an_adapter_is_merged_into_a_model_that_transformers_loads(alice: Client, tmp_path: Path) -> None:
    model = alice.model()
    alice.train(model, 1, 5)
    wanted = logprobs(alice, model, 11)
    assert alice.done("save_weights_external", model_id=model, seq_id=12, path="merged")["path"].endswith("/merged")
    place = f"training_runs/{model}/checkpoints/external_weights/merged/external_weights_urls"
    urls = alice.get(place).json()["urls"]
    for name, url in urls.items():
        answer = httpx2.get(url)  # without the key
        assert answer.status_code == 200
        (tmp_path / name).write_bytes(answer.content)
    some = urls["config.json"]
    assert httpx2.get(some.replace("config.json", "model.safetensors")).status_code == 403
    assert httpx2.get(some.replace("/files/", "/files/0")).status_code == 403
    merged = AutoModelForCausalLM.from_pretrained(tmp_path)
    np.testing.assert_allclose(module_logprobs(merged, SEQUENCE).numpy(), wanted, atol=1e-4)
    assert "a merged model is no adapter" in alice.load(f"tinker://{model}/external_weights/merged")["error"]


def test_an_adapter_from_elsewhere_is_trained_on(alice: Client, bob: Client, tmp_path: Path) -> None:
    """Uploaded by a client, or given to all by the operator."""

    def imported(content: bytes) -> httpx2.Response:
        return alice.request("import_adapter/mine", content, **{"Content-Type": "application/zip"})

    folder = random_adapter(tiny_model(), tmp_path / "peft", 1, ["q_proj", "up_proj"])
    files = contents(Path(folder))
    damaged = _zip(files, zipfile.ZIP_DEFLATED).replace(b"adapter_config.json", b"adapter_config.json" + b"\xff" * 9, 1)
    path = imported(_zip({f"some/{name}": content for name, content in files.items()})).json()["path"]
    model = alice.load(path)["model_id"]
    wanted = module_logprobs(PeftModel.from_pretrained(tiny_model(), folder), SEQUENCE)
    np.testing.assert_allclose(logprobs(alice, model, 1), wanted.numpy(), atol=1e-4)
    losses = alice.train(model, 2, 8)
    assert losses[-1] < 0.7 * losses[0]
    given = "tinker://server/weights/given"
    assert bob.load(given)["model_id"]
    assert alice.greedy(5, model_path=given) != alice.greedy(5, base_model=BASE)
    other = random_adapter(tiny_model(hidden_size=64), tmp_path / "other", 1, ["q_proj"])
    for content, error in (
        (b"no archive", "must be a ZIP archive"),
        (_zip({"adapter_config.json": b"{}"}), "it lacks one"),
        (damaged, "must be a ZIP archive"),
        (_zip(contents(Path(other))), ""),
    ):
        text = error_of(imported(content), 400)
        assert error in text and "/runs/" not in text, "a folder of the server"
    given = "training_runs/server/checkpoints/weights/given"
    for answer in (alice.delete(given), alice.put(f"{given}/ttl", ttl_seconds=1)):
        assert "only its operator removes it" in error_of(answer, 400)


def test_links_lead_to_the_adapter_of_the_operator_alone(
    service: TrainingService, alice: Client, tmp_path: Path
) -> None:
    """Its folder may have secrets in it, or links to them, and every key may ask for the links."""
    folder = service.store.find("tinker://server/weights/given", "alice").folder
    (tmp_path / "secret").write_text("x")
    (folder / ".env").write_text("x")
    (folder / "link.safetensors").symlink_to(tmp_path / "secret")
    weights = folder / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.rename(tmp_path / "blob")  # as in the cache of a hub
    weights.symlink_to(tmp_path / "blob")
    urls = alice.get("training_runs/server/checkpoints/weights/given/external_weights_urls").json()["urls"]
    assert set(urls) == {"adapter_config.json", "adapter_model.safetensors"}
    assert httpx2.get(urls["adapter_model.safetensors"]).content == content


def test_a_checkpoint_that_is_broken_is_named_by_its_path(service: TrainingService, alice: Client) -> None:
    """Not by its folder, which tells where the server has its files."""
    model = alice.model()
    path = alice.save(model, 1, "broken")["path"]
    folder = service.store.find(path, "alice").folder
    settings = folder / "adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"use_dora": True}))
    sampled = alice.result(alice.asample([3], {"max_tokens": 2}, model_path=path))
    loaded = alice.done("load_weights", model_id=model, seq_id=2, path=path, optimizer=False)
    for answer in (sampled, loaded, alice.load(path)):
        assert path in answer["error"] and str(folder.parent) not in answer["error"], answer


def test_a_slow_disk_holds_up_no_other_client(alice: Client, bob: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions were written by the thread that answers."""
    gate = Gate(store.write_whole)
    monkeypatch.setattr(store, "write_whole", gate)
    with ThreadPoolExecutor(1) as threads:
        session = threads.submit(alice.session)
        with gate.held():
            assert bob.get("healthz").status_code == 200
        assert session.result()


def test_a_full_disk_is_named(alice: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a status that the client does not repeat; and its key can make room itself."""
    model = alice.model()
    alice.save(model, 1, "x")
    session = {"session_id": alice.session(), "base_model": BASE, "sampling_session_seq_id": 1}
    monkeypatch.setattr(store, "write_whole", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    failed = alice.save(model, 2, "y")
    assert failed["category"] == "server" and "the disk of the server is full" in failed["error"]
    for path, body in (("create_session", {}), ("create_sampling_session", session)):
        assert "the disk of the server is full" in error_of(alice.request(path, body), 400)
    ttl = f"training_runs/{model}/checkpoints/weights/x"
    assert "the disk of the server is full" in error_of(alice.put(f"{ttl}/ttl", ttl_seconds=9), 400)
    assert alice.delete(ttl).status_code == 200


def test_a_server_starts_on_a_full_disk_with_what_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clients delete checkpoints through it."""
    config = TrainServerConfig(path=BASE)
    write_settings(config, tmp_path)
    before = (tmp_path / "config.yaml").read_text()
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(record, "save_config", full)
    write_settings(replace(config, max_models=3), tmp_path)
    assert (tmp_path / "config.yaml").read_text() == before
    with pytest.raises(OSError, match="No space left"):
        write_settings(config, tmp_path / "new")
    full.side_effect = OSError(errno.EROFS, "Read-only file system")
    with pytest.raises(OSError, match="Read-only"):
        write_settings(config, tmp_path)


def _zip(files: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", compression) as writer:
        for name, content in files.items():
            writer.writestr(name, content)
    return archive.getvalue()


# -- sessions


def test_a_finished_session_lets_its_models_go(service: TrainingService, engine: Any, alice: Client) -> None:
    session = alice.session()
    model = alice.model(session)
    alice.train(model, 1, 2)
    path = alice.save(model, 5, "kept")["path"]
    waiting = alice.forward_backward(alice.model(session, 1), 2)  # the command before it never comes
    alice.post(f"sessions/{session}/finish")
    assert alice.request("session_heartbeat", {"session_id": session}).status_code == 410  # the client stops them
    wait_until(lambda: model not in engine.names)
    assert model not in service.models
    assert "the model has been unloaded" in alice.result(waiting)["error"]
    assert alice.post("weights_info", tinker_path=path)["lora_rank"] == 4


def test_models_leave_while_there_is_always_something_to_compute(
    engine: Any, alice: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stayed until the server had nothing to do."""
    compute = engine.forward_backward
    remove = engine.remove
    calls: list[str] = []
    gate = Gate(lambda rows: (calls.append("compute"), compute(rows))[1])
    monkeypatch.setattr(engine, "forward_backward", gate)
    monkeypatch.setattr(engine, "remove", lambda name: (calls.append(name), remove(name)))
    session = alice.session()
    idle = alice.model(session)
    long = alice.forward_backward(alice.model(), 1, [list(range(3, 60))] * 10)
    with gate.held():
        alice.post(f"sessions/{session}/finish")
    alice.result(long)
    assert calls.count("compute") == 10 and calls.index(idle) <= 2


def test_a_command_that_comes_while_its_model_leaves_is_done(
    engine: Any, alice: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It failed, as if the model had been unloaded after it."""
    model = alice.model()
    wanted = alice.train(model, 1, 2)
    alice.save(model, 5, "state")
    gate = Gate(engine.remove)
    monkeypatch.setattr(engine, "remove", gate)
    unload = alice.post("unload_model", model_id=model)["request_id"]
    with gate.held():
        request = alice.forward_backward(model, 6)
    assert alice.result(unload)["type"] == "unload_model"
    assert loss_of(alice.result(request)) < wanted[-1]


def test_a_session_that_never_finishes_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its models leave, and then what only its clients need; what was saved by name stays, and so does all of a session
    that is seen."""
    monkeypatch.setattr("hybrid_rlhf.serving.training.worker._SWEEP_SECONDS", 0.1)
    monkeypatch.setattr("hybrid_rlhf.serving.training.sessions.KEPT_SECONDS", 2.0)
    with training_server(tmp_path, session_minutes=0.05) as (url, service):
        alice = Client(url)
        alive = alice.session()
        lost = alice.session()
        runs = {session: [alice.model(session, number) for number in range(2)] for session in (alive, lost)}
        samplers = {}
        for session, (model, _) in runs.items():
            alice.save(model, 1, "kept")
            samplers[session] = alice.save(model, 2, None)["sampling_session_id"]

        def is_over() -> bool:
            alice.post("session_heartbeat", session_id=alive)
            return not (tmp_path / "sessions" / f"{lost}.json").exists()

        wait_until(is_over)
        engine: Any = service.base.engine
        assert set(service.models) == {*engine.names} == {*runs[alive]}
        assert alice.get("sessions").json()["sessions"] == [alive]
        assert alice.request("session_heartbeat", {"session_id": lost}).status_code == 404
        kept = runs[lost][0]
        path = f"tinker://{kept}/weights/kept"
        assert {*service.store.runs} == {*runs[alive], kept}
        assert {*service.store.samplers} == {samplers[alive]}
        assert [entry.path for entry in service.store.checkpoints(run_id=kept)] == [path]
        # a run is forgotten before its folder is removed
        wait_until(lambda: {file.name for file in (tmp_path / "runs").iterdir()} == {*service.store.runs})
        assert alice.greedy(5, sampling_session_id=samplers[alive])
        assert alice.get(f"sessions/{alive}").json()["sampler_ids"] == [samplers[alive]]
        assert alice.load(path, alive, 2, optimizer=True)["model_id"] == f"{alive}:train:2"
        assert alice.loss(kept, 3) > 0, "it was saved by its last command"
        assert alice.get(f"sessions/{lost}").json()["training_run_ids"] == [kept]
        assert alice.delete(f"training_runs/{kept}/checkpoints/weights/kept").status_code == 200
        wait_until(lambda: not (tmp_path / "runs" / kept).exists())
        assert alice.get(f"training_runs/{kept}").status_code == 404


def test_an_unloaded_model_goes_on_only_from_what_it_saved(alice: Client) -> None:
    """Never silently from an older state."""
    model = alice.model()
    wanted = alice.train(model, 1, 2)
    alice.save(model, 5, "state")
    alice.unload(model)
    assert alice.train(model, 6, 1)[0] < wanted[-1], "it was saved after the last command that changed it"
    alice.unload(model)
    assert alice.send(model, 8).status_code == 410
    model = alice.model()
    alice.save(model, 1, "state")
    alice.forward_backward(model, 2)
    alice.done("save_weights_for_sampler", model_id=model, seq_id=3, path="sampler")
    alice.unload(model)  # with a gradient, which is not saved
    for seq in (4, None):  # without a number, the server cannot tell whether later updates are missing
        assert f"tinker://{model}/weights/state" in error_of(alice.send(model, seq), 410)


# -- sampling


def test_a_sampling_session_that_is_asked_for_again_is_the_same_or_refused(alice: Client) -> None:
    """With other weights it was answered as if it had them; 409 would be sent again by the client."""
    session = alice.session()
    path = alice.done("save_weights_for_sampler", model_id=alice.model(session), seq_id=1, path="a")["path"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    first = alice.post("create_sampling_session", **body)
    assert alice.post("create_sampling_session", **body) == first
    refused = alice.request("create_sampling_session", {**body, "base_model": BASE, "model_path": None})
    assert "keeps its weights" in error_of(refused, 400)
    body = {"model_id": alice.model(session, 1), "seq_id": 1, "sampling_session_seq_id": 0}
    assert "keeps its weights" in mistake(alice.done("save_weights_for_sampler", **body))
    assert alice.get(f"samplers/{first['sampling_session_id']}").json()["model_path"] == path


def test_a_sampling_session_keeps_its_weights_while_training_goes_on(alice: Client) -> None:
    session = alice.session()
    model = alice.model(session)
    alice.train(model, 1, 15)
    saved = alice.save(model, 31, None)
    assert saved["path"] is None
    sampler = {"sampling_session_id": saved["sampling_session_id"]}
    assert alice.greedy(SEQUENCE[0], **sampler) == SEQUENCE[1:]
    alice.train(model, 32, 3, [OTHER])
    newer = alice.done("save_weights_for_sampler", model_id=model, seq_id=38, path="newer")["path"]
    assert alice.greedy(SEQUENCE[0], model_path=newer) != SEQUENCE[1:]
    other = alice.model(session, 1)
    alice.train(other, 1, 15, [OTHER])
    path = alice.done("save_weights_for_sampler", model_id=other, seq_id=31, path="other")["path"]
    assert alice.greedy(OTHER[0], model_path=path) == OTHER[1:]
    assert alice.greedy(SEQUENCE[0], 1, **sampler) == SEQUENCE[1:]
    assert alice.greedy(SEQUENCE[0], base_model=BASE) != SEQUENCE[1:]
    assert alice.get(f"samplers/{sampler['sampling_session_id']}").json()["base_model"] == BASE
    assert alice.post("join_sampling_session", **sampler)["client_counter"] > 0


def test_samples_have_what_was_asked_for(alice: Client) -> None:
    content = {"session_id": alice.session(), "sampling_session_seq_id": 0, "base_model": BASE}
    sampler = alice.post("create_sampling_session", **content)
    prompt = {"chunks": [{"tokens": [5, 6]}, {"tokens": [7]}]}

    def ask(place: int, sampling: dict[str, Any] | None = None, **more: Any) -> Any:
        params = {"max_tokens": 6, "seed": 3, **(sampling or {})}
        result = alice.done("asample", **sampler, prompt=prompt, sampling_params=params, seq_id=place, **more)
        return MESSAGES["SampleResponse"].FromString(result)

    def tokens_of(answer: Any) -> list[list[int]]:
        return [np.frombuffer(sequence.tokens, "<i4").tolist() for sequence in answer.sequences]

    first = ask(0, num_samples=3, topk_sample_logprobs=2)
    tokens = tokens_of(first)
    assert len({tuple(entry) for entry in tokens}) == 3
    assert [sequence.stop_reason for sequence in first.sequences] == [
        int(len(entry) == 6 and 2 not in entry) for entry in tokens
    ]
    top = first.sequences[0].topk_sampled_logprobs
    assert (top.k, top.length) == (2, len(tokens[0]))
    assert ask(0, num_samples=3, topk_sample_logprobs=2) == first, "sent again: the same result"
    assert tokens_of(ask(1, num_samples=3)) == tokens
    assert tokens_of(ask(2, {"stop": [tokens[0][1]]}))[0] == tokens[0][:2]
    whole = np.frombuffer(ask(3, prompt_logprobs=True).prompt_logprobs, "<f4")
    assert np.isnan(whole).tolist() == [True, False, False]
    last = np.frombuffer(ask(4, prompt_logprobs=True, prompt_logprobs_last_n=1).prompt_logprobs, "<f4")
    assert np.isnan(last).tolist() == [True, True, False] and last[2] == whole[2]
    (greedy,) = tokens_of(ask(5, {"temperature": 0, "max_tokens": 1000}))
    assert len(greedy) <= 61, "as many as the context has room for"
    for tokens, sampling, more, error in (
        ([1] * 64, {}, {}, "prompt must have 1 to 63 tokens"),
        ([], {}, {}, "prompt must have 1 to 63 tokens"),
        ([999], {}, {}, "token ids must be in"),
        ([5], {"stop": []}, {}, "stop must name what ends a completion"),
        ([5], {}, {"topk_sample_logprobs": 99}, "at most 20"),
    ):
        request = alice.asample(tokens, {"max_tokens": 2, **sampling}, base_model=BASE, **more)
        assert error in mistake(alice.result(request))


def test_samples_of_one_request_take_turns(service: TrainingService, alice: Client, bob: Client) -> None:
    """It entered the batch as a whole, and others waited for its last sample."""
    with service.samplers.batch.paused():
        sampling = {"max_tokens": 50, "seed": 1, "temperature": 100.0}
        large = alice.asample([5], sampling, base_model=BASE, num_samples=100)
        request = bob.asample([5], {"max_tokens": 5}, base_model=BASE)
        wait_until(lambda: service.samplers.batch.unfinished == 8)  # seven of hers, and his
    assert len(samples_of(bob.result(request))) == 1
    assert service.futures.find(large, service.tenants.of_key(ALICE)).finished is None  # type: ignore[arg-type]
    samples = samples_of(alice.result(large))
    assert len(samples) == 100
    again = samples_of(alice.result(alice.asample([5], sampling, base_model=BASE, num_samples=3)))
    assert again == samples[:3]  # the parts continue the numbers of the samples


def test_a_cancelled_request_ends_and_others_go_on(alice: Client) -> None:
    long = [alice.asample([5], {"max_tokens": 60}, base_model=BASE, num_samples=8) for _ in range(6)]
    for request in long:
        alice.post("cancel_future", request_id=request)
    results = [alice.result(request) for request in long]
    assert any(isinstance(entry, dict) and "cancelled" in entry["error"] for entry in results)
    assert len(alice.greedy(5, base_model=BASE)) > 0


def test_a_request_that_is_cancelled_while_its_weights_are_loaded_is_not_sampled(
    service: TrainingService, alice: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was decoded to its end."""
    samplers = service.samplers
    path = alice.done("save_weights_for_sampler", model_id=alice.model(), seq_id=1, path="slow")["path"]
    submitted: list[Any] = []
    monkeypatch.setattr(samplers.batch, "submit", lambda batch, deliver: submitted.append(batch))
    with samplers.batch.paused():
        request = alice.asample([5], {"max_tokens": 60}, model_path=path)
        alice.post("cancel_future", request_id=request)
        assert "cancelled" in alice.result(request)["error"]
    wait_until(lambda: not samplers._running)
    assert submitted == []


def test_a_request_whose_prompt_fails_is_not_decoded_on(
    service: TrainingService, alice: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It kept its rows of the batch, in which others had their turns already."""
    batch = service.samplers.batch
    with batch.paused(), monkeypatch.context() as patch:
        failing: Future[Any] = Future()
        failing.set_exception(RuntimeError("out of memory"))
        patch.setattr(batch, "prompt_logprobs", lambda *_, **__: failing)
        failed = alice.result(alice.asample([5], {"max_tokens": 60}, base_model=BASE, prompt_logprobs=True))
        assert failed["category"] == "server" and not batch._owners


# -- bodies


def test_compressed_and_sparse_bodies(alice: Client) -> None:
    """The client compresses its commands, and sends two-dimensional targets as sparse ones."""
    model = alice.model()
    wanted = logprobs(alice, model, 1)
    message = MESSAGES["ForwardBackwardRequest"].FromString(forward_backward(model, 2, forward_only=True))
    targets = message.data[0].loss_fn_inputs[0].value
    dense = targets.dense
    targets.ClearField("dense")
    targets.shape.append(1)
    targets.sparse_csr.values = dense
    targets.sparse_csr.crow_indices = np.arange(9, dtype="<i8").tobytes()
    targets.sparse_csr.col_indices = np.zeros(8, "<i8").tobytes()
    body = pyarrow.compress(message.SerializeToString(), codec="zstd", asbytes=True)
    answer = alice.request("forward_backward", body, **{"Content-Encoding": "zstd"})
    np.testing.assert_array_equal(logprobs_of(alice.result(answer.json()["request_id"]))[0], wanted)
    for encoding, content in (("zstd", body[:-4]), ("zstd", b"x"), ("br", body)):
        assert alice.request("forward_backward", content, **{"Content-Encoding": encoding}).status_code == 400


def test_metrics_name_the_tenants(url: str, alice: Client) -> None:
    alice.train(alice.model(), 1, 1)
    text = httpx2.get(f"{url}/metrics").text
    for line in (
        'hybrid_rlhf_training_trained_tokens_total{tenant="alice"}',
        'hybrid_rlhf_training_steps_total{tenant="alice"}',
        'hybrid_rlhf_training_models{tenant="alice"}',
        'hybrid_rlhf_training_stored_bytes{tenant="bob"}',
        'hybrid_rlhf_training_waiting_tokens{tenant="bob"} 0.0',
        "hybrid_rlhf_training_batch_seconds_count",
        'path="/forward_backward",status="200"',
    ):
        assert line in text
