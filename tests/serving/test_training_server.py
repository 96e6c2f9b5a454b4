"""The training service in plain HTTP, on the real engine: order, retries, tenants, quotas, checkpoints, failures.

tests/tinker asks it with Tinker's client.
"""

from __future__ import annotations

import io
import json
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pyarrow
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from hybrid_rlhf.serving.training.messages import MESSAGES
from hybrid_rlhf.serving.training.service import TrainingService
from tests.support.clock import wait_until
from tests.support.models import random_adapter
from tests.support.tiny import tiny_model
from tests.support.training_server import (
    ALICE,
    BASE,
    BOB,
    SEQUENCE,
    Client,
    forward_backward,
    logprobs_of,
    loss_of,
    samples_of,
    training_server,
)

ADAM = {"learning_rate": 0.02}
OTHER = SEQUENCE[::-1]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, TrainingService]]:
    folder = tmp_path_factory.mktemp("server")
    adapter = random_adapter(tiny_model(), tmp_path_factory.mktemp("adapter"), 0, ["q_proj", "down_proj"])
    with training_server(folder, adapters={"given": adapter}, max_models=6) as (url, service):
        yield url, service


@pytest.fixture
def alice(served: tuple[str, TrainingService]) -> Iterator[Client]:
    """A client whose sessions are finished afterwards, so that their models leave."""
    yield from _client(served[0], ALICE)


@pytest.fixture
def bob(served: tuple[str, TrainingService]) -> Iterator[Client]:
    """Another one, with another key."""
    yield from _client(served[0], BOB)


def _client(url: str, key: str) -> Iterator[Client]:
    client = Client(url, key)
    yield client
    for session in client.get("sessions").json()["sessions"]:
        client.post(f"sessions/{session}/finish")


def logprobs(client: Client, model: str, seq: int) -> np.ndarray:
    """Log-probs of the sequence by a model."""
    result: np.ndarray = logprobs_of(client.result(client.forward_backward(model, seq, forward_only=True)))[0]
    return result


def sample(client: Client, first: int, place: int = 0, **weights: Any) -> list[int]:
    """The greedy continuation of a token."""
    request = client.post(
        "asample",
        prompt={"chunks": [{"type": "encoded_text", "tokens": [first]}]},
        sampling_params={"max_tokens": 8, "temperature": 0},
        seq_id=place,
        **weights,
    )
    return samples_of(client.result(request["request_id"]))[0]


# -- order and retries


def test_commands_run_in_their_order_whatever_the_order_of_arrival(alice: Client) -> None:
    wanted = alice.train(alice.model(seed=5), 1, 3)
    model = alice.model(seed=5)
    for step in (2, 1, 0):
        alice.post("optim_step", model_id=model, seq_id=2 * step + 2, adam_params=ADAM)
    requests = [alice.forward_backward(model, 2 * step + 1) for step in (2, 1, 0)]
    assert [loss_of(alice.result(request)) for request in reversed(requests)] == wanted


def test_a_request_that_is_sent_again_is_done_once(alice: Client) -> None:
    wanted = alice.train(alice.model(seed=5), 1, 2)
    model = alice.model(seed=5)
    losses = []
    for step in range(2):
        requests = {alice.forward_backward(model, 2 * step + 1) for _ in range(3)}
        assert len(requests) == 1
        losses.append(loss_of(alice.result(requests.pop())))
        steps = [
            alice.post("optim_step", model_id=model, seq_id=2 * step + 2, adam_params=ADAM)["request_id"]
            for _ in range(2)
        ]
        assert steps[0] == steps[1] and alice.result(steps[0])["metrics"]["skipped"] == 0
    assert losses == wanted
    changed = alice.request("forward_backward", forward_backward(model, 1, [OTHER]))
    assert changed.status_code == 400 and "must be the same" in changed.json()["error"]
    session = alice.session()
    body = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 2}}
    assert alice.post("create_model", **body) == alice.post("create_model", **body)


def test_commands_without_a_number_follow_the_last_one(alice: Client) -> None:
    model = alice.model()
    first = alice.request("forward_backward", forward_backward(model, None, [SEQUENCE])).json()["request_id"]
    alice.result(first)
    assert alice.done("optim_step", model_id=model, adam_params=ADAM)["type"] == "optim_step"
    assert first == f"{model}:1"


def test_a_faulty_command_fails_in_its_place_and_later_ones_go_on(alice: Client) -> None:
    model = alice.model()
    odd = MESSAGES["ForwardBackwardRequest"].FromString(forward_backward(model, 11, [SEQUENCE]))
    odd.data[0].loss_fn_inputs[0].value.shape[:] = [-2, -4]
    faulty = [
        alice.forward_backward(model, 1, loss="unknown"),
        alice.forward_backward(model, 2, [[1, 2, 300]]),
        alice.forward_backward(model, 3, [[1] * 66]),
        alice.forward_backward(model, 4, []),
        alice.forward_backward(model, 5, inputs=[{"weights": [float("nan")] * 8}]),
        alice.post("optim_step", model_id=model, seq_id=6, adam_params={"learning_rate": -1})["request_id"],
        alice.post("optim_step", model_id=model, seq_id=7, adam_params=ADAM)["request_id"],
        alice.post("save_weights", model_id=model, seq_id=8, path="../x")["request_id"],
        alice.post("save_weights", model_id=model, seq_id=9, path="ä" * 128)["request_id"],
        alice.post("save_weights", model_id=model, seq_id=10, ttl_seconds=10**12)["request_id"],
        alice.request("forward_backward", odd.SerializeToString()).json()["request_id"],
        alice.post("load_weights", model_id=model, seq_id=12, path="x" * 501, optimizer=True)["request_id"],
    ]
    errors = [alice.result(request) for request in faulty]
    assert [error["category"] for error in errors] == ["user"] * 12
    reasons = ["loss_fn must be", "must be token ids", "1 to 64 tokens", "at least one datum", "weights must be finite"]
    reasons += ["adam_params.learning_rate must", "optim_step needs a forward_backward", "a checkpoint's name is"]
    reasons += ["a checkpoint's name is", "ttl_seconds must", "must have the shape [-2, -4]", "path must be as"]
    for error, reason in zip(errors, reasons, strict=True):
        assert reason in error["error"]
    assert alice.train(model, 13, 1) == alice.train(alice.model(), 1, 1)


