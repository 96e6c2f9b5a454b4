"""`hybrid-rlhf train` or `python train.py`: all steps, or those of `--steps sft,reward` or `--steps sft,preference`.

Each step runs in separate processes, so that its memory is freed; its output is shown and appended to OUTPUT_DIR/logs.
Without --base_model and without a model of a step this is the demo: an embedded model and embedded conversations.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from hybrid_rlhf.cli.runs.hosts import LOST_CODE, RESTART_WAIT_SECONDS, require_hosts
from hybrid_rlhf.cli.runs.processes import CommandEnd, launcher, launcher_environment, local_ranks, tee
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.pipeline import (
    FOLDERS,
    STEP_NAMES,
    PipelineConfig,
    has_model,
    step_config,
)
from hybrid_rlhf.configs.sections.placement import is_automatic
from hybrid_rlhf.configs.sections.rules import require
from hybrid_rlhf.configs.sections.training import HALVED_FILE
from hybrid_rlhf.runtime.command_line import (
    INTERRUPTED_EXIT_CODE,
    PACKAGE,
    USER_ERROR_CODE,
    changed_settings,
    is_first_rank,
    parse_config,
    read_config,
    save_config,
    user_errors,
)
from hybrid_rlhf.runtime.files.disk import make_writable
from hybrid_rlhf.runtime.hostfile import SHARED_SECONDS, process_count
from hybrid_rlhf.runtime.liveness.signals import STOPPED_EXIT_CODE
from hybrid_rlhf.runtime.output import print_document, wants_json
from hybrid_rlhf.runtime.placement import placed_roles, resolve_placement

PipelineT = TypeVar("PipelineT", bound=PipelineConfig)
DEMO = PACKAGE / "configs" / "commands" / "demo.yaml"
SIGNALS = {
    -signal.SIGKILL: "it was killed, most likely by the kernel because host memory ran out: see dmesg and hybrid-rlhf "
    "plan",
    -signal.SIGBUS: "a memory-mapped file was truncated, or its disk failed: see dmesg and data.cache_dir",
}
"""Explanations of exit codes of steps that a signal ended, which cannot report it themselves."""


def main(argv: Sequence[str] | None = None, *, prog: str | None = None) -> None:
    """Parse, run the steps that are not finished, and print what changed."""
    with user_errors():
        config, steps = pipeline(PipelineConfig, argv, prog=prog)
        from hybrid_rlhf.cli.runs.checks import check_steps

        check_placement(steps, config)
        starting = {name: steps[name] for name in config.step_names if not _is_done(name, steps[name])}
        if starting:
            require_folder(config)
        check_steps(starting, log=Path(config.output_dir) / "logs" / f"{FOLDERS['rl']}.log")
        try:
            for name in config.step_names:
                run_step(name, steps[name], config)
        finally:
            link_reports(config, steps)
        changes: dict[str, Any] = {}
        if config.step_names[-1] in ("rl", "preference"):
            changes = show_changes(steps, last=config.step_names[-1])
        if wants_json():
            runs = {name: run_document(steps[name].output_dir) for name in config.step_names}
            print_document({"output_dir": config.output_dir, "steps": runs, **changes})


def print_run(folder: str) -> None:
    """With --json, print the folder of a step's run and its last metrics; on the main rank."""
    if wants_json() and is_first_rank():
        print_document(run_document(folder))


def run_document(folder: str) -> dict[str, Any]:
    """The folder of a run, with the last value of each metric, as a document."""
    from hybrid_rlhf.runtime.observability.metrics import read_metrics

    return {
        "output_dir": folder,
        "finished": (Path(folder) / "finished.json").exists(),
        "metrics": {name: value for line in read_metrics(Path(folder)) for name, value in line.items()},
    }


def pipeline(
    config_type: type[PipelineT], argv: Sequence[str] | None, *, prog: str | None = None
) -> tuple[PipelineT, dict[str, Any]]:
    """The config of a command line, and those of its steps, resolved and checked together.

    Raises:
        UserError: for a wrong command line, or steps that do not fit together.
    """
    config = parse_config(config_type, argv, prog=prog)
    if config.is_demo:
        config = demo_config(config_type, argv, prog=prog)
    steps: dict[str, Any] = {name: step_config(name, config) for name in STEP_NAMES}
    check_seeds(steps)
    check_ranks(config)
    check_models(steps, config)
    return config, steps


