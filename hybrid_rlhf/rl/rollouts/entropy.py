"""Entropy control: the tokens whose updates reduce the entropy most, and an entropy bonus that follows a target.

An update of a softmax policy reduces its entropy by about the covariance of log-probs and advantages, to which few
tokens contribute most. Source of both methods that act on these tokens: Cui et al. 2025 (arXiv 2505.22617), section 4.

    Cov_t = (log p_t - mean(log p)) (A_t - mean(A))

Clip-Cov gives no policy gradient to a random share of the tokens, selected among those with Cov_t in [low, high].
KL-Cov adds coef * |log p_t / p_old_t| to the loss of the share with the highest Cov_t (rl/updates/policy_loss.py).
Deviations: log-probs are those of the policy before the updates, and means and shares are over the rollout of all
ranks; the paper takes the current policy's over a mini-batch. The selection therefore does not depend on micro-batches
or ranks, and a resumed run makes it again. The clip of the algorithm also acts with KL-Cov. At least one token is
selected (the authors' code).

The adaptive coefficient is that of Skywork-OR1 (arXiv 2505.22312, adaptive entropy control): e_k is the entropy of the
rollout k before its updates, a_k the coefficient of their entropy bonus.

    a_k = c_k if e_k <= target else 0,  c_k+1 = c_k + step if e_k < target else max(c_k - step, 0)

Deviation: there is no largest coefficient (0.005 in the scripts of Skywork-OR1).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hybrid_rlhf.configs.sections.algorithm import EntropyConfig
from hybrid_rlhf.functional.advantages import covariance_terms
from hybrid_rlhf.functional.masking import masked_sum
from hybrid_rlhf.rl.sharing import RowIndex
from hybrid_rlhf.rl.types import Batch, Rollout
from hybrid_rlhf.runtime.world import World

_DRAWS = 1
"""Key of the random streams of Clip-Cov, distinct from those of the mini-batches."""


def select_tokens(batch: Batch, config: EntropyConfig, *, seed: int, step: int, world: World) -> Batch:
    """The batch with the tokens that Clip-Cov or KL-Cov selects. Every rank calls.

    Args:
        batch: this rank's rows with old log-probs and advantages.
        config: the method and its share.
        seed: seed of the run.
        step: key of the random choice, with the numbers of the rows.
        world: the ranks that hold rows.
    """
    rollout = batch.rollout
    mask = rollout.learned_mask
    assert rollout.old_logprobs is not None and config.selected_share is not None
    index = rollout.numbered(world)
    covariance = covariance_terms(rollout.old_logprobs, advantages=batch.advantages, mask=mask, total=world.total)
    tokens = int(world.total(mask.sum()))
    count = max(1, int(config.selected_share * tokens))
    if config.method == "kl_cov":
        selected = _highest(covariance, mask, count, index)
    else:
        low, high = config.bounds
        draws = torch.zeros_like(covariance)
        for row, number in enumerate(index.mine):
            draws[row] = torch.from_numpy(np.random.default_rng([seed, step, number, _DRAWS]).random(mask.shape[1]))
        selected = _highest(draws, mask & (covariance >= low) & (covariance <= high), count, index)
    share = float(world.total(selected.sum())) / max(tokens, 1)
    return replace(batch, selected=selected, metrics={**batch.metrics, "policy/selected_tokens": share})


def _highest(values: Tensor, among: Tensor, count: int, index: RowIndex) -> Tensor:
    """[n, T] bool, the tokens with the highest values over all ranks, at most `count`; of equal values, those of the
    first rows and tokens. Every rank calls.

    Args:
        values: [n, T] float64 of this rank's rows.
        among: [n, T] bool, the tokens to select from.
        count: number of tokens over all ranks.
        index: the numbers of the rows.
    """
    rows, places = among.nonzero(as_tuple=True)
    numbers = torch.tensor(index.mine, dtype=torch.long)[rows]
    candidates = _first(torch.stack([-values[among], numbers.double(), places.double()]).numpy(), count)
    chosen = _first(np.concatenate(index.world.all_gather_objects(candidates), axis=1), count)
    row_of = {number: row for row, number in enumerate(index.mine)}
    selected = torch.zeros_like(among)
    for number, place in chosen[1:].T.astype(int).tolist():
        if number in row_of:
            selected[row_of[number], place] = True
    return selected


def _first(columns: np.ndarray, count: int) -> np.ndarray:
    """The first `count` columns [keys, n] in the order of their keys."""
    return columns[:, np.lexsort(columns[::-1])[:count]]


class EntropyController:
    """Holds the coefficient of the entropy bonus; raises it if the entropy is below the target and lowers it
    otherwise."""

    def __init__(self, config: EntropyConfig, *, coef: float) -> None:
        """Take the settings of method adaptive and the first coefficient."""
        self._config = config
        self._coef = coef
        self._entropy = 0.0

    def measure(self, rollout: Rollout, world: World) -> None:
        """Take the entropy before the updates of a rollout, the mean over its response tokens. Every rank calls."""
        assert rollout.entropy is not None
        index = rollout.numbered(world)
        summed = index.gather(masked_sum(rollout.entropy.double(), mask=rollout.response_mask, dim=1)).sum()
        self._entropy = float(summed / index.responses.sum().clamp(min=1))

    @property
    def coef(self) -> float:
        """The coefficient for the updates of the rollout."""
        return self._coef if self._entropy <= self._config.target else 0.0

    def update(self) -> None:
        """Move the coefficient after the updates of the rollout."""
        step = self._config.step
        self._coef = max(self._coef + (step if self._entropy < self._config.target else -step), 0.0)

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"coef": self._coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the state of a checkpoint."""
        self._coef = state["coef"]
