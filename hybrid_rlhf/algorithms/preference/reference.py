"""What a reference thinks of answers: asked at each update, or once before training and kept.

Kept log-probs lie in the run's folder, so that a run that goes on does not ask again, and the reference takes no memory
while the actor learns. An actor that starts where the reference is, is asked itself, before its first update.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.algorithms.starting import frozen_beside, require_same_tokens, resolve
from hybrid_rlhf.algorithms.supervised import each_once
from hybrid_rlhf.configs.batch_plan import BatchPlan
from hybrid_rlhf.configs.preference import PreferenceStepConfig
from hybrid_rlhf.configs.whole_files import write_whole
from hybrid_rlhf.data.augmented import AugmentedRows, Rows
from hybrid_rlhf.data.collation import LabelledBatch, PreferenceBatch
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.runtime.logs import LOGGER_NAME
from hybrid_rlhf.runtime.run import Run

KEPT_FILE = "reference_logprobs.json"
logger = logging.getLogger(LOGGER_NAME)

BatchT = TypeVar("BatchT", PreferenceBatch, LabelledBatch)
Reading = Callable[[], AbstractContextManager[ModelEngine]]
"""Around what the reference reads: gives it, where it computes."""


def answer_logprobs(engine: ModelEngine, batch: PreferenceBatch | LabelledBatch) -> Tensor:
    """[N] the log-prob of each answer of a batch, summed over its tokens."""
    logprobs: Tensor = engine(batch.input_ids, batch.attention_mask, batch.response_mask)[0]
    return logprobs.sum(dim=1)


@torch.no_grad()
def with_reference(batches: Sequence[BatchT], reading: Reading) -> list[BatchT]:
    """Batches with what the reference says now."""
    with reading() as reference:
        return [replace(batch, ref_logprobs=answer_logprobs(reference, batch)) for batch in batches]


@torch.no_grad()
def read_reference(
    rows: Rows, reference: ModelEngine, *, collate: Callable[[Sequence[Mapping[str, Any] | None]], Any], plan: BatchPlan
) -> list[list[float]]:
    """The log-prob of each row's answers under the reference, by row; every rank calls and gets all.

    Args:
        rows: with `responses`.
        reference: as it is now.
        collate: rows to a batch.
        plan: how many rows pass at once.
    """
    if not len(rows):
        return []
    numbered = AugmentedRows(rows, lambda place, _: {"place": place})
    found: dict[int, list[float]] = {}
    for micro_batches in each_once(numbered, plan, reference.world, padded=not reference.packs):
        for micro in micro_batches:
            told = answer_logprobs(reference, collate(micro)).tolist()
            for row in micro:
                count = 1 if row is None else len(row["responses"])
                mine, told = told[:count], told[count:]
                if row is not None:
                    found[row["place"]] = mine
    everyones = reference.world.all_gather_objects(found)
    by_place = {place: values for part in everyones for place, values in part.items()}
    return [by_place[place] for place in range(len(rows))]


def with_kept_reference(rows: Rows, logprobs: Sequence[Sequence[float]]) -> AugmentedRows:
    """Rows with what `read_reference` found, as `ref_logprobs`."""
    return AugmentedRows(rows, lambda place, _: {"ref_logprobs": list(logprobs[place])})


class ReferenceReader:
    """The reference of a preference run: the actor without its adapters, or a model of its own."""

    def __init__(
        self, config: PreferenceStepConfig, run: Run, actor: ModelEngine, actor_path: str,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:  # fmt: skip
        """Take the run and its actor, before the first update and before a checkpoint is read.

        Raises:
            UserError: when the reference cannot be loaded, or its tokens are not the actor's.
        """
        self._config, self._run, self._actor = config, run, actor
        # After a warm start the reference is still what the actor began as.
        start = config.reference.path or (run.warm_start and config.model.path)
        self._path = resolve(config, run, start, key="reference.path") if start else actor_path
        self._is_start = self._path == actor_path
        if not self._is_start:
            require_same_tokens("reference", self._path, tokenizer, config.model)
        self._live: ModelEngine | None = None
        if config.reference.logprobs == "live" and not (self._is_start and config.lora.rank):
            self._live = frozen_beside(config, run, "reference", self._path)

    def __call__(self) -> AbstractContextManager[ModelEngine]:
        """Around what is read during training."""
        return self._actor.reference() if self._live is None else nullcontext(self._live)

    def kept(
        self, *parts: Rows, collate: Callable[[Sequence[Mapping[str, Any] | None]], Any], plan: BatchPlan
    ) -> list[AugmentedRows]:
        """Rows with what the reference says of them, read now or before the checkpoint that this run goes on from."""
        file = self._run.folder / KEPT_FILE
        self._run.watchdog.beat("reference log-probs")
        key = {"reference": self._path, "answers": _answers_key(parts) if self._run.world.is_main else None}
        told = self._read(file, key)
        if told is None:
            if self._run.world.is_main:
                rows, name = f"{sum(map(len, parts)):,}", KEPT_FILE
                logger.info("the reference reads %s rows, once; what it says of them stays in %s", rows, name)
            engine = self._actor
            if not self._is_start:
                engine = frozen_beside(self._config, self._run, "reference", self._path)
            told = [read_reference(rows, engine, collate=collate, plan=plan) for rows in parts]
            if engine is not self._actor:
                engine.drop_weights()
            if self._run.world.is_main:
                write_whole(file, json.dumps({"key": key, "logprobs": told}))
            self._run.world.barrier()
        return [with_kept_reference(rows, values) for rows, values in zip(parts, told, strict=True)]

    def _read(self, file: Path, key: Mapping[str, Any]) -> list[list[list[float]]] | None:
        """What an earlier start of this run wrote; every rank gets the same, none where it is of something else."""
        found: list[list[list[float]]] | None = None
        if self._run.world.is_main and self._run.checkpoint is not None and file.is_file():
            content = json.loads(file.read_text())
            found = content["logprobs"] if content["key"] == key else None
        return self._run.world.broadcast_object(found)


def _answers_key(parts: Sequence[Rows]) -> str:
    """Of all answers in their order, so of data, tokenizer, seed and algorithm."""
    digest = hashlib.sha256()
    for rows in parts:
        for place in range(len(rows)):
            digest.update(json.dumps(rows[place]["responses"]).encode())
        digest.update(b"\n")
    return digest.hexdigest()
