"""Completions of the ranks that sample, sent to all ranks: first their lengths, then flat tokens without padding.

They are not sent as objects, because pickling a rollout of a million tokens encodes every number separately.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from hybrid_rlhf.generation.sampling import Completion, FinishReason
from hybrid_rlhf.runtime.world import World


class Sampled(NamedTuple):
    """A completion with its prompt."""

    place: int
    """Position of the prompt in the rollout."""
    prompt: list[int]
    completion: Completion


@dataclass(frozen=True)
class _Heading:
    """Metadata of a completion, sent before its tokens."""

    place: int
    prompt_tokens: int
    tokens: int
    finish_reason: FinishReason | None
    weight_versions: list[tuple[int, int]]
    """Runs of equal versions as (version, number of tokens)."""
    truncates: bool
    """True if there are log-probs of the truncated distribution."""
    routes: tuple[tuple[int, ...], str] | None
    """Shape and dtype of the recorded experts."""


def run_lengths(values: Iterable[int]) -> list[tuple[int, int]]:
    """Equal neighbours as (value, count)."""
    return [(value, len(list(equal))) for value, equal in itertools.groupby(values)]


def gather_completions(mine: Sequence[Sampled], world: World) -> list[Sampled]:
    """The completions of all ranks, in the order of ranks. Every rank calls.

    Log-probs arrive as float32.
    """
    if world.size == 1:
        return list(mine)
    headings = world.all_gather_objects([_heading(sample) for sample in mine])
    gathered = []
    for source, of_rank in enumerate(headings):
        if not of_rank:
            continue
        completions = [sample.completion for sample in mine] if source == world.rank else []
        prompts = [sample.prompt for sample in mine] if source == world.rank else []
        ids = [prompt + output.token_ids for prompt, output in zip(prompts, completions, strict=True)]
        floats = [output.logprobs + output.sampling_logprobs for output in completions]
        experts = [output.routes.reshape(-1).view(np.uint8) for output in completions if output.routes is not None]
        counts = (
            sum(heading.prompt_tokens + heading.tokens for heading in of_rank),
            sum(heading.tokens * (1 + heading.truncates) for heading in of_rank),
            sum(map(_bytes, of_rank)),
        )
        gathered += _read(
            of_rank,
            _sent(ids, counts[0], np.dtype(np.int32), source, world),
            _sent(floats, counts[1], np.dtype(np.float32), source, world),
            _sent(experts, counts[2], np.dtype(np.uint8), source, world),
        )
    return gathered


def _heading(sampled: Sampled) -> _Heading:
    completion = sampled.completion
    routes = None if completion.routes is None else (completion.routes.shape, completion.routes.dtype.str)
    return _Heading(
        sampled.place,
        len(sampled.prompt),
        len(completion.token_ids),
        completion.finish_reason,
        run_lengths(completion.weight_versions),
        bool(completion.sampling_logprobs),
        routes,
    )


def _bytes(heading: _Heading) -> int:
    return 0 if heading.routes is None else int(np.prod(heading.routes[0])) * np.dtype(heading.routes[1]).itemsize


def _sent(values: Sequence[Any], count: int, dtype: np.dtype[Any], source: int, world: World) -> np.ndarray:
    """The numbers that a rank sends, received on every rank."""
    if not count:
        return np.empty(0, dtype)
    flat = np.concatenate([np.asarray(part, dtype) for part in values]) if values else np.empty(count, dtype)
    return world.broadcast(torch.from_numpy(flat).to(world.device), source=source).cpu().numpy()


def _read(headings: Sequence[_Heading], ids: np.ndarray, floats: np.ndarray, experts: np.ndarray) -> list[Sampled]:
    """The completions that headings and flat numbers describe."""
    completions = []
    tokens = iter(ids.tolist())
    numbers = iter(floats.tolist())
    byte = 0
    for heading in headings:
        prompt = list(itertools.islice(tokens, heading.prompt_tokens))
        token_ids = list(itertools.islice(tokens, heading.tokens))
        logprobs = list(itertools.islice(numbers, heading.tokens))
        drawn = list(itertools.islice(numbers, heading.tokens * heading.truncates))
        routes = None
        if heading.routes is not None:
            shape, dtype = heading.routes
            routes = experts[byte : byte + _bytes(heading)].view(dtype).reshape(shape)
            byte += _bytes(heading)
        versions = [version for version, count in heading.weight_versions for _ in range(count)]
        completion = Completion(token_ids, logprobs, heading.finish_reason, drawn, versions, routes)
        completions.append(Sampled(heading.place, prompt, completion))
    return completions
