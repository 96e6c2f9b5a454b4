"""The places of a decoding step that verifies drafts, and which of the sampled tokens are kept.

A row with a draft of d tokens computes 1 + d places in one step: its last token and the draft. Each place attends to
those before it in its row, so its logits are the ones that decoding token by token computes there, and it draws with
the uniform number of its own place in the completion. A draft token is right if it is what the place before it drew.
The tokens up to and including the first that differs from the draft are therefore what decoding without drafts
samples, up to the rounding of a forward over more tokens.

Source: speculative decoding (Leviathan et al. 2023, arXiv 2211.17192, section 2.3) for drafts that are certain, with
the draws coupled by their uniform numbers: the acceptance rate is the same, the probability of the draft token.

Shapes: S rows, N places in all, D tokens of the longest draft, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rlhf.generation.batching.decode_batch import DecodeBatch
from hybrid_rlhf.generation.transfers import to_device


@dataclass(frozen=True)
class DraftPlaces:
    """The places of S rows, those of a row adjacent and in order."""

    rows: Tensor
    """[N] the row of each place."""
    offsets: Tensor
    """[N] its number in the row: 0 for the row's last token, then those of the draft."""
    tokens: Tensor
    """[N] the draft's token at the place; any at offset 0."""
    expected: Tensor
    """[N] the draft's token at the next place; -1, which no place draws, after the last."""
    starts: Tensor
    """[S] the first place of each row."""
    longest: int
    """D."""

    @classmethod
    def of(cls, drafts: Sequence[Sequence[int]], device: torch.device) -> DraftPlaces:
        """Places of rows with these drafts, which may be empty."""
        columns = [
            (row, offset, token, expected)
            for row, draft in enumerate(drafts)
            for offset, (token, expected) in enumerate(zip((0, *draft), (*draft, -1), strict=True))
        ]
        rows, offsets, tokens, expected = to_device(columns, device).unbind(dim=1)
        sizes = to_device([1 + len(draft) for draft in drafts], device)
        return cls(rows, offsets, tokens, expected, sizes.cumsum(0) - sizes, max(map(len, drafts)))

    def spread(self, table: DecodeBatch) -> DecodeBatch:
        """A row [N] for each place, before the token that it draws, from the table of S rows."""
        placed = table.select(self.rows)
        placed.token.copy_(torch.where(self.offsets > 0, self.tokens, placed.token))
        placed.advance(self.offsets)
        if placed.seen is not None:
            own = torch.arange(len(self.rows), device=self.rows.device)
            for depth in range(1, self.longest + 1):
                drafted = self.tokens[(own - self.offsets + depth).clamp(max=len(own) - 1), None]
                seen = placed.seen.gather(1, drafted) | (self.offsets >= depth)[:, None]
                placed.seen.scatter_(1, drafted, seen)
        return placed

    def accept(self, table: DecodeBatch, sampled: Tensor) -> Tensor:
        """Append those of the sampled tokens [N] that are kept to the table of S rows; returns which they are [N]."""
        offsets = torch.arange(1 + self.longest, device=sampled.device)
        places = (self.starts[:, None] + offsets).clamp(max=len(sampled) - 1)
        right = (sampled == self.expected)[places].long().cumprod(dim=1).sum(dim=1)
        kept, last = self.offsets <= right[self.rows], sampled[self.starts + right]
        table.token.copy_(last)
        table.advance(right + 1)
        if table.seen is not None:  # a row's last token stands in for those that are not kept: every write is True
            table.seen[self.rows, torch.where(kept, sampled, last[self.rows])] = True
        return kept
