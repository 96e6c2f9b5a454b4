"""A run: its ranks, its folder, its log and its metrics. Made at the start of a step, closed at its end.

A folder belongs to one run. One that already holds a run is refused, or gone on with; never written over.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hybrid_rlhf.configs.cli import read_config
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections import StepConfig
from hybrid_rlhf.runtime.checkpoint_folder import (
    CHECKPOINTS,
    MANIFEST,
    find_fault,
    newest_whole,
    read_manifest,
    set_aside_newer,
)
from hybrid_rlhf.runtime.logs import LOGGER_NAME, close_log_file, setup_logging
from hybrid_rlhf.runtime.metrics import METRICS_FILE, MetricsWriter, StepDisplay, format_figure, read_metrics
from hybrid_rlhf.runtime.timers import Timers
from hybrid_rlhf.runtime.watchdog import Watchdog
from hybrid_rlhf.runtime.world import World, close_world, init_world, restarts, seed_all

CONFIG_FILE = "config.yaml"
FINISHED_FILE = "finished.json"
logger = logging.getLogger(LOGGER_NAME)


@dataclass
class Run:
    """What the loops of a step need around them."""

    world: World
    folder: Path
    config: StepConfig
    timers: Timers
    watchdog: Watchdog
    checkpoint: Path | None
    """The checkpoint that the run goes on from, whole; none: it starts."""
    warm_start: Path | None = None
    """A model folder whose weights the run starts from in place of its models' own."""
    _metrics: MetricsWriter | None = None

    @property
    def resumable_config(self) -> StepConfig:
        """The config that is kept: it knows the warm start that the run, gone on with since, once had."""
        return self.config if self.warm_start is None else replace(self.config, resume=str(self.warm_start))

    def open_metrics(self, resumed_step: int | None) -> None:
        """Open metrics.jsonl, keeping what was written up to the step that the run goes on from; none: it starts."""
        self.watchdog.begin((resumed_step or 0) + 1)
        if self.world.is_main:
            last = -1 if resumed_step is None else resumed_step
            done = [line for line in read_metrics(self.folder) if line["step"] <= last]
            self._metrics = MetricsWriter(
                self.folder,
                tensorboard=self.config.logging.tensorboard,
                resumed_step=last,
                start_seconds=done[-1]["time_seconds"] if done else 0.0,
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a step's metrics and come to the next; every rank calls, rank 0 writes."""
        self.watchdog.begin(step + 1)
        if self._metrics is not None:
            self._metrics.write(step, metrics)

    def flush(self) -> None:
        """Return when the metrics so far are on the disk."""
        if self._metrics is not None:
            self._metrics.flush()

    def say(self, title: str, figures: Mapping[str, float]) -> None:
        """One line of figures on the console."""
        if self.world.is_main and figures:
            logger.info("%s  %s", title, "  ".join(f"{name} {format_figure(value)}" for name, value in figures.items()))

    def display(self, title: str, *, total_steps: int, done_steps: int = 0) -> StepDisplay:
        """A progress display for the main rank."""
        return StepDisplay(
            title,
            total_steps=total_steps,
            done_steps=done_steps,
            every=self.config.logging.every,
            enabled=self.world.is_main,
        )

    def close(self) -> None:
        """Close the metrics."""
        if self._metrics is not None:
            self._metrics.close()


@contextlib.contextmanager
def start_run(config: StepConfig) -> Iterator[Run]:
    """Join the ranks, claim the folder, seed, and leave again at the end.

    Raises:
        UserError: on every rank, when the folder holds a run that may not be touched.
    """
    world = init_world(timeout_seconds=config.faults.collective_timeout_seconds)
    folder = Path(config.output_dir)
    try:
        resume = effective_resume(config, world)
        if restarts() and (folder / FINISHED_FILE).exists():
            raise SystemExit(0)  # it was done when a rank died
        failure = world.broadcast_object(_claim(folder, resume) if world.is_main else None)
        if failure is not None:
            raise UserError(failure)
        setup_logging(world, file=folder / "log.txt")
        checkpoint = _checkpoint(folder, resume, world)
        warm_start = _warm_start(folder, config.resume, checkpoint)
        seed_all(config.seed, deterministic=config.deterministic)
        with Watchdog(world, folder, limit_seconds=config.faults.phase_timeout_seconds) as watchdog:
            timers = Timers(world.device, on_phase=watchdog.enter)
            run = Run(world, folder, config, timers, watchdog, checkpoint, warm_start)
            try:
                yield run
            finally:
                run.close()
    finally:
        close_log_file()
        close_world()


def effective_resume(config: StepConfig, world: World) -> str:
    """How a run resumes: one that torchrun has restarted goes on, however it began.

    Every rank calls: torchrun counts restarts a host.
    """
    restarted = any(world.all_gather_objects(restarts()))
    return "auto" if restarted else config.resume


def _claim(folder: Path, resume: str) -> str | None:
    """Why the folder cannot be used, if so."""
    if resume not in ("never", "auto") and not _is_checkpoint(resume) and not _is_model(resume):
        place = f"{folder}/{CHECKPOINTS}/step_N"
        return f"resume takes never, auto, a checkpoint or a model folder, {resume} is none: give {place}"
    if (folder / FINISHED_FILE).exists():
        return f"{folder} holds a finished run: give another output_dir, or remove that folder"
    holds_run = any((folder / name).exists() for name in (METRICS_FILE, CONFIG_FILE))
    is_its_own = Path(resume).resolve().parent == (folder / CHECKPOINTS).resolve()
    if holds_run and resume != "auto" and not is_its_own:
        return f"{folder} holds a run that did not finish: set resume to auto, or give another output_dir"
    return _make(folder)


def _is_checkpoint(resume: str) -> bool:
    return (Path(resume) / MANIFEST).is_file()


def _is_model(resume: str) -> bool:
    """A model that transformers reads, or the actor that step 3 left."""
    return resume not in ("never", "auto") and any(
        (Path(resume) / name / "config.json").is_file() for name in ("", "actor")
    )


def _checkpoint(folder: Path, resume: str, world: World) -> Path | None:
    """The checkpoint to go on from, seen to be whole; every rank calls.

    Raises:
        UserError: when the one that was named is not whole.
    """
    starts = resume == "never" or _is_model(resume)
    checkpoint = None if starts else newest_whole(folder, world) if resume == "auto" else Path(resume)
    if checkpoint is not None and resume != "auto" and (fault := find_fault(checkpoint, world)) is not None:
        raise UserError(f"resume needs a whole checkpoint, {resume} is not ({fault}): give another, or auto")
    if world.is_main:
        if checkpoint is None and (folder / METRICS_FILE).exists():
            logger.info("%s has no whole checkpoint: the run starts from its beginning", folder)
        set_aside_newer(folder, checkpoint)
    return checkpoint


def _warm_start(folder: Path, resume: str, checkpoint: Path | None) -> Path | None:
    """The model folder that a run starts from, or once did: what it froze is in no checkpoint."""
    if _is_model(resume):
        return Path(resume)
    if checkpoint is not None:
        resume = str(read_manifest(checkpoint).get("config", {}).get("resume", resume))
    elif (folder / CONFIG_FILE).exists():
        resume = str(read_config(folder / CONFIG_FILE).get("resume", resume))
    return Path(resume) if _is_model(resume) else None


def _make(folder: Path) -> str | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        return f"output_dir must be a folder that can be written, {folder} is not ({error.strerror}): choose another"
    free_gib = shutil.disk_usage(folder).free / 2**30
    if free_gib < 0.05:
        return f"output_dir needs room, {folder} has {free_gib:.2f} GiB left: free some, or choose another"
    return None
