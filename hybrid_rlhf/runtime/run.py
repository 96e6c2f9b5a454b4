"""A run: its ranks, its folder, its log and its metrics. Made at the start of a step, closed at its end.

A folder belongs to one run. One that already holds a run is refused, or gone on with; never written over.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from hybrid_rlhf.configs.cli import read_config
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.resuming import changed_keys
from hybrid_rlhf.configs.sections import StepConfig
from hybrid_rlhf.configs.whole_files import write_whole
from hybrid_rlhf.runtime.checkpoint_folder import (
    CHECKPOINTS,
    MANIFEST,
    find_fault,
    newest_whole,
    read_manifest,
    set_aside_newer,
)
from hybrid_rlhf.runtime.folder_lock import FolderLock
from hybrid_rlhf.runtime.interrupts import saves_dropped
from hybrid_rlhf.runtime.launcher import stop_with_launcher
from hybrid_rlhf.runtime.logs import LOGGER_NAME, close_log_file, setup_logging
from hybrid_rlhf.runtime.metrics import METRICS_FILE, MetricsWriter, StepDisplay, format_figure, read_metrics
from hybrid_rlhf.runtime.product_backend import choose_products
from hybrid_rlhf.runtime.progress import ProgressLog
from hybrid_rlhf.runtime.timers import Timers
from hybrid_rlhf.runtime.watchdog import Watchdog
from hybrid_rlhf.runtime.world import World, close_world, init_world, restarts, seed_all

CONFIG_FILE = "config.yaml"
FINISHED_FILE = "finished.json"
_WORDS = ("never", "auto")
"""What resume takes that is no folder."""
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
    begun_from: str = "never"
    """What the first start of the run was told to resume."""
    _metrics: MetricsWriter | None = None
    _in_loop: bool = False

    @property
    def resumable_config(self) -> StepConfig:
        """The config that a checkpoint keeps: it knows the warm start that the run, gone on with since, once had."""
        return self.config if self.warm_start is None else replace(self.config, resume=str(self.warm_start))

    @property
    def kept_config(self) -> StepConfig:
        """The config that the folder keeps: it knows what to go on from while no checkpoint of its own is whole."""
        return replace(self.config, resume=self.begun_from)

    def open_metrics(self, resumed_step: int | None) -> None:
        """Open metrics.jsonl, keeping what was written up to the step that the run goes on from; none: it starts."""
        self._in_loop = True
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

    def progress(self, what: str, *, total: int, unit: str = "rows") -> ProgressLog:
        """Shows that work of the present phase moves; as long as it does, the phase is not late."""
        beat = partial(self.watchdog.beat, self.watchdog.phase)
        return ProgressLog(what, total=total, unit=unit, on_advance=beat)

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
        SystemExit: on every rank, with code 0, when the run that is to be resumed is finished.
    """
    folder = Path(config.output_dir)
    lock = FolderLock(folder)
    stop_with_launcher()
    with saves_dropped():
        world = init_world(timeout_seconds=config.faults.collective_timeout_seconds)
        try:
            resume = effective_resume(config, world)
            changed = _changed_if_finished(folder, config) if world.is_main else None
            if world.broadcast_object(resume == "auto" and changed == []):
                setup_logging(world).info("%s holds a finished run: nothing is left to do", folder)
                raise SystemExit(0)
            failure = world.broadcast_object(_claim(folder, resume, lock, changed) if world.is_main else None)
            if failure is not None:
                raise UserError(failure)
            setup_logging(world, file=folder / "log.txt")
            begun_from = _begun_from(folder, config.resume)
            checkpoint = _checkpoint(folder, resume, begun_from, world)
            warm_start = _warm_start(begun_from, checkpoint)
            seed_all(config.seed, deterministic=config.deterministic)
            choose_products(world, folder, checkpoint=checkpoint, deterministic=config.deterministic)
            with Watchdog(world, folder, limit_seconds=config.faults.phase_timeout_seconds) as watchdog:
                timers = Timers(world.device, on_phase=watchdog.enter)
                run = Run(world, folder, config, timers, watchdog, checkpoint, warm_start, begun_from)
                try:
                    with _config_put_back(run):
                        yield run
                finally:
                    run.close()
        finally:
            close_log_file()
            lock.release()
            close_world()