def test_several_commands_before_a_step_add_their_gradients(alice: Client) -> None:
    together = alice.model()
    alice.train(together, 1, 1, [SEQUENCE, OTHER])
    apart = alice.model()
    alice.forward_backward(apart, 1, [SEQUENCE])
    alice.forward_backward(apart, 2, [OTHER])
    alice.post("optim_step", model_id=apart, seq_id=3, adam_params=ADAM)
    np.testing.assert_allclose(logprobs(alice, apart, 4), logprobs(alice, together, 3), atol=1e-5)


# -- tenants


def test_a_key_is_needed_and_others_things_are_not_there(
    served: tuple[str, TrainingService], alice: Client, bob: Client
) -> None:
    url, _ = served
    for key in ("", "tml-wrong-key", "Bearer x"):
        answer = Client(url, key).get("get_server_capabilities")
        assert answer.status_code == 401 and "TINKER_API_KEY" in answer.json()["error"]
    assert Client(url, "").get("healthz").json() == {"status": "ok"}
    session = alice.session()
    model = alice.model(session)
    path = alice.done("save_weights", model_id=model, seq_id=1, path="mine")["path"]
    sampler = alice.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, model_path=path)
    sampler_id = sampler["sampling_session_id"]
    prompt = {"prompt": {"chunks": [{"tokens": [3]}]}, "sampling_params": {"max_tokens": 1}}
    for path_of, content, status in (
        ("get_info", {"model_id": model}, 404),
        ("forward_backward", forward_backward(model, 2, [SEQUENCE]), 404),
        ("optim_step", {"model_id": model, "adam_params": {}}, 404),
        ("save_weights", {"model_id": model, "path": "theirs"}, 404),
        ("unload_model", {"model_id": model}, 404),
        ("retrieve_future", {"request_id": f"{model}:1"}, 410),
        ("cancel_future", {"request_id": f"{model}:1"}, 410),
        ("session_heartbeat", {"session_id": session}, 404),
        ("create_model", {"session_id": session, "model_seq_id": 1, "base_model": BASE}, 404),
        ("weights_info", {"tinker_path": path}, 404),
        ("asample", {**prompt, "model_path": path}, 404),
        ("asample", {**prompt, "sampling_session_id": sampler_id, "seq_id": 0}, 404),
        (
            "create_sampling_session",
            {"session_id": bob.session(), "sampling_session_seq_id": 0, "model_path": path},
            404,
        ),
    ):
        answer = bob.request(path_of, content)
        assert answer.status_code == status, (path_of, answer.text)
    assert bob.delete(f"training_runs/{model}/checkpoints/weights/mine").status_code == 404
    assert bob.get(f"training_runs/{model}").status_code == 404
    loaded = bob.done("load_weights", session_id=bob.session(), model_seq_id=0, path=path, optimizer=False)
    assert loaded["category"] == "user" and "there is no checkpoint" in loaded["error"]
    assert model not in json.dumps([bob.get(place).json() for place in ("training_runs", "checkpoints", "sessions")])
    assert alice.get(f"training_runs/{model}").json()["last_checkpoint"]["tinker_path"] == path


def test_neighbours_in_a_batch_change_nothing(served: tuple[str, TrainingService], alice: Client, bob: Client) -> None:
    """Commands that wait together go into one packed batch."""
    _, service = served
    wanted = {client: client.train(client.model(seed=seed), 1, 4) for client, seed in ((alice, 1), (bob, 2))}
    models = {alice: alice.model(seed=1), bob: bob.model(seed=2)}
    engine = service.base.engine
    batches: list[set[str]] = []
    compute = engine.forward_backward

    def observed(rows: Any) -> Any:
        batches.append({row.adapter for row in rows})
        return compute(rows)

    engine.forward_backward = observed  # type: ignore[method-assign]
    try:
        with Hold(service):
            requests = {client: [] for client in models}
            for client, model in models.items():
                for step in range(4):
                    requests[client].append(client.forward_backward(model, 2 * step + 1))
                    client.post("optim_step", model_id=model, seq_id=2 * step + 2, adam_params=ADAM)
        losses = {client: [loss_of(client.result(entry)) for entry in sent] for client, sent in requests.items()}
    finally:
        engine.forward_backward = compute  # type: ignore[method-assign]
    assert batches[1:-1] == [set(models.values())] * 3, "the first command of the first client is alone"
    for client, values in wanted.items():
        np.testing.assert_allclose(losses[client], values, rtol=1e-5)


class Hold:
    """Context in which the engine's thread is busy, so that requests wait."""

    def __init__(self, service: TrainingService) -> None:
        self._service = service
        self._released = threading.Event()

    def __enter__(self) -> None:
        begun = threading.Event()
        self._service.worker._thread.submit(lambda: (begun.set(), self._released.wait(30)))
        assert begun.wait(30)

    def __exit__(self, *_: object) -> None:
        self._released.set()