def demo_config(config_type: type[PipelineT], argv: Sequence[str] | None, *, prog: str | None = None) -> PipelineT:
    """The settings of the demo with the overrides of the user, and its conversations unless the user names a source."""
    config = parse_config(config_type, argv, prog=prog, defaults=DEMO)
    if config.data.sources or not config.starts_steps:
        return config
    from hybrid_rlhf.data.rows.embedded import write_demo_data

    require_folder(config)
    file = write_demo_data(
        Path(config.output_dir) / "demo_data", seed=config.sft.seed if config.seed is None else config.seed
    )
    return replace(config, data=replace(config.data, sources=[str(file)]))


def require_folder(config: PipelineConfig) -> None:
    """Raise UserError unless the output_dir of all steps can be written."""
    failure = make_writable(Path(config.output_dir))
    if failure is not None:
        raise UserError(failure)


def check_seeds(steps: dict[str, Any]) -> None:
    """Check that steps that share a split have one seed: splits are disjoint only if every step shuffles rows alike."""
    seeds = {name: step.seed for name, step in steps.items() if step.data.split is not None}
    require(len({*seeds.values()}) < 2, f"steps that share data.split need one seed, got {seeds}: give --seed")


def check_models(steps: dict[str, Any], config: PipelineConfig) -> None:
    """Check, before the first step, that each step has a model to start from and RL a reward model."""
    for name in config.step_names:
        if steps[name].model.path is None:
            raise UserError(f"step {name} starts from a model, got none: give --base_model, or --{name}.model.path")
    folder = config.folder("reward")
    alone = "rl" in config.step_names and "reward" not in config.step_names
    if alone and config.starts_steps and steps["rl"].reward.components == [folder]:
        require(
            has_model(folder),
            f"step rl needs a reward model, {folder} holds none: add reward to --steps, or give --rl.reward.components",
        )


def check_ranks(config: PipelineConfig) -> None:
    """Raise UserError unless the hostfile can be read, and the ranks that the placement of RL names will start."""
    processes, source = process_count(config.launcher)
    placement = config.rl.placement
    if "rl" not in config.step_names or processes is None or not config.starts_steps or placement is None:
        return
    for name, role in placement.roles.items():
        require(
            role.ranks is None or role.ranks[-1] < processes,
            f"rl.placement.{name}.ranks must be below the {processes} ranks of {source}, got "
            f"{role.ranks and role.ranks[-1]}: add the missing hosts or ranks, or name others",
        )


def check_placement(steps: dict[str, Any], config: PipelineConfig) -> None:
    """Check, before the first step, that the ranks to start fit the placement of RL.

    A planned placement is not known yet, and a resumed run may have another reference: both are checked at the start of
    the step.
    """
    rl = steps["rl"]
    is_new = rl.resume in ("never", "auto") and not (Path(rl.output_dir) / "config.yaml").exists()
    if "rl" in config.step_names and is_new and not is_automatic(rl.placement):
        ranks = process_count(config.launcher)[0] or local_ranks(config.launcher)
        resolve_placement(rl.placement, placed_roles(rl), ranks=ranks)


def link_reports(config: PipelineConfig, steps: dict[str, Any]) -> None:
    """Write the page that links the reports of the steps, and print its path."""
    from hybrid_rlhf.loop.report.pipeline import write_pipeline_report

    folders = {name: Path(steps[name].output_dir) for name in config.step_names}
    try:
        page = write_pipeline_report(Path(config.output_dir), folders)
    except OSError as error:  # the steps have reported their ends
        print(f"== the reports of the steps are not linked ({error})", flush=True)
        return
    if page is not None:
        print(f"== reports of the steps: {page}", flush=True)


def show_changes(steps: dict[str, Any], *, last: str) -> dict[str, Any]:
    """Print held-out metrics before and after each step, and completions of the models; return them for programs."""
    from hybrid_rlhf.cli.saved_models.comparison import report

    folders = {name: step.output_dir for name, step in steps.items() if name in ("sft", "reward", last)}
    sft = steps["sft"]
    base_model = sft.model.path if steps[last].model.path == sft.output_dir else None
    return report(base_model=base_model, folders=folders, last=steps[last])


