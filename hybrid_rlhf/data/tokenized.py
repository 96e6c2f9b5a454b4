"""The data of each step, tokenised: sources read, adapted, encoded, cut to length, dealt, held out and blended.

Rows are dealt to the steps, and held out, by their place in the source and before anything is dropped, so that no
row is seen by two steps, or by training and evaluation, whatever their limits drop.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.ppo import PromptDataConfig
from hybrid_rlhf.configs.reward import PreferenceConfig
from hybrid_rlhf.configs.sections import DataConfig, DataSource
from hybrid_rlhf.configs.sft import SFTDataConfig
from hybrid_rlhf.data.cache import cached_rows, tokenizer_key
from hybrid_rlhf.data.chat import RULES_VERSION
from hybrid_rlhf.data.conditional import Condition, find_condition
from hybrid_rlhf.data.encoding import (
    encode_conversation_row,
    encode_labelled_row,
    encode_preference_row,
    encode_prompt_row,
)
from hybrid_rlhf.data.rows import head_place, ptx_row, sft_row
from hybrid_rlhf.data.sources import Row, open_source
from hybrid_rlhf.data.stepwise import encode_stepwise_row
from hybrid_rlhf.runtime.logs import LOGGER_NAME
from hybrid_rlhf.runtime.progress import ProgressLog
from hybrid_rlhf.runtime.world import World, mistakes_shared

logger = logging.getLogger(LOGGER_NAME)
Encode = Callable[[str, Row, PreTrainedTokenizerBase, int], list[dict[str, Any]]]


@dataclass(frozen=True)
class Kind:
    """What a step makes of a row."""

    name: str
    encode: Encode
    """A row of a source to the rows that are learned from: `cut`, whether a row was cut to the limit, `usable`, whether
    it can teach, `ignored`, what the chat template has no place for."""
    step_index: int
    """The step's share of data.split."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What else its columns depend on."""


@dataclass(frozen=True)
class TokenizedData:
    """Rows to train on and rows held out."""

    train: datasets.Dataset
    held_out: datasets.Dataset
    condition: Condition | None = None
    """What rows are told of their score."""


def load_sft_data(config: DataConfig, *, tokenizer: PreTrainedTokenizerBase, seed: int, world: World) -> TokenizedData:
    """Columns `input_ids`, `loss_mask`, `length`; with data.condition_buckets rows are told their bucket."""
    if not isinstance(config, SFTDataConfig) or not (config.condition_buckets and config.sources):
        kind = Kind("sft", lambda p, row, t, limit: encode_conversation_row(p, sft_row(p, row), t, limit), 0)
        return _load(kind, config, tokenizer, config.max_length, seed, world)
    condition = find_condition(config, lambda rows: _dealt(rows, config, 0, seed)[0].tolist(), world)

    def encode(place: str, row: Row, tokenizer: PreTrainedTokenizerBase, limit: int) -> list[dict[str, Any]]:
        return encode_conversation_row(place, condition.applied(place, row, sft_row(place, row)), tokenizer, limit)

    kind = Kind("sft", encode, 0, {"condition": condition.settings()})
    return replace(_load(kind, config, tokenizer, config.max_length, seed, world), condition=condition)


def load_preference_data(
    config: DataConfig, *, tokenizer: PreTrainedTokenizerBase, seed: int, world: World
) -> TokenizedData:
    """Columns `responses` (token ids with the prompt), `masks` (true on an answer's own), `pairs`, `margins`, `length`
    (the longest), `tokens` (all)."""
    return _load(Kind("preference", encode_preference_row, 1), config, tokenizer, config.max_length, seed, world)


def load_labelled_data(
    config: DataConfig, *, tokenizer: PreTrainedTokenizerBase, seed: int, world: World
) -> TokenizedData:
    """Columns as those of pairs, with `labels`, whether each answer is good, in place of `pairs` and `margins`."""
    return _load(Kind("labelled", encode_labelled_row, 1), config, tokenizer, config.max_length, seed, world)


def load_reward_data(
    config: DataConfig, preference: PreferenceConfig, *, tokenizer: PreTrainedTokenizerBase, seed: int, world: World
) -> TokenizedData:
    """Columns of pairs, of labels, or of steps as `encode_stepwise_row`; with several heads also `head`, its place."""
    return _load(_reward_kind(preference), config, tokenizer, config.max_length, seed, world)