def test_a_long_batch_of_one_does_not_hold_up_another(
    served: tuple[str, TrainingService], alice: Client, bob: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """60 rows of alice are 15 batches; bob's row is in the one after that which is computed when it comes."""
    _, service = served
    long = alice.model()
    short = bob.model()
    engine = service.base.engine
    compute = engine.forward_backward
    begun = threading.Event()
    released = threading.Event()
    batches: list[set[str]] = []

    def observed(rows: Any) -> Any:
        batches.append({row.adapter for row in rows})
        begun.set()
        assert released.wait(30)
        return compute(rows)

    monkeypatch.setattr(engine, "forward_backward", observed)
    waiting = alice.forward_backward(long, 1, [list(range(3, 20))] * 60)
    assert begun.wait(30)
    request = bob.forward_backward(short, 1)
    released.set()
    assert loss_of(bob.result(request)) > 0 and loss_of(alice.result(waiting)) > 0
    assert batches[:2] == [{long}, {long, short}]
    assert len(batches) >= 15 and all(batch == {long} for batch in batches[2:])


# -- failures of the engine


def test_a_batch_that_fails_is_computed_one_by_one_and_only_the_cause_fails(
    served: tuple[str, TrainingService], alice: Client, bob: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, service = served
    wanted = alice.train(alice.model(seed=1), 1, 1)
    good = alice.model(seed=1)
    bad = bob.model(seed=2)
    engine = service.base.engine
    compute = engine.forward_backward

    def failing(rows: Any) -> Any:
        if any(row.adapter == bad for row in rows):
            raise RuntimeError("out of memory")
        return compute(rows)

    monkeypatch.setattr(engine, "forward_backward", failing)
    with Hold(service):
        requests = [alice.forward_backward(good, 1), bob.forward_backward(bad, 1)]
        step = bob.post("optim_step", model_id=bad, seq_id=2, adam_params=ADAM)["request_id"]
    assert loss_of(alice.result(requests[0])) == wanted[0]
    for request in (requests[1], step):
        failed = bob.result(request)
        assert failed["category"] == "server" and "RuntimeError: the log of the server tells why" in failed["error"]
    assert "out of memory" not in bob.result(step)["error"], "what failed may contain other clients' data"
    monkeypatch.undo()
    assert bob.train(bad, 3, 2) == bob.train(bob.model(seed=2), 1, 2), "the step without its gradient was left out"


def test_a_command_that_cannot_be_read_fails_in_its_place_too(
    served: tuple[str, TrainingService], alice: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unexpected error was status 500; sent again, the command had no result, and later ones waited for it."""
    model = alice.model()
    with monkeypatch.context() as patch:
        patch.setattr("hybrid_rlhf.serving.training.rows.read_datum", lambda *_: 1 / 0)
        request = alice.forward_backward(model, 1)
    assert alice.result(request)["category"] == "server"
    assert loss_of(alice.result(alice.forward_backward(model, 2))) > 0


def test_an_answer_that_fails_is_not_computed_again(
    served: tuple[str, TrainingService], alice: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradient, and those of the others in its batch, would count twice."""
    _, service = served
    engine = service.base.engine
    compute = engine.forward_backward
    computed: list[int] = []
    models = [alice.model() for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(engine, "forward_backward", lambda rows: (computed.append(len(rows)), compute(rows))[1])
        patch.setattr("hybrid_rlhf.serving.training.rows.forward_backward_output", lambda *_: 1 / 0)
        with Hold(service):
            requests = [alice.forward_backward(models[0], 1, forward_only=True)]
            wait_until(lambda: service.worker._thread._work_queue.qsize() == 1)
            requests += [alice.forward_backward(models[0], 2), alice.forward_backward(models[1], 1)]
        assert [alice.result(request)["category"] for request in requests] == ["server"] * 3
    assert computed == [1, 2]
    left_out = alice.done("optim_step", model_id=models[0], seq_id=3, adam_params=ADAM)
    assert "the step is left out" in left_out["error"]
    assert alice.train(models[0], 4, 2) == alice.train(alice.model(), 1, 2)


def test_a_forward_pass_that_fails_leaves_the_step_alone(
    served: tuple[str, TrainingService], alice: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of an earlier command is whole: the step was left out."""
    model = alice.model()
    alice.result(alice.forward_backward(model, 1))
    with monkeypatch.context() as patch:
        patch.setattr(served[1].base.engine, "forward_backward", lambda rows: 1 / 0)
        failed = alice.result(alice.forward_backward(model, 2, forward_only=True))
    assert failed["category"] == "server"
    assert alice.done("optim_step", model_id=model, seq_id=3, adam_params=ADAM)["metrics"]["skipped"] == 0


# -- quotas


def test_what_a_key_has_too_much_of_is_refused(tmp_path: Path) -> None:
    limits = {"max_requests": 3, "max_models": 2, "max_stored_gib": 1e-5, "max_body_mib": 0.05}
    with training_server(tmp_path, **limits) as (url, service):
        alice = Client(url, ALICE)
        session = alice.session()
        models = [alice.model(session, number) for number in range(2)]
        third = alice.done("create_model", session_id=session, model_seq_id=2, base_model=BASE)
        assert "may have 2 models in training" in third["error"] and third["category"] == "user"
        with Hold(service):
            waiting = [alice.forward_backward(models[0], seq) for seq in (1, 2, 3)]
            refused = alice.request("forward_backward", forward_backward(models[1], 1, [SEQUENCE]))
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            bob = Client(url, BOB)
            bob.session()  # another key is not concerned
        for request in waiting:
            alice.result(request)
        assert loss_of(alice.result(alice.forward_backward(models[1], 1))) > 0
        assert alice.done("save_weights", model_id=models[0], seq_id=4, path="a")["path"]
        over = alice.done("save_weights", model_id=models[0], seq_id=5, path="b")
        assert "bytes of checkpoints, at most" in over["error"]
        large = alice.request("create_session", {"user_metadata": {"x": "y" * 60_000}})
        assert large.status_code == 413
        assert alice.done("unload_model", model_id=models[0])["type"] == "unload_model"
        assert alice.model(session, 3)


def test_a_command_that_others_wait_for_is_accepted(tmp_path: Path) -> None:
    """Those that wait for it had used up the quota, and neither could go on."""
    with training_server(tmp_path, max_requests=2) as (url, _):
        alice = Client(url, ALICE)
        model = alice.model()
        later = [alice.forward_backward(model, seq) for seq in (3, 4)]
        assert alice.request("forward_backward", forward_backward(model, 2, [SEQUENCE])).status_code == 429
        first = alice.forward_backward(model, 1)
        assert loss_of(alice.result(first)) > 0
        second = alice.forward_backward(model, 2)
        for request in (second, *later):
            assert loss_of(alice.result(request)) > 0


# -- checkpoints


def test_a_checkpoint_that_is_deleted_twice_at_once_is_not_there(
    served: tuple[str, TrainingService], alice: Client
) -> None:
    """The second request, and one that sets its time meanwhile, failed the server's way."""
    _, service = served
    model = alice.model()
    alice.done("save_weights", model_id=model, seq_id=1, path="a")
    place = f"training_runs/{model}/checkpoints/weights/a"
    others = [Client(served[0], ALICE) for _ in range(3)]
    with ThreadPoolExecutor(3) as threads:
        with Hold(service):
            answers = [threads.submit(client.delete, place) for client in others[:2]]
            wait_until(lambda: service.worker._thread._work_queue.qsize() == 2)
            answers.append(threads.submit(others[2].put, f"{place}/ttl", ttl_seconds=60))
            wait_until(lambda: service.worker._thread._work_queue.qsize() == 3)
        statuses = [answer.result().status_code for answer in answers]
    assert sorted(statuses[:2]) == [200, 404] and statuses[2] == 404


def test_a_checkpoint_never_changes(
    served: tuple[str, TrainingService], alice: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, service = served
    model = alice.model()
    path = alice.done("save_weights", model_id=model, seq_id=1, path="a")["path"]
    folder = service.store.find(path, "alice").folder
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    alice.train(model, 2, 1)
    again = alice.done("save_weights", model_id=model, seq_id=4, path="a")
    assert "a checkpoint never changes" in again["error"]
    engine = service.base.engine
    save = engine.save

    def failing(name: str, place: Path, **options: Any) -> None:
        save(name, place, **options)
        raise OSError("no space left on device")

    monkeypatch.setattr(engine, "save", failing)
    lost = alice.done("save_weights", model_id=model, seq_id=5, path="b")
    assert lost["category"] == "server"
    lost = alice.done("save_weights", model_id=model, seq_id=6, path="a", overwrite=True)
    monkeypatch.undo()
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == files
    assert [entry.name for entry in folder.parent.iterdir()] == ["a"], "nothing is left of the others"
    assert alice.done("save_weights", model_id=model, seq_id=7, path="a", overwrite=True)["path"] == path
    assert (folder / "adapter_model.safetensors").read_bytes() != files["adapter_model.safetensors"]


def test_a_saved_state_continues_exactly(alice: Client) -> None:
    model = alice.model()
    alice.train(model, 1, 3)
    path = alice.done("save_weights", model_id=model, seq_id=7, path="state")["path"]
    wanted = alice.train(model, 8, 3)
    session = alice.session()
    body = {"session_id": session, "path": path}
    loaded = alice.done("load_weights", model_seq_id=0, optimizer=True, **body)
    assert loaded["model_id"] == f"{session}:train:0"
    assert alice.train(loaded["model_id"], 1, 3) == wanted
    weights_only = alice.done("load_weights", model_seq_id=1, optimizer=False, **body)["model_id"]
    losses = alice.train(weights_only, 1, 3)
    assert losses[0] == wanted[0] and losses[1:] != wanted[1:]
    alice.done("load_weights", model_id=weights_only, seq_id=7, path=path, optimizer=True)
    assert alice.train(weights_only, 8, 3) == wanted
    assert alice.post("get_info", model_id=weights_only)["lora_rank"] == 4


def test_checkpoints_are_listed_deleted_and_expire(served: tuple[str, TrainingService], alice: Client) -> None:
    _, service = served
    model = alice.model()
    for seq, (route, name) in enumerate(
        (("save_weights", "a"), ("save_weights", "b"), ("save_weights_for_sampler", "c"))
    ):
        alice.done(route, model_id=model, seq_id=seq + 1, path=name, ttl_seconds=3600, user_metadata={"n": name})
    runs = f"training_runs/{model}/checkpoints"
    listed = alice.get(runs).json()["checkpoints"]
    assert [entry["checkpoint_id"] for entry in listed] == ["weights/a", "weights/b", "sampler_weights/c"]
    assert listed[0]["user_metadata"] == {"n": "a"} and listed[0]["expires_at"] is not None
    assert listed[0]["size_bytes"] > 1000 and listed[2]["checkpoint_type"] == "sampler"
    assert alice.delete(f"{runs}/weights/a").status_code == 200
    assert alice.delete(f"{runs}/weights/a").status_code == 404
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
    with torch.no_grad():
        logits = merged(torch.tensor([SEQUENCE[:-1]])).logits[0].log_softmax(-1)
    logprobs_of_merged = logits.gather(1, torch.tensor(SEQUENCE[1:])[:, None])[:, 0]
    np.testing.assert_allclose(logprobs_of_merged.numpy(), wanted, atol=1e-4)
    session = alice.session()
    refused = alice.done(
        "load_weights",
        session_id=session,
        model_seq_id=0,
        path=f"tinker://{model}/external_weights/merged",
        optimizer=False,
    )
    assert "a merged model is no adapter" in refused["error"]


def test_an_adapter_from_elsewhere_is_trained_on(
    served: tuple[str, TrainingService], alice: Client, bob: Client, tmp_path: Path
) -> None:
    """Uploaded by a client, or given to all by the operator."""
    url, _ = served
    folder = random_adapter(tiny_model(), tmp_path / "peft", 1, ["q_proj", "up_proj"])
    files = {file.name: file.read_bytes() for file in Path(folder).iterdir()}
    archive = _zip({f"some/{name}": content for name, content in files.items()})
    damaged = _zip(files, zipfile.ZIP_DEFLATED).replace(b"adapter_config.json", b"adapter_config.json" + b"\xff" * 9, 1)
    sent = {"content": archive, "headers": {"X-API-Key": ALICE, "Content-Type": "application/zip"}}
    path = httpx2.post(f"{url}/api/v1/import_adapter/mine", **sent).json()["path"]
    body = {"session_id": alice.session(), "model_seq_id": 0, "optimizer": False}
    model = alice.done("load_weights", path=path, **body)["model_id"]
    theirs = PeftModel.from_pretrained(tiny_model(), folder)
    with torch.no_grad():
        wanted = theirs(torch.tensor([SEQUENCE[:-1]])).logits[0].log_softmax(-1)
    wanted = wanted.gather(1, torch.tensor(SEQUENCE[1:])[:, None])[:, 0]
    np.testing.assert_allclose(logprobs(alice, model, 1), wanted.numpy(), atol=1e-4)
    losses = alice.train(model, 2, 8)
    assert losses[-1] < 0.7 * losses[0]
    theirs_too = {"session_id": bob.session(), "model_seq_id": 0, "optimizer": False}
    assert "there is no checkpoint" in bob.done("load_weights", path=path, **theirs_too)["error"]
    assert bob.done("load_weights", path="tinker://server/weights/given", **theirs_too | {"model_seq_id": 1})[
        "model_id"
    ]
    assert sample(alice, 5, model_path="tinker://server/weights/given") != sample(alice, 5, base_model=BASE)
    for content, error in (
        (b"no archive", "must be a ZIP archive"),
        (_zip({"adapter_config.json": b"{}"}), "it lacks one"),
        (damaged, "must be a ZIP archive"),
    ):
        answer = httpx2.post(f"{url}/api/v1/import_adapter/x", content=content, headers=sent["headers"])
        assert answer.status_code == 400 and error in answer.json()["error"]
    other = random_adapter(tiny_model(hidden_size=64), tmp_path / "other", 1, ["q_proj"])
    files = {file.name: file.read_bytes() for file in Path(other).iterdir()}
    answer = httpx2.post(f"{url}/api/v1/import_adapter/x", content=_zip(files), headers=sent["headers"])
    assert answer.status_code == 400, answer.text
    given = "training_runs/server/checkpoints/weights/given"
    for refused in (alice.delete(given), alice.put(f"{given}/ttl", ttl_seconds=1)):
        assert refused.status_code == 400 and "only its operator removes it" in refused.json()["error"]


def _zip(files: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", compression) as writer:
        for name, content in files.items():
            writer.writestr(name, content)
    return archive.getvalue()


# -- sessions


def test_a_finished_session_lets_its_models_go(served: tuple[str, TrainingService], alice: Client) -> None:
    _, service = served
    session = alice.session()
    model = alice.model(session)
    alice.train(model, 1, 2)
    path = alice.done("save_weights", model_id=model, seq_id=5, path="kept")["path"]
    waiting = alice.forward_backward(alice.model(session, 1), 2)  # the command before it never comes
    alice.post(f"sessions/{session}/finish")
    assert alice.request("session_heartbeat", {"session_id": session}).status_code == 410  # the client stops them
    wait_until(lambda: model not in service.base.engine.names)  # type: ignore[attr-defined]
    assert model not in service.models
    assert "the model has been unloaded" in alice.result(waiting)["error"]
    assert alice.post("weights_info", tinker_path=path)["lora_rank"] == 4


def test_a_session_without_a_sign_of_life_lets_its_models_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid_rlhf.serving.training.worker._SWEEP_SECONDS", 0.1)
    with training_server(tmp_path, session_minutes=0.05) as (url, service):
        alice = Client(url, ALICE)
        session = alice.session()
        alive = alice.model(session)
        gone = alice.model()
        deadline = time.monotonic() + 60
        while gone in service.models and time.monotonic() < deadline:
            alice.post("session_heartbeat", session_id=session)
            time.sleep(0.05)
        assert set(service.models) == {alive}
        assert service.base.engine.names == (alive,)  # type: ignore[attr-defined]


def test_models_leave_while_there_is_always_something_to_compute(
    served: tuple[str, TrainingService], alice: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stayed until the server had nothing to do."""
    engine = served[1].base.engine
    compute = engine.forward_backward
    remove = engine.remove
    begun = threading.Event()
    released = threading.Event()
    calls: list[str] = []

    def observed(rows: Any) -> Any:
        begun.set()
        assert released.wait(30)
        calls.append("compute")
        return compute(rows)

    monkeypatch.setattr(engine, "forward_backward", observed)
    monkeypatch.setattr(engine, "remove", lambda name: (calls.append(name), remove(name)))
    session = alice.session()
    idle = alice.model(session)
    long = alice.forward_backward(alice.model(), 1, [list(range(3, 60))] * 10)
    assert begun.wait(30)
    alice.post(f"sessions/{session}/finish")
    released.set()
    alice.result(long)
    assert calls.count("compute") == 10 and calls.index(idle) <= 2


def test_a_command_that_comes_while_its_model_leaves_is_done(
    served: tuple[str, TrainingService], alice: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It failed, as if the model had been unloaded after it."""
    engine = served[1].base.engine
    remove = engine.remove
    begun = threading.Event()
    released = threading.Event()

    def slow(name: str) -> None:
        begun.set()
        assert released.wait(30)
        remove(name)

    model = alice.model()
    wanted = alice.train(model, 1, 2)
    alice.done("save_weights", model_id=model, seq_id=5, path="state")
    monkeypatch.setattr(engine, "remove", slow)
    unload = alice.post("unload_model", model_id=model)["request_id"]
    assert begun.wait(30)
    request = alice.forward_backward(model, 6)
    released.set()
    assert alice.result(unload)["type"] == "unload_model"
    assert loss_of(alice.result(request)) < wanted[-1]


def test_an_unloaded_model_counts_again_when_it_goes_on(tmp_path: Path) -> None:
    """A key had as many models in the engine as it had saved."""
    with training_server(tmp_path, max_models=1) as (url, service):
        alice = Client(url, ALICE)
        session = alice.session()
        model = alice.model(session)
        alice.done("save_weights", model_id=model, seq_id=1, path="state")
        alice.done("unload_model", model_id=model)
        other = alice.model(session, 1)
        refused = alice.result(alice.forward_backward(model, 2))
        assert refused["category"] == "user" and "may have 1 models in training" in refused["error"]
        assert set(service.models) == {other}


def test_a_session_that_never_finishes_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what only its clients need; what was saved by name stays, and so does all of a session that is seen."""
    monkeypatch.setattr("hybrid_rlhf.serving.training.worker._SWEEP_SECONDS", 0.1)
    monkeypatch.setattr("hybrid_rlhf.serving.training.sessions.KEPT_SECONDS", 2.0)
    with training_server(tmp_path, session_minutes=0.01) as (url, service):
        alice = Client(url, ALICE)
        alive = alice.session()
        lost = alice.session()
        runs = {session: [alice.model(session, number) for number in range(2)] for session in (alive, lost)}
        samplers = {}
        for session, (model, _) in runs.items():
            alice.done("save_weights", model_id=model, seq_id=1, path="kept")
            saved = alice.done("save_weights_for_sampler", model_id=model, seq_id=2, sampling_session_seq_id=0)
            samplers[session] = saved["sampling_session_id"]

        def is_over() -> bool:
            alice.post("session_heartbeat", session_id=alive)
            return not (tmp_path / "sessions" / f"{lost}.json").exists()

        wait_until(is_over)
        assert alice.get("sessions").json()["sessions"] == [alive]
        assert alice.request("session_heartbeat", {"session_id": lost}).status_code == 404
        assert {*service.store.runs} == {*runs[alive], runs[lost][0]}
        assert {*service.store.samplers} == {samplers[alive]}
        assert [entry.path for entry in service.store.checkpoints(run_id=runs[lost][0])] == [
            f"tinker://{runs[lost][0]}/weights/kept"
        ]
        assert sorted(file.name for file in (tmp_path / "runs").iterdir()) == sorted(service.store.runs)
        assert sample(alice, 5, sampling_session_id=samplers[alive])
        assert alice.get(f"sessions/{alive}").json()["sampler_ids"] == [samplers[alive]]
        path = f"tinker://{runs[lost][0]}/weights/kept"
        body = {"session_id": alive, "model_seq_id": 2, "path": path, "optimizer": True}
        assert alice.done("load_weights", **body)["model_id"] == f"{alive}:train:2"
        assert loss_of(alice.result(alice.forward_backward(runs[lost][0], 3))) > 0, "it was saved by its last command"
        assert alice.get(f"sessions/{lost}").json()["training_run_ids"] == [runs[lost][0]]
        assert alice.delete(f"training_runs/{runs[lost][0]}/checkpoints/weights/kept").status_code == 200
        wait_until(lambda: not (tmp_path / "runs" / runs[lost][0]).exists())
        assert alice.get(f"training_runs/{runs[lost][0]}").status_code == 404


def test_an_unloaded_model_goes_on_only_from_what_it_saved(alice: Client) -> None:
    """Never silently from an older state."""
    model = alice.model()
    wanted = alice.train(model, 1, 2)
    alice.done("save_weights", model_id=model, seq_id=5, path="state")
    alice.done("unload_model", model_id=model)
    assert alice.train(model, 6, 1)[0] < wanted[-1], "it was saved after the last command that changed it"
    alice.done("unload_model", model_id=model)
    lost = alice.request("forward_backward", forward_backward(model, 8, [SEQUENCE]))
    assert lost.status_code == 410
    model = alice.model()
    alice.done("save_weights", model_id=model, seq_id=1, path="state")
    alice.forward_backward(model, 2)
    alice.done("save_weights_for_sampler", model_id=model, seq_id=3, path="sampler")
    alice.done("unload_model", model_id=model)  # with a gradient, which is not saved
    lost = alice.request("forward_backward", forward_backward(model, 4, [SEQUENCE]))
    assert lost.status_code == 410 and f"tinker://{model}/weights/state" in lost.json()["error"]


def test_a_command_without_a_number_does_not_go_on_from_an_older_state(alice: Client) -> None:
    """It went on from the saved state; the server cannot tell whether later updates are missing."""
    model = alice.model()
    path = alice.done("save_weights", model_id=model, seq_id=1, path="state")["path"]
    alice.train(model, 2, 1)
    alice.done("unload_model", model_id=model)
    lost = alice.request("forward_backward", forward_backward(model, None, [SEQUENCE]))
    assert lost.status_code == 410 and path in lost.json()["error"]


# -- sampling


def test_a_sampling_session_that_is_asked_for_again_is_the_same_or_refused(alice: Client) -> None:
    """With other weights it was answered as if it had them; 409 would be sent again by the client."""
    session = alice.session()
    path = alice.done("save_weights_for_sampler", model_id=alice.model(session), seq_id=1, path="a")["path"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    first = alice.post("create_sampling_session", **body)
    assert alice.post("create_sampling_session", **body) == first
    refused = alice.request("create_sampling_session", {**body, "base_model": BASE, "model_path": None})
    assert refused.status_code == 400 and "keeps its weights" in refused.json()["error"]
    body = {"model_id": alice.model(session, 1), "seq_id": 1, "sampling_session_seq_id": 0}
    failed = alice.result(alice.post("save_weights_for_sampler", **body)["request_id"])
    assert failed["category"] == "user" and "keeps its weights" in failed["error"]
    assert alice.get(f"samplers/{first['sampling_session_id']}").json()["model_path"] == path


def test_a_sampling_session_keeps_its_weights_while_training_goes_on(alice: Client) -> None:
    session = alice.session()
    model = alice.model(session)
    alice.train(model, 1, 15)
    body = {"model_id": model, "seq_id": 31, "sampling_session_seq_id": 0}
    saved = alice.done("save_weights_for_sampler", **body)
    assert saved["path"] is None
    sampler = {"sampling_session_id": saved["sampling_session_id"]}
    assert sample(alice, SEQUENCE[0], 0, **sampler) == SEQUENCE[1:]
    alice.train(model, 32, 3, [OTHER])
    newer = alice.done("save_weights_for_sampler", model_id=model, seq_id=38, path="newer")["path"]
    assert sample(alice, SEQUENCE[0], model_path=newer) != SEQUENCE[1:]
    other = alice.model(session, 1)
    alice.train(other, 1, 15, [OTHER])
    path = alice.done("save_weights_for_sampler", model_id=other, seq_id=31, path="other")["path"]
    assert sample(alice, OTHER[0], model_path=path) == OTHER[1:]
    assert sample(alice, SEQUENCE[0], 1, **sampler) == SEQUENCE[1:]
    assert sample(alice, SEQUENCE[0], base_model=BASE) != SEQUENCE[1:]
    assert alice.get(f"samplers/{sampler['sampling_session_id']}").json()["base_model"] == BASE
    assert alice.post("join_sampling_session", **sampler)["client_counter"] > 0


def test_samples_have_what_was_asked_for(alice: Client) -> None:
    def ask(place: int, **more: Any) -> Any:
        params = {"max_tokens": 6, "seed": 3, **more.pop("sampling_params", {})}
        session = alice.post(
            "create_sampling_session", session_id=session_id, sampling_session_seq_id=0, base_model=BASE
        )
        body = {"prompt": {"chunks": [{"tokens": [5, 6]}, {"tokens": [7]}]}, "sampling_params": params, "seq_id": place}
        request = alice.post("asample", **session, **body, **more)
        result = alice.result(request["request_id"])
        return MESSAGES["SampleResponse"].FromString(result) if isinstance(result, bytes) else result

    session_id = alice.session()
    first = ask(0, num_samples=3, topk_sample_logprobs=2)
    tokens = [np.frombuffer(sequence.tokens, "<i4").tolist() for sequence in first.sequences]
    assert len({tuple(entry) for entry in tokens}) == 3
    assert [sequence.stop_reason for sequence in first.sequences] == [
        int(len(entry) == 6 and 2 not in entry) for entry in tokens
    ]
    top = first.sequences[0].topk_sampled_logprobs
    assert (top.k, top.length) == (2, len(tokens[0]))
    assert ask(0, num_samples=3, topk_sample_logprobs=2) == first, "sent again: the same result"
    assert [np.frombuffer(entry.tokens, "<i4").tolist() for entry in ask(1, num_samples=3).sequences] == tokens
    assert (
        ask(2, sampling_params={"stop": [tokens[0][1]]}).sequences[0].tokens
        == np.asarray(tokens[0][:2], "<i4").tobytes()
    )
    scored = ask(3, prompt_logprobs=True)
    whole = np.frombuffer(scored.prompt_logprobs, "<f4")
    assert np.isnan(whole).tolist() == [True, False, False]
    last = np.frombuffer(ask(4, prompt_logprobs=True, prompt_logprobs_last_n=1).prompt_logprobs, "<f4")
    assert np.isnan(last).tolist() == [True, True, False] and last[2] == whole[2]
    greedy = ask(5, sampling_params={"temperature": 0, "max_tokens": 1000})
    assert len(np.frombuffer(greedy.sequences[0].tokens, "<i4")) <= 61, "as many as the context has room for"
    for place, (change, error) in enumerate(
        (
            ({"prompt": {"chunks": [{"tokens": [1] * 64}]}}, "prompt must have 1 to 63 tokens"),
            ({"prompt": {"chunks": []}}, "prompt must have 1 to 63 tokens"),
            ({"prompt": {"chunks": [{"tokens": [999]}]}}, "token ids must be in"),
            ({"sampling_params": {"stop": []}}, "stop must name what ends a completion"),
            ({"topk_sample_logprobs": 99}, "at most 20"),
        )
    ):
        body = {
            "prompt": {"chunks": [{"tokens": [5]}]},
            "sampling_params": {"max_tokens": 2},
            "base_model": BASE,
            **change,
        }
        failed = alice.done("asample", **body, seq_id=place)
        assert failed["category"] == "user" and error in failed["error"]


def test_sampling_takes_turns_too(served: tuple[str, TrainingService], alice: Client, bob: Client) -> None:
    """A request does not wait for all that another key has sent before."""
    _, service = served
    body = {"prompt": {"chunks": [{"tokens": [5]}]}, "base_model": BASE}
    with service.samplers.batch.paused():
        for _ in range(20):
            last = alice.post("asample", **body, num_samples=8, sampling_params={"max_tokens": 50})["request_id"]
        request = bob.post("asample", **body, num_samples=2, sampling_params={"max_tokens": 5})["request_id"]
    assert len(samples_of(bob.result(request))) == 2
    assert service.tenants.of_key(ALICE).requests >= 15  # type: ignore[union-attr]
    assert len(samples_of(alice.result(last))) == 8


def test_a_cancelled_request_ends_and_others_go_on(served: tuple[str, TrainingService], alice: Client) -> None:
    body = {"prompt": {"chunks": [{"tokens": [5]}]}, "base_model": BASE}
    long = [
        alice.post("asample", **body, num_samples=8, sampling_params={"max_tokens": 60})["request_id"] for _ in range(6)
    ]
    for request in long:
        alice.post("cancel_future", request_id=request)
    results = [alice.result(request) for request in long]
    assert any(isinstance(entry, dict) and "cancelled" in entry["error"] for entry in results)
    assert len(sample(alice, 5, base_model=BASE)) > 0


def test_a_request_that_is_cancelled_while_its_weights_are_loaded_is_not_sampled(
    served: tuple[str, TrainingService], alice: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was decoded to its end."""
    samplers = served[1].samplers
    path = alice.done("save_weights_for_sampler", model_id=alice.model(), seq_id=1, path="slow")["path"]
    submitted: list[Any] = []
    monkeypatch.setattr(samplers.batch, "submit", lambda batch, deliver: submitted.append(batch))
    with samplers.batch.paused():
        body = {"prompt": {"chunks": [{"tokens": [5]}]}, "sampling_params": {"max_tokens": 60}, "model_path": path}
        request = alice.post("asample", **body)["request_id"]
        alice.post("cancel_future", request_id=request)
        assert "cancelled" in alice.result(request)["error"]
    wait_until(lambda: not samplers._running)
    assert submitted == []


def test_a_request_whose_prompt_fails_is_not_decoded_on(
    served: tuple[str, TrainingService], alice: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It kept its rows of the batch, in which others had their turns already."""
    batch = served[1].samplers.batch
    with batch.paused(), monkeypatch.context() as patch:
        failing: Future[Any] = Future()
        failing.set_exception(RuntimeError("out of memory"))
        patch.setattr(batch, "prompt_logprobs", lambda *_, **__: failing)
        body = {"prompt": {"chunks": [{"tokens": [5]}]}, "sampling_params": {"max_tokens": 60}, "base_model": BASE}
        failed = alice.done("asample", **body, prompt_logprobs=True)
        assert failed["category"] == "server" and not batch._owners


# -- bodies


def test_compressed_and_sparse_bodies(alice: Client) -> None:
    """The client compresses its commands, and sends two-dimensional targets as sparse ones."""
    model = alice.model()
    wanted = logprobs(alice, model, 1)
    message = MESSAGES["ForwardBackwardRequest"].FromString(forward_backward(model, 2, [SEQUENCE], forward_only=True))
    targets = message.data[0].loss_fn_inputs[0].value
    dense = targets.dense
    targets.ClearField("dense")
    targets.shape.append(1)
    targets.sparse_csr.values = dense
    targets.sparse_csr.crow_indices = np.arange(9, dtype="<i8").tobytes()
    targets.sparse_csr.col_indices = np.zeros(8, "<i8").tobytes()
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(message.SerializeToString())
    body = sink.getvalue().to_pybytes()
    answer = alice.request("forward_backward", body, **{"Content-Encoding": "zstd"})
    np.testing.assert_array_equal(logprobs_of(alice.result(answer.json()["request_id"]))[0], wanted)
    for encoding, content in (("zstd", body[:-4]), ("zstd", b"x"), ("br", body)):
        assert alice.request("forward_backward", content, **{"Content-Encoding": encoding}).status_code == 400


def test_metrics_name_the_tenants(served: tuple[str, TrainingService], alice: Client) -> None:
    url, _ = served
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
