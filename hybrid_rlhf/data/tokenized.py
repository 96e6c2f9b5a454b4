"""Tokenised data of each step: reads sources, encodes rows, splits them, holds rows out and blends sources.

Rows are split between the steps, and held out, by their index in the source and before any are dropped. Two steps, or
training and evaluation, therefore never share a row, independently of the rows that their length limits drop.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.reward import RewardObjectiveConfig
from hybrid_rlhf.configs.rl import PtxConfig
from hybrid_rlhf.configs.sections.data import DataConfig, DataSource, RowDataConfig
from hybrid_rlhf.configs.sft import ConditionConfig
from hybrid_rlhf.data.cache import cached_rows, quiet_datasets, tokenizer_key
from hybrid_rlhf.data.chat.conversation import RULES_VERSION
from hybrid_rlhf.data.encoding import (
    Encode,
    EncodedRows,
    earlier_turns_text,
    encode_conversation_row,
    encode_labelled_row,
    encode_preference_row,
    encode_prompt_row,
    encode_sft_row,
    require_rendered,
)
from hybrid_rlhf.data.images.expansion import NO_IMAGES, ImageRules
from hybrid_rlhf.data.images.references import ImageReference, changed_files, tokenised_images
from hybrid_rlhf.data.row_views import column_array
from hybrid_rlhf.data.rows.conditional import ScoreBuckets, find_score_buckets
from hybrid_rlhf.data.rows.counts import RowCounts
from hybrid_rlhf.data.rows.files import Row
from hybrid_rlhf.data.rows.formats import form_of, head_index, is_tie, mixed_forms_text, read_ptx_row, read_sft_row
from hybrid_rlhf.data.rows.sources import open_source
from hybrid_rlhf.data.rows.stepwise import encode_stepwise_row
from hybrid_rlhf.runtime.files.reading import cache_folder
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.observability.progress import ProgressLog
from hybrid_rlhf.runtime.world import World, shared_user_errors

STEP_INDICES = {"sft": 0, "reward": 1, "preference": 1, "rl": 2}
"""Index of each step in data.split."""


@dataclass(frozen=True)
class RowEncoding:
    """Encoding of the rows of a step's sources."""

    name: str
    encode: Encode
    """Encodes a row of a source as rows of tokens, with columns `cut`, `usable` and `ignored`; see encoding.py."""
    step: str
    """The step whose forms the rows have, a key of FORMS and STEP_INDICES."""
    limit: int
    """Longest row in tokens."""
    limit_key: str = "data.max_length"
    """Name of the setting of the limit."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further settings that the columns depend on."""
    is_scored: bool = False
    """True if the score of the whole conversation is learned, not the log-probs of completions."""
    images: ImageRules = NO_IMAGES


@dataclass(frozen=True)
class TokenizedData:
    """Training rows and held-out rows."""

    train: datasets.Dataset
    held_out: datasets.Dataset
    counts: RowCounts
    score_buckets: ScoreBuckets | None = None
    """The score buckets of conditional SFT."""

    @property
    def has_images(self) -> bool:
        """True if a row has an image, also one that was left out: to select rows would read the bytes of all images."""
        parts = (rows for rows in (self.train, self.held_out) if "images" in rows.column_names)
        return any(column.null_count < len(column) for column in (rows.data.column("images") for rows in parts))


def load_sft_data(
    config: RowDataConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    world: World,
    conditional: ConditionConfig | None = None,
    images: ImageRules = NO_IMAGES,
) -> TokenizedData:
    """Columns `input_ids`, `loss_mask`, `length`; with `conditional`, prompts name the bucket of the score; `images`,
    here and below, if the model reads them (`tokenised_images`)."""
    encoding = RowEncoding("sft", encode_sft_row, "sft", config.max_length, images=images)
    if conditional is None or not config.sources:
        return _load(encoding, config, tokenizer, seed, world)
    buckets = find_score_buckets(conditional, config, lambda counts: _split_rows(counts, config, "sft", seed)[0], world)

    def encode(location: str, row: Row, *rest: Any, **named: Any) -> EncodedRows:
        record = buckets.apply(location, row, read_sft_row(location, row, refusal=images.refusal))
        return encode_conversation_row(location, record, *rest, **named)

    encoding = replace(encoding, encode=encode, settings={"condition": buckets.to_json()})
    return replace(_load(encoding, config, tokenizer, seed, world), score_buckets=buckets)


def load_preference_data(
    config: RowDataConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    world: World,
    images: ImageRules = NO_IMAGES,
) -> TokenizedData:
    """Columns `responses` (token ids of prompt and completion), `masks` (true on the completion), `pairs`, `margins`,
    `length` (tokens of the longest response), `tokens` (tokens of all responses), `image_order` (the indices of each
    response's images)."""
    encoding = RowEncoding("preference", encode_preference_row, "reward", config.max_length, images=images)
    return _load(encoding, config, tokenizer, seed, world)


