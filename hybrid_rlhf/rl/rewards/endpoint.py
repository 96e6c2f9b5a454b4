"""HTTP endpoints as reward components.

A request is a POST of {"prompts": [...], "completions": [...], "columns": {...}}; the reply is {"scores": [...]} with a
number or null per completion. Messages with images have the content parts of OpenAI's API. Remote reward models of
OpenRLHF (0.11.2, utils/agent.py) get {"query": [...], "prompts": [...], "labels": [...]} and reply {"rewards": [...]}.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import torch

from hybrid_rlhf.configs.sections.rewards import Protocol, RewardComponentConfig
from hybrid_rlhf.models.pretrained.folders import first_line
from hybrid_rlhf.rl.images import pixels_uri, with_parts
from hybrid_rlhf.rl.rewards.components import CompletionTexts, ComponentScores, RewardBatch, RewardComponent
from hybrid_rlhf.rl.rewards.foreign import openrlhf_arguments
from hybrid_rlhf.rl.rewards.replicas import Endpoint, Rejected, Show, Unusable
from hybrid_rlhf.runtime.background import BackgroundCall

_REPLY_KEYS = {"scores": "scores", "openrlhf": "rewards"}
"""Names of the scores in a reply, by protocol."""
REQUESTS_PER_REPLICA = 8
"""Concurrent requests of a rank per replica."""


class EndpointReward(RewardComponent):
    """Sends this rank's rows to an endpoint in batches, over all of its replicas concurrently."""

    reads_images = True

    def __init__(self, config: RewardComponentConfig, *, device: torch.device) -> None:
        """Read the API key.

        Raises:
            UserError: when its environment variable is not set, or is not valid in a header.
        """
        super().__init__(config)
        self._config = config
        self._device = device
        self._endpoint = Endpoint(
            config.urls,
            key="reward.components",
            api_key_env=config.api_key_env,
            timeout_seconds=config.timeout_seconds,
            retries=config.most_retries,
            concurrent=REQUESTS_PER_REPLICA,
        )

    def begin(self, batch: RewardBatch) -> Callable[[], ComponentScores]:
        """Start the requests in a thread."""
        return BackgroundCall(lambda: self.score(batch.texts), device=self._device).result

    def score(self, texts: CompletionTexts) -> ComponentScores:
        """Scores of completions."""
        size = self._config.batch_size
        batches = [texts.select(range(len(texts))[start : start + size]) for start in range(0, len(texts), size)]
        scores = [ComponentScores.failed(len(batch), "") for batch in batches]
        body = functools.partial(_body, self._config.protocol)
        bodies = {number: functools.partial(body, batch) for number, batch in enumerate(batches)}
        key = _REPLY_KEYS[self._config.protocol]

        def read(number: int, reply: Any, show: Show) -> None:
            if not isinstance(reply, dict) or key not in reply:
                raise Unusable(f'got {show(reply)} in place of {{"{key}": [...]}}')
            found = ComponentScores.read(reply[key], len(batches[number]), show=show)
            scores[number] = scores[number].filled_from(found)
            if found.failures:
                raise Unusable(next(iter(found.failures.values())))

        for number, reason in self._endpoint.send(bodies, read).items():
            scores[number] = scores[number].filled_from(ComponentScores.failed(len(batches[number]), reason))
        return ComponentScores.join(scores)


def _body(protocol: Protocol, texts: CompletionTexts) -> str:
    """The body of a request, which may be large: with its images."""
    try:
        return json.dumps(_request(texts, protocol), allow_nan=False)
    except ValueError as error:
        raise Rejected(f"a data column does not fit JSON ({first_line(error)})") from error


def _request(texts: CompletionTexts, protocol: Protocol) -> dict[str, object]:
    """The body of a request."""
    if protocol == "scores":
        prompts = texts.prompts
        if texts.images is not None:
            uri = functools.cache(pixels_uri)
            prompts = [
                with_parts(prompt, map(uri, images)) for prompt, images in zip(prompts, texts.images, strict=True)
            ]
        return {"prompts": prompts, "completions": texts.completions, "columns": texts.columns}
    given = openrlhf_arguments(texts.prompts, texts.completions, texts.columns)
    return {"query": given.pop("queries"), **given}
