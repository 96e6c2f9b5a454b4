"""Losses that a training command names, each over one sequence; they are those of functional/losses.py where that has
them.

Source: the losses of Tinker's documentation (tinker-docs.thinkingmachines.ai/tinker/losses), as sums over the tokens of
a sequence. Deviation: ratios are at most exp(MAX_LOG_RATIO). `stable_reinforce` is refused, its objective is not
published; a custom loss runs in the client, as a forward pass and a cross_entropy with the gradient as weights.

Shapes: N tokens of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.functional.losses import bounded_ratio, clipped_surrogate
from hybrid_rlhf.serving.training.messages import Datum

SequenceLoss = Callable[[Tensor], Tensor]
"""The loss of a sequence, a scalar, from the log-probs [N] of its targets."""
_Tensors = Mapping[str, Tensor]
_CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


@dataclass(frozen=True)
class _Loss:
    inputs: tuple[str, ...]
    """Required inputs, in addition to target_tokens."""
    compute: Callable[[Tensor, _Tensors], Tensor]
    config: Mapping[str, float]
    """Keys of its config with their defaults. A key may also be an input, with a value for each token."""


def _cross_entropy(logprobs: Tensor, inputs: _Tensors) -> Tensor:
    return -(logprobs * inputs["weights"]).sum()


def _log_ratio(logprobs: Tensor, inputs: _Tensors) -> Tensor:
    return logprobs - inputs["logprobs"]


def _everywhere(logprobs: Tensor) -> Tensor:
    return torch.ones_like(logprobs, dtype=torch.bool)


def _importance_sampling(logprobs: Tensor, inputs: _Tensors) -> Tensor:
    ratio = bounded_ratio(_log_ratio(logprobs, inputs), mask=_everywhere(logprobs))
    return -(ratio * inputs["advantages"]).sum()


def _clipped(log_ratio: Tensor, inputs: _Tensors) -> Tensor:
    return clipped_surrogate(
        log_ratio,
        advantages=inputs["advantages"],
        mask=_everywhere(log_ratio),
        clip_low=1 - inputs["clip_low_threshold"],  # type: ignore[arg-type]  # a bound for each token
        clip_high=inputs["clip_high_threshold"] - 1,  # type: ignore[arg-type]
    ).total


def _ppo(logprobs: Tensor, inputs: _Tensors) -> Tensor:
    return _clipped(_log_ratio(logprobs, inputs), inputs)


def _gspo(logprobs: Tensor, inputs: _Tensors) -> Tensor:
    """Every token has the ratio of the sequence and its own gradient (GSPO-token)."""
    counts = inputs["sequence_ratio_mask"] != 0
    of_sequence = _log_ratio(logprobs.detach(), inputs)[counts].sum() / counts.sum().clamp(min=1)
    return _clipped(of_sequence + logprobs - logprobs.detach(), inputs)


def _cispo(logprobs: Tensor, inputs: _Tensors) -> Tensor:
    ratio = bounded_ratio(_log_ratio(logprobs, inputs).detach(), mask=_everywhere(logprobs))
    clipped = ratio.clamp(inputs["clip_low_threshold"], inputs["clip_high_threshold"])
    return -(clipped * logprobs * inputs["advantages"]).sum()


def _dro(logprobs: Tensor, inputs: _Tensors) -> Tensor:
    penalty = 0.5 * inputs["beta"] * _log_ratio(logprobs, inputs).square()
    return (penalty - logprobs * inputs["advantages"]).sum()


_POLICY = ("logprobs", "advantages")
_LOSSES = {
    "cross_entropy": _Loss((), _cross_entropy, {"weights": 1.0}),
    "importance_sampling": _Loss(_POLICY, _importance_sampling, {}),
    "ppo": _Loss(_POLICY, _ppo, _CLIPS),
    "cispo": _Loss(_POLICY, _cispo, _CLIPS),
    "dro": _Loss(_POLICY, _dro, {"beta": 0.05}),
    # the bounds of the paper's experiments, arXiv 2507.18071, section 5.1
    "gspo": _Loss(
        (*_POLICY, "sequence_ratio_mask"),
        _gspo,
        {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
    ),
}
_IGNORED = ("target_tokens", "mask")
"""Inputs that no loss reads as a number."""


def check_loss(name: str, config: Mapping[str, float | str]) -> None:
    """Check the loss of a command.

    Raises:
        UserError: for a loss or a key of its config that there is not, or a value that is not a finite number.
    """
    if name == "stable_reinforce":
        raise UserError(
            "stable_reinforce cannot be computed here, its objective is not published: take ppo or importance_sampling"
        )
    if name not in _LOSSES:
        raise UserError(f"loss_fn must be one of {', '.join(_LOSSES)}, got {name[:100]!r}: name one of them")
    for key, value in config.items():
        known = [key for key in _LOSSES[name].config if key != "weights"]
        if key not in known:
            raise UserError(
                f"loss_fn_config of {name} takes {', '.join(known) or 'no keys'}, got {key[:100]!r}: leave it out"
            )
        if isinstance(value, str) or not np.isfinite(value):
            raise UserError(f"loss_fn_config.{key} must be a finite number, got {str(value)[:100]}: give one")


def sequence_loss(name: str, config: Mapping[str, float | str], datum: Datum, index: int) -> SequenceLoss:
    """The loss of one sequence.

    Args:
        name: of the loss, which `check_loss` has checked with its config.
        config: numbers of the loss.
        datum: the sequence.
        index: its place in the command, for errors.

    Raises:
        UserError: for an input that is missing, unknown, of another length, or not finite.
    """
    loss = _LOSSES[name]
    known = {*loss.inputs, *loss.config}
    inputs = {}
    for key, values in datum.inputs.items():
        if key in _IGNORED:
            continue
        if key not in known:
            raise UserError(
                f"{name} takes the inputs {', '.join(sorted(known))}, datum {index} has {key[:100]!r}: leave it out"
            )
        inputs[key] = _checked(key, values, len(datum.tokens), index)
    for key in loss.inputs:
        if key not in inputs:
            raise UserError(f"{name} needs {key} of each datum, datum {index} has none: send it")
    for key, default in loss.config.items():
        inputs.setdefault(key, np.full(len(datum.tokens), float(config.get(key, default)), np.float32))

    def compute(logprobs: Tensor) -> Tensor:
        tensors = {key: torch.from_numpy(values).to(logprobs.device) for key, values in inputs.items()}
        return loss.compute(logprobs, tensors)

    return compute


def _checked(key: str, values: np.ndarray, length: int, index: int) -> np.ndarray:
    values = values.reshape(-1) if values.ndim == 2 and values.shape[1] == 1 else values
    if values.shape != (length,):
        raise UserError(
            f"{key} must have one value for each of the {length} tokens of model_input, datum {index} has the shape "
            f"{list(values.shape)}: send as many"
        )
    if not np.isfinite(values).all():
        raise UserError(f"{key} must be finite, datum {index} has NaN or infinity: replace it")
    return values.astype(np.float32)
