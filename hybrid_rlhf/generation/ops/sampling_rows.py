"""What sampling reads and writes of each row, as tensors on the device, and which of its parts the rows need.

All integers of a row are in one table and all floats in another, so that a kernel takes two addresses.

Shapes: S rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from torch import Tensor

INTEGERS = ("token", "position", "drawn", "top_k", "greedy", "min_new_tokens")
FLOATS = ("divisor", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class SamplingMode:
    """Which parts of sampling some of the requests need; the other parts are skipped for all."""

    greedy: bool
    temperature: bool
    top_k_top_p: bool
    min_p: bool
    repetition_penalty: bool
    min_new_tokens: bool
    top_logprobs: bool

    def covers(self, other: SamplingMode) -> bool:
        """Whether requests that need the other mode can be sampled in this one."""
        return all(has or not needs for has, needs in zip(astuple(self), astuple(other), strict=True))

    @property
    def draws_from_all(self) -> bool:
        """Whether tokens are drawn from the whole distribution, without truncation or penalty."""
        return not (self.top_k_top_p or self.min_p or self.repetition_penalty or self.min_new_tokens)


@dataclass
class SamplingRows:
    """Tables of S rows."""

    integers: Tensor
    """[S, 6 + stop tokens] int64."""
    floats: Tensor
    """[S, 4 + longest completion] float64."""
    seen: Tensor | None
    """[S, V] bool, tokens of prompt and completion; none without a repetition penalty."""

    def append(self, tokens: Tensor) -> None:
        """Add one sampled token [S] to each row."""
        self.token.copy_(tokens)
        self.advance(1)
        if self.seen is not None:
            self.seen.scatter_(1, tokens[:, None], True)

    def advance(self, tokens: Tensor | int) -> None:
        """Count so many tokens [S] more in each row."""
        self.integers[:, 1:3] += tokens if isinstance(tokens, int) else tokens[:, None]

    @property
    def token(self) -> Tensor:
        """[S], the last token of each row."""
        return self.integers[:, 0]

    @property
    def position(self) -> Tensor:
        """[S], position of the last token."""
        return self.integers[:, 1]

    @property
    def drawn(self) -> Tensor:
        """[S], tokens of the completion so far."""
        return self.integers[:, 2]

    @property
    def top_k(self) -> Tensor:
        """[S, 1]."""
        return self.integers[:, 3:4]

    @property
    def greedy(self) -> Tensor:
        """[S] bool."""
        return self.integers[:, 4].bool()

    @property
    def early_stops(self) -> tuple[Tensor, Tensor]:
        """Stop tokens [S, n], and whether they are not allowed yet [S, 1]."""
        return self.integers[:, 6:], (self.drawn < self.integers[:, 5])[:, None]

    @property
    def temperature(self) -> Tensor:
        """[S, 1] float32."""
        return self.floats[:, 0:1].float()

    @property
    def top_p(self) -> Tensor:
        """[S, 1] float32."""
        return self.floats[:, 1:2].float()

    @property
    def min_p(self) -> Tensor:
        """[S, 1] float32."""
        return self.floats[:, 2:3].float()

    @property
    def repetition_penalty(self) -> Tensor:
        """[S, 1] float32."""
        return self.floats[:, 3:4].float()

    @property
    def uniform(self) -> Tensor:
        """[S] float64, the uniform number that draws the next token; a finished row repeats its last one."""
        place = (self.drawn + len(FLOATS)).clamp(max=self.floats.shape[1] - 1)
        return self.floats.gather(1, place[:, None]).squeeze(1)
