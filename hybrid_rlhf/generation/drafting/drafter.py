"""What an engine holds for speculative decoding: where drafts come from, how long they are, and whether they pay.

A drafter lives as long as the engine that uses it; `CallDrafts` is what one call of `generate` needs of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.generation.architecture.model_description import ModelDescription
from hybrid_rlhf.generation.batching.requests import Request
from hybrid_rlhf.generation.drafting.memory import MOST_TOKENS, CompletionMemory
from hybrid_rlhf.generation.drafting.sources import DraftSource, NGramDrafts, PreviousDrafts
from hybrid_rlhf.generation.drafting.trial import DraftTrial
from hybrid_rlhf.runtime.world import World

DraftName = Literal["ngram", "previous"]
"""ngram: n-grams of the prompt and of its completions so far; previous: the completions of an earlier call."""
DRAFT_TOKENS = 4
"""Longest draft by default."""


class Drafter:
    """Speculative decoding: drafts for the calls of an engine. Tensor-parallel ranks need equal settings."""

    def __init__(
        self,
        name: DraftName,
        *,
        draft_tokens: int = DRAFT_TOKENS,
        memory_tokens: int = MOST_TOKENS,
        always: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Choose the source of drafts.

        Args:
            name: `ngram`, n-grams of the prompt and of its completions so far; or `previous`, its completions of an
                earlier call.
            draft_tokens: longest draft, in tokens.
            memory_tokens: prompt and completion tokens that `previous` keeps in host memory, 4 bytes each.
            always: draft in every step, without comparing with steps without drafts.
            clock: seconds, for the comparison with steps without drafts.

        Raises:
            UserError: for an unknown name or no tokens.
        """
        if name not in get_args(DraftName):
            raise UserError(f"drafts are ngram or previous, got {name}: take one of these")
        if draft_tokens < 1:
            raise UserError(f"draft_tokens must be 1 or more, got {draft_tokens}: raise it")
        self.name, self.draft_tokens = name, draft_tokens
        self.memory = CompletionMemory(memory_tokens)
        """Of `previous`; empty otherwise."""
        self.trial = None if always else DraftTrial(clock)

    def begin(self, requests: Sequence[Request], world: World) -> CallDrafts | None:
        """The drafter's state for a call; none if there is nothing to draft from."""
        if self.name == "ngram":
            return CallDrafts(self, NGramDrafts(requests), world)
        prompts = {request.prompt_index: request.prompt for request in requests}
        earlier = {index: completions for index in prompts if (completions := self.memory.recall(prompts[index]))}
        return CallDrafts(self, PreviousDrafts(requests, earlier), world) if earlier else None

    def remember(self, completed: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Keep completions, as (prompt, completion), for later calls if they are a source of drafts."""
        if self.name != "previous":
            return
        by_prompt: dict[tuple[int, ...], list[Sequence[int]]] = {}
        for prompt, token_ids in completed:
            by_prompt.setdefault(tuple(prompt), []).append(token_ids)
        for prompt, completions in by_prompt.items():
            self.memory.store(prompt, completions)


class CallDrafts:
    """The drafts of one call."""

    def __init__(self, drafter: Drafter, source: DraftSource, world: World) -> None:
        self._most, self._trial, self._source, self._world = drafter.draft_tokens, drafter.trial, source, world
        if self._trial is not None:
            self._trial.begin()

    @property
    def drafting(self) -> bool:
        """Whether the next step has drafts."""
        return self._trial is None or self._trial.drafting

    def propose(self, request: Request) -> list[int]:
        """A draft that leaves room for the token after it, and has no stop token: nothing follows one."""
        left = len(request.uniforms) - len(request.token_ids) - 1
        if left < 1:
            return []
        draft = self._source.propose(request, min(self._most, left))
        end = next((place for place, token in enumerate(draft) if token in request.stop), len(draft))
        return draft[:end]

    def observe(self, request: Request) -> None:
        """Note that tokens were appended to a request."""
        self._source.observe(request)

    def record(self, *, rows: int, tokens: int, prefill: bool) -> None:
        """See DraftTrial."""
        if self._trial is not None:
            self._trial.record(rows=rows, tokens=tokens, prefill=prefill, world=self._world)


def check_can_draft(architecture: ModelDescription | None, *, setting: str) -> None:
    """Refuse drafts where no step can verify them.

    Args:
        architecture: of the inference weights; none: the model has none.
        setting: what asked for drafts.

    Raises:
        UserError: without inference weights, and for recurrent layers, whose states cannot return to a rejected draft's
            beginning.
    """
    if architecture is None:
        raise UserError(f"{setting} needs inference weights, got the model's own module: leave it out")
    if architecture.recurrence is not None:
        raise UserError(f"{setting} needs attention in every layer, got a model with recurrent layers: leave it out")
