"""Weights, gradient and optimizer state of one adapter, each in one flat float32 tensor.

Shapes: P parameters, r rank, K inputs and N outputs of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from hybrid_rlhf.configs.sections.training import AdamStep


@dataclass(frozen=True)
class LinearLayer:
    """Name and sizes of an adapted layer."""

    name: str
    inputs: int
    outputs: int


class Adapter:
    """A LoRA adapter (Hu et al. 2021, arXiv 2106.09685) with its own AdamW.

    The gradient exists from a backward pass to the next step, the optimizer's averages from the first step on.
    """

    def __init__(self, layers: Sequence[LinearLayer], *, rank: int, alpha: float, device: torch.device) -> None:
        """Allocate weights, all 0.

        Args:
            layers: adapted layers, in the order of the model.
            rank: r.
            alpha: the adapter's output is scaled by alpha / rank.
            device: device of the tensors.
        """
        self.layers = tuple(layers)
        self.rank = rank
        self.alpha = alpha
        self.size = rank * sum(layer.inputs + layer.outputs for layer in layers)
        """P."""
        self.steps = 0
        """Number of optimizer steps."""
        self._device = device
        self._tensors: dict[str, Tensor] = {"weights": torch.zeros(self.size, device=device)}
        self._parts: dict[str, list[Tensor]] = {}

    @property
    def scale(self) -> float:
        """Factor of the adapter's output."""
        return self.alpha / self.rank

    def initialise(self, seed: int) -> None:
        """Draw the first factors as peft does, uniform in +-1 / sqrt(K), on the host: equal on every device. The second
        ones are 0."""
        generator = torch.Generator().manual_seed(seed)
        for down in self.parts("weights")[::2]:
            drawn = torch.empty(down.shape)
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
            down.copy_(drawn)

    def parts(self, state: str) -> list[Tensor]:
        """Parts of "weights", "gradient", "exp_avg" or "exp_avg_sq", as views: of each layer the first factor [r, K]
        and the transposed second one [r, N]. A state that does not exist yet is 0."""
        if state not in self._parts:
            sizes = [self.rank * size for layer in self.layers for size in (layer.inputs, layer.outputs)]
            flat = self.flat(state)
            self._parts[state] = [part.view(self.rank, -1) for part in flat.split(sizes)]
        return self._parts[state]

    def named(self, state: str) -> Iterator[tuple[str, Tensor]]:
        """Parts of a state by peft's names, as peft has them: [r, K] and [N, r]."""
        parts = self.parts(state)
        for layer, down, up in zip(self.layers, parts[::2], parts[1::2], strict=True):
            yield f"{layer.name}.lora_A.weight", down
            yield f"{layer.name}.lora_B.weight", up.t()

    def flat(self, state: str) -> Tensor:
        """A state as one tensor [P]."""
        if state != "weights" and state not in self._tensors:
            self._tensors[state] = torch.zeros(self.size, device=self._device)
        return self._tensors[state]

    def zero_gradient(self) -> None:
        """Remove the gradient."""
        self._tensors.pop("gradient", None)
        self._parts.pop("gradient", None)

    def step(self, adam: AdamStep) -> dict[str, float]:
        """Update the weights with the gradient, and remove it. An update whose gradient is not finite is skipped.

        Returns:
            grad_norm: norm before clipping; step: number of updates so far; skipped: 1 if this one was skipped.
        """
        gradient = self.flat("gradient")
        norm = torch.linalg.vector_norm(gradient)
        finite = bool(norm.isfinite())
        if finite:
            if adam.max_grad_norm:
                gradient.mul_((adam.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))  # as torch's clip_grad_norm_
            adamw(
                [self.flat("weights")],
                [gradient],
                [self.flat("exp_avg")],
                [self.flat("exp_avg_sq")],
                [],
                [torch.tensor(float(self.steps), device=self._device)],
                fused=True,
                amsgrad=False,
                lr=adam.lr,
                beta1=adam.betas[0],
                beta2=adam.betas[1],
                weight_decay=adam.weight_decay,
                eps=adam.eps,
                maximize=False,
            )
            self.steps += 1
        self.zero_gradient()
        return {"grad_norm": float(norm), "step": float(self.steps), "skipped": float(not finite)}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The states that exist, by name."""
        return dict(self._tensors)

    def release(self) -> None:
        """Remove all states, which are parked; `give` returns them."""
        self._tensors = {}
        self._parts = {}

    def give(self, tensors: dict[str, Tensor]) -> None:
        """Take states back onto the device."""
        self._tensors = {state: tensor.to(self._device) for state, tensor in tensors.items()}
