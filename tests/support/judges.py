"""A server with OpenAI's API whose model is a function of the question, and judges that ask it."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image

from hybrid_rlhf.configs.sections.rewards import RewardComponentConfig
from hybrid_rlhf.rl.rewards.components import CompletionTexts
from hybrid_rlhf.rl.rewards.judge import JudgeReward
from tests.support.messages import user
from tests.support.servers import json_server


@dataclass(frozen=True)
class Asked:
    """A question as a judge reads it."""

    body: dict[str, Any]

    @property
    def text(self) -> str:
        """The only message, with [image] for each picture."""
        (message,) = self.body["messages"]
        content = message["content"]
        return content if isinstance(content, str) else "".join(part.get("text", "[image]") for part in content)

    @property
    def images(self) -> list[bytes]:
        """The pixels of its pictures."""
        (message,) = self.body["messages"]
        uris = [part["image_url"]["url"] for part in message["content"] if "image_url" in part]
        return [Image.open(io.BytesIO(base64.b64decode(uri.partition("base64,")[2]))).tobytes() for uri in uris]

    @property
    def tag(self) -> str:
        """What the instructions say of the marks."""
        return re.findall(r"stand between marks with (\w+)\.", self.text)[0]

    @property
    def marked(self) -> dict[str, str]:
        """The texts between the marks, by name, with control tokens as their authors wrote them."""
        text = self.text.replace("\u200b", "")
        return dict(re.findall(rf"<(\w+) {self.tag}>\n(.*?)\n</\1 {self.tag}>", text, re.DOTALL))

    @property
    def answers(self) -> list[str]:
        """The answers, in their order."""
        return [text for name, text in self.marked.items() if name.startswith("answer_")]

    @property
    def instructions(self) -> str:
        """What is outside of the marks."""
        return re.sub(rf"<(\w+) {self.tag}>\n.*?\n</\1 {self.tag}>", "", self.text, flags=re.DOTALL)


Judging = Callable[[Asked], Any]
"""Numbers of the answers; a text is the reply itself, a pair the status and body of the response."""


@dataclass
class JudgeServer:
    """A running server."""

    url: str = ""
    asked: list[Asked] = field(default_factory=list)


@contextlib.contextmanager
def judge_server(judging: Judging, *, model: str = "wise") -> Iterator[JudgeServer]:
    """A server whose replies have 10 tokens."""
    server = JudgeServer()

    def answer(method: str, path: str, body: bytes) -> tuple[int, Any]:
        if method == "GET":
            assert path == "/v1/models"
            return 200, {"data": [{"id": model}]}
        assert path == "/v1/chat/completions"
        asked = Asked(json.loads(body))
        assert asked.body["model"] == model
        server.asked.append(asked)
        verdict = judging(asked)
        if isinstance(verdict, tuple):
            return verdict
        if not isinstance(verdict, str):
            verdict = verdict_of(verdict)
        return 200, {"choices": [{"message": {"content": verdict}}], "usage": {"total_tokens": 10}}

    with json_server(answer) as url:
        server.url = f"{url}/v1"
        yield server


def verdict_of(numbers: Sequence[int], **more: str) -> str:
    """A reply with the numbers of the answers, behind other keys."""
    return json.dumps(more | {f"answer_{number}": value for number, value in enumerate(numbers, 1)})


def judge_of(server: JudgeServer, *, settings: Any = None, **judge: Any) -> JudgeReward:
    """A judge that asks a server, without a pause before retries."""
    config = RewardComponentConfig(judge={"url": server.url, "retries": 0, **judge}, **(settings or {}))
    return JudgeReward(config, device=torch.device("cpu"))


def ranks_by(value: Callable[[str], float]) -> Judging:
    """A judge that ranks by a value, 1 for the highest; equal values have the same rank."""
    return lambda asked: [1 + sum(value(other) > value(mine) for other in asked.answers) for mine in asked.answers]


def first_is_best(asked: Asked) -> list[int]:
    """A judge that looks only at the position."""
    return [*range(1, len(asked.answers) + 1)]


def texts_of(completions: Sequence[str], **columns: Any) -> CompletionTexts:
    """Completions of the prompt "Why?"."""
    return CompletionTexts([[user("Why?")]] * len(completions), [*completions], columns)
