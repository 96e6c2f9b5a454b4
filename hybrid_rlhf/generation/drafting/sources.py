"""Where drafts come from: n-grams of a prompt and its group, or what the same prompt was completed with before.

`NGramDrafts` continues a row by what followed its last tokens where they occurred before: in its prompt, in itself, or
in another completion of its group. `PreviousDrafts` follows a completion of the same prompt from an earlier call; where
the row leaves it, the row's last tokens are looked up in all earlier completions of the prompt.

Source: prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding); earlier completions as
drafts: SPEC-RL (arXiv 2509.23232), which verifies one prefix of a completion before it samples, whereas here each step
verifies a few tokens and a row may return to an earlier completion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from hybrid_rlhf.generation.batching.requests import Request

_SHORTEST, _LONGEST = 2, 4
"""Tokens that must have occurred before, and the most that are compared."""
_OCCURRENCES = 8
"""Most places that are remembered for two tokens, the latest."""


class DraftSource(Protocol):
    """Drafts for the requests of one call."""

    def propose(self, request: Request, most: int) -> list[int]:
        """At most `most` tokens that may come next; [] if nothing is known."""

    def observe(self, request: Request) -> None:
        """Note that tokens were appended to a request."""


class NGrams:
    """Finds where the last tokens of a sequence occurred before."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, int], list[tuple[Sequence[int], int]]] = {}
        """For two adjacent tokens, the latest places behind them, as (sequence, place)."""

    def add(self, tokens: Sequence[int], start: int) -> None:
        """Index the tokens from place `start` on of a sequence, which may grow later."""
        for place in range(max(_SHORTEST, start), len(tokens)):
            found = self._after.setdefault((tokens[place - 2], tokens[place - 1]), [])
            found.append((tokens, place))
            if len(found) > _OCCURRENCES:
                del found[0]

    def find(self, tokens: Sequence[int]) -> tuple[Sequence[int], int] | None:
        """Where the longest end of these tokens occurred, the latest of equals: the sequence, and the place behind."""
        best, longest = None, _SHORTEST - 1
        for sequence, place in reversed(self._after.get((tokens[-2], tokens[-1]), ()) if len(tokens) > 1 else ()):
            same, most = _SHORTEST, min(_LONGEST, place, len(tokens))
            while same < most and sequence[place - same - 1] == tokens[-same - 1]:
                same += 1
            if same > longest:
                best, longest = (sequence, place), same
        return best


class NGramDrafts:
    """Continues a row as one of its group has gone on before."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._unfinished = Counter(request.prompt_index for request in requests)
        self._groups: dict[int, NGrams] = {}
        self._sequences: dict[Request, list[int]] = {}
        """Prompt and completion, as far as they are indexed."""
        self._behind: dict[Request, None] = {}
        """Requests with tokens that are not indexed yet."""

    def observe(self, request: Request) -> None:
        """See DraftSource; the tokens are indexed when a draft is next asked for."""
        self._behind[request] = None
        if request.finish_reason is not None:
            self._unfinished[request.prompt_index] -= 1
            if not self._unfinished[request.prompt_index]:
                self._forget(request.prompt_index)

    def propose(self, request: Request, most: int) -> list[int]:
        """See DraftSource."""
        for changed in self._behind:
            self._index(changed)
        self._behind.clear()
        tokens = self._sequences[request]
        found = self._groups[request.prompt_index].find(tokens)
        draft = list[int]()
        if found is not None:
            sequence, place = found
            for at in range(place, place + most):
                if at < len(sequence):
                    draft.append(sequence[at])
                elif sequence is tokens:  # the row repeats itself, and so does the draft
                    draft.append(draft[at - len(sequence)])
        return draft

    def _index(self, request: Request) -> None:
        ngrams = self._groups.get(request.prompt_index)
        if ngrams is None:
            ngrams = self._groups[request.prompt_index] = NGrams()
            ngrams.add(list(request.prompt), 0)
        tokens = self._sequences.setdefault(request, list(request.prompt))
        start = len(tokens)
        tokens += request.token_ids[start - len(request.prompt) :]
        ngrams.add(tokens, start)

    def _forget(self, prompt_index: int) -> None:
        self._groups.pop(prompt_index, None)
        for table in (self._sequences, self._behind):
            for request in [one for one in table if one.prompt_index == prompt_index]:
                del table[request]


class PreviousDrafts:
    """Follows an earlier completion of the same prompt."""

    def __init__(self, requests: Sequence[Request], completions: Mapping[int, Sequence[Sequence[int]]]) -> None:
        """Take requests, and the earlier completions of each prompt by prompt_index.

        Sample i of a prompt begins with its i-th earlier completion.
        """
        self._earlier = completions
        self._followed: dict[Request, tuple[Sequence[int], int]] = {}
        """The completion that a request follows, and the place of the next token in it."""
        self._read: dict[Request, int] = {}
        """Tokens of a request that have been compared with the completion it follows."""
        self._ngrams: dict[int, NGrams] = {}
        samples = Counter[int]()
        for request in requests:
            earlier = completions.get(request.prompt_index, ())
            if samples[request.prompt_index] < len(earlier):
                self._followed[request] = earlier[samples[request.prompt_index]], 0
            samples[request.prompt_index] += 1

    def observe(self, request: Request) -> None:
        """See DraftSource; tokens are compared when a draft is next asked for."""
        if request.finish_reason is not None:
            self._followed.pop(request, None)
            self._read.pop(request, None)

    def propose(self, request: Request, most: int) -> list[int]:
        """See DraftSource."""
        read = self._read.get(request, 0)
        new, followed = request.token_ids[read:], self._followed.get(request)
        self._read[request] = read + len(new)
        if followed is not None:
            sequence, place = followed
            if sequence[place : place + len(new)] == new:
                followed = sequence, place + len(new)
            else:
                followed = None
        if followed is None:
            followed = self._find(request)
        if followed is None:
            self._followed.pop(request, None)
            return []
        self._followed[request] = followed
        sequence, place = followed
        return list(sequence[place : place + most])

    def _find(self, request: Request) -> tuple[Sequence[int], int] | None:
        ngrams = self._ngrams.get(request.prompt_index)
        if ngrams is None:
            ngrams = self._ngrams[request.prompt_index] = NGrams()
            for earlier in self._earlier.get(request.prompt_index, ()):
                end = request.prompt[-_LONGEST:]
                ngrams.add([*end, *earlier], len(end))
        return ngrams.find([*request.prompt[-_LONGEST:], *request.token_ids[-_LONGEST:]])
