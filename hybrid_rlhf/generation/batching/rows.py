"""What continuous batching keeps of a running request, of a launched step, and of the lengths of completions."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybrid_rlhf.generation.batching.blocks import BlockTable
from hybrid_rlhf.generation.batching.requests import Request
from hybrid_rlhf.generation.batching.workspace import Fetch


@dataclass(eq=False)
class LiveRow:
    """A running request."""

    request: Request
    age: int
    """Place in the order of arrival."""
    table: BlockTable
    slot: int
    """Of its states in recurrent layers."""
    computed: int = 0
    """Tokens whose keys and values are in the cache, or will be by the steps that have been launched; of drafts, those
    that were kept."""
    listed: int = 0
    """Blocks whose pages are in the workspace's table."""
    samples: list[LiveRow] = field(default_factory=list)
    """Other samples of the prompt, which enter with this one."""


@dataclass(frozen=True)
class LaunchedStep:
    """A step that was launched."""

    rows: list[LiveRow]
    decoding: int
    """Rows that decode; the others enter."""
    places: list[int]
    """Tokens that each row samples: one, and those of its draft."""
    prefill: bool
    """Whether chunks of prompts are computed."""
    fetch: Fetch


@dataclass
class ExpectedLength:
    """Expected length of a completion: tokens sampled per finished completion.

    That is the maximum likelihood of a constant chance to end, with running completions counted as censored; before
    any has finished, half of the limit.
    """

    tokens: float = 0.0
    finished: float = 0.0

    def of(self, limit: int) -> float:
        """The mean for a completion of at most `limit` tokens."""
        return min(limit, (self.tokens + limit / 2) / (self.finished + 1))
