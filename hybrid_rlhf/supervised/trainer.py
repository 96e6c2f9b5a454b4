"""Trainer of one model: one optimizer update per batch, and evaluation on held-out rows.

An Objective defines the loss of a batch. The loss of an update is divided once, by its count over all micro-batches
and ranks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from hybrid_rlhf.configs.sections.training import TrainConfig
from hybrid_rlhf.data.collation import images_of
from hybrid_rlhf.data.loaders import BatchLoader
from hybrid_rlhf.data.row_views import RowSequence
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.engines.saved.checkpoints import LoopState
from hybrid_rlhf.functional.losses import LossSum
from hybrid_rlhf.loop.batch_plan import BatchPlan
from hybrid_rlhf.loop.checkpointing import CheckpointManager
from hybrid_rlhf.loop.loss_sums import RunningSums, global_count
from hybrid_rlhf.loop.non_finite import SkippedUpdates, rows_with_non_finite_loss
from hybrid_rlhf.loop.trainer import Trainer
from hybrid_rlhf.models.routers.losses import ROUTER_METRICS
from hybrid_rlhf.runtime.observability.logs import note
from hybrid_rlhf.runtime.observability.profiling import model_flops_utilisation
from hybrid_rlhf.runtime.observability.progress import ProgressLog
from hybrid_rlhf.runtime.observability.timers import peak_memory_gib
from hybrid_rlhf.runtime.run import Run
from hybrid_rlhf.runtime.world import World

BatchT = TypeVar("BatchT")
CollatedT = TypeVar("CollatedT", bound=Any)


class Objective(ABC, Generic[BatchT]):
    """Loss and metrics of a batch."""

    name: str
    """Prefix of the training metrics."""
    packs = True
    """True if other models that it uses, such as a teacher, take rows without padding."""
    collator: ClassVar[staticmethod[[Sequence[Mapping[str, Any] | None], int], Any]]
    """Collates rows on the host, padded with the token of the second argument."""

    def __init__(self, *, pad_token_id: int, device: torch.device, has_images: bool = False) -> None:
        """Take the token of padding, the device of the models, and whether rows of the data have images."""
        self._pad_token_id = pad_token_id
        self._device = device
        self._has_images = has_images

    def collate(self, rows: Sequence[Mapping[str, Any] | None]) -> BatchT:
        """Collate rows of the data as tensors on the host; None is an empty row."""
        return self.with_images(self.collator(rows, self._pad_token_id), rows)

    def with_images(self, batch: CollatedT, rows: Sequence[Mapping[str, Any] | None]) -> CollatedT:
        """A batch with the images of its rows, empty ones too where others have images: ranks call the tower
        alike."""
        return replace(batch, images=images_of(rows)) if self._has_images else batch

    def prepare(self, engine: ModelEngine, batches: Sequence[BatchT]) -> Sequence[BatchT]:
        """Add values that are computed from all micro-batches of an update, before its losses. Every rank calls."""
        return batches

    def resample(self, engine: ModelEngine, batches: Sequence[BatchT], *, step: int) -> Sequence[BatchT]:
        """Replace the micro-batches of an update by sampled ones, if the objective samples. Every rank calls."""
        return batches

    @abstractmethod
    def count(self, batch: BatchT) -> int:
        """The denominator of the loss of a batch: its number of tokens, pairs or labels."""

    def masks(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Masks [B, T] of the real tokens of a batch, and of those whose log-probs a causal LM computes."""
        return batch.attention_mask, batch.response_mask

    @abstractmethod
    def loss(self, engine: ModelEngine, batch: BatchT) -> LossSum:
        """Return the loss of a batch, summed over what `count` counts."""

    @abstractmethod
    def metrics(self, means: Mapping[str, float], prefix: str) -> dict[str, float]:
        """Metrics, under a prefix, from the means of the loss and its stats."""


