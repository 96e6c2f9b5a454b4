"""Check of what a sampler makes of a prompt with an image against the training forward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.generation.weights.probe import agreement_with
from hybrid_rlhf.models.head_check import probe_tokens
from hybrid_rlhf.models.structure import backbone_of
from hybrid_rlhf.models.vision import ImageEncoder, Images
from hybrid_rlhf.runtime.world import shared_user_errors

_TOLERANCE = {torch.float32: 1e-3}
"""Relative difference of the tower's states above which it is named as wrong, by dtype; 0.05 in lower precision."""


@torch.no_grad()
def check_images(
    decoder: Decoder, engine: ModelEngine, encoder: ImageEncoder, *, limit: float | None, updates: int
) -> None:
    """Compare the states of a fixed image, then the log-probs of a prompt with it. Every rank of the engine calls.

    Args:
        decoder: with the current weights.
        engine: the training forward.
        encoder: reads the images of prompts.
        limit: largest mean difference of log-probs in nats; none: by dtype, see `agreement_with`.
        updates: optimizer updates so far, for the message.

    Raises:
        UserError: on every rank, when one of them differs by more than rounding.
    """
    image = engine.images.loader.probe
    text = [
        token for token in probe_tokens(decoder.architecture.vocab_size) if token not in decoder.architecture.banned_ids
    ]
    tokens = [*text, *[encoder.token_id] * image.tokens, *text]
    ids = torch.tensor([tokens])
    real = torch.ones_like(ids, dtype=torch.bool)
    with _states_of(engine.lm) as states:
        logprobs: Tensor = engine(ids, real, real, images=Images([[image]]))[0][0, 1:]
    with shared_user_errors(engine.world):
        encoded = encoder.encode([image], tokens)
        (training,) = states
        training = torch.cat(list(training)) if not isinstance(training, Tensor) else training
        training = training.flatten(0, -2).to(encoded.states)
        difference = float((encoded.states - training).norm() / training.norm().clamp(min=1e-12))
        if not difference <= _TOLERANCE.get(training.dtype, 0.05):
            raise UserError(
                f"the vision tower must read images as the training forward does, its states differ by "
                f"{difference:.3g} of their size after the weight sync of update {updates}: report the model"
            )
    if decoder.architecture.expert_layers:
        return  # rounding changes experts
    with shared_user_errors(engine.world):
        result = agreement_with(decoder, logprobs, (tokens, encoded))
        most = result.tolerance if limit is None else limit
        if not result.measured <= most:
            raise UserError(
                "inference weights must agree with the training forward on a prompt with an image to "
                f"{most:.3g} nats, they differ by {result.measured:.3g} after the weight sync of update {updates}, "
                "while the vision tower agrees: report the model"
            )


@contextlib.contextmanager
def _states_of(lm: PreTrainedModel) -> Iterator[list[Any]]:
    """Context that notes the states of images which the tower of a model computes in a forward."""
    backbone: Any = backbone_of(lm)
    compute = backbone.get_image_features
    noted = list[Any]()

    def noting(*args: Any, **kwargs: Any) -> Any:
        output = compute(*args, **kwargs)
        noted.append(output.pooler_output)
        return output

    vars(backbone)["get_image_features"] = noting
    try:
        yield noted
    finally:
        del vars(backbone)["get_image_features"]
