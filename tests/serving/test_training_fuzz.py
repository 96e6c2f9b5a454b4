"""Malformed requests to a training server: each is answered with a status below 500, and no model of others changes."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2

from hybrid_rlhf.serving.training.futures import CommandFailed
from tests.support.training_server import BASE, BOB, Client, forward_backward, training_server

VALUES: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 2**80, -0.5, 1e308, "", "x", "tinker://a/weights/b", "../..", "\x00", "ä" * 300,
    [], [[]], [None], {}, {"a": 1}, ["x"] * 50,
]  # fmt: skip


def bodies(session: str, model: str) -> dict[str, dict[str, Any]]:
    """A good body of each route with JSON."""
    path = f"tinker://{model}/weights/a"
    sampling = {"max_tokens": 2, "seed": 1, "stop": ["x"], "temperature": 0.5, "top_k": 3, "top_p": 0.9}
    save = {"path": "fuzz", "ttl_seconds": 4000, "user_metadata": {"a": "b"}}
    command = {"model_id": model, "seq_id": 10_000}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [3, 4]}]}
    return {
        "client/config": {"sdk_version": "0"},
        "client/dynamic_config": {"sdk_version": "0"},
        "telemetry": {"events": []},
        "create_session": {"tags": [], "user_metadata": {"a": "b"}, "sdk_version": "0"},
        "session_heartbeat": {"session_id": session},
        "create_model": {
            "session_id": session,
            "model_seq_id": 5,
            "base_model": BASE,
            "lora_config": {"rank": 2, "seed": 1, "train_mlp": True, "train_attn": True},
            "optimizer_config": {"type": "adamw"},
        },
        "get_info": {"model_id": model},
        "optim_step": {**command, "adam_params": {"learning_rate": 1e-3, "beta1": 0.9, "eps": 1e-8}},
        "save_weights": {**command, **save, "overwrite": True},
        "save_weights_for_sampler": {**command, "sampling_session_seq_id": 1, "kind": "snapshot"},
        "save_weights_external": {**command, "path": "fuzz"},
        "load_weights": {"session_id": session, "model_seq_id": 6, "path": path, "optimizer": True},
        "create_sampling_session": {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE},
        "join_sampling_session": {"sampling_session_id": f"{session}:sample:0"},
        "asample": {
            "prompt": prompt,
            "sampling_params": sampling,
            "num_samples": 2,
            "base_model": BASE,
            "prompt_logprobs": True,
            "topk_sample_logprobs": 1,
        },
        "retrieve_future": {"request_id": f"{model}:0"},
        "cancel_future": {"request_id": f"{model}:0"},
        "weights_info": {"tinker_path": path},
    }


def mutated(body: Any, rng: random.Random) -> Any:
    """A body with one value replaced or removed, anywhere in it."""
    changed = copy.deepcopy(body)
    place = changed
    while True:
        key = rng.choice(list(place) if isinstance(place, dict) else list(range(len(place))))
        inner = place[key]
        if isinstance(inner, (dict, list)) and inner and rng.random() < 0.7:
            place = inner
            continue
        if rng.random() < 0.2:
            del place[key]
        else:
            place[key] = copy.deepcopy(rng.choice(VALUES))
        return changed


def damaged(body: bytes, rng: random.Random) -> bytes:
    """Bytes with some of them changed, removed or doubled, or cut off."""
    data = body
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(data) + 1)
        end = len(data) if rng.random() < 0.1 else start + rng.randint(1, 9)
        part = data[start:end]
        data = data[:start] + rng.choice((b"", part * 2, rng.randbytes(len(part)))) + data[end:]
    return data


def test_malformed_requests_never_fail_the_server_and_change_nothing_of_others(tmp_path: Path) -> None:
    rng = random.Random(0)
    with training_server(tmp_path, poll_seconds=0.01, max_models=100, max_requests=100_000) as (url, service):
        bob = Client(url, BOB)
        wanted = bob.train(bob.model(), 1, 4)
        model = bob.model()
        losses = bob.train(model, 1, 2)
        path = bob.save(model, 5, "state")["path"]
        files = {file.name: file.read_bytes() for file in service.store.find(path, "bob").folder.iterdir()}

        alice = Client(url)
        session = alice.session()
        mine = alice.model(session)
        alice.save(mine, 1, "a")
        statuses = Counter[int]()

        def send(answer: httpx2.Response, what: object) -> None:
            statuses[answer.status_code] += 1
            assert answer.status_code < 500, (what, answer.text)
            if answer.status_code >= 400:
                assert answer.json()["error"], what

        for route, body in bodies(session, mine).items():
            for _ in range(15):
                changed = mutated(body, rng)
                send(alice.request(route, changed), (route, changed))
            for raw in (
                b"",
                b"{",
                b"[]",
                b"\xff\xfe",
                b'{"a": NaN}',
                b'{"a": 1, "a": 2}',
                b"[" * 5000,
                damaged(json.dumps(body).encode(), rng),
            ):
                send(alice.request(route, raw, **{"Content-Type": "application/json"}), (route, raw))
        inputs = [{"logprobs": [-1.0] * 8, "advantages": [0.5] * 8}]
        good = forward_backward(mine, 20_000, loss="ppo", inputs=inputs, config={"clip_low_threshold": 0.9})
        for _ in range(200):
            changed = damaged(good, rng)
            send(alice.request("forward_backward", changed), changed)
        for changed in (damaged(good, rng) for _ in range(20)):
            send(alice.request("forward_backward", changed, **{"Content-Encoding": "zstd"}), changed)
        for place in (
            "training_runs/x",
            "samplers/..",
            "sessions/x",
            "training_runs/x/checkpoints",
            "nothing",
            "files/a/b/c/d/e/f",
        ):
            send(alice.get(place), place)
        assert statuses[400] > 250 and statuses[200] > 50, statuses

        assert not isinstance(service.models[mine].broken, CommandFailed)
        assert losses + bob.train(model, 6, 2) == wanted, "another client's model is what it was"
        assert {file.name: file.read_bytes() for file in service.store.find(path, "bob").folder.iterdir()} == files
        assert alice.post("get_info", model_id=mine)["is_lora"]
