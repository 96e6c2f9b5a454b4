"""`hybrid-rlhf train` or `python train.py`: all steps, or those of `--steps sft,reward` or `--steps sft,preference`.

Each step runs in separate processes, so that its memory is freed; its output is shown and appended to OUTPUT_DIR/logs.
Without --base_model and without a model of a step this is the demo: an embedded model and embedded conversations.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess  # starts the commands of this package  # nosec B404
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TextIO, TypeVar

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.listing import changed_keys
from hybrid_rlhf.configs.pipeline import (
    FOLDERS,
    STEP_NAMES,
    LauncherConfig,
    PipelineConfig,
    has_model,
    start_of,
    step_config,
)
from hybrid_rlhf.configs.sections.placement import RolePlacements, is_automatic
from hybrid_rlhf.configs.sections.rules import require
from hybrid_rlhf.runtime.command_line import ERROR_FILE, parse_config, read_config, save_config, user_errors
from hybrid_rlhf.runtime.host_memory import MALLOC_ENVIRONMENT
from hybrid_rlhf.runtime.hostfile import process_count
from hybrid_rlhf.runtime.liveness.launcher import STARTED_BY
from hybrid_rlhf.runtime.liveness.signals import STOPPED_EXIT_CODE, forward_signals
from hybrid_rlhf.runtime.openmp import shared_cores
from hybrid_rlhf.runtime.output import print_document, print_result, wants_json
from hybrid_rlhf.runtime.placement import placed_roles, resolve_placement

PipelineT = TypeVar("PipelineT", bound=PipelineConfig)
ROOT = Path(__file__).parents[2]
"""Folder that contains the package: the checkout, or site-packages."""
DEMO = ROOT / "hybrid_rlhf" / "configs" / "commands" / "demo.yaml"
MODULES = {
    "sft": "hybrid_rlhf.cli.sft",
    "reward": "hybrid_rlhf.cli.reward",
    "preference": "hybrid_rlhf.cli.preference",
    "rl": "hybrid_rlhf.cli.rl",
}
SIGNALS = {
    -signal.SIGKILL: "it was killed, most likely by the kernel because host memory ran out: see dmesg and --plan",
    -signal.SIGBUS: "a memory-mapped file was truncated, or its disk failed: see dmesg and data.cache_dir",
}
"""Explanations of exit codes of steps that a signal ended, which cannot report it themselves."""


def main(argv: Sequence[str] | None = None, *, prog: str | None = None) -> None:
    """Parse, run the steps that are not finished, and print what changed."""
    with user_errors():
        config, steps = pipeline(PipelineConfig, argv, prog=prog)
        if config.plan:
            from hybrid_rlhf.cli.machine.plan import planned_phases
            from hybrid_rlhf.memory.report import table

            lines, fits = table(*planned_phases(config, steps), steps)
            if "rl" in config.step_names and is_automatic(steps["rl"].placement):
                lines.append(
                    "placement auto: the memory of rl is that of flattening, see hybrid-rlhf plan for the best"
                )
            print_result({"fits": fits, "lines": lines}, "\n".join(lines))
            sys.exit(0 if fits else 1)
        from hybrid_rlhf.cli.runs.checks import check_steps

        check_placement(steps, config)
        starting = {name: steps[name] for name in config.step_names if not _is_done(steps[name])}
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
    if wants_json() and os.environ.get("RANK", "0") == "0":
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
    if config.data.sources or config.plan:
        return config
    from hybrid_rlhf.data.rows.embedded import write_demo_data

    file = write_demo_data(
        Path(config.output_dir) / "demo_data", seed=config.sft.seed if config.seed is None else config.seed
    )
    return replace(config, data=replace(config.data, sources=[str(file)]))


def check_seeds(steps: dict[str, Any]) -> None:
    """Check that steps that share a split have one seed: splits are disjoint only if every step shuffles rows alike."""
    seeds = {name: step.seed for name, step in steps.items() if step.data.split is not None}
    if len(set(seeds.values())) > 1:
        raise UserError(f"steps that share data.split need one seed, got {seeds}: give --seed")


def check_models(steps: dict[str, Any], config: PipelineConfig) -> None:
    """Check, before the first step, that each step has a model to start from and RL a reward model."""
    for name in config.step_names:
        if start_of(steps[name]) is None:
            raise UserError(f"step {name} starts from a model, got none: give --base_model, or --{name}.model.path")
    folder, alone = config.folder("reward"), "rl" in config.step_names and "reward" not in config.step_names
    if alone and not config.plan and steps["rl"].reward.components == [folder]:
        require(
            has_model(folder),
            f"step rl needs a reward model, {folder} holds none: add reward to --steps, or give --rl.reward.components",
        )


def check_ranks(config: PipelineConfig) -> None:
    """Raise UserError unless the hostfile can be read, and the ranks that the placement of RL names will start."""
    processes, source = process_count(config.launcher)
    placement = config.rl.placement
    if "rl" not in config.step_names or processes is None or config.plan or not isinstance(placement, RolePlacements):
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
        ranks = process_count(config.launcher)[0] or _local_ranks(config.launcher)
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
    base_model = sft.model.path if start_of(steps[last]) == sft.output_dir else None
    return report(base_model=base_model, folders=folders, last=steps[last])


def run_step(name: str, step: Any, config: PipelineConfig) -> None:
    """Start a step and wait for it; skip it if it is finished.

    Raises:
        UserError: if its folder contains a run with other settings.
        SystemExit: with the exit code of the step if it fails.
    """
    folder = Path(step.output_dir)
    if _is_done(step):
        print(f"== {name}: already finished in {folder}, skipped", flush=True)
        return
    if _resumes(folder, step.resume):
        print(f"== {name}: resuming the unfinished run in {folder}", flush=True)
        step = replace(step, resume="auto")
    logs = Path(config.output_dir) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    settings = logs / f"{FOLDERS[name]}.yaml"
    save_config(step, settings)
    command = [*launcher(config.launcher), MODULES[name], "--config", str(settings)]
    print(f"== {name}: {' '.join(command)}", flush=True)
    start = time.monotonic()
    threads = {} if config.launcher.hostfile is not None else shared_cores(_local_ranks(config.launcher))
    log = logs / f"{FOLDERS[name]}.log"
    end = tee(command, log, {**os.environ, **threads})
    if end.code == STOPPED_EXIT_CODE:
        print(f"== {name}: stopped; run the same command to resume", flush=True)
        sys.exit(end.code)
    if end.code:
        _fail(name, end, command, log)
    print(f"== {name}: done in {time.monotonic() - start:.0f} s, model in {folder}", flush=True)


def _fail(name: str, end: CommandEnd, command: Sequence[str], log: Path) -> NoReturn:
    """Report a step that failed, and end with its exit code; that of a user's mistake is 2 under every launcher."""
    mistake = end.user_error is not None
    error = f"step {name}: {end.user_error}" if mistake else f"step {name} failed with exit code {end.code}"
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
    sys.exit(2 if mistake else end.code)


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