def _reward_kind(preference: PreferenceConfig) -> Kind:
    heads, separator = preference.heads, preference.step_separator
    encodings: dict[str, tuple[str, Encode]] = {
        "binary": ("labelled", encode_labelled_row),
        "steps": (
            f"stepwise {separator!r}",
            lambda place, row, t, limit: encode_stepwise_row(place, row, t, limit, separator=separator),
        ),
    }
    name, encode = encodings.get(preference.loss, ("reward", encode_preference_row))
    if not heads:
        return Kind(name, encode, 1)

    def with_head(place: str, row: Row, tokenizer: PreTrainedTokenizerBase, limit: int) -> list[dict[str, Any]]:
        head = {"head": head_place(place, row, heads)}
        return [columns | head for columns in encode(place, row, tokenizer, limit)]

    return Kind(f"{name} with heads {', '.join(heads)}", with_head, 1)


def load_prompt_data(
    config: DataConfig, *, tokenizer: PreTrainedTokenizerBase, seed: int, world: World, max_prompt_tokens: int
) -> TokenizedData:
    """Columns `input_ids`, `prompt` (messages as JSON), `columns` (the row's others as JSON), `length`."""
    return _load(Kind("prompt", encode_prompt_row, 2), config, tokenizer, max_prompt_tokens, seed, world)


def load_ptx_data(
    config: PromptDataConfig, *, tokenizer: PreTrainedTokenizerBase, seed: int, world: World
) -> datasets.Dataset:
    """The rows of data.ptx_sources, with the columns of SFT; none are held out."""
    kind = Kind("ptx", lambda p, row, t, limit: encode_conversation_row(p, ptx_row(p, row), t, limit), 2)
    parts = [_tokenize(kind, s, config, tokenizer, config.max_length, world) for s in config.ptx_sources]
    return _report(kind, _blend(parts, config.ptx_sources, seed), None, parts, config.max_length, config, world).train


def _load(
    kind: Kind, config: DataConfig, tokenizer: PreTrainedTokenizerBase, limit: int, seed: int, world: World
) -> TokenizedData:
    if not config.sources:
        raise UserError(
            "data.sources names at least one file, folder or hub name, got none: give --data.sources FILE.jsonl"
        )
    parts = [_tokenize(kind, source, config, tokenizer, limit, world) for source in config.sources]
    train, held_out = [], []
    for part in parts:
        places = np.asarray(part["source_row"])
        mine, held = _dealt(int(places[-1]) + 1, config, kind.step_index, seed)
        train.append(part.select(_made_of(mine, places)))
        held_out.append(part.select(_made_of(held, places)))
    if config.eval_sources:
        held_out = [_tokenize(kind, source, config, tokenizer, limit, world) for source in config.eval_sources]
        parts = parts + held_out
    evaluated = datasets.concatenate_datasets([_usable(part) for part in held_out])
    evaluated = evaluated.select(range(min(len(evaluated), config.max_eval_rows)))
    return _report(kind, _blend(train, config.sources, seed), evaluated, parts, limit, config, world)


