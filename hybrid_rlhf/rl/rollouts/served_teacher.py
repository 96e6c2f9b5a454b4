"""A teacher behind `hybrid-rlhf serve` or vLLM, which is asked for the log-probs of given tokens (`prompt_logprobs`).

Before a run it must tokenise as the actor does, and answer the same tokens alike twice: a server whose weights, adapter
or arithmetic change between requests would teach noise. Failed requests are sent again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.credentials import expanded_key
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rl import TeacherConfig
from hybrid_rlhf.configs.sections.rules import require
from hybrid_rlhf.generation.backends.vllm import ServerLost, VLLMServer
from hybrid_rlhf.rl.types import Rollout
from hybrid_rlhf.runtime.background import retry_delay_seconds
from hybrid_rlhf.runtime.urls import expanded_url, shown_url

REQUESTS = 8
"""Requests of a rank at a time."""
MOST_TRIES = 5
"""Of a request; the last one waits 8 seconds more than the one before."""
MOST_DIFFERENCE = 0.1
"""Mean difference in nats between two answers, the bound of faults.max_logprob_diff in lower precision."""
_PROBE = "Let f(x) = 12345.678x + 90; is it so?\n\n\tdef f(x): return {'é': \"naïve\"}  # 数学, привет, 🙂 <|im_end|>"
T = TypeVar("T")


class ServedTeacher:
    """A server that reads rows."""

    def __init__(self, config: TeacherConfig, *, k: int) -> None:
        """Take the settings and the number of likely tokens that are wanted."""
        key = expanded_key(config.api_key, key="teacher.api_key")
        address = str(config.url)
        self._k = k
        self._server = VLLMServer(
            expanded_url(address, key="teacher.url").rstrip("/").removesuffix("/v1"),
            shown_url(address),
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            setting="teacher.url",
        )

    def require_same(self, tokenizer: PreTrainedTokenizerBase, *, longest: int) -> None:
        """Raise UserError for a server with other tokens than the tokenizer's, without room for a row of `longest`
        tokens, or whose two answers differ."""
        server = self._server
        self._retried(server.introduce)
        require(
            server.max_positions is None or longest < server.max_positions,
            "a teacher must have room for rollout.max_prompt_tokens, rollout.sampling.max_new_tokens and a token that "
            f"it samples, {longest} + 1, {server.shown} has a context of {server.max_positions}: lower one, or serve "
            "it with a longer context",
        )
        mine = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
        body = {"model": server.model, "prompt": _PROBE, "add_special_tokens": False}
        theirs = self._retried(lambda: server.call("POST", "/tokenize", json=body)["tokens"])
        require(
            mine == theirs,
            f"the teacher must share the actor's tokens, {server.shown} has others: use a model of the actor's family",
        )
        first, again = (self._retried(lambda: server.prompt_logprobs(mine)) for _ in range(2))
        apart = sum(abs(a - b) for a, b in zip(first, again, strict=True)) / len(first)
        require(
            apart <= MOST_DIFFERENCE,
            f"a teacher must answer the same tokens alike, {server.shown} differs by {apart:.3g} nats on average in "
            "two requests: serve one model, without adapters that are trained",
        )

    def __call__(self, rollout: Rollout) -> Tensor:
        """[N, T, 1 + 2 k] float32: for each response token its log-prob, the largest ones, and their tokens.

        Raises:
            UserError: when the server fails several times, or refuses a request.
        """
        if not self._server.model:
            self._retried(self._server.introduce)
        found = torch.zeros(*rollout.input_ids.shape, 1 + 2 * self._k)
        rows = [ids[:length] for ids, length in zip(rollout.input_ids.tolist(), rollout.lengths.tolist(), strict=True)]
        with ThreadPoolExecutor(REQUESTS) as pool:
            for row, values in enumerate(pool.map(self._read, rows)):
                found[row, 1 : len(rows[row])] = values
        return found * rollout.response_mask[:, :, None]

    def _read(self, ids: Sequence[int]) -> Tensor:
        """[len(ids) - 1, 1 + 2 k] of all tokens but the first."""
        answer = self._retried(lambda: self._server.likely_tokens(ids, self._k))
        if any(token not in likely or len(likely) < self._k for token, likely in zip(ids[1:], answer, strict=True)):
            raise UserError(
                f"teacher.url must tell the log-probs of each token and of the {self._k} most likely ones, "
                f"{self._server.shown} does not: lower teacher.top_k, or use vLLM"
            )
        values = []
        for token, likely in zip(ids[1:], answer, strict=True):
            top = sorted(likely.items(), key=lambda pair: -pair[1])[: self._k]
            values.append([likely[token], *(value for _, value in top), *(float(other) for other, _ in top)])
        return torch.tensor(values)

    def _retried(self, ask: Callable[[], T]) -> T:
        for tries in range(1, MOST_TRIES + 1):
            try:
                return ask()
            except ServerLost as error:
                if tries == MOST_TRIES:
                    raise UserError(
                        f"teacher.url must be a server that answers, {self._server.shown} failed {tries} times "
                        f"({error}): start it, and resume"
                    ) from error
                time.sleep(retry_delay_seconds(tries))
        raise AssertionError("unreachable")
