"""The rows of a training command, checked, and its answer from their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.serving.training.base import LoadedBase
from hybrid_rlhf.serving.training.futures import Answer
from hybrid_rlhf.serving.training.losses import check_loss, sequence_loss
from hybrid_rlhf.serving.training.messages import forward_backward_output, loss_config, read_datum
from hybrid_rlhf.serving.training.queue import Command, PackedRow

_MOST_DATA = 4096
"""Largest number of sequences of a command; the client sends 1024."""


def packed_rows(request: Any, base: LoadedBase) -> Sequence[PackedRow]:
    """The rows of the engine for the message of a command.

    Raises:
        UserError: for a loss, a sequence or an input of it that cannot be computed.
    """
    config = loss_config(request)
    check_loss(request.loss_fn, config)
    if not 1 <= len(request.data) <= _MOST_DATA:
        raise UserError(f"data must have 1 to {_MOST_DATA} datums, got {len(request.data)}: send as many")
    rows = []
    for index, message in enumerate(request.data):
        datum = read_datum(message, index)
        length = len(datum.tokens)
        if not 1 <= length <= base.max_tokens:
            raise UserError(
                f"model_input must have 1 to {base.max_tokens} tokens, datum {index} has {length}: split it"
            )
        targets = datum.inputs.get("target_tokens")
        targets = targets.reshape(-1) if targets is not None and targets.ndim == 2 else targets
        if targets is None or targets.shape != (length,) or targets.dtype.kind != "i":
            raise UserError(
                f"target_tokens must be one token id for each of the {length} tokens of model_input, datum {index} "
                "has others: send as many"
            )
        for key, ids in (("model_input", datum.tokens), ("target_tokens", targets)):
            if ids.min() < 0 or ids.max() >= base.vocabulary:
                raise UserError(
                    f"{key} must be token ids in 0..{base.vocabulary - 1}, datum {index} has "
                    f"{ids.min()}..{ids.max()}: use the tokenizer of the model"
                )
        loss = sequence_loss(request.loss_fn, config, datum, index)
        row = base.make_row(
            request.model_id,
            tokens=torch.from_numpy(datum.tokens),
            targets=torch.from_numpy(targets.astype(np.int64)),
            loss=None if request.forward_only else loss,
        )
        rows.append(PackedRow(row, length, loss))
    return rows


def forward_backward_answer(command: Command) -> Answer:
    """The answer of a command whose rows were computed."""
    logprobs = [result.logprobs.numpy() for result in command.results]
    total = 0.0
    for row, result in zip(command.rows, command.results, strict=True):
        total += float(row.loss(result.logprobs)) if result.loss is None else result.loss
    return forward_backward_output(logprobs, {"loss:sum": total})
