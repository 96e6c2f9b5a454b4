"""Losses of Tinker's API against the formulas of its documentation, with torch's autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hybrid_rlhf.serving.training.losses import check_loss, sequence_loss
from hybrid_rlhf.serving.training.messages import Datum
from tests.support.errors import user_error

LENGTH = 12
GENERATOR = np.random.default_rng(3)
INPUTS = {
    "logprobs": GENERATOR.normal(-2, 1, LENGTH).astype(np.float32),
    "advantages": GENERATOR.normal(0, 1, LENGTH).astype(np.float32),
    "weights": GENERATOR.random(LENGTH).astype(np.float32),
    "sequence_ratio_mask": (np.arange(LENGTH) > 4).astype(np.float32),
    "clip_high_threshold": np.linspace(1.0, 1.5, LENGTH, dtype=np.float32),
}
LOGPROBS = torch.tensor(INPUTS["logprobs"]) + torch.from_numpy(GENERATOR.normal(0, 0.4, LENGTH).astype(np.float32))


def value_and_gradient(loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    logprobs = LOGPROBS.clone().requires_grad_()
    total = loss(logprobs)
    total.backward()
    assert logprobs.grad is not None
    return total.detach(), logprobs.grad


def clipped(ratio: Tensor, advantages: Tensor, low: Any, high: Any) -> Tensor:
    low = torch.as_tensor(low).expand_as(ratio)
    high = torch.as_tensor(high).expand_as(ratio)
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages).sum()


def gspo(p: Tensor, q: Tensor, a: Tensor, mask: Tensor) -> Tensor:
    of_sequence = (p.detach() - q)[mask != 0].mean()
    return clipped((of_sequence + p - p.detach()).exp(), a, 0.9, 1.1)


RATIOS = ["logprobs", "advantages"]


@pytest.mark.parametrize(
    ("name", "keys", "config", "formula"),
    [
        ("cross_entropy", ["weights"], {}, lambda p, w: -(p * w).sum()),
        ("cross_entropy", [], {}, lambda p: -p.sum()),  # without weights every token counts
        ("importance_sampling", RATIOS, {}, lambda p, q, a: -((p - q).exp() * a).sum()),
        ("ppo", RATIOS, {}, lambda p, q, a: clipped((p - q).exp(), a, 0.8, 1.2)),
        (  # a bound may be given for each token
            "ppo",
            [*RATIOS, "clip_high_threshold"],
            {"clip_low_threshold": 0.5},
            lambda p, q, a, high: clipped((p - q).exp(), a, 0.5, high),
        ),
        (
            "cispo",
            RATIOS,
            {"clip_low_threshold": 0.7, "clip_high_threshold": 1.05},
            lambda p, q, a: -((p - q).exp().clamp(0.7, 1.05).detach() * p * a).sum(),
        ),
        ("dro", RATIOS, {"beta": 0.3}, lambda p, q, a: -(p * a - 0.5 * 0.3 * (p - q).square()).sum()),
        ("gspo", [*RATIOS, "sequence_ratio_mask"], {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}, gspo),
    ],
)
def test_a_loss_is_that_of_the_documentation(
    name: str, keys: list[str], config: dict[str, float], formula: Callable[..., Tensor]
) -> None:
    check_loss(name, config)
    loss = sequence_loss(name, config, Datum(np.zeros(LENGTH, np.int64), {key: INPUTS[key] for key in keys}), 0)
    result = value_and_gradient(loss)
    wanted = value_and_gradient(lambda logprobs: formula(logprobs, *(torch.tensor(INPUTS[key]) for key in keys)))
    torch.testing.assert_close(result, wanted)
    assert result[1].abs().max() > 0


@pytest.mark.parametrize(
    ("name", "config", "inputs", "error"),
    [
        ("sum", {}, {}, "loss_fn must be one of cross_entropy, .*, got 'sum'"),
        ("stable_reinforce", {}, {}, "stable_reinforce cannot be computed here, its objective is not published"),
        ("ppo", {"beta": 1.0}, {}, "loss_fn_config of ppo takes clip_low_threshold, clip_high_threshold, got 'beta'"),
        ("cross_entropy", {"weights": 1.0}, {}, "loss_fn_config of cross_entropy takes no keys, got 'weights'"),
        ("dro", {"beta": "high"}, {}, "loss_fn_config.beta must be a finite number, got high"),
        ("dro", {"beta": float("nan")}, {}, "loss_fn_config.beta must be a finite number, got nan"),
        ("ppo", {}, {"logprobs": INPUTS["logprobs"]}, "ppo needs advantages of each datum, datum 7 has none"),
        ("cross_entropy", {}, {"advantages": INPUTS["advantages"]}, "cross_entropy takes the inputs weights, datum 7"),
        (
            "cross_entropy",
            {},
            {"weights": INPUTS["weights"][:3]},
            "one value for each of the 12 tokens .* shape \\[3\\]",
        ),
        ("cross_entropy", {}, {"weights": INPUTS["weights"] * np.inf}, "weights must be finite, datum 7 has NaN or"),
    ],
)
def test_mistakes_are_named(name: str, config: dict[str, Any], inputs: dict[str, Any], error: str) -> None:
    with user_error(error):
        check_loss(name, config)
        sequence_loss(name, config, Datum(np.zeros(LENGTH, np.int64), inputs), 7)
