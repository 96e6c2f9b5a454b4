"""The critic's values from inference weights, on ranks that do not train the critic.

The copy receives the critic's weights before it computes (synced.py), and gives the same values as the training module
(generation/scoring.py). The critic's ranks then only train it, and need not wait.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from hybrid_rlhf.configs.sections.rules import require
from hybrid_rlhf.engines.role_model import RoleModel
from hybrid_rlhf.engines.separate.broadcast import SyncRanks
from hybrid_rlhf.engines.separate.synced import SyncedWeights
from hybrid_rlhf.functional.logprobs import agreement
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.generation.scoring import InferenceScorer, described_scorer
from hybrid_rlhf.generation.weights.probe import LOW_PRECISION_TOLERANCE
from hybrid_rlhf.models.head_check import probe_tokens
from hybrid_rlhf.runtime.world import World, shared_user_errors


class CriticCopy:
    """A Reader of the critic's values. The ranks of a tensor-parallel group compute the same rows."""

    def __init__(
        self,
        critic: RoleModel,
        *,
        world: World,
        tensor_parallel: int = 1,
        check_weights: bool = False,
    ) -> None:
        """Plan the inference weights. Every rank of the run makes this call, after `create_groups`.

        Args:
            critic: the critic.
            world: ranks that compute values; none of them trains the critic.
            tensor_parallel: number of ranks that share one copy.
            check_weights: faults.check_weights of the config.

        Raises:
            UserError: on every rank of critic and copy, when the critic has no inference weights for such groups.
        """
        self.world = world
        self.shares_prefixes = False
        """As in Reader: inference weights compute each row alone."""
        self._ranks = SyncRanks.of(critic.world, world)
        self._critic = critic
        group = world.split(tensor_parallel)
        self.tensor_parallel = group.size
        """Number of ranks that compute the same rows together."""
        self.reports_rows = group.is_main
        """True if the results of this rank count, among those that compute the same rows."""
        self._scorer: InferenceScorer | None = None
        self._weights: SyncedWeights | None = None
        if self._ranks.union.is_member:
            self._weights = SyncedWeights(
                critic,
                ranks=self._ranks,
                group=group if world.is_member else None,
                key="placement.critic_copy",
                describe=described_scorer,
                check_weights=check_weights,
                release=self._release,
            )

    def sync(self) -> None:
        """Receive the critic's weights if they have changed. Every rank must make this call.

        Raises:
            UserError: on every rank of critic and copy, when weights arrive damaged, or their values differ from the
                critic's.
        """
        decoder = None if self._weights is None else self._weights.current(self._verify)
        self._scorer = None if decoder is None else InferenceScorer(decoder)

    def on_device(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing: the weights are always on the device."""
        return contextlib.nullcontext()

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, images: None = None) -> Tensor:
        """Return the output of the head after each real token, as Scorer, of rows of text. All ranks of the group pass
        the same rows."""
        assert self._scorer is not None, "called after sync, on ranks of the copy"
        return self._scorer(input_ids, attention_mask)

    def _release(self) -> None:
        self._scorer = None

    @torch.no_grad()
    def _verify(self, decoder: Decoder | None) -> None:
        """Raise UserError if the values of fixed tokens differ from those of the critic's forward."""
        weights = self._weights
        critic = self._critic
        assert weights is not None
        ids = torch.tensor([probe_tokens(weights.model.described.architecture.vocab_size)])
        expected: Tensor = self._ranks.of_source(critic(ids, ids >= 0)[0].cpu() if critic.world.is_member else None)
        if not bool(expected.isfinite().all()):
            return  # the weights are not finite, which the loop reports
        with shared_user_errors(self._ranks.union):
            if decoder is not None:
                values = InferenceScorer(decoder)(ids, ids >= 0)[0]
                unit = max(1.0, float(expected.abs().mean()))  # rounding of large values is large
                result = agreement(
                    values / unit,
                    expected=expected / unit,
                    dtype=weights.dtype,
                    low_precision=LOW_PRECISION_TOLERANCE,
                    magnitude=1.0,
                )
                require(
                    result.holds,
                    f"the critic's copy must agree with its training forward to {result.tolerance * unit:.3g}, values "
                    f"differ by {result.measured * unit:.3g} after update {weights.version}: report the model, or "
                    "leave placement.critic_copy out",
                )