class SupervisedTrainer(Trainer, Generic[BatchT]):
    """Trains one engine with one objective."""

    def __init__(
        self,
        objective: Objective[BatchT],
        engine: ModelEngine,
        *,
        train: RowSequence,
        held_out: RowSequence,
        plan: BatchPlan,
        config: TrainConfig,
        run: Run,
        by_generation: Callable[[], dict[str, float]] = dict,
    ) -> None:
        self._objective = objective
        self._engine = engine
        self._padded = not (engine.packs and objective.packs)
        self._plan = replace(plan, micro_batches=replace(plan.micro_batches, padded=self._padded))
        self._loader = train_loader(train, self._plan, run)
        few_updates = self._loader.few_updates_text()
        if few_updates and run.world.is_main:
            note(few_updates)
        steps = steps_of_epochs(self._loader, config)
        length = config.length_text(steps)
        if length and run.world.is_main:
            note(length)
        passes = None if config.passes is None else math.ceil(config.passes)
        self._batches = self._loader.iterate(passes)  # begins where `resume` has set the loader
        self._held_out = held_out
        self._by_generation = by_generation
        self._skipped = SkippedUpdates(run, limit=run.config.faults.max_skipped_steps)
        super().__init__(
            objective.name,
            total_steps=config.total_steps(steps),
            config=config,
            run=run,
            checkpoints=CheckpointManager(run, config, {engine.role: engine}),
            shown_metrics=(f"{objective.name}/", "lr", "perf/tokens_per_second", "eval/"),
        )

    def step(self, step: int) -> dict[str, float]:
        """Make one optimizer update, and return its metrics."""
        micro_batches = next(self._batches)
        objective = self._objective
        world = self._world
        sums = RunningSums(world.device)
        with self._run.timers("training"):
            collated = [objective.collate(rows) for rows in micro_batches]
            batches = objective.prepare(self._engine, objective.resample(self._engine, collated, step=step))
            count = global_count(sum(objective.count(batch) for batch in batches), world)
            losses = []
            saved: list[int] = []
            for batch in batches:
                loss = objective.loss(self._engine, batch)
                saved += self._engine.saved_rows
                self._engine.backward(loss.total, count=count)
                sums.add(loss)
                losses.append(loss.total.detach())
            stats = self._engine.step()
            means = sums.means(world)
        seconds = self._run.timers.take()["training"]
        masks = [objective.masks(batch) for batch in batches]
        real_tokens = global_count(sum(int(real.sum()) for real, _ in masks), world)
        shared = global_count(sum(saved), world)
        speed = (real_tokens - shared) / seconds
        of_rows = self._engine.operations.of_rows
        operations = sum(of_rows(real.sum(dim=1), head_tokens=float(wanted.sum())) for real, wanted in masks)
        operations -= of_rows(torch.tensor(saved), head_tokens=0.0)
        if stats.is_fault:
            self._skipped.keep(step, list(map(dict, rows_with_non_finite_loss(micro_batches, losses, world=world))))
        norm = {} if stats.grad_norm is None else {"grad_norm": stats.grad_norm}
        return {
            **objective.metrics(means, objective.name),
            **{f"{objective.name}/{name}": means[name] for name in ROUTER_METRICS if name in means},
            "lr": stats.lr,
            **norm,
            "time/training_seconds": seconds,
            "perf/train_tokens_per_second": speed,
            "perf/tokens_per_second": speed,
            **({"perf/shared_tokens_ratio": shared / real_tokens} if shared else {}),
            **model_flops_utilisation(
                operations=global_count(operations, world), seconds=seconds, ranks=world.size, device=world.device
            ),
            "memory/peak_gib": peak_memory_gib(world.device),
            **self._skipped.record(step, ["the gradient"] if stats.is_fault else []),
        }

    def resume(self) -> int | None:
        """Restore the newest checkpoint and return its step; None without a checkpoint."""
        state = self._checkpoints.resume()
        if state is None:
            return None
        self._loader.load_state_dict(state.content["loader"])
        self._skipped.load_state_dict(state.content["skipped"])
        return state.step

    def state(self, step: int) -> LoopState:
        """Return the positions of the data loader and the skipped updates, for a checkpoint."""
        return LoopState(step, {"loader": self._loader.state_dict(), "skipped": self._skipped.state_dict()})

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Metrics on the held-out rows and of the evaluation by generation; {} if there are none."""
        metrics = self._by_generation()
        if not len(self._held_out):
            return metrics
        self._run.watchdog.enter_phase("evaluation")
        sums = RunningSums(self._world.device)
        progress = self._run.progress("evaluation", total=len(self._held_out))
        for micro_batches in one_pass(self._held_out, self._plan, self._world, padded=self._padded, progress=progress):
            batches = [self._objective.collate(rows) for rows in micro_batches]
            for batch in self._objective.prepare(self._engine, batches):
                sums.add(self._objective.loss(self._engine, batch))
        return metrics | self._objective.metrics(sums.means(self._world), "eval")


def train_loader(rows: RowSequence, plan: BatchPlan, run: Run) -> BatchLoader:
    """Loader of the training rows, with the run's seed."""
    return BatchLoader(
        rows,
        global_batch_size=plan.global_batch_size,
        world_rank=run.world.rank,
        world_size=run.world.size,
        micro_batches=plan.micro_batches,
        seed=run.config.seed,
    )


def one_pass(
    rows: RowSequence, plan: BatchPlan, world: World, *, padded: bool, progress: ProgressLog
) -> Iterator[list[list[dict[str, Any] | None]]]:
    """This rank's micro-batches of one pass over all rows, in order; empty rows complete the last batch.

    `progress` counts rows and advances after each batch.
    """
    size = plan.global_batch_size
    batches = BatchLoader(
        rows,
        global_batch_size=size,
        world_rank=world.rank,
        world_size=world.size,
        micro_batches=replace(plan.micro_batches, padded=padded),
        seed=0,
        in_order=True,
    ).iterate(1)
    for start, micro_batches in zip(range(0, len(rows), size), batches, strict=True):
        yield micro_batches
        progress.advance(min(size, len(rows) - start))


def steps_of_epochs(loader: BatchLoader, config: TrainConfig) -> int:
    """Number of optimizer updates of all epochs."""
    return math.ceil(loader.steps_per_epoch * (config.epochs or 1))