@contextlib.contextmanager
def _config_put_back(run: Run) -> Iterator[None]:
    """A start that a mistake ends before its loop leaves no settings behind: mended, it is the start of a run."""
    file = run.folder / CONFIG_FILE
    before = file.read_bytes() if run.world.is_main and file.exists() else None
    try:
        yield
    except UserError:
        if run.world.is_main and not run._in_loop:
            with contextlib.suppress(OSError):  # the mistake is what to tell
                file.unlink(missing_ok=True) if before is None else write_whole(file, before)
        raise


def effective_resume(config: StepConfig, world: World) -> str:
    """How a run resumes: one that torchrun has restarted goes on, however it began.

    Every rank calls: torchrun counts restarts a host.
    """
    restarted = any(world.all_gather_objects(restarts()))
    return "auto" if restarted else config.resume


def _changed_if_finished(folder: Path, config: StepConfig) -> list[str] | None:
    """The settings in which a finished run in the folder differs; none: the folder holds no finished run."""
    if not (folder / FINISHED_FILE).exists():
        return None
    file = folder / CONFIG_FILE
    return changed_keys(read_config(file), read_config(config)) if file.exists() else []


def _claim(folder: Path, resume: str, lock: FolderLock, changed: list[str] | None) -> str | None:
    """Why the folder cannot be used, if so; else its lock is taken. Of a finished run `changed` settings are named."""
    if resume not in _WORDS and not _is_checkpoint(resume) and not _is_model(resume):
        place = f"{folder}/{CHECKPOINTS}/step_N"
        return f"resume takes never, auto, a checkpoint or a model folder, {resume} is none: give {place}"
    if changed is not None:
        other = f" with other settings ({', '.join(changed[:3])}{', ...' * (len(changed) > 3)})" if changed else ""
        return f"{folder} holds a finished run{other}: give another output_dir, or remove that folder"
    if (failure := _make(folder)) is not None:
        return failure
    if (owner := lock.take()) is not None:
        return f"a run's folder is for one process, {folder} is used by {owner}: end it, or give another output_dir"
    holds_run = any((folder / name).exists() for name in (METRICS_FILE, CONFIG_FILE))
    if holds_run and resume != "auto" and not _is_own(resume, folder):
        return f"{folder} holds a run that did not finish: set resume to auto, or give another output_dir"
    return None


def _is_own(resume: str, folder: Path) -> bool:
    """Whether it is a checkpoint of the run itself."""
    return Path(resume).resolve().parent == (folder / CHECKPOINTS).resolve()


def _is_checkpoint(resume: str) -> bool:
    return (Path(resume) / MANIFEST).is_file()


def _is_model(resume: str) -> bool:
    """A model that transformers reads, or the actor that step 3 left."""
    return resume not in _WORDS and any((Path(resume) / name / "config.json").is_file() for name in ("", "actor"))


def _begun_from(folder: Path, resume: str) -> str:
    """What the first start of a run was told to resume: what is said now, unless that is to go on with the run."""
    if resume != "auto" and not _is_own(resume, folder):
        return resume
    file = folder / CONFIG_FILE
    return str(read_config(file).get("resume", resume)) if file.exists() else resume


def _checkpoint(folder: Path, resume: str, begun_from: str, world: World) -> Path | None:
    """The checkpoint to go on from, seen to be whole; every rank calls.

    Raises:
        UserError: when the one that was named, now or at the run's first start, is not whole.
    """
    checkpoint = newest_whole(folder, world) if resume == "auto" else None
    named = begun_from if resume == "auto" else resume
    if checkpoint is None and named not in _WORDS and not _is_model(named):
        checkpoint = Path(named)
        if (fault := find_fault(checkpoint, world)) is not None and resume != "auto":
            raise UserError(f"resume needs a whole checkpoint, {resume} is not ({fault}): give another, or auto")
        if fault is not None:
            raise UserError(
                f"{folder} has no whole checkpoint, it goes on from what it began from, and {named} is not whole "
                f"({fault}): bring that back, or give another output_dir"
            )
    if world.is_main:
        if checkpoint is None and (folder / METRICS_FILE).exists():
            logger.info("%s has no whole checkpoint: the run starts from its beginning", folder)
        set_aside_newer(folder, checkpoint)
    return checkpoint


def _warm_start(begun_from: str, checkpoint: Path | None) -> Path | None:
    """The model folder that a run starts from, or once did: what it froze is in no checkpoint."""
    if checkpoint is not None and not _is_model(begun_from):
        begun_from = str(read_manifest(checkpoint).get("config", {}).get("resume", begun_from))
    return Path(begun_from) if _is_model(begun_from) else None


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
