"""Prompts, sampling parameters and requests that tests of generation share."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hybrid_rlhf.generation import Completion, GenerationEngine, SamplingParams
from hybrid_rlhf.generation.batching.requests import Request
from hybrid_rlhf.generation.batching.workspace import Workspace
from hybrid_rlhf.generation.model.cache import BLOCK_TOKENS
from hybrid_rlhf.generation.open_batch import OpenBatch, PromptBatch, StreamedToken
from hybrid_rlhf.generation.sampling import per_request, uniform_stream
from tests.support.tiny import tiny_model

GENERATOR = torch.Generator().manual_seed(0)


def engine_of(model: PreTrainedModel | None = None, stop: Iterable[int] = (), **settings: Any) -> GenerationEngine:
    """An engine of a model, or of the tiny one, with these stop tokens."""
    return GenerationEngine.from_model(model or tiny_model(), stop_token_ids=stop, **settings)


def keep_in_flight(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Steps that are launched before the result of an earlier one is fetched: 1 as on a GPU."""
    begin = Workspace.__init__

    def ahead(self: Workspace, *given: Any, **named: Any) -> None:
        begin(self, *given, **named)
        self.steps_in_flight = steps

    monkeypatch.setattr(Workspace, "__init__", ahead)


def random_tokens(length: int) -> list[int]:
    """Random token ids, different in each call of a test, and the same in each run of it (conftest.py)."""
    return torch.randint(3, 200, (length,), generator=GENERATOR).tolist()


SYSTEM_PROMPT = random_tokens(2 * BLOCK_TOKENS + 3)
PROMPTS = [
    random_tokens(5),
    SYSTEM_PROMPT + random_tokens(4),
    random_tokens(1),
    SYSTEM_PROMPT + random_tokens(9),
    SYSTEM_PROMPT[:20] + random_tokens(3),
    SYSTEM_PROMPT,
    random_tokens(40),
]
"""Of many lengths; four begin with the same tokens."""
SAMPLED = SamplingParams(max_new_tokens=14, seed=7, n=2)
STOP_TOKEN_IDS = range(3, 30)
_SHORT_GENERATOR = torch.Generator().manual_seed(0)
SHORT_PROMPTS = [torch.randint(3, 200, (length,), generator=_SHORT_GENERATOR).tolist() for length in (5, 1, 9, 3, 7)]
SHORT_GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0)
SHORT_SAMPLED = SamplingParams(max_new_tokens=12, seed=7, n=2)


def token_ids_of(results: list[list[Completion]]) -> list[list[list[int]]]:
    """The tokens of each completion."""
    return [[completion.token_ids for completion in samples] for samples in results]


@functools.cache
def completions_alone() -> list[list[list[int]]]:
    """Each prompt in an engine of its own, one sample at a time."""
    engine = engine_of(stop=STOP_TOKEN_IDS, max_batch_rows=1)
    each = per_request(SAMPLED, len(PROMPTS))
    return [token_ids_of(engine.generate([prompt], [params]))[0] for prompt, params in zip(PROMPTS, each, strict=True)]


def requests_for(params: Sequence[SamplingParams], prompt: Sequence[int] = (1,)) -> list[Request]:
    """One request per parameter set, all with the same prompt."""
    return [Request(prompt, i, p, frozenset({2}), uniform_stream(7, i, 4)) for i, p in enumerate(params)]


Steps = SimpleQueue[list[StreamedToken]]
"""What a submission of an open batch delivers."""


def completed(batch: OpenBatch, prompts: list[list[int]], sampling: SamplingParams) -> list[list[list[StreamedToken]]]:
    """All tokens of each sample, as they are delivered."""
    steps = Steps()
    found: list[list[list[StreamedToken]]] = [[[] for _ in range(sampling.n)] for _ in prompts]
    unfinished = len(prompts) * sampling.n
    batch.submit(PromptBatch(prompts, sampling), steps.put)
    while unfinished:
        tokens = steps.get(timeout=60)
        assert tokens, "the batch has ended"
        for token in tokens:
            found[token.prompt][token.sample].append(token)
            unfinished -= token.finish_reason is not None
    return found


def ids_of(found: list[list[list[StreamedToken]]]) -> list[list[list[int]]]:
    """The tokens of each sample."""
    return [[[token.token_id for token in sample] for sample in samples] for samples in found]