def _is_done(step: Any) -> bool:
    """Return True if a step is finished and need not start.

    Raises:
        UserError: if its folder contains a run with other settings.
    """
    folder = Path(step.output_dir)
    changed = changed_settings(step)
    if changed:
        raise UserError(
            f"{folder} contains a run with other settings ({', '.join(changed[:3])}{', ...' * (len(changed) > 3)}): "
            "remove the folder, or set another --output_dir"
        )
    return (folder / "finished.json").exists()


def changed_settings(step: Any) -> list[str]:
    """Keys whose values differ from the run in the folder of a step; those that do not affect results are ignored."""
    file = Path(step.output_dir) / "config.yaml"
    return changed_keys(type(step), read_config(file), read_config(step)) if file.exists() else []


def launcher(options: LauncherConfig) -> list[str]:
    """The command, up to the name of a module, that starts the module on these processes."""
    if options.hostfile is not None:
        deepspeed = shutil.which(
            "deepspeed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        )
        if deepspeed is None:
            raise UserError("launcher.hostfile needs the command deepspeed, PATH has none: pip install deepspeed")
        return [deepspeed, "--hostfile", options.hostfile, "--no_local_rank", "--module"]
    processes = _local_ranks(options)
    if processes == 1:
        return [sys.executable, "-m"]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]


def _local_ranks(options: LauncherConfig) -> int:
    return options.num_processes or max(1, _gpus())


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


@dataclass(frozen=True)
class CommandEnd:
    """The end of a command."""

    code: int
    tail: list[str]
    """The last lines of its output."""
    first_error: str | None = None
    """The first line that begins with `error:`."""
    user_error: str | None = None
    """The user's mistake that ended a process of this host, if any."""


def tee(command: list[str], log: Path, base: Mapping[str, str]) -> CommandEnd:
    """Run a command, copy its output to the console and a file.

    `base` is the environment, to which the variables of a step are added.
    """
    with tempfile.TemporaryDirectory(prefix="hybrid_rlhf_") as folder:
        mistake = Path(folder) / "user_error"
        end = _tee(command, log, {**base, ERROR_FILE: str(mistake)})
        return replace(end, user_error=mistake.read_text(encoding="utf-8")) if mistake.exists() else end


def _tee(command: list[str], log: Path, base: Mapping[str, str]) -> CommandEnd:
    tail: deque[str] = deque(maxlen=20)
    first_error: str | None = None
    environment = {**base, "PYTHONUNBUFFERED": "1", STARTED_BY: str(os.getpid())}
    if not _gpus():
        environment = {**MALLOC_ENVIRONMENT, **environment}
    if ROOT.name not in ("site-packages", "dist-packages"):  # a checkout, which need not be installed
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    with log.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(  # a list of arguments, no shell  # nosec B603
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,  # Ctrl-C reaches only this process, which forwards it
        )
        assert process.stdout is not None
        with forward_signals(process) as asked:
            sinks: list[TextIO] = [sys.stdout, file]
            for line in process.stdout:
                _pass_on(line, sinks)
                tail.append(line)
                if first_error is None and line.startswith("error:"):
                    first_error = line
            code = process.wait()
        return CommandEnd(STOPPED_EXIT_CODE if code and asked.stop else code, list(tail), first_error)


def _pass_on(line: str, sinks: list[TextIO]) -> None:
    """Write a line to the console and the log; a sink that fails is dropped."""
    for sink in list(sinks):
        try:
            sink.write(line)
            sink.flush()
        except OSError:
            sinks.remove(sink)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sink.fileno())  # flushing its buffer at exit must not fail


if __name__ == "__main__":
    main()
