"""What a reference thinks of answers: asked at each update, or once before training and kept.

Kept log-probs lie in the run's folder, so that a resumed run does not ask again, and the reference takes no memory
while the actor learns. Only rows that the run uses are read. An actor that starts where the reference is, is asked
itself, before its first update: at every start of the run, before its checkpoint is loaded.
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
from hybrid_rlhf.data.loaders import ChosenRows
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.runtime.logs import LOGGER_NAME
from hybrid_rlhf.runtime.progress import ProgressLog
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
    rows: Rows, reference: ModelEngine, *, collate: Callable[[Sequence[Mapping[str, Any] | None]], Any],
    plan: BatchPlan, progress: ProgressLog,
) -> dict[str, list[float]]:  # fmt: skip
    """The log-prob of each row's answers under the reference, by `answers_key`; every rank calls and gets all.

    Args:
        rows: with `responses` and `masks`.
        reference: as it is now.
        collate: rows to a batch.
        plan: how many rows pass at once.
        progress: over the rows.
    """
    if not len(rows):
        return {}
    found: dict[str, list[float]] = {}
    for micro_batches in each_once(rows, plan, reference.world, padded=not reference.packs, progress=progress):
        for micro in micro_batches:
            told = answer_logprobs(reference, collate(micro)).tolist()
            for row in micro:
                count = 1 if row is None else len(row["responses"])
                mine, told = told[:count], told[count:]
                if row is not None:
                    found[answers_key(row)] = mine
    everyones = reference.world.all_gather_objects(found)
    return {key: values for part in everyones for key, values in part.items()}


def answers_key(row: Mapping[str, Any]) -> str:
    """What a row's log-probs depend on besides the model: the tokens of its answers, and which of them count."""
    return hashlib.sha256(json.dumps([row["responses"], row["masks"]]).encode()).hexdigest()[:32]


def with_kept_reference(rows: Rows, logprobs: Mapping[str, Sequence[float]]) -> AugmentedRows:
    """Rows with what `read_reference` found, as `ref_logprobs`."""
    return AugmentedRows(rows, lambda _, row: {"ref_logprobs": list(logprobs[answers_key(row)])})


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
        self, train: Rows, held_out: Rows, *, used: Sequence[int],
        collate: Callable[[Sequence[Mapping[str, Any] | None]], Any], plan: BatchPlan,
    ) -> list[AugmentedRows]:  # fmt: skip
        """Both sets of rows with the reference's log-probs, read now or by an earlier start of this run.

        Only the rows that the run will use are read: of the training rows those at the places `used`, in this order,
        and all that are held out. A resumed run reads what is missing before its checkpoint is loaded, when the actor
        is still the reference.
        """
        file, world, watchdog = self._run.folder / KEPT_FILE, self._run.world, self._run.watchdog
        watchdog.beat("reference log-probs")
        told = self._read(file)
        parts = [(train, used), (held_out, range(len(held_out)))]
        missing = world.broadcast_object(self._missing(parts, told) if world.is_main else [])
        count = sum(map(len, missing))
        if count:
            if world.is_main:
                logger.info("the reference reads %s rows; their log-probs are kept in %s", f"{count:,}", KEPT_FILE)
            engine = self._actor
            if not self._is_start:
                engine = frozen_beside(self._config, self._run, "reference", self._path)
            progress = self._run.progress("reference log-probs", total=count)
            for (rows, _), places in zip(parts, missing, strict=True):
                told |= read_reference(
                    ChosenRows(rows, places), engine, collate=collate, plan=plan, progress=progress
                )  # fmt: skip
            if engine is not self._actor:
                engine.drop_weights()
            if world.is_main:
                write_whole(file, json.dumps({"reference": self._path, "logprobs": told}))
            world.barrier()
        return [with_kept_reference(rows, told) for rows in (train, held_out)]

    def _missing(self, parts: Sequence[tuple[Rows, Sequence[int]]], told: Mapping[str, Any]) -> list[list[int]]:
        """Of each part the places of the rows to read; of rows with the same answers, as in a repeated source, one."""
        known = set(told)
        progress = self._run.progress("answers of the run", total=sum(len(places) for _, places in parts))
        missing: list[list[int]] = []
        for rows, places in parts:
            missing.append([])
            for place in progress.over(places):
                if (key := answers_key(rows[place])) not in known:
                    known.add(key)
                    missing[-1].append(place)
        return missing

    def _read(self, file: Path) -> dict[str, list[float]]:
        """What an earlier start of this run wrote, on every rank; {} where it is of another reference."""
        found: dict[str, list[float]] = {}
        if self._run.world.is_main and self._run.checkpoint is not None and file.is_file():
            content = json.loads(file.read_text())
            found = content["logprobs"] if content.get("reference") == self._path else {}
        return self._run.world.broadcast_object(found)