def load_labelled_data(
    config: RowDataConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    world: World,
    images: ImageRules = NO_IMAGES,
) -> TokenizedData:
    """Columns of `load_preference_data` with `labels` (true if the completion is desirable) instead of `pairs` and
    `margins`."""
    encoding = RowEncoding("labelled", encode_labelled_row, "reward", config.max_length, images=images)
    return _load(encoding, config, tokenizer, seed, world)


def load_reward_data(
    config: RowDataConfig,
    objective: RewardObjectiveConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    world: World,
    images: ImageRules = NO_IMAGES,
) -> TokenizedData:
    """Columns of pairs, labels or steps (`encode_stepwise_row`); with several heads also `head`, the head's index."""
    encodings: dict[str, tuple[str, Encode]] = {
        "binary": ("labelled", encode_labelled_row),
        "steps": (
            f"stepwise {objective.step_separator!r}",
            partial(encode_stepwise_row, separator=objective.step_separator),
        ),
    }
    name, encode = encodings.get(objective.loss, ("reward", encode_preference_row))
    if heads := objective.heads:
        name = f"{name} with heads {', '.join(heads)}"
        encode = partial(_with_head, encode, heads)
    encoding = RowEncoding(name, encode, "reward", config.max_length, is_scored=True, images=images)
    return _load(encoding, config, tokenizer, seed, world)


def _with_head(encode: Encode, heads: Sequence[str], location: str, row: Row, *rest: Any, **named: Any) -> EncodedRows:
    head = {"head": head_index(location, row, heads)}
    return [columns | head for columns in encode(location, row, *rest, **named)]


def load_prompt_data(
    config: DataConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    world: World,
    max_prompt_tokens: int,
    images: ImageRules = NO_IMAGES,
) -> TokenizedData:
    """Columns `input_ids`, `prompt` (messages as JSON), `columns` (the row's other columns as JSON), `length`; of
    held-out rows also `source`, the name of their source."""
    encoding = RowEncoding(
        "prompt", encode_prompt_row, "rl", max_prompt_tokens, "rollout.max_prompt_tokens", images=images
    )
    return _load(encoding, config, tokenizer, seed, world)


def most_rows(step: str, config: DataConfig, counts: Sequence[int], seed: int) -> int:
    """Number of rows that a step trains on if none is dropped, from the number of rows of each source."""
    rows = map(len, _split_rows(counts, config, step, seed)[0])
    passes = [(count, *_passes(source, count)) for count, source in zip(rows, config.sources, strict=True)]
    return sum(copies * count + part for count, copies, part in passes)


def load_ptx_data(
    ptx: PtxConfig,
    config: DataConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    world: World,
    images: ImageRules = NO_IMAGES,
) -> TokenizedData:
    """The rows of ptx.sources with the columns of SFT; none are held out."""

    def encode(location: str, row: Row, *rest: Any, **named: Any) -> EncodedRows:
        record = read_ptx_row(location, row, refusal=images.refusal)
        return encode_conversation_row(location, record, *rest, **named)

    encoding = RowEncoding("ptx", encode, "sft", ptx.max_length, "ptx.max_length", images=images)
    parts = [_tokenize(encoding, source, config, tokenizer, world) for source in ptx.sources]
    blend = _blend(parts, ptx.sources, seed)
    return _report(encoding, blend, blend.select([]), parts, ptx.sources, config, world)


def _load(
    encoding: RowEncoding, config: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int, world: World
) -> TokenizedData:
    config.require_sources()
    parts = [_tokenize(encoding, source, config, tokenizer, world) for source in config.sources]
    numbers = [column_array(part, "source_row") for part in parts]
    split = _split_rows([int(source_rows[-1]) + 1 for source_rows in numbers], config, encoding.step, seed)
    train, held_out = (
        [part.select(_encoded_rows(*rows)) for part, *rows in zip(parts, of_source, numbers, strict=True)]
        for of_source in split
    )
    evaluates = config.eval_sources or config.sources
    if config.eval_sources:
        held_out = [_tokenize(encoding, source, config, tokenizer, world) for source in config.eval_sources]
        parts = parts + held_out
    held_out = [_usable(part) for part in held_out]
    shares = _even_shares([len(part) for part in held_out], config.max_eval_rows)
    evaluated = datasets.concatenate_datasets(
        [part.select(range(rows)) for part, rows in zip(held_out, shares, strict=True)]
    )
    if encoding.step == "rl":
        names = [label for label, rows in zip(source_labels(evaluates), shares, strict=True) for _ in range(rows)]
        with quiet_datasets():
            evaluated = evaluated.add_column("source", names)
    blend = _blend(train, config.sources, seed)
    return _report(encoding, blend, evaluated, parts, [*config.sources, *config.eval_sources], config, world)