def run_step(name: str, step: Any, config: PipelineConfig) -> None:
    """Start a step and wait for it; skip it if it is finished.

    Raises:
        UserError: if its folder contains a run with other settings.
        SystemExit: with the exit code of the step if it fails.
    """
    folder = Path(step.output_dir)
    if _is_done(name, step):
        print(f"== {name}: already finished in {folder}, skipped", flush=True)
        return
    logs = Path(config.output_dir) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    settings = logs / f"{FOLDERS[name]}.yaml"
    log = logs / f"{FOLDERS[name]}.log"
    command = [*launcher(config.launcher), f"hybrid_rlhf.cli.{name}", "--config", str(settings)]
    start = time.monotonic()
    attempt, is_halved = 0, (folder / HALVED_FILE).exists()
    while True:
        if _resumes(folder, step.resume):
            print(f"== {name}: resuming the unfinished run in {folder}", flush=True)
            step = replace(step, resume="auto")
        save_config(step, settings)
        if config.launcher.hostfile is not None:
            wait_seconds = RESTART_WAIT_SECONDS if attempt else SHARED_SECONDS
            require_hosts(config.launcher.hostfile, [settings], seconds=wait_seconds)
        print(f"== {name}: {' '.join(command)}", flush=True)
        end = tee(command, log, {**os.environ, **launcher_environment(config.launcher)})
        if config.launcher.hostfile is not None and end.code == LOST_CODE:
            from hybrid_rlhf.runtime.liveness.watchdog import EXIT_CODE

            end = replace(end, code=EXIT_CODE)
        if (folder / HALVED_FILE).exists() and not is_halved:
            is_halved = True
            print(f"== {name}: starting again with smaller micro-batches", flush=True)
            continue
        if not _may_restart(end) or attempt == config.launcher.restarts:
            break
        error = "" if end.first_error is None else f" ({end.first_error.strip()})"
        print(f"== {name}: ended with exit code {end.code}{error}", flush=True)
        attempt += 1
        print(f"== {name}: restart {attempt} of {config.launcher.restarts}", flush=True)
    if end.code == STOPPED_EXIT_CODE:
        print(f"== {name}: stopped; run the same command to resume", flush=True)
        sys.exit(end.code)
    if end.code:
        _fail(name, end, command, log)
    print(f"== {name}: done in {time.monotonic() - start:.0f} s, model in {folder}", flush=True)


def _may_restart(end: CommandEnd) -> bool:
    """Return True if a step may end otherwise when it starts again."""
    return end.user_error is None and end.code not in (0, STOPPED_EXIT_CODE, INTERRUPTED_EXIT_CODE)


def _fail(name: str, end: CommandEnd, command: Sequence[str], log: Path) -> NoReturn:
    """Report a step that failed, and end with its exit code; that of a user's mistake is 2 under every launcher."""
    from hybrid_rlhf.cli.runs.checks import step_keys

    mistake = end.user_error is not None
    error = (
        f"step {name}: {step_keys(end.user_error or '', name)}"
        if mistake
        else f"step {name} failed with exit code {end.code}"
    )
    if wants_json():
        print_document({"error": error, "log": log})
    print(f"\nerror: {error}" + ("" if mistake else f": {' '.join(command)}"), file=sys.stderr)
    if not mistake:
        if end.code in SIGNALS:
            print(SIGNALS[end.code], file=sys.stderr)
        if end.first_error is not None and end.first_error not in end.tail:
            print(f"first error of {log}:\n  {end.first_error}", end="", file=sys.stderr)
        print(f"last lines of {log}:", file=sys.stderr)
        print("".join(f"  {line}" for line in end.tail), end="", file=sys.stderr)
    sys.exit(USER_ERROR_CODE if mistake else end.code)


def _resumes(folder: Path, resume: str) -> bool:
    """Return True if a step resumes from its newest checkpoint: its folder has a run, and `resume` names no other
    start.

    A checkpoint outside the folder from which the run first started is no other start: the same command resumes.
    """
    if not (folder / "config.yaml").exists():
        return False
    outside = not Path(resume).resolve().is_relative_to(folder.resolve())
    started = outside and resume == read_config(folder / "config.yaml").get("resume")
    return started or resume in ("never", "auto")


def _is_done(name: str, step: Any) -> bool:
    """Return True if a step is finished and need not start.

    Raises:
        UserError: if its folder contains a run with other settings.
    """
    folder = Path(step.output_dir)
    changed = [f"{name}.{key}" for key in changed_settings(step)]
    require(
        not changed,
        f"{folder} contains a run with other settings ({', '.join(changed[:3])}{', ...' * (len(changed) > 3)}): "
        "remove the folder, or set another --output_dir",
    )
    return (folder / "finished.json").exists()
