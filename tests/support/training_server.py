"""`hybrid-rlhf train-server`: in a thread, or in a process of its own; and its protocol in plain HTTP."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import torch

from hybrid_rlhf.cli.main import main
from hybrid_rlhf.configs.inference import TrainServerConfig
from hybrid_rlhf.engines.adapters import AdapterEngine, AdapterRow
from hybrid_rlhf.generation import GenerationEngine
from hybrid_rlhf.models.packing import use_packing
from hybrid_rlhf.runtime.world import solo_world
from hybrid_rlhf.serving.admission import Activity
from hybrid_rlhf.serving.training.app import build_app
from hybrid_rlhf.serving.training.base import LoadedBase
from hybrid_rlhf.serving.training.messages import MESSAGES
from hybrid_rlhf.serving.training.server import training_service
from hybrid_rlhf.serving.training.service import TrainingService
from hybrid_rlhf.serving.web import served_in_background
from tests.support.serving import ServerProcess, printing_process
from tests.support.tiny import tiny_model, tiny_tokenizer

BASE = "tiny"
ALICE = "tml-alice-secret"
BOB = "tml-bob-secret"
KEYS = {"alice": ALICE, "bob": BOB}
MAX_TOKENS = 64
"""Of a sequence, and of a micro-batch."""
SEQUENCE = [3, 9, 27, 81, 12, 5, 7, 8, 19]


class Client:
    """One client of the protocol."""

    def __init__(self, url: str, key: str = ALICE) -> None:
        """Take a server's URL and a key."""
        self._http = httpx2.Client(base_url=f"{url}/api/v1", headers={"X-API-Key": key}, timeout=60)

    def get(self, path: str, **query: Any) -> httpx2.Response:
        """Ask for something."""
        return self._http.get(path, params=query)

    def put(self, path: str, **content: Any) -> httpx2.Response:
        """Set something."""
        return self._http.put(path, json=content)

    def delete(self, path: str) -> httpx2.Response:
        """Delete something."""
        return self._http.delete(path)

    def request(self, path: str, content: Any, **headers: str) -> httpx2.Response:
        """Send a body: bytes of a protobuf message, or an object as JSON."""
        if isinstance(content, bytes):
            headers = {"Content-Type": "application/x-protobuf", **headers}
            return self._http.post(path, content=content, headers=headers)
        return self._http.post(path, json=content, headers=headers)

    def post(self, path: str, /, **content: Any) -> Any:
        """Send a JSON body that is accepted."""
        answer = self.request(path, content)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def result(self, request_id: str) -> Any:
        """The result of a request, when it has one: an object, or a message's bytes."""
        while True:
            answer = self.request("retrieve_future", {"request_id": request_id})
            assert answer.status_code == 200, answer.text
            if answer.headers["content-type"] == "application/x-protobuf":
                return answer.content
            if answer.json().get("type") != "try_again":
                return answer.json()

    def done(self, path: str, /, **content: Any) -> Any:
        """The result of a command."""
        return self.result(self.post(path, **content)["request_id"])

    def save(self, model_id: str, seq: int, path: str | None, **more: Any) -> Any:
        """The result of saving weights by a name; none: for the first sampler of the session."""
        if path is None:
            return self.done("save_weights_for_sampler", model_id=model_id, seq_id=seq, sampling_session_seq_id=0)
        return self.done("save_weights", model_id=model_id, seq_id=seq, path=path, **more)

    def load(self, path: str, session: str | None = None, number: int = 0, *, optimizer: bool = False) -> Any:
        """The result of loading weights into a new model."""
        content = {"session_id": session or self.session(), "model_seq_id": number}
        return self.done("load_weights", path=path, optimizer=optimizer, **content)

    def unload(self, model_id: str) -> Any:
        """The result of unloading a model."""
        return self.done("unload_model", model_id=model_id)

    def asample(self, tokens: Sequence[int], sampling: dict[str, Any], **more: Any) -> str:
        """The id of a request for samples after a prompt."""
        prompt = {"chunks": [{"type": "encoded_text", "tokens": tokens}]}
        request_id: str = self.post("asample", prompt=prompt, sampling_params=sampling, **more)["request_id"]
        return request_id

    def greedy(self, first: int, place: int = 0, **weights: Any) -> list[int]:
        """The greedy continuation of a token."""
        sampling = {"max_tokens": 8, "temperature": 0}
        return samples_of(self.result(self.asample([first], sampling, seq_id=place, **weights)))[0]

    def session(self) -> str:
        """A new session's id."""
        session_id: str = self.post("create_session", tags=[], user_metadata=None, sdk_version="test")["session_id"]
        return session_id

    def model(self, session: str | None = None, number: int = 0, *, rank: int = 4, seed: int = 0) -> str:
        """A new model's id."""
        lora = {"rank": rank, "seed": seed}
        created = self.done(
            "create_model",
            session_id=session or self.session(),
            model_seq_id=number,
            base_model=BASE,
            lora_config=lora,
        )
        assert created["type"] == "create_model", created
        model_id: str = created["model_id"]
        return model_id

    def send(self, model_id: str, seq: int | None, *given: Any, **named: Any) -> httpx2.Response:
        """Send a command whose rows are whole sequences."""
        return self.request("forward_backward", forward_backward(model_id, seq, *given, **named))

    def forward_backward(self, model_id: str, seq: int | None, *given: Any, **named: Any) -> str:
        """The id of the request of such a command."""
        answer = self.send(model_id, seq, *given, **named)
        assert answer.status_code == 200, answer.text
        request_id: str = answer.json()["request_id"]
        return request_id

    def loss(self, model_id: str, seq: int) -> float:
        """The loss of such a command."""
        return loss_of(self.result(self.forward_backward(model_id, seq)))

    def step(self, model_id: str, seq: int | None, learning_rate: float = 0.02) -> str:
        """The id of the request of an update."""
        adam = {"learning_rate": learning_rate}
        request_id: str = self.post("optim_step", model_id=model_id, seq_id=seq, adam_params=adam)["request_id"]
        return request_id

    def train(
        self, model_id: str, first_seq: int, steps: int, rows: Sequence[Sequence[int]] = (SEQUENCE,)
    ) -> list[float]:
        """The losses of some steps, each of two commands."""
        requests = []
        for seq in range(first_seq, first_seq + 2 * steps, 2):
            requests.append(self.forward_backward(model_id, seq, rows))
            self.step(model_id, seq + 1)
        return [loss_of(self.result(request)) for request in requests]


