"""Log-probs of completions under the reference: computed at each update, or once before training and cached.

Cached log-probs are stored in the run's folder, so a resumed run does not compute them again, and the reference takes
no memory during training. Only rows that the run uses are computed. If the actor starts from the reference, the actor
itself computes them before its first update; a resumed run does so before its checkpoint is loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.preference import PreferenceReferenceConfig, PreferenceStepConfig
from hybrid_rlhf.data.collation import PreferenceBatch, PreferenceLabelBatch
from hybrid_rlhf.data.images.references import tokenised_images
from hybrid_rlhf.data.row_views import RowSequence, RowView, augmented_rows, row_subset
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.loop.batch_plan import BatchPlan
from hybrid_rlhf.loop.setup import build_frozen_engine, require_same_tokens, resolve
from hybrid_rlhf.runtime.files.atomic import write_whole
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.observability.progress import ProgressLog
from hybrid_rlhf.runtime.run import Run
from hybrid_rlhf.supervised.trainer import one_pass

LOGPROBS_FILE = "reference_logprobs.json"

BatchT = TypeVar("BatchT", PreferenceBatch, PreferenceLabelBatch)
EngineContext = Callable[[], AbstractContextManager[ModelEngine]]
"""Returns a context that yields the reference, ready for forwards."""


def completion_logprobs(engine: ModelEngine, batch: PreferenceBatch | PreferenceLabelBatch) -> Tensor:
    """[N] log-probs of the completions of a batch, summed over their tokens."""
    masks = batch.attention_mask, batch.response_mask
    logprobs: Tensor = engine(batch.input_ids, *masks, images=batch.images)[0]
    return logprobs.sum(dim=1)


@torch.no_grad()
def compute_reference_logprobs(
    rows: RowSequence,
    reference: ModelEngine,
    *,
    collate: Callable[[Sequence[Mapping[str, Any] | None]], Any],
    plan: BatchPlan,
    progress: ProgressLog,
) -> dict[str, list[float]]:
    """Log-probs of the completions of each row under the reference, by `completions_key`.

    Every rank calls, and receives the log-probs of all ranks.

    Args:
        rows: rows with `responses` and `masks`.
        reference: the model that computes them.
        collate: turns rows into a batch.
        plan: sizes of batches and micro-batches.
        progress: log that counts the rows.
    """
    if not len(rows):
        return {}
    computed: dict[str, list[float]] = {}
    for micro_batches in one_pass(rows, plan, reference.world, padded=not reference.packs, progress=progress):
        of_all = [completion_logprobs(reference, collate(micro)) for micro in micro_batches]
        logprobs = iter(torch.cat(of_all).tolist() if of_all else [])
        for row in chain.from_iterable(micro_batches):
            of_row = list(islice(logprobs, 1 if row is None else len(row["responses"])))
            if row is not None:
                computed[completions_key(row)] = of_row
    gathered = reference.world.all_gather_objects(computed)
    return {key: values for part in gathered for key, values in part.items()}


def completions_key(row: Mapping[str, Any]) -> str:
    """Hash of the tokens, masks and images of a row's completions, which determine its log-probs under a model."""
    parts = [row["responses"], row["masks"]]
    if images := tokenised_images(row):
        parts += [[image.digest for image in images], row["image_order"]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


class ReferenceModel:
    """The reference of a preference run: the actor without its adapters, or a separate model."""

    def __init__(
        self,
        config: PreferenceStepConfig,
        reference: PreferenceReferenceConfig,
        run: Run,
        actor: ModelEngine,
        actor_path: str,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        """Take the run and its actor, before the first update and before a checkpoint is loaded.

        Raises:
            UserError: when the reference cannot be loaded, or its vocabulary differs from the actor's.
        """
        self._config = config
        self._run = run
        self._actor = actor
        # After a warm start the reference is still the model that the actor was first trained from.
        start = reference.path or (run.warm_start and config.model.path)
        self._path = resolve(config, run, start, key="reference.path") if start else actor_path
        self._is_start = self._path == actor_path
        if not self._is_start:
            require_same_tokens("reference", self._path, tokenizer, config.model)
        self._live: ModelEngine | None = None
        if reference.logprobs == "live" and not (self._is_start and config.lora is not None):
            self._live = build_frozen_engine(config, run, "reference", self._path)

    def __call__(self) -> AbstractContextManager[ModelEngine]:
        """Context in which the reference runs during training."""
        return self._actor.reference() if self._live is None else nullcontext(self._live)

    def with_cached_logprobs(
        self,
        train: RowSequence,
        held_out: RowSequence,
        *,
        used: Sequence[int],
        collate: Callable[[Sequence[Mapping[str, Any] | None]], Any],
        plan: BatchPlan,
    ) -> list[RowView]:
        """Training and held-out rows with the reference's log-probs, from the run's folder or computed now.

        Args:
            train: training rows.
            held_out: held-out rows; log-probs of all of them are computed.
            used: indices of the training rows that the run uses, in order of use; the others are not computed.
            collate: turns rows into a batch.
            plan: sizes of batches and micro-batches.
        """
        file = self._run.folder / LOGPROBS_FILE
        world = self._run.world
        watchdog = self._run.watchdog
        watchdog.beat("reference log-probs")
        known = self._read(file)
        wanted = [(train, used), (held_out, range(len(held_out)))]
        missing = world.broadcast_object(self._missing(wanted, known) if world.is_main else [])
        count = sum(map(len, missing))
        if count:
            if world.is_main:
                logger.info(
                    "computing reference log-probs of %s rows; they are stored in %s", f"{count:,}", LOGPROBS_FILE
                )
            engine = self._actor
            if not self._is_start:
                engine = build_frozen_engine(self._config, self._run, "reference", self._path)
            progress = self._run.progress("reference log-probs", total=count)
            for (rows, _), numbers in zip(wanted, missing, strict=True):
                known |= compute_reference_logprobs(
                    row_subset(rows, numbers), engine, collate=collate, plan=plan, progress=progress
                )
            if engine is not self._actor:
                engine.drop_weights()
            if world.is_main:
                write_whole(file, json.dumps({"reference": self._path, "logprobs": known}))
            world.barrier()
        return [
            augmented_rows(rows, lambda _, row: {"ref_logprobs": list(known[completions_key(row)])}, {})
            for rows in (train, held_out)
        ]

    def _missing(
        self, wanted: Sequence[tuple[RowSequence, Sequence[int]]], known: Mapping[str, Any]
    ) -> list[list[int]]:
        """Indices of the rows to compute, per set of rows; only the first of rows with equal completions."""
        seen = set(known)
        progress = self._run.progress("rows of the run", total=sum(len(numbers) for _, numbers in wanted))
        missing: list[list[int]] = []
        for rows, numbers in wanted:
            missing.append([])
            for number in progress.track(numbers):
                if (key := completions_key(rows[number])) not in seen:
                    seen.add(key)
                    missing[-1].append(number)
        return missing

    def _read(self, file: Path) -> dict[str, list[float]]:
        """Log-probs that an earlier start of this run stored, on every rank; {} if a different reference computed
        them."""
        logprobs: dict[str, list[float]] = {}
        if self._run.world.is_main and self._run.checkpoint is not None and file.is_file():
            content = json.loads(file.read_text())
            logprobs = content["logprobs"] if content.get("reference") == self._path else {}
        return self._run.world.broadcast_object(logprobs)
