"""Memory of the tower of a vision-language model, measured on shapes.

Images are known when rows are read. A plan takes as many as fill the tokens of a micro-batch, an upper bound.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only
from transformers import PreTrainedModel

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.models.families import unread_weights
from hybrid_rlhf.models.families.vision import images_refused
from hybrid_rlhf.models.pretrained.processors import ImageProcessor
from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
from hybrid_rlhf.models.vision import ImageEncoder, RowImage
from hybrid_rlhf.planning.memo import once
from hybrid_rlhf.planning.meta_device import ForwardMemory, passage

_MEASURED_PIXELS = 2**16
"""Pixels of the image that is measured, at most: towers split images into windows and tiles, which are alike."""


class Tower:
    """The tower and the projector of a model on the meta device, and an image."""

    def __init__(self, lm: PreTrainedModel, image: RowImage) -> None:
        """Take the model and the image, whose memory per token is that of others."""
        self._lm = lm
        self._image = image

    @cached_property
    def weights(self) -> list[Tensor]:
        """The weights that text does not read."""
        weights = dict(self._lm.named_parameters())
        return [weights[name] for name in unread_weights(self._lm, weights)]

    @once
    def measure(self, tokens: int, *, backward: bool) -> ForwardMemory:
        """Memory of images with a number of tokens: linear in them, from one and two images."""
        with torch.set_grad_enabled(backward):
            one, two = self._run(1), self._run(2)
        return one.extrapolated(two, tokens / self._image.tokens - 2)

    def _run(self, images: int) -> ForwardMemory:
        encoder = ImageEncoder(self._lm)
        arguments = encoder.joined([self._image] * images, self._lm.dtype)

        held: list[Tensor] = []

        def forward() -> Tensor:
            on_device = {name: values.to("meta") for name, values in arguments.items()}
            floats = {name: values for name, values in on_device.items() if values.is_floating_point()}
            states = encoder.features(arguments | floats)
            held.extend((*on_device.values(), *states))
            return torch.stack([part.float().sum() for part in states]).sum()

        with _ValuesOfIntegers():
            return passage(self._lm, forward, device="cpu")


def find_tower(lm: PreTrainedModel, path: str, config: ModelConfig, max_pixels: int) -> Tower | None:
    """The tower of a model at a path, for images of at most `max_pixels`; None if it reads none or has no processor."""
    if images_refused(lm.config) is not None:
        return None
    trusted = config.trust_remote_code
    try:
        tokenizer = load_tokenizer(path, trust_remote_code=trusted)
        processor = ImageProcessor.load(path, tokenizer, trust_remote_code=trusted)
    except UserError:
        return None
    from PIL import Image

    side = math.isqrt(min(max_pixels, _MEASURED_PIXELS))
    return Tower(lm, processor.row_image(Image.new("RGB", (side, side)), key=0))


class _ValuesOfIntegers(TorchDispatchMode):
    """Lets the integers on which shapes depend, such as sizes of images, be on the host, beside tensors without values.
    No value of these equals a number, and masks of them select everything."""

    def __torch_dispatch__(self, func: Any, types: Any, inputs: Any = (), options: Any = None) -> Any:
        if any(isinstance(each, Tensor) and each.is_meta for each in tree_iter((inputs, options))):
            inputs, options = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (inputs, options))
            first = inputs[0]
            if func is torch.ops.aten._local_scalar_dense.default and first.dtype == torch.bool:
                return True
            if func is torch.ops.aten.eq.Scalar:
                return torch.zeros(first.shape, dtype=torch.bool)
            if func is torch.ops.aten.index.Tensor and (mask := inputs[1][0]) is not None and mask.dtype == torch.bool:
                return first.flatten(0, mask.dim() - 1).clone()
        return func(*inputs, **(options or {}))
