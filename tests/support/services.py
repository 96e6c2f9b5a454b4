"""Services of this process, and clients of any server. In a module of its own: the process of a server needs none."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import httpx2
import openai
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.serving.app import Access, build_app
from hybrid_rlhf.serving.service import Service
from hybrid_rlhf.serving.web import served_in_background
from tests.support.messages import user
from tests.support.serving import KEY

JSON = {"Content-Type": "application/json"}
HEADERS = {"Authorization": f"Bearer {KEY}", **JSON}


@contextmanager
def open_service(
    engine: GenerationEngine,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int,
    rows: int = 4,
    name: str = "m",
    **sampling: Any,
) -> Iterator[Service]:
    """The service of a model, whose sampling has these settings."""
    with engine.open(rows=rows, max_tokens=max_tokens) as batch:
        yield Service(
            batch,
            tokenizer,
            name=name,
            sampling=SamplingParams(**sampling),
            max_queue=20,
            allows_lark=True,
            image_reader=engine.image_reader,
            placeholders=engine.maker.banned_ids,
        )


def served_service(service: Service, access: Access | None = None, **more: Any) -> AbstractContextManager[str]:
    """The URL of a server of the service in a thread."""
    return served_in_background(build_app(service, access or Access(), created=0, **more))


class Server:
    """A server of a model, asked also for the tokens of its answers."""

    def __init__(self, url: str, question: str = "hello", *, name: str = "m") -> None:
        """Take its URL, what conversations ask where nothing else is said, and the model's name."""
        self.url = url
        self.client = openai_client(url)
        self._defaults: dict[str, Any] = {"model": name, "messages": [user(question)]}

    def chat(self, **settings: Any) -> Any:
        """An answer to a conversation."""
        return self.client.chat.completions.create(**self._defaults | _with_tokens(settings))

    def complete(self, prompt: Any = "hello", **settings: Any) -> Any:
        """The completion of a prompt."""
        content = {"model": self._defaults["model"], "prompt": prompt}
        return self.client.completions.create(**content | _with_tokens(settings))

    def post(self, path: str, content: Any) -> httpx2.Response:
        """Send a body."""
        return post(f"{self.url}{path}", content)


def _with_tokens(settings: dict[str, Any]) -> dict[str, Any]:
    return settings | {"extra_body": {"return_token_ids": True, **settings.get("extra_body", {})}}


def openai_client(url: str, key: str = KEY) -> openai.OpenAI:
    """OpenAI's client, which asks once."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120)


def post(url: str, content: Any, **headers: str) -> httpx2.Response:
    """Send bytes, or an object as JSON, with the server's key."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return httpx2.post(url, content=body, headers=HEADERS | headers, timeout=60)


def metric(url: str, name: str) -> float:
    """The value of a metric of a server."""
    found = re.search(rf"^hybrid_rlhf_{name} (\S+)$", httpx2.get(f"{url}/metrics").text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])