def _dealt(rows: int, config: DataConfig, step_index: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The places of a source's rows that a step trains on, and of those that it holds out."""
    mine = _share(rows, config.split, step_index, seed)
    count = 0 if config.eval_sources else _held_out_count(len(mine), config)
    return mine[count:], mine[:count]


def _made_of(source_rows: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The indices of the rows that were made of some source rows, in their order; `places` ascends."""
    first, last = (np.searchsorted(places, source_rows, side=side) for side in ("left", "right"))
    if len(places) == int(places[-1]) + 1:
        return first
    return np.concatenate([np.arange(start, stop) for start, stop in zip(first, last, strict=True)] or [first])


def _share(rows: int, split: list[float] | None, step_index: int, seed: int) -> np.ndarray:
    """The places of a step's rows in a source, in a seeded order; every row without a split.

    The order is of the seed alone: a source is split alike wherever it stands in the lists of the three steps.
    """
    order = np.random.default_rng([seed, 0]).permutation(rows)
    if split is None:
        return order
    edges = np.round(np.cumsum([0.0, *split]) / sum(split) * rows).astype(int)
    return order[edges[step_index] : edges[step_index + 1]]


def _held_out_count(rows: int, config: DataConfig) -> int:
    if config.eval_fraction == 0 or rows < 2:
        return 0
    return min(config.max_eval_rows, max(1, round(rows * config.eval_fraction)))


def _blend(parts: list[datasets.Dataset], sources: list[str | DataSource], seed: int) -> datasets.Dataset:
    """Each source as often as its weight says: whole copies, and a seeded part of one."""
    blended = []
    for number, (part, source) in enumerate(zip(parts, sources, strict=True)):
        part = _usable(part)
        copies, rest = divmod(source.weight if isinstance(source, DataSource) else 1.0, 1.0)
        chosen = np.random.default_rng([seed, number, 1]).permutation(len(part))[: round(rest * len(part))]
        blended += [part] * int(copies) + ([part.select(np.sort(chosen))] if len(chosen) else [])
    return datasets.concatenate_datasets(blended or [_usable(parts[0]).select([])])


def _usable(part: datasets.Dataset) -> datasets.Dataset:
    """The rows that limits left, without the columns that say so."""
    usable = np.flatnonzero(np.asarray(part["usable"], dtype=bool))
    return part.select(usable).remove_columns(["usable", "cut", "ignored", "source_row"])


def _tokenize(
    kind: Kind,
    source: str | DataSource,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    world: World,
) -> datasets.Dataset:
    """All rows of a source, in its order, from the cache if they are there."""
    with mistakes_shared(world):
        rows = open_source(source)

    def make() -> Iterator[dict[str, Any]]:
        progress = ProgressLog(f"tokenising {rows.source.path}", total=rows.count())
        for number, (place, row) in enumerate(progress.over(rows)):
            for columns in kind.encode(place, row, tokenizer, limit):
                if config.too_long == "drop" and columns["cut"]:
                    columns["usable"] = False
                yield columns | {"source_row": number}

    key = {
        "kind": kind.name,
        "content": rows.fingerprint,
        "tokenizer": tokenizer_key(tokenizer),
        "limit": limit,
        "too_long": config.too_long,
        "rules": RULES_VERSION,
        **kind.settings,
    }
    return cached_rows(key, make, cache_dir=config.cache_dir, world=world)


def _report(
    kind: Kind,
    train: datasets.Dataset,
    held_out: datasets.Dataset | None,
    parts: list[datasets.Dataset],
    limit: int,
    config: DataConfig,
    world: World,
) -> TokenizedData:
    """Say what became of the rows.

    Raises:
        UserError: when none is left to train on.
    """
    cut = sum(int(np.sum(part["cut"])) for part in parts)
    dropped = sum(len(part) - int(np.sum(part["usable"])) for part in parts)
    truncated = 0 if config.too_long == "drop" else cut
    if not len(train):
        raise UserError(
            f"{kind.name} data has no row left to train on, of {sum(map(len, parts))} {dropped} were dropped at "
            f"{limit} tokens: raise the limit or a source's weight, set data.too_long to truncate, or add rows"
        )
    if held_out is None:
        held_out = train.select([])
    if world.is_main:
        _report_templates(parts)
        logger.info(
            "%s data: %s rows to train on, %s held out; of all rows %s were truncated to %s tokens, %s dropped",
            kind.name, f"{len(train):,}", f"{len(held_out):,}", f"{truncated:,}", f"{limit:,}", f"{dropped:,}",
        )  # fmt: skip
    return TokenizedData(train, held_out)


def _report_templates(parts: list[datasets.Dataset]) -> None:
    """Log what the chat template did to conversations: turns in rows of their own, keys that it does not read."""
    made, sources = sum(map(len, parts)), sum(len(np.unique(part["source_row"])) for part in parts)
    if made > sources:
        logger.info(
            "the chat template renders earlier turns anew: %s conversations make %s rows, each with the loss on turns "
            "as generation sees them",
            f"{sources:,}", f"{made:,}",
        )  # fmt: skip
    ignored = Counter(key for part in parts for keys in part["ignored"] if keys for key in keys.split(","))
    if ignored:
        counts = ", ".join(f"{key} ({count:,})" for key, count in ignored.most_common())
        logger.warning(
            "the chat template has no place for %s: roles are shown as the nearest, tool calls as JSON text, others "
            "are left out", counts,
        )  # fmt: skip
