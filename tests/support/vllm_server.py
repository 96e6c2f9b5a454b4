"""A server with the routes of vLLM 0.32 that rollouts use, over our own generation engine.

As a program it takes the command line with which a rank starts vLLM; `fake_python` writes an interpreter that runs it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from tests.support.servers import json_server

ROOT = Path(__file__).parents[2]


_LOCK = threading.Lock()
"""Only one thread may load a model or use an engine."""


@dataclass
class FakeVLLM:
    """State of a server."""

    folder: Path
    """The model."""
    url: str = ""
    label: str = "default"
    paused: bool = False
    calls: list[str] = field(default_factory=list)
    """Paths of all requests but completions, in order."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of completions."""
    most_at_once: int = 0
    delay_seconds: float = 0.0
    intercept: Callable[[dict[str, Any]], tuple[int, Any] | None] = lambda body: None
    """Answers a completion in place of the model, unless it returns None."""
    shift: float = 0.0
    """Added to the log-probs of prompts."""
    max_model_len: int = 256
    token_seconds: float = 0.0
    """Time of a token, after which a pause ends the completion."""
    tokens: int = 0
    """Tokens that took their time."""
    _engine: GenerationEngine | None = None
    _running: int = 0

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        content = json.loads(body) if body else {}
        if path != "/v1/completions":
            self.calls.append(path)
            return self._control(path, content)
        self.bodies.append(content)
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        try:
            time.sleep(self.delay_seconds)
            answer = self.intercept(content)
            return self._complete(content) if answer is None else answer
        finally:
            self._running -= 1

    def _control(self, path: str, content: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "tiny", "max_model_len": self.max_model_len}]}
        if path == "/weight_info":
            return 200, {"weight_version": self.label}
        if path == "/pause":
            self.paused = True
        elif path == "/resume":
            self.paused = False
        elif path == "/update_weight_version":
            self.label = content["new_version"]
        elif path == "/collective_rpc":
            assert self.paused and content["method"] == "reload_weights"
            self.folder = Path(content["kwargs"]["weights_path"])
            self._engine = None
        elif path == "/sleep":  # level 2
            self.folder, self._engine = Path("discarded"), None
        elif path not in ("/health", "/reset_prefix_cache", "/wake_up"):
            return 404, {"detail": "Not Found"}
        return 200, {}

    def _complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        while self.paused:
            time.sleep(0.01)
        with _LOCK:
            if self._engine is None:
                self._engine = GenerationEngine.from_pretrained(str(self.folder), dtype=torch.float32)
                self._engine.maker.stop_token_ids = frozenset()
            prompt = body["prompt"]
            if "prompt_logprobs" in body:
                logprobs = self._engine.backend.prompt_logprobs(prompt).logprobs
                told = [
                    {str(t): {"logprob": value + self.shift}} for t, value in zip(prompt[1:], logprobs, strict=True)
                ]
                return 200, {"choices": [{"prompt_logprobs": [None, *told]}]}
            params = SamplingParams(
                max_new_tokens=min(body["max_tokens"], self.max_model_len - len(prompt)),
                temperature=body["temperature"],
                stop_token_ids=tuple(body["stop_token_ids"]),
                seed=body["seed"],
            )
            ((completion,),) = self._engine.generate([prompt], params)
        count = len(completion.token_ids)
        for sampled in range(count if self.token_seconds else 0):
            time.sleep(self.token_seconds)
            if self.paused:
                count = sampled
                break
            self.tokens += 1
        choice = {
            "token_ids": completion.token_ids[:count],
            "logprobs": {"token_logprobs": completion.sampling_logprobs[:count]},
            "finish_reason": completion.finish_reason if count == len(completion.token_ids) else "abort",
        }
        return 200, {"choices": [choice]}


@contextlib.contextmanager
def fake_vllm(folder: Path, **settings: Any) -> Iterator[FakeVLLM]:
    """A running server of a model, at a URL."""
    server = FakeVLLM(folder, **settings)
    with json_server(server.answer) as server.url:
        yield server


def fake_python(folder: Path, *, fails: str = "", ends_after: int | None = None) -> Path:
    """An interpreter whose `-m vllm... ARGUMENTS` runs this server; `fails`: it ends with this error; `ends_after`: the
    first such server is killed in place of its completion of that number."""
    script = folder / "python"
    once = folder / "killed"
    words = f"--killed {once} --ends_after {ends_after}" if ends_after is not None else ""
    run = f"PYTHONPATH={ROOT} exec {sys.executable} -m tests.support.vllm_server {words}"
    script.write_text(f'#!/bin/sh\nshift 2\n{f"echo {fails!r}; exit 1" if fails else run} "$@"\n')
    script.chmod(0o755)
    return script


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--uds")
    parser.add_argument("--killed", type=Path)
    parser.add_argument("--ends_after", type=int)
    options, _ = parser.parse_known_args()
    server = FakeVLLM(options.model)

    def intercept(body: dict[str, Any]) -> None:
        sampled = sum("prompt_logprobs" not in other for other in server.bodies)
        if options.killed is not None and not options.killed.exists() and sampled > options.ends_after:
            options.killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    server.intercept = intercept
    with json_server(server.answer, unix_socket=options.uds):
        threading.Event().wait()


if __name__ == "__main__":
    main()
