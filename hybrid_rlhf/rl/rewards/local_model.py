"""The model of a judge in the run: the generation engine answers the requests of a step in one batch.

It answers as `hybrid-rlhf serve` would, each request once: its answers do not change. Ranks have different numbers of
requests, so nothing here waits for other ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.judge import JudgeConfig
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.data.chat.conversation import stop_token_ids
from hybrid_rlhf.data.chat.reasoning import text_decoder
from hybrid_rlhf.data.chat.template import render, token_ids
from hybrid_rlhf.generation.batching.grammar import require_grammars
from hybrid_rlhf.generation.engine import GenerationEngine
from hybrid_rlhf.rl.rewards.replicas import Body, Show, Unusable
from hybrid_rlhf.runtime.observability.logs import shortened
from hybrid_rlhf.serving.packages import require_packages

K = TypeVar("K")


class LocalModel:
    """Answers requests for chat completions in this process, in place of an Endpoint."""

    def __init__(self, config: JudgeConfig, load: Callable[[], GenerationEngine]) -> None:
        """Take what loads the engine and its tokenizer.

        Raises:
            UserError: when a package of the extra `serve` is missing.
        """
        require_packages("path of a judge")
        require_grammars()
        self.load = functools.cache(load)
        """Returns the engine, which is loaded in the first call."""
        self._sampling = config.in_run

    def send(
        self,
        bodies: Mapping[K, Body],
        read: Callable[[K, Any, Show], None],
        *,
        path: str = "",
        most_failures: float = math.inf,
    ) -> dict[K, str]:
        """Answer all requests, each once; bodies, `read` and the result are those of `Endpoint.send`."""
        if not bodies:
            return {}
        engine = self.load()
        failures: dict[K, str] = {}
        asked: dict[K, tuple[list[int], SamplingParams]] = {}
        for key, body in bodies.items():
            assert isinstance(body, str), "a judge sends questions, here without images"
            try:
                asked[key] = self._prompt(engine, body)
            except UserError as error:
                failures[key] = str(error)
        completions = engine.generate([ids for ids, _ in asked.values()], [params for _, params in asked.values()])
        engine.backend.reset()  # training needs the memory of keys and values
        assert engine.maker.tokenizer is not None
        text = text_decoder(engine.maker.tokenizer)
        for (key, (ids, _)), (completion,) in zip(asked.items(), completions, strict=True):
            tokens = completion.token_ids
            message = {"message": {"content": text(tokens)}}
            try:
                read(
                    key,
                    {"choices": [message], "usage": {"total_tokens": len(ids) + len(tokens)}},
                    lambda part: shortened(repr(part)),
                )
            except Unusable as error:
                failures[key] = str(error)
        return failures

    def _prompt(self, engine: GenerationEngine, request: str) -> tuple[list[int], SamplingParams]:
        """The tokens of a request, and how they are completed.

        Raises:
            UserError: when the template or the model refuses them, such as too many.
        """
        # imported here, as fastapi is an optional package
        from hybrid_rlhf.serving.bodies import ChatBody, read_body
        from hybrid_rlhf.serving.conversations import read_conversation
        from hybrid_rlhf.serving.formats import response_format

        tokenizer = engine.maker.tokenizer
        assert tokenizer is not None
        body = read_body(ChatBody, request.encode())
        messages = read_conversation("messages", body.messages)
        text = render(messages, tokenizer, add_generation_prompt=True, variables=body.chat_template_kwargs)
        ids = token_ids(text, tokenizer)
        form = response_format(body, tokenizer, ids)
        params = replace(self._sampling, response_format=form, stop_token_ids=stop_token_ids(tokenizer, None))
        engine.maker.requests([ids], params)
        return ids, params