def source_labels(sources: Sequence[str | DataSource]) -> list[str]:
    """Names of sources in metrics: the file's or data set's, with the place in the list where several share it."""
    paths = [source.path if isinstance(source, DataSource) else source for source in sources]
    names = [re.sub(r"[^\w.-]", "_", Path(path).stem) for path in paths]
    return [name if names.count(name) == 1 else f"{name}_{place}" for place, name in enumerate(names, 1)]


def _split_rows(
    counts: Sequence[int], config: DataConfig, step: str, seed: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Indices of the training rows and of the held-out rows of each source, given the sources' numbers of rows."""
    mine = [_step_rows(rows, config.split, STEP_INDICES[step], seed) for rows in counts]
    fraction = 0.0 if config.eval_sources else config.eval_fraction
    wanted = [max(1, round(len(rows) * fraction)) if fraction and len(rows) >= 2 else 0 for rows in mine]
    held_out = _even_shares(wanted, config.max_eval_rows)
    split = list(zip(mine, held_out, strict=True))
    return [rows[count:] for rows, count in split], [rows[:count] for rows, count in split]


def _even_shares(counts: Sequence[int], most: int) -> list[int]:
    """Number of rows to take from each source, at most `most` in total: an equal share, or all of a smaller source."""
    shares = [0] * len(counts)
    by_size = sorted(range(len(counts)), key=counts.__getitem__)
    for done, source in enumerate(by_size):
        shares[source] = min(counts[source], (most - sum(shares)) // (len(counts) - done))
    return shares


def _encoded_rows(indices: np.ndarray, source_rows: np.ndarray) -> np.ndarray:
    """The indices of the rows encoded from some rows of the source, in their order.

    Args:
        indices: indices of the rows in the source.
        source_rows: the index in the source of each encoded row, ascending.
    """
    first, last = (np.searchsorted(source_rows, indices, side=side) for side in ("left", "right"))
    counts = last - first
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(first, counts) + within


def _step_rows(rows: int, split: list[float] | None, step_index: int, seed: int) -> np.ndarray:
    """The indices of a step's rows in a source, in a seeded order; all rows without a split.

    The order depends only on the seed: a source is split equally at any position in the lists of the three steps.
    """
    order = np.random.default_rng([seed, 0]).permutation(rows)
    if split is None:
        return order
    edges = np.round(np.cumsum([0.0, *split]) / sum(split) * rows).astype(int)
    return order[edges[step_index] : edges[step_index + 1]]


def _blend(parts: list[datasets.Dataset], sources: list[str | DataSource], seed: int) -> datasets.Dataset:
    """Concatenate the sources, each repeated by its weight: full copies and a seeded part of one more."""
    blended = []
    for number, (part, source) in enumerate(zip(parts, sources, strict=True)):
        part = _usable(part)
        copies, rest = _passes(source, len(part))
        chosen = np.random.default_rng([seed, number, 1]).permutation(len(part))[:rest]
        blended += [part] * copies + ([part.select(np.sort(chosen))] if rest else [])
    return datasets.concatenate_datasets(blended or [_usable(parts[0]).select([])])


def _passes(source: str | DataSource, rows: int) -> tuple[int, int]:
    """The number of full passes over a source by its weight, and of rows of one more."""
    passes, rest = divmod(source.weight if isinstance(source, DataSource) else 1.0, 1.0)
    return int(passes), round(rest * rows)


def _usable(part: datasets.Dataset) -> datasets.Dataset:
    """The usable rows, without the columns that describe the encoding."""
    usable = np.flatnonzero(column_array(part, "usable"))
    return part.select(usable).remove_columns(["usable", "cut", "full_length", "ignored", "source_row", "form"])


def _tokenize(
    encoding: RowEncoding,
    source: str | DataSource,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    world: World,
) -> datasets.Dataset:
    """All rows of a source in order, from the cache if it has them."""
    with shared_user_errors(world):
        reader = open_source(source)
        fingerprint = reader.fingerprint

    # All images of rows of tokens are in files: such rows are collected, and travel between processes.
    images = replace(encoding.images, store=cache_folder(config.cache_dir).absolute() / "images")

    def make() -> Iterator[dict[str, Any]]:
        progress = ProgressLog(f"tokenising {reader.source.path}", total=reader.count())
        for number, (location, row) in enumerate(progress.track(reader)):
            form = "" if encoding.step != "rl" and is_tie(row) else " + ".join(form_of(encoding.step, row) or ())
            for columns in encoding.encode(location, row, tokenizer, encoding.limit, images=images):
                require_rendered(location, row, columns["ignored"])
                if config.too_long == "drop" and columns["cut"]:
                    columns["usable"] = False
                yield columns | {"source_row": number, "form": form}

    key = {
        "kind": encoding.name,
        "content": fingerprint,
        "tokenizer": tokenizer_key(tokenizer),
        "limit": encoding.limit,
        "too_long": config.too_long,
        "rules": RULES_VERSION,
        **encoding.settings,
        **images.settings,
    }
    if images.layout is not None:
        key["path"] = os.path.abspath(reader.source.path)  # of images beside the rows
    rows = cached_rows(key, make, cache_dir=config.cache_dir, world=world)
    if images.layout is not None:
        changed = world.broadcast_object(changed_files(rows) if world.is_main else [])
        if changed:
            rows = cached_rows(key | {"changed": changed}, make, cache_dir=config.cache_dir, world=world)
    return rows


def _report(
    encoding: RowEncoding,
    train: datasets.Dataset,
    held_out: datasets.Dataset,
    parts: list[datasets.Dataset],
    sources: Sequence[str | DataSource],
    config: DataConfig,
    world: World,
) -> TokenizedData:
    """Log how many rows there are, and how many were truncated or dropped.

    Raises:
        UserError: if no training rows are left.
    """
    counts = RowCounts.of(
        encoding.name,
        parts,
        sources=[source.path if isinstance(source, DataSource) else source for source in sources],
        limit=encoding.limit,
        drops_long=config.too_long == "drop",
        training=len(train),
        held_out=len(held_out),
        image_tokens=[encoding.images.tokens(images) for part in parts for images in _images_of(part)],
    )
    too_long = counts.too_long_text(encoding.limit_key)
    if not len(train):
        raise UserError(
            f"{encoding.name} data must have a training row, got none: {_why_none(counts, config, too_long)}"
        )
    if world.is_main:
        for source, part in zip(counts.sources, parts, strict=True):
            first = np.unique(column_array(part, "source_row"), return_index=True)[1]
            forms = Counter(column_array(part, "form")[first].tolist())
            if mixed := mixed_forms_text(forms):
                logger.warning("%s data: %s: %s", encoding.name, source, mixed)
        _report_templates(encoding, parts, counts)
        logger.info(
            "%s data: %s training rows, %s held out; of all rows %s were truncated to %s tokens, %s dropped%s",
            encoding.name,
            f"{counts.training:,}",
            f"{counts.held_out:,}",
            f"{counts.truncated:,}",
            f"{encoding.limit:,}",
            f"{counts.dropped:,}",
            counts.ties_text,
        )
        if too_long:
            logger.warning("%s data: %s", encoding.name, too_long)
    return TokenizedData(train, held_out, counts)


def _images_of(part: datasets.Dataset) -> Iterator[list[ImageReference]]:
    """The images of each row that has any."""
    if "images" not in part.column_names:
        return
    for batch in part.select_columns(["images"]).with_format("arrow").iter(10_000):
        yield from (tokenised_images({"images": row}) for row in batch["images"].drop_null().to_pylist())


def _why_none(counts: RowCounts, config: DataConfig, too_long: str) -> str:
    """Why there is no training row, and what to change."""
    if counts.held_out > counts.dropped and not config.eval_sources:
        return (
            f"{counts.held_out} of {counts.encoded} rows are held out (data.eval_fraction {config.eval_fraction:g}): "
            "lower it or add rows"
        )
    ways = ["raise the limit or a source's weight", "add rows"]
    if config.too_long != "truncate":
        ways.insert(1, "set data.too_long to truncate")
    return (
        f"{counts.dropped} of {counts.encoded} rows were dropped at {counts.limit_tokens} tokens{counts.ties_text}"
        f"{too_long and f' ({too_long})'}: {', '.join(ways[:-1])} or {ways[-1]}"
    )


def _report_templates(encoding: RowEncoding, parts: list[datasets.Dataset], counts: RowCounts) -> None:
    """Log the effects of the chat template on conversations: turns in separate rows, keys that it does not render."""
    if counts.encoded > counts.read:
        logger.info(
            "the chat template renders earlier turns differently from the last: %s conversations make %s rows, with "
            "the loss on turns as generation renders them",
            f"{counts.read:,}",
            f"{counts.encoded:,}",
        )
    ignored: Counter[str] = Counter()
    for part in parts:
        for keys, count in zip(*np.unique(column_array(part, "ignored"), return_counts=True), strict=True):
            ignored.update({key: int(count) * number for key, number in Counter(json.loads(keys)).items()})
    earlier = earlier_turns_text(ignored)
    if earlier and not encoding.is_scored:
        logger.warning("%s data: %s", encoding.name, earlier)
    if ignored:
        found = ", ".join(f"{key} ({count:,})" for key, count in ignored.most_common())
        logger.warning(
            "the chat template does not render all of the rows: %s; a role that it lacks becomes the nearest one, tool "
            "calls become JSON text, the rest is left out: data.chat_template sets another template",
            found,
        )
