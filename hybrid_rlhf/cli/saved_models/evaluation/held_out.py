"""Measures of given completions: perplexity of conversations, accuracy of a reward model on preference pairs.

Rows are rendered, masked and truncated as in training, so that a value equals that of a run's own evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from hybrid_rlhf.cli.saved_models.evaluation.results import Measurement, bootstrap, wilson
from hybrid_rlhf.cli.saved_models.loading import Place, load_lm, load_scorer
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.inference import EvaluateConfig
from hybrid_rlhf.data.collation import collate_preferences, collate_tokens, images_of
from hybrid_rlhf.data.encoding import encode_preference_row, encode_sft_row
from hybrid_rlhf.data.images.expansion import ImageRules
from hybrid_rlhf.data.rows.files import Row
from hybrid_rlhf.data.rows.formats import head_index
from hybrid_rlhf.data.rows.sources import open_source
from hybrid_rlhf.generation.image_loading import ImageLoader
from hybrid_rlhf.models.policy import Policy, of_heads, scores_at_end
from hybrid_rlhf.runtime.observability.progress import ProgressLog


def source_rows(config: EvaluateConfig) -> Iterator[tuple[str, Row]]:
    """The rows to evaluate on, each with its location for errors."""
    rows = (row for source in config.data for row in open_source(source))
    return islice(rows, config.max_rows)


@torch.no_grad()
def perplexity(config: EvaluateConfig, place: Place) -> Measurement:
    """Perplexity of the tokens that the assistant generates, counted as in SFT; the interval is over conversations."""
    encoded: list[dict[str, Any]] = []
    rules = place.image_rules(config.max_image_pixels)
    for number, (where, row) in enumerate(source_rows(config)):
        encoded_rows = encode_sft_row(where, row, place.tokenizer, config.max_length, images=rules)
        encoded += [columns | {"number": number} for columns in encoded_rows]
    usable = _usable(encoded, config)
    images = _loader(rules, usable)
    policy = Policy(load_lm(place))
    losses = np.zeros(encoded[-1]["number"] + 1)
    tokens = np.zeros(encoded[-1]["number"] + 1)
    for rows in _batches(usable, config.batch_rows):
        batch = collate_tokens(rows, int(place.tokenizer.pad_token_id))  # type: ignore[arg-type]
        given = None if images is None else images.images(images_of(rows))
        logprobs, _ = policy(batch.input_ids, batch.attention_mask, batch.loss_mask, images=given, device=place.device)
        for row, loss, count in zip(rows, -logprobs.double().sum(dim=1).cpu(), batch.loss_mask.sum(dim=1), strict=True):
            losses[row["number"]] += float(loss)
            tokens[row["number"]] += int(count)
    seen = tokens > 0
    losses = losses[seen]
    tokens = tokens[seen]
    return Measurement(
        "Held-out conversations",
        {
            "perplexity": bootstrap(losses, tokens, seed=config.seed, transform=np.exp),
            "loss per token (nats)": bootstrap(losses, tokens, seed=config.seed),
            "conversations": int(seen.sum()),
            "tokens": int(tokens.sum()),
            **_lost(encoded),
        },
    )


@torch.no_grad()
def accuracy(config: EvaluateConfig, place: Place) -> Measurement:
    """Share of the pairs in which the chosen completion has the higher score; the interval is over rows."""
    scorer = load_scorer(place)
    encoded: list[dict[str, Any]] = []
    rules = place.image_rules(config.max_image_pixels)
    for where, row in source_rows(config):
        head = {"head": head_index(where, row, scorer.heads)} if scorer.heads else {}
        encoded_rows = encode_preference_row(where, row, place.tokenizer, config.max_length, images=rules)
        encoded += [columns | head for columns in encoded_rows]
    usable = _usable(encoded, config)
    images = _loader(rules, usable)
    correct: list[float] = []
    margins: list[float] = []
    pairs = 0
    for rows in _batches(usable, config.batch_rows):
        batch = collate_preferences(rows, int(place.tokenizer.pad_token_id))  # type: ignore[arg-type]
        given = None if images is None else images.images(images_of(rows))
        outputs = scorer.model(batch.input_ids, batch.attention_mask, images=given, device=place.device).cpu()
        scores = scores_at_end(of_heads(outputs, batch.head), batch.attention_mask)
        margin = scores[batch.chosen_index] - scores[batch.rejected_index]
        of_row = batch.row[batch.chosen_index]
        for number in range(len(rows)):
            mine = margin[of_row == number]
            correct.append(float((mine > 0).double().mean()))
            margins.append(float(mine.double().mean()))
            pairs += len(mine)
    return Measurement(
        "Preference pairs",
        {
            "accuracy": wilson(correct),
            "margin": bootstrap(margins, np.ones(len(margins)), seed=config.seed),
            "rows": len(correct),
            "pairs": pairs,
            **_lost(encoded),
        },
    )


def _loader(rules: ImageRules, rows: Sequence[dict[str, Any]]) -> ImageLoader | None:
    """What loads the images of rows; None if there are none."""
    return ImageLoader(rules.layout) if any(row.get("images") for row in rows) else None  # type: ignore[arg-type]


def _usable(encoded: Sequence[dict[str, Any]], config: EvaluateConfig) -> list[dict[str, Any]]:
    usable = [row for row in encoded if row["usable"]]
    if not usable:
        raise UserError(
            f"evaluate needs a row with tokens to measure, {', '.join(config.data)} has none within max_length "
            f"{config.max_length}: raise it, or give other data"
        )
    return usable


def _batches(rows: Sequence[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    """Rows of similar length together, the longest first, so that too little memory fails at once."""
    ordered = sorted(rows, key=lambda row: -int(row["length"]))
    progress = ProgressLog("measuring", total=len(ordered))
    for start in range(0, len(ordered), size):
        batch = ordered[start : start + size]
        yield batch
        progress.advance(len(batch))


def _lost(encoded: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Numbers of rows that were truncated or have nothing to measure; without entries of 0."""
    counts = {
        "truncated": sum(bool(row["cut"]) for row in encoded),
        "without tokens to measure": sum(not row["usable"] for row in encoded),
    }
    return {name: count for name, count in counts.items() if count}
