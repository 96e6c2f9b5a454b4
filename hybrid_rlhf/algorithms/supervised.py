"""The loop that SFT and reward modelling share: batches in, one optimizer update each, held-out evaluation.

What differs between the two is an Objective of a page. The loss of an update is divided once by its count over all
micro-batches and ranks.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.algorithms.continuation import Continuation, due
from hybrid_rlhf.algorithms.nonfinite import SkippedSteps, rows_to_blame
from hybrid_rlhf.algorithms.sums import RunningSums, global_count
from hybrid_rlhf.configs.batch_plan import BatchPlan
from hybrid_rlhf.configs.sections import TrainConfig
from hybrid_rlhf.configs.whole_files import write_whole
from hybrid_rlhf.data.augmented import Rows
from hybrid_rlhf.data.chat import stop_token_ids
from hybrid_rlhf.data.loaders import BatchLoader
from hybrid_rlhf.engines.checkpoints import LoopState
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.engines.partition import whole_tensors
from hybrid_rlhf.functional.losses import LossSum
from hybrid_rlhf.models.saving import save_model
from hybrid_rlhf.runtime.disk import full_disk_named
from hybrid_rlhf.runtime.profiling import model_flops_utilisation, profiled
from hybrid_rlhf.runtime.progress import ProgressLog
from hybrid_rlhf.runtime.run import FINISHED_FILE, Run
from hybrid_rlhf.runtime.timers import peak_memory_gib
from hybrid_rlhf.runtime.world import World

BatchT = TypeVar("BatchT")


class Objective(ABC, Generic[BatchT]):
    """What is learned from a batch."""

    name: str
    """Prefix of the training metrics."""
    packs = True
    """Whether models that it asks besides take rows without padding."""

    @abstractmethod
    def collate(self, rows: Sequence[Mapping[str, Any] | None]) -> BatchT:
        """Rows of the data to tensors on the device; None is an empty row."""

    def prepare(self, engine: ModelEngine, batches: Sequence[BatchT]) -> Sequence[BatchT]:
        """What must be known of all micro-batches of an update before the first loss; every rank calls."""
        return batches

    def resample(self, engine: ModelEngine, batches: Sequence[BatchT], *, step: int) -> Sequence[BatchT]:
        """What an update learns from in place of the data's micro-batches, if anything; every rank calls."""
        return batches

    @abstractmethod
    def count(self, batch: BatchT) -> int:
        """What the loss on a batch is divided by."""

    @abstractmethod
    def tokens(self, batch: BatchT) -> int:
        """Real tokens of a batch."""

    @abstractmethod
    def loss(self, engine: ModelEngine, batch: BatchT) -> LossSum:
        """The loss on a batch."""

    @abstractmethod
    def metrics(self, means: Mapping[str, float], prefix: str) -> dict[str, float]:
        """Means of the loss and its stats to metrics under a prefix."""


