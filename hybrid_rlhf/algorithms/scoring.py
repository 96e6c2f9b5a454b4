"""A rollout with its scores, and what the roles say of it.

Shapes: N completions of the rollout over all ranks, T time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rlhf.algorithms.experience import Sequences, completion_kl
from hybrid_rlhf.algorithms.rewards.reward import COUNTS
from hybrid_rlhf.configs.on_policy import AlgorithmConfig


@dataclass(frozen=True)
class Rated:
    """A rollout with its scores. Rows that the reward dropped are gone, so that nothing after counts them."""

    sequences: Sequences
    prompts: Tensor
    """[N] int64, of each sequence the prompt, by its place in the step."""
    scores: Tensor
    """[N] float32, without penalties."""
    penalties: Tensor
    """[N] float32, to be subtracted."""
    metrics: dict[str, float]
    """Of the reward's parts."""
    greedy: Rated | None = None
    """The greedy completion of each prompt, where the algorithm asks for it."""

    @property
    def penalised(self) -> Tensor:
        """[N] scores with penalties."""
        return self.scores - self.penalties

    def select(self, chosen: Tensor) -> Rated:
        """The rows where chosen [N] is true."""
        if bool(chosen.all()):
            return self
        rows = chosen.nonzero().flatten().tolist()
        return Rated(
            self.sequences.rows(rows), self.prompts[rows], self.scores[rows], self.penalties[rows], self.metrics,
            self.greedy,
        )  # fmt: skip

    @staticmethod
    def joined(parts: Sequence[Rated]) -> Rated:
        """Rows of several, whose prompts are different ones; metrics are means by their rows, counts sums."""
        if len(parts) == 1:
            return parts[0]
        prompts, scores, penalties = (
            torch.cat([getattr(part, name) for part in parts]) for name in ("prompts", "scores", "penalties")
        )
        rows = [float(len(part.scores)) for part in parts]
        names = {name for part in parts for name in part.metrics}
        metrics = {}
        for name in sorted(names):
            told = [part.metrics.get(name, 0.0) for part in parts]
            mean = sum(value * n for value, n in zip(told, rows, strict=True)) / max(sum(rows), 1)
            metrics[name] = sum(told) if name.endswith(COUNTS) else mean
        greedy = [part.greedy for part in parts if part.greedy is not None]
        sequences = Sequences.joined([part.sequences for part in parts])
        return Rated(sequences, prompts, scores, penalties, metrics, Rated.joined(greedy) if greedy else None)


@dataclass(frozen=True)
class Scored:
    """What the roles say of sequences: [N, T], scores [N]; float32, whole on every rank."""

    rated: Rated
    old_logprobs: Tensor
    ref_logprobs: Tensor | None
    old_values: Tensor | None

    @property
    def sequences(self) -> Sequences:
        """What was read."""
        return self.rated.sequences

    @property
    def kl(self) -> Tensor | None:
        """[N] KL to the reference of each completion, in nats (k1); none: there is no reference."""
        return completion_kl(self.old_logprobs, self.ref_logprobs, self.sequences.response_mask)


def score_penalties(sequences: Sequences, config: AlgorithmConfig, *, max_new_tokens: int, scores_std: float) -> Tensor:
    """[N] float32, what is subtracted from scores: for want of an end, and for length.

    Source: the EOS trick of N+ details, for scores of deviation 1; overlong shaping, DAPO (arXiv 2503.14476, eq. 13).

    Args:
        sequences: the N completions.
        config: of the penalties.
        max_new_tokens: longest completion.
        scores_std: standard deviation of the rollout's scores, the penalty for want of an end where it is "auto".
    """
    lengths = sequences.response_mask.sum(dim=1)
    missing_eos = scores_std if config.missing_eos_penalty == "auto" else config.missing_eos_penalty
    penalties = missing_eos * (~sequences.stopped) + config.length_penalty * lengths
    last_part = config.overlong_fraction * max_new_tokens
    if last_part:
        begins = sequences.response_mask.int().argmax(dim=1)
        followed = torch.where(lengths > 0, sequences.lengths - begins, 0)  # observations take room too
        overlong = (followed - (max_new_tokens - last_part)).clamp(min=0) / last_part
        penalties = penalties + config.overlong_penalty * overlong
    return penalties.float()
