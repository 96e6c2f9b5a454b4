"""A run: its ranks, folder, log and metrics, opened at the start of a step and closed at its end.

A folder belongs to one run. If it already contains one, the new run either resumes it or is refused; nothing is ever
overwritten.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.placement import in_words
from hybrid_rlhf.configs.sections.run import StepConfig
from hybrid_rlhf.runtime.command_line import changed_settings, read_config
from hybrid_rlhf.runtime.files.atomic import write_whole
from hybrid_rlhf.runtime.files.checkpoint_folder import (
    CHECKPOINTS,
    MANIFEST,
    find_fault,
    newest_complete,
    read_manifest,
    rename_superseded,
)
from hybrid_rlhf.runtime.files.disk import make_writable
from hybrid_rlhf.runtime.files.folder_lock import FolderLock
from hybrid_rlhf.runtime.files.names import CONFIG_FILE, FINISHED_FILE, LOG_FILE
from hybrid_rlhf.runtime.hostfile import SHARED_SECONDS
from hybrid_rlhf.runtime.installation import device_line
from hybrid_rlhf.runtime.liveness.launcher import stop_with_launcher
from hybrid_rlhf.runtime.liveness.signals import SignalRequests, ignore_save_requests
from hybrid_rlhf.runtime.liveness.watchdog import Watchdog
from hybrid_rlhf.runtime.observability.alerts import Alerts, Ending
from hybrid_rlhf.runtime.observability.display import StepDisplay
from hybrid_rlhf.runtime.observability.formatting import format_value
from hybrid_rlhf.runtime.observability.logs import close_log_file, log_to_file, logger, setup_logging
from hybrid_rlhf.runtime.observability.metrics import METRICS_FILE, SINKS, MetricsWriter
from hybrid_rlhf.runtime.observability.progress import ProgressLog
from hybrid_rlhf.runtime.observability.sinks.sink import IDS_FILE, EndState, TrackedRun, require_installed
from hybrid_rlhf.runtime.observability.timers import Timers
from hybrid_rlhf.runtime.placement import Placement
from hybrid_rlhf.runtime.product_backend import choose_product_backend
from hybrid_rlhf.runtime.world import (
    World,
    close_world,
    init_world,
    restart_count,
    seed_all,
    shared_user_errors,
)

DATA_FILE = "data.json"
"""Counts of the rows of the sources."""
_SETTINGS_FILES = (CONFIG_FILE, METRICS_FILE, IDS_FILE)
"""Files that make a folder that of a run which has started."""
_START_FILES = (*_SETTINGS_FILES, LOG_FILE, DATA_FILE)
"""Files that a start may write before its first step is complete."""
_GROWING = (METRICS_FILE, LOG_FILE)
"""Those of them that are continued, not replaced."""
_RESUME_MODES = ("never", "auto")
"""The values of `resume` that do not name a folder."""
Callback = Callable[[int, Mapping[str, float]], object]
"""Called with a step and its metrics."""


@dataclass
class Run:
    """The context of a training loop."""

    world: World
    folder: Path
    config: StepConfig
    timers: Timers
    watchdog: Watchdog
    checkpoint: Path | None
    """The complete checkpoint that the run resumes from; None if it starts from the beginning."""
    warm_start: Path | None = None
    """A model folder with the initial weights, in place of the configured models."""
    callbacks: Sequence[Callback] = ()
    """Called with each step and its metrics."""
    placed: tuple[StepConfig, Placement] | None = None
    """In RL, the config completed by the planner, and the current placement of the roles."""
    micro_batch_tokens: int | None = None
    """Size of the micro-batches, if the settings name none."""
    peaks: Sequence[Mapping[str, float]] = ()
    """Peak memory in GiB of each rank by timed phase, as last gathered."""
    initial_resume: str = "never"
    """The value of `resume` when the run was first started."""
    signals: SignalRequests = field(default_factory=SignalRequests)
    """The signals that request a checkpoint or the end."""
    at_end: list[Callable[[Run, Ending], object]] = field(default_factory=list)
    """Called on rank 0 at the end of the run, normal or not."""
    in_loop: bool = False
    """True if the loop has begun: a user's error before it leaves the folder's files unchanged."""
    has_stepped: bool = False
    """True once a step is complete: an error before it leaves no settings in the folder."""
    started: float = field(default_factory=time.monotonic)
    """Time at which this process joined the run, on time.monotonic's clock."""
    _metrics: MetricsWriter | None = None
    _alerts: Alerts | None = None
    _has_ended: bool = False

    @property
    def checkpoint_config(self) -> StepConfig:
        """The config stored in checkpoints: `resume` is the warm start of the run, also after it has been resumed."""
        return self.config if self.warm_start is None else replace(self.config, resume=str(self.warm_start))

    @property
    def folder_config(self) -> StepConfig:
        """The config stored in the run folder: `resume` is used again until the run has a complete checkpoint."""
        return replace(self.config, resume=self.initial_resume)

    def open_metrics(self, resumed_step: int | None) -> None:
        """Open metrics.jsonl and drop the lines after the resumed step; None: drop all."""
        self.in_loop = True
        self.watchdog.begin_step((resumed_step or 0) + 1)
        if self.world.is_main:
            self._metrics = MetricsWriter(
                self.folder,
                sinks=self.config.logging.sinks,
                tracked=self._tracked(),
                resumed_step=-1 if resumed_step is None else resumed_step,
            )

    def _tracked(self) -> TrackedRun:
        section = self.config.logging
        folder = self.folder.resolve()
        name = section.run_name or f"{folder.parent.name}-{folder.name}"
        return TrackedRun(self.folder, section.project, name, read_config(self.config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step and begin the next; every rank calls, rank 0 writes."""
        self.watchdog.begin_step(step + 1)
        self.has_stepped |= step > 0
        if self._metrics is not None:
            self._metrics.write(step, metrics)
        for callback in self.callbacks:
            callback(step, metrics)

    def flush(self) -> None:
        """Flush all metrics written so far to disk."""
        if self._metrics is not None:
            self._metrics.flush()

    def report(self, title: str, metrics: Mapping[str, float]) -> None:
        """Log one line of metrics."""
        if self.world.is_main and metrics:
            logger.info("%s  %s", title, "  ".join(f"{name} {format_value(value)}" for name, value in metrics.items()))

    def progress(self, what: str, *, total: int) -> ProgressLog:
        """A progress log for work of the current phase; every advance restarts the phase's time limit."""
        beat = partial(self.watchdog.beat, self.watchdog.phase)
        return ProgressLog(what, total=total, on_advance=beat)

    def display(self, title: str, *, total_steps: int, done_steps: int = 0) -> StepDisplay:
        """A step display, shown by the main rank."""
        return StepDisplay(
            title,
            total_steps=total_steps,
            done_steps=done_steps,
            every=self.config.logging.every,
            enabled=self.world.is_main,
        )

    def close(self, end_state: EndState = "finished") -> None:
        """Close the metrics files."""
        if self._metrics is not None:
            self._metrics.close(end_state)

    def alert(self, event: str, text: str) -> None:
        """Send a message to the webhook, if there is one; returns at once. Rank 0 sends."""
        if self._alerts is not None:
            self._alerts.send(event, text, step=self._last_step)

    @property
    def _last_step(self) -> int:
        """The last logged step."""
        return max(self.watchdog.step - 1, 0)

    def end(self, ending: Ending) -> None:
        """Close the metrics, call `at_end` and send the last message. On rank 0, once; raises nothing."""
        if not self.world.is_main or self._has_ended:
            return
        self._has_ended = True
        self.close(ending.end_state)
        for call in self.at_end:
            try:
                call(self, ending)
            except Exception as error:  # noqa: BLE001 - an error of a hook must not replace the run's ending
                logger.warning("after the end of the run: %s: %s", type(error).__name__, error)
        if self._alerts is not None:
            self._alerts.send(ending.end_state, ending.text, step=self._last_step)
            self._alerts.close()
        if ending.end_state in ("failed", "stalled"):  # the last line of the log, which the board shows
            log_to_file(self.folder / LOG_FILE, f"error: {ending.text}" + f" ({ending.place})" * bool(ending.place))


@contextlib.contextmanager
def start_run(config: StepConfig, callbacks: Sequence[Callback] = ()) -> Iterator[Run]:
    """Context of a run: joins the ranks, locks the folder and seeds; leaves and unlocks at the end.

    Args:
        config: the step.
        callbacks: called with each step and its metrics.

    Raises:
        UserError: on every rank, if the folder contains a run that may not be resumed.
        SystemExit: on every rank, with code 0, if the run to be resumed has finished.
    """
    folder = Path(config.output_dir)
    lock = FolderLock(folder)
    stop_with_launcher()
    with ignore_save_requests():
        world = init_world(timeout_seconds=config.faults.collective_timeout_seconds)
        before: dict[str, bytes | None] = {}
        run: Run | None = None
        try:
            resume = effective_resume(config, world)
            is_finished = world.is_main and (folder / FINISHED_FILE).exists()
            changed = changed_settings(config) if is_finished else None
            if world.broadcast_object(resume == "auto" and changed == []):
                setup_logging(world)
                logger.info("%s contains a finished run: nothing to do", folder)
                raise SystemExit(0)
            failure = world.broadcast_object(_claim(folder, resume, lock, changed) if world.is_main else None)
            if failure is not None:
                raise UserError(failure)
            _require_shared(folder, world)
            # every rank has them: an error that rank 0 does not see, such as too little memory, also leaves no settings
            before = world.broadcast_object(_contents(folder) if world.is_main else {})
            setup_logging(world, file=folder / LOG_FILE)
            _log_device(world)
            initial_resume = _initial_resume(folder, config.resume)
            checkpoint = _checkpoint(folder, resume, initial_resume, world)
            warm_start = _warm_start(initial_resume, checkpoint)
            seed_all(config.seed, deterministic=config.deterministic)
            choose_product_backend(world, deterministic=config.deterministic)
            alerts = _check_logging(config, world)
            limit = config.faults.phase_timeout_seconds
            with Watchdog(world, folder, limit_seconds=limit) as watchdog:
                timers = Timers(world.device, on_phase=watchdog.enter_phase)
                run = Run(
                    world,
                    folder,
                    config,
                    timers,
                    watchdog,
                    checkpoint,
                    warm_start=warm_start,
                    callbacks=callbacks,
                    initial_resume=initial_resume,
                    _alerts=alerts,
                )
                watchdog.on_end = lambda end_state, text: run.end(Ending(end_state, text))
                with _ended(run):
                    yield run
        except (UserError, KeyboardInterrupt):
            if run is None or not run.in_loop:
                _restore(folder, before)
            elif not run.has_stepped and not (folder / CHECKPOINTS).exists():
                _restore(folder, {name: before[name] for name in _SETTINGS_FILES if name in before})
            raise
        finally:
            close_log_file()
            lock.release()
            close_world()


def _require_shared(folder: Path, world: World) -> None:
    """Check that every host sees a new file of rank 0 in the run folder: each rank writes its part of a checkpoint.

    Raises:
        UserError: on every rank, if a host does not see the file in time.
    """
    if not world.has_several_hosts:
        return
    marker = folder / world.broadcast_object(f".shared_{secrets.token_hex(8)}")
    if world.is_main:
        marker.touch()
    world.barrier()
    try:
        with shared_user_errors(world):
            until = time.monotonic() + SHARED_SECONDS
            while world.is_local_main and not marker.exists():
                if time.monotonic() > until:
                    raise UserError(
                        f"output_dir must be on a file system that all hosts share, {folder} on "
                        f"{socket.gethostname()} is another folder than that of rank 0: set output_dir to a shared one"
                    )
                time.sleep(0.1)
    finally:
        if world.is_main:
            marker.unlink()


def _log_device(world: World) -> None:
    """Log the device of rank 0, and a warning for a GPU that it does not use, or cannot compile kernels for; and the
    hosts, if there are several."""
    if world.has_several_hosts:
        ranks = defaultdict(list)
        for rank, host in enumerate(world.all_gather_objects(socket.gethostname())):
            ranks[host].append(rank)
        logger.info("hosts: %s", ", ".join(f"{host} (ranks {in_words(own)})" for host, own in ranks.items()))
    if world.is_main:
        line, faults = device_line(world)
        logger.info("%s", line)
        for fault in faults:
            logger.warning("%s: %s", fault.problem, fault.fix)


def _check_logging(config: StepConfig, world: World) -> Alerts | None:
    """Check, before models are loaded, that sinks are installed and the webhook's variables set. Every rank calls.

    Returns:
        the alerts of rank 0, if there is a webhook; otherwise None.

    Raises:
        UserError: on every rank.
    """
    alerts = None
    section = config.logging
    with shared_user_errors(world):
        if world.is_main:
            require_installed(SINKS, section.sinks)
            if section.webhook is not None:
                alerts = Alerts(section.webhook, run=Path(config.output_dir).resolve().name)
    return alerts


@contextlib.contextmanager
def _ended(run: Run) -> Iterator[None]:
    """Context that ends the run with the ending of the block."""
    try:
        yield
    except BaseException as error:
        run.end(Ending.of(error))
        raise
    run.end(Ending("finished"))


def effective_resume(config: StepConfig, world: World) -> str:
    """The value of `resume` to use: `auto` if torchrun has restarted any rank, otherwise the configured one.

    Every rank calls: torchrun counts restarts per host.
    """
    restarted = any(world.all_gather_objects(restart_count()))
    return "auto" if restarted else config.resume


def _claim(folder: Path, resume: str, lock: FolderLock, changed: list[str] | None) -> str | None:
    """Lock the folder, or return why it cannot be used; `changed` are the keys that differ from a finished run."""
    if resume not in _RESUME_MODES and not (Path(resume) / MANIFEST).is_file() and not _is_model(resume):
        example = f"{folder}/{CHECKPOINTS}/step_N"
        return (
            f"resume must be never, auto, a checkpoint or a model folder, got {resume}, which is neither: "
            f"give for example {example}"
        )
    if changed is not None:
        differences = (
            f" with other settings ({', '.join(changed[:3])}{', ...' * (len(changed) > 3)})" if changed else ""
        )
        return f"output_dir {folder} contains a finished run{differences}: set another output_dir, or remove the folder"
    if (failure := make_writable(folder)) is not None:
        return failure
    if (owner := lock.acquire()) is not None:
        return (
            f"output_dir can be used by one run at a time, {folder} is locked by {owner}: stop that run, or set "
            "another output_dir"
        )
    has_run = any((folder / name).exists() for name in (METRICS_FILE, CONFIG_FILE))
    if has_run and resume != "auto" and not _is_own(resume, folder):
        return f"output_dir {folder} contains an unfinished run: set resume to auto, or set another output_dir"
    return None


def _is_own(resume: str, folder: Path) -> bool:
    """Return True if `resume` is a checkpoint of the run in the folder."""
    return Path(resume).resolve().parent == (folder / CHECKPOINTS).resolve()


def _is_model(resume: str) -> bool:
    """Return True if `resume` is a model folder of transformers, or one that contains the actor of an RL run."""
    files = (Path(resume) / name / "config.json" for name in ("", "actor"))
    return resume not in _RESUME_MODES and any(file.is_file() for file in files)


def _initial_resume(folder: Path, resume: str) -> str:
    """The value of `resume` at the first start of the run: that in config.yaml if this start resumes it."""
    if resume != "auto" and not _is_own(resume, folder):
        return resume
    file = folder / CONFIG_FILE
    return str(read_config(file).get("resume", resume)) if file.exists() else resume


def _checkpoint(folder: Path, resume: str, initial_resume: str, world: World) -> Path | None:
    """The checkpoint to resume from, verified to be complete; every rank calls.

    Raises:
        UserError: if the checkpoint that `resume` names, now or when the run was first started, is not complete.
    """
    checkpoint = newest_complete(folder, world) if resume == "auto" else None
    named = initial_resume if resume == "auto" else resume
    if checkpoint is None and named not in _RESUME_MODES and not _is_model(named):
        checkpoint = Path(named)
        if (fault := find_fault(checkpoint, world)) is not None and resume != "auto":
            raise UserError(f"resume needs a complete checkpoint, {resume} is not ({fault}): give another, or auto")
        if fault is not None:
            raise UserError(
                f"resume auto needs a complete checkpoint, {folder} has none, and {named}, from which the run "
                f"started, is not complete ({fault}): restore it, or set another output_dir"
            )
    if world.is_main:
        if checkpoint is None and (resume == "auto" or (folder / METRICS_FILE).exists()):
            logger.info("%s has no complete checkpoint: the run starts from the beginning", folder)
        rename_superseded(folder, checkpoint)
    return checkpoint


def _warm_start(initial_resume: str, checkpoint: Path | None) -> Path | None:
    """The model folder that the run started from; it is needed again because checkpoints omit frozen weights."""
    if checkpoint is not None and not _is_model(initial_resume):
        initial_resume = str(read_manifest(checkpoint).get("config", {}).get("resume", initial_resume))
    return Path(initial_resume) if _is_model(initial_resume) else None


def _contents(folder: Path) -> dict[str, bytes | None]:
    """Contents of the files that a start may write, by name; None for a file that does not exist. Existing ones that
    grow are left out."""
    contents: dict[str, bytes | None] = {}
    for name in _START_FILES:
        file = folder / name
        if not file.exists():
            contents[name] = None
        elif name not in _GROWING:
            contents[name] = file.read_bytes()
    return contents


def _restore(folder: Path, before: Mapping[str, bytes | None]) -> None:
    """Remove files that did not exist, and restore the others."""
    for name, content in before.items():
        with contextlib.suppress(OSError):  # the user's error is the one to report
            if content is None:
                (folder / name).unlink(missing_ok=True)
            else:
                write_whole(folder / name, content)