def forward_backward(
    model_id: str,
    seq: int | None,
    rows: Sequence[Sequence[int]] = (SEQUENCE,),
    *,
    loss: str = "cross_entropy",
    inputs: Sequence[dict[str, Sequence[float]]] = (),
    config: dict[str, float] | None = None,
    forward_only: bool = False,
) -> bytes:
    """The body of a command; `inputs`: of the loss of each row."""
    message = MESSAGES["ForwardBackwardRequest"](model_id=model_id, loss_fn=loss, forward_only=forward_only)
    if seq is not None:
        message.seq_id = seq
    for key, value in (config or {}).items():
        message.loss_fn_config_v2.add(key=key).value.number = value
    for index, row in enumerate(rows):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(row[:-1], "<i4").tobytes()
        targets = datum.loss_fn_inputs.add(key="target_tokens").value
        targets.dense = np.asarray(row[1:], "<i8").tobytes()
        targets.dtype = 2
        targets.shape.append(len(row) - 1)
        for key, values in (inputs[index] if inputs else {}).items():
            tensor = datum.loss_fn_inputs.add(key=key).value
            tensor.dense = np.asarray(values, "<f4").tobytes()
            tensor.dtype = 1
            tensor.shape.append(len(values))
    body: bytes = message.SerializeToString()
    return body


def error_of(answer: httpx2.Response, status: int) -> str:
    """The error of an answer with a status."""
    assert answer.status_code == status, answer.text
    error: str = answer.json()["error"]
    return error


def loss_of(result: Any) -> float:
    """The loss of a command's result."""
    assert isinstance(result, bytes), result
    message = MESSAGES["ForwardBackwardOutput"].FromString(result)
    return float({entry.key: entry.value for entry in message.metrics}["loss:sum"])


def logprobs_of(result: bytes) -> list[np.ndarray]:
    """The log-probs of each row of a command's result."""
    message = MESSAGES["ForwardBackwardOutput"].FromString(result)
    values = []
    for record in message.loss_fn_outputs:
        tensor = record.fields[0].value
        offsets = np.frombuffer(tensor.offsets, "<i8") // 4
        flat = np.frombuffer(tensor.data, "<f4")
        values += [flat[start:stop] for start, stop in zip(offsets, offsets[1:], strict=False)]
    return values


def samples_of(result: bytes) -> list[list[int]]:
    """The tokens of a sampling request's result."""
    message = MESSAGES["SampleResponse"].FromString(result)
    return [np.frombuffer(sequence.tokens, "<i4").tolist() for sequence in message.sequences]


def loaded_base() -> LoadedBase:
    """The tiny model, loaded for training and sampling."""
    lm = tiny_model().eval()
    use_packing(lm)
    engine = AdapterEngine(lm, world=solo_world(lm.device), micro_batch_tokens=MAX_TOKENS)
    tokenizer = tiny_tokenizer()
    generation = GenerationEngine.from_model(lm, tokenizer=tokenizer, cuda_graphs=False)
    batch = generation.open(rows=8, max_tokens=MAX_TOKENS, memory_share=0.1)
    return LoadedBase(
        engine,
        AdapterRow,
        generation,
        batch,
        base_model=BASE,
        tokenizer=tokenizer,
        tokenizer_id="unused",
        batch_tokens=MAX_TOKENS,
    )


@contextlib.contextmanager
def training_server(
    folder: Path, *, poll_seconds: float = 0.5, **settings: Any
) -> Iterator[tuple[str, TrainingService]]:
    """The URL and the service of a server in a thread, with the keys of `KEYS`."""
    config = TrainServerConfig(
        path=BASE, max_sequence_tokens=MAX_TOKENS, micro_batch_tokens=MAX_TOKENS, api_keys=KEYS, **settings
    )
    base = loaded_base()
    service = training_service(config, base, folder, KEYS)
    app = build_app(
        service,
        host="127.0.0.1",
        activity=Activity(),
        max_body_bytes=int(config.max_body_mib * 2**20),
        poll_seconds=poll_seconds,
    )
    try:
        with served_in_background(app) as url:
            yield url, service
    finally:
        service.worker.close()
        base.batch.close()


def training_server_process(
    model: str, folder: Path, line: str = "", *, port: int = 0
) -> contextlib.AbstractContextManager[tuple[ServerProcess, str]]:
    """The command in a process of its own, and its URL; killed at the end. Port 0: a free one."""
    words = ["train-server", model, "--output_dir", str(folder), "--port", str(port), *line.split()]
    return printing_process(_serve, [words], r"training of \S+ on (http://127\.0\.0\.1:\d+)\n")


def _serve(words: list[str], output: Connection) -> None:
    os.dup2(output.fileno(), 1)
    torch.set_num_threads(1)
    main(words)
