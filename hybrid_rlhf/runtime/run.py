"""A run: its ranks, its folder, its log and its metrics. Made at the start of a step, closed at its end.

A folder belongs to one run. One that already holds a run is refused, or gone on with; never written over.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections import StepConfig
from hybrid_rlhf.runtime.logs import LOGGER_NAME, setup_logging
from hybrid_rlhf.runtime.metrics import METRICS_FILE, MetricsWriter, StepDisplay, format_figure, read_metrics
from hybrid_rlhf.runtime.timers import Timers
from hybrid_rlhf.runtime.watchdog import Watchdog
from hybrid_rlhf.runtime.world import World, close_world, init_world, restarts, seed_all

CONFIG_FILE = "config.yaml"
CHECKPOINTS = "checkpoints"
CHECKPOINT_MANIFEST = "manifest.json"
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
    """The checkpoint that the run goes on from; none: it starts."""
    _metrics: MetricsWriter | None = None

    def open_metrics(self, resumed_step: int = 0) -> None:
        """Open metrics.jsonl, keeping what was written up to the step that the run goes on from."""
        self.watchdog.begin(resumed_step + 1)
        if self.world.is_main:
            done = [line for line in read_metrics(self.folder) if line["step"] <= resumed_step]
            self._metrics = MetricsWriter(
                self.folder,
                tensorboard=self.config.logging.tensorboard,
                resumed_step=resumed_step if done else -1,
                start_seconds=done[-1]["time_seconds"] if done else 0.0,
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step that is done; rank 0 does, all call."""
        self.watchdog.begin(step + 1)
        if self._metrics is not None:
            self._metrics.write(step, metrics)

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
        failure, checkpoint = world.broadcast_object(_claim(folder, resume) if world.is_main else (None, None))
        if failure is not None:
            raise UserError(failure)
        setup_logging(world, file=folder / "log.txt")
        seed_all(config.seed)
        with Watchdog(world, folder, limit_seconds=config.faults.phase_timeout_seconds) as watchdog:
            timers = Timers(world.device, on_phase=watchdog.enter)
            run = Run(world, folder, config, timers, watchdog, checkpoint)
            try:
                yield run
            finally:
                run.close()
    finally:
        close_world()


def effective_resume(config: StepConfig, world: World) -> str:
    """How a run resumes: one that torchrun has restarted goes on where it would else refuse its own folder.

    Every rank calls: torchrun counts restarts a host.
    """
    restarted = any(world.all_gather_objects(restarts()))
    return "auto" if restarted and config.resume == "never" else config.resume


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint of a run: one whose manifest, written last, is there."""
    whole = [path for path in (folder / CHECKPOINTS).glob("step_*") if (path / CHECKPOINT_MANIFEST).is_file()]
    return max(whole, key=lambda path: int(path.name.removeprefix("step_")), default=None)


def _claim(folder: Path, resume: str) -> tuple[str | None, Path | None]:
    """Why the folder cannot be used, if so; and the checkpoint to go on from, if any."""
    if resume not in ("never", "auto"):
        checkpoint = Path(resume)
        if not (checkpoint / CHECKPOINT_MANIFEST).is_file():
            place = f"{folder}/{CHECKPOINTS}/step_N"
            return f"resume takes never, auto or a whole checkpoint folder, {resume} is none: give {place}", None
        return _make(folder), checkpoint
    if (folder / FINISHED_FILE).exists():
        return f"{folder} holds a finished run: give another output_dir, or remove that folder", None
    if any((folder / name).exists() for name in (METRICS_FILE, CONFIG_FILE)):
        if resume == "never":
            return f"{folder} holds a run that did not finish: set resume to auto, or give another output_dir", None
        return None, newest_checkpoint(folder)
    return _make(folder), None


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
