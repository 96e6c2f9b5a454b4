"""The critic's values from inference weights, on ranks that do not train it.

The copy takes the critic's weights before it reads (plane.py), and computes what the training module does
(generation/scoring.py). The critic's own ranks go on meanwhile, and only train it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_rlhf.configs.sections.rules import require
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.engines.separate.plane import PlaneSettings, WeightPlane
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.generation.scoring import InferenceScorer, described_scorer
from hybrid_rlhf.generation.weights.probe import LOW_PRECISION_TOLERANCE
from hybrid_rlhf.models.head_check import agreement, probe_tokens
from hybrid_rlhf.runtime.world import World, shared_user_errors


class CriticCopy:
    """Reads rows as the critic's ModelEngine does; the ranks of a tensor-parallel group read the same ones."""

    def __init__(
        self,
        critic: ModelEngine | None,
        *,
        world: World,
        union: World,
        tensor_parallel: int = 1,
        check_weights: bool = False,
    ) -> None:
        """Plan the transfer; every rank of the run calls, after `create_groups`.

        Args:
            critic: none on ranks that do not train it.
            world: the ranks that compute values, none of which trains the critic.
            union: those and the critic's, in a group that nothing else uses.
            tensor_parallel: ranks that share one copy.
            check_weights: see faults.check_weights.

        Raises:
            UserError: on every rank of `union`, when the critic has no inference weights for such groups.
        """
        self.world, self._union, self._critic = world, union, critic
        self.group = world.split(tensor_parallel)
        self._scorer: InferenceScorer | None = None
        self._plane: WeightPlane | None = None
        if union.is_member:
            settings = PlaneSettings(
                "critic", "placement.critic_copy", describe=described_scorer, check_weights=check_weights
            )
            own = self.group if world.is_member else None
            self._plane = WeightPlane(critic, settings, union=union, group=own, release=self._release)

    def sync(self) -> None:
        """Take the critic's weights if they have changed; every rank calls.

        Raises:
            UserError: on every rank of critic and copy, when weights arrive damaged or compute something else than
                those that train.
        """
        decoder = None if self._plane is None else self._plane.current(self._verify)
        self._scorer = None if decoder is None else InferenceScorer(decoder)

    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The head's output after each real token, see Scorer; all ranks of the group call, with the same rows."""
        assert self._scorer is not None, "called after sync, on ranks of the copy"
        return self._scorer(input_ids, attention_mask)

    @property
    def tensor_parallel(self) -> int:
        """See ModelEngine."""
        return self.group.size

    @property
    def reports_rows(self) -> bool:
        """See ModelEngine."""
        return self.group.is_main

    def _release(self) -> None:
        self._scorer = None

    @torch.no_grad()
    def _verify(self, decoder: Decoder | None) -> None:
        """Compare the values of fixed tokens with those of the critic's forward."""
        plane, critic = self._plane, self._critic
        assert plane is not None
        ids = torch.tensor([probe_tokens(plane.model.described.architecture.vocab_size)], device=self.world.device)
        expected = plane.of_trained(None if critic is None else critic(ids, ids >= 0)[0].cpu())
        assert expected is not None
        if not bool(expected.isfinite().all()):
            return  # the weights themselves are not finite, which the loop reports
        with shared_user_errors(self._union):
            if decoder is not None:
                found = InferenceScorer(decoder)(ids, ids >= 0)[0]
                unit = max(1.0, float(expected.abs().mean()))  # rounding of large values is large
                result = agreement(
                    found / unit, expected / unit, plane.dtype, low_precision=LOW_PRECISION_TOLERANCE, magnitude=1.0
                )
                require(
                    result.holds,
                    f"the critic's copy must agree with its training forward to {result.tolerance * unit:.3g}, values "
                    f"differ by {result.measured * unit:.3g} after update {plane.version}: report the model, or leave "
                    "placement.critic_copy out",
                )