class SupervisedTrainer(Generic[BatchT]):
    """Trains one engine on one objective."""

    def __init__(
        self,
        objective: Objective[BatchT],
        engine: ModelEngine,
        *,
        train: Rows,
        held_out: Rows,
        plan: BatchPlan,
        config: TrainConfig,
        run: Run,
    ) -> None:
        self._objective, self._engine, self._config, self._run = objective, engine, config, run
        self._world = run.world
        self._padded = not (engine.packs and objective.packs)
        self._plan = replace(plan, micro_batches=replace(plan.micro_batches, padded=self._padded))
        self._loader = train_loader(train, self._plan, run)
        self._total_steps = total_steps(self._loader, config)
        self._held_out = held_out
        self._skipped = SkippedSteps(run, limit=run.config.faults.max_skipped_steps)
        self._continuation = Continuation(run, config, {engine.role: engine})

    def train(self) -> None:
        """Run to the last step, from the start or from the run's checkpoint."""
        run = self._run
        step = self._resume()
        run.open_metrics(step or None)
        if step == 0:
            before = self._evaluate()
            run.log(0, before)
            run.say(f"{self._objective.name} before training", before)
        display = run.display(self._objective.name, total_steps=self._total_steps, done_steps=step)
        with self._continuation.running(), display:
            steps = range(step + 1, self._total_steps + 1)  # first: no rows are read for a step past the last
            for step, micro_batches in zip(steps, self._loader.iterate(self._config.epochs), strict=False):
                with profiled(step, run.config.logging.profile_steps, run.folder, self._world):
                    metrics = self._update(step, micro_batches)
                if step == self._total_steps or due(step, self._config.eval_every):
                    metrics |= self._evaluate()
                run.log(step, metrics)
                display.show(step, self._figures(metrics))
                self._continuation.after_step(step, partial(self._state, step), metrics)

    def _resume(self) -> int:
        """The step that the run goes on from; 0: it starts."""
        state = self._continuation.resume()
        if state is None:
            return 0
        self._loader.load_state_dict(state.content["loader"])
        self._skipped.load_state_dict(state.content["skipped"])
        return state.step

    def _state(self, step: int) -> LoopState:
        return LoopState(step, {"loader": self._loader.state_dict(), "skipped": self._skipped.state_dict()})

    def _update(self, step: int, micro_batches: Sequence[Sequence[Mapping[str, Any] | None]]) -> dict[str, float]:
        objective, world = self._objective, self._world
        sums = RunningSums(world.device)
        with self._run.timers("training"):
            collated = [objective.collate(rows) for rows in micro_batches]
            batches = objective.prepare(self._engine, objective.resample(self._engine, collated, step=step))
            count = global_count(sum(objective.count(batch) for batch in batches), world)
            losses = []
            for batch in batches:
                loss = objective.loss(self._engine, batch)
                self._engine.backward(loss.total, count=count)
                sums.add(loss)
                losses.append(loss.total.detach())
            stats = self._engine.step()
            means = sums.means(world)
        seconds = self._run.timers.take()["training"]
        speed = global_count(sum(objective.tokens(batch) for batch in batches), world) / seconds
        if stats.skipped:
            self._skipped.keep(step, [dict(row) for row in rows_to_blame(micro_batches, losses)])
        norm = {} if stats.grad_norm is None else {"grad_norm": stats.grad_norm}
        return {
            **objective.metrics(means, objective.name), "lr": stats.lr, **norm,
            "time/training_seconds": seconds,
            "perf/train_tokens_per_second": speed, "perf/tokens_per_second": speed,
            **model_flops_utilisation(
                parameters=self._engine.parameters, tokens=speed, seconds=1.0, ranks=world.size, device=world.device
            ),
            "memory/peak_gib": peak_memory_gib(world.device),
            **self._skipped.settle(step, ["the gradient"] if stats.skipped else []),
        }  # fmt: skip

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        """Metrics on the held-out rows; {} where there are none."""
        if not len(self._held_out):
            return {}
        self._run.watchdog.enter("evaluation")
        sums = RunningSums(self._world.device)
        progress = self._run.progress("evaluation", total=len(self._held_out))
        for micro_batches in each_once(self._held_out, self._plan, self._world, padded=self._padded, progress=progress):
            batches = [self._objective.collate(rows) for rows in micro_batches]
            for batch in self._objective.prepare(self._engine, batches):
                sums.add(self._objective.loss(self._engine, batch))
        return self._objective.metrics(sums.means(self._world), "eval")

    def _figures(self, metrics: Mapping[str, float]) -> dict[str, float]:
        wanted = (self._objective.name, "eval", "lr", "perf/tokens_per_second")
        return {name: value for name, value in metrics.items() if name.startswith(wanted)}


def train_loader(rows: Rows, plan: BatchPlan, run: Run) -> BatchLoader:
    """The training loader of a plan, seeded by the run."""
    return BatchLoader(
        rows,
        global_batch_size=plan.global_batch_size,
        world_rank=run.world.rank,
        world_size=run.world.size,
        micro_batches=plan.micro_batches,
        seed=run.config.seed,
    )


def each_once(
    rows: Rows, plan: BatchPlan, world: World, *, padded: bool, progress: ProgressLog
) -> Iterator[list[list[dict[str, Any] | None]]]:
    """This rank's micro-batches of all rows, in their order, padded or not; a last batch is filled up.

    The progress, whose total is the rows, advances when a batch is done.
    """
    size = plan.global_batch_size
    batches = BatchLoader(
        rows, global_batch_size=size, world_rank=world.rank, world_size=world.size,
        micro_batches=replace(plan.micro_batches, padded=padded), seed=0, shuffle=False, drop_last=False,
    ).iterate(1)  # fmt: skip
    for start, micro_batches in zip(range(0, len(rows), size), batches, strict=True):
        yield micro_batches
        progress.advance(min(size, len(rows) - start))


def total_steps(loader: BatchLoader, config: TrainConfig) -> int:
    """Optimizer updates of the whole run."""
    steps = loader.steps_per_epoch * config.epochs
    return steps if config.max_steps is None else min(steps, config.max_steps)


def save_engine(run: Run, name: str, engine: ModelEngine, tokenizer: PreTrainedTokenizerBase) -> None:
    """Save a model of a run under a name; "" is the run's own folder."""
    folder = run.folder / name
    run.watchdog.beat(f"save of {folder}")
    if run.world.is_main:
        folder.mkdir(exist_ok=True)
    if engine.lm.can_generate() and (settings := engine.lm.generation_config) is not None:
        # Whoever generates from the folder stops where rollouts do.
        settings.eos_token_id = list(stop_token_ids(tokenizer, settings.eos_token_id))
    with full_disk_named(run.folder):
        save_model(folder, whole_tensors(engine.lm, run.world), lm=engine.lm, tokenizer=tokenizer, world=run.world)


def finish(run: Run, folders: Mapping[str, ModelEngine], tokenizer: PreTrainedTokenizerBase) -> None:
    """Save the models of a run by name, then mark the run finished."""
    for name, engine in folders.items():
        save_engine(run, name, engine, tokenizer)
    if run.world.is_main:
        write_whole(run.folder / FINISHED_FILE, json.dumps({"models": list(folders)}) + "\n")
    run.world.barrier()
