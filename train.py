"""All steps from one command: `python train.py`, or some with `--steps sft,reward`, or `--steps sft,preference`.

Each step runs as its own process (or processes), so that it gives its memory back; what it says is shown here and kept
in OUTPUT/logs. With no --base_model and no model of a step's own this is the demo: an embedded model and embedded
conversations.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess  # starts this project's own modules  # nosec B404
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from hybrid_rlhf.configs.cli import parse_config, read_config, save_config, user_errors
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.pipeline import FOLDERS, STEP_NAMES, PipelineConfig, has_model, start_of
from hybrid_rlhf.configs.resuming import changed_keys
from hybrid_rlhf.configs.sections import require
from hybrid_rlhf.runtime.host_memory import MALLOC_ENVIRONMENT
from hybrid_rlhf.runtime.interrupts import STOPPED_EXIT_CODE, signals_passed_on
from hybrid_rlhf.runtime.launcher import STARTED_BY

DEMO = Path(__file__).parent / "hybrid_rlhf" / "configs" / "demo.yaml"
MODULES = {
    "sft": "training.step1_sft.main",
    "reward": "training.step2_reward.main",
    "preference": "training.preference.main",
    "ppo": "training.step3_ppo.main",
}
SIGNALS = {
    -signal.SIGKILL: "it was killed, mostly by the kernel for want of host memory: see dmesg, and train.py --plan",
    -signal.SIGBUS: "a file that it reads in place was cut short, or its disk fails: see dmesg, and data.cache_dir",
}
"""What a step that a signal ends cannot say itself, by exit code."""


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, run the steps that are not finished, and say what changed."""
    with user_errors():
        argv = with_bare_plan(sys.argv[1:] if argv is None else argv)
        # What is read depends on the demo's settings too, once it is the demo.
        is_demo = parse_config(PipelineConfig, argv, prog="train.py", unread="ignore").is_demo
        config = demo_config(argv) if is_demo else parse_config(PipelineConfig, argv, prog="train.py")
        steps = {name: step_config(name, config) for name in STEP_NAMES}
        check_seeds(steps)
        check_models(steps, config)
        if config.plan:
            from hybrid_rlhf.algorithms.memory_report import report as report_memory

            lines, fits = report_memory(config, steps)
            print("\n".join(lines))
            sys.exit(0 if fits else 1)
        for name in config.step_names:
            run_step(name, steps[name], config)
        if config.step_names[-1] in ("ppo", "preference"):
            show_changes(steps, last=config.step_names[-1])


def with_bare_plan(words: Sequence[str]) -> list[str]:
    """The words of the line, where --plan may stand without a value."""
    following = [*words, "--"][1:]
    bare = [word == "--plan" and after.startswith("--") for word, after in zip(words, following, strict=True)]
    return ["--plan=true" if alone else word for word, alone in zip(words, bare, strict=True)]


def demo_config(argv: Sequence[str] | None) -> PipelineConfig:
    """The demo's settings under the user's, and its conversations unless the user names others."""
    config = parse_config(PipelineConfig, argv, prog="train.py", defaults=DEMO)
    if config.data.sources or config.plan:
        return config
    from hybrid_rlhf.data.embedded import write_demo_data

    file = write_demo_data(
        Path(config.output_dir) / "demo_data", seed=config.sft.seed if config.seed is None else config.seed
    )
    return replace(config, data=replace(config.data, sources=[str(file)]))


def check_seeds(steps: dict[str, Any]) -> None:
    """A split is without overlap only if every step deals the rows alike."""
    seeds = {name: step.seed for name, step in steps.items() if step.data.split is not None}
    if len(set(seeds.values())) > 1:
        raise UserError(f"steps that share data.split need one seed, got {seeds}: give --seed")


def check_models(steps: dict[str, Any], config: PipelineConfig) -> None:
    """Each step that runs has a model to start from, and PPO one that scores, before the first begins."""
    for name in config.step_names:
        if start_of(steps[name]) is None:
            key = "actor.path" if name == "ppo" else "model.path"
            raise UserError(f"step {name} starts from a model, got none: give --base_model, or --{name}.{key}")
    folder, alone = config.folder("reward"), "ppo" in config.step_names and "reward" not in config.step_names
    if alone and not config.plan and steps["ppo"].reward.path == folder:
        require(
            has_model(folder),
            f"step ppo needs a reward model, {folder} holds none: add reward to --steps, or give --ppo.reward.path",
        )


def step_config(name: str, config: PipelineConfig) -> Any:
    """A step's own config, with the paths and data that the pipeline knows where the step names none."""
    step: Any = getattr(config, name)
    data = step.data
    if not data.sources:
        data = replace(data, sources=config.data.sources, split=data.split or config.data.split)
    data = replace(
        data, chat_template=data.chat_template or config.data.chat_template,
        chat_template_kwargs=data.chat_template_kwargs or config.data.chat_template_kwargs,
    )  # fmt: skip
    seed = step.seed if config.seed is None else config.seed
    step = replace(step, output_dir=config.folder(name), data=data, seed=seed)
    start = start_of(step) or config.start(name)
    if name == "ppo":
        actor = replace(step.actor, path=start)
        # With an environment the reward model is one more voice, where it is trained.
        trained = config.folder("reward") if step.environment.path is None or "reward" in config.step_names else None
        path = None if step.reward.parts else step.reward.path or trained
        return replace(step, actor=actor, reward=replace(step.reward, path=path))
    return replace(step, model=replace(step.model, path=start))


def show_changes(steps: dict[str, Any], *, last: str) -> None:
    """What the runs changed, and answers of the models from the first to the last."""
    from inference.compare import report

    folders = {name: step.output_dir for name, step in steps.items() if name in ("sft", "reward", last)}
    sft = steps["sft"]
    base_model = sft.model.path if start_of(steps[last]) == sft.output_dir else None
    report(base_model=base_model, folders=folders, last=steps[last])


def run_step(name: str, step: Any, config: PipelineConfig) -> None:
    """Start a step and wait for it; skip it when it is finished.

    Raises:
        UserError: when its folder holds a run with other settings.
        SystemExit: with the step's exit code when it fails.
    """
    folder = Path(step.output_dir)
    finished = (folder / "finished.json").exists()
    changed = _changed_keys(folder, step)
    if changed:
        raise UserError(
            f"{folder} holds a run with other settings ({', '.join(changed[:3])}{', ...' * (len(changed) > 3)}): "
            "remove that folder, or give another --output_dir"
        )
    if finished:
        print(f"== {name}: finished already in {folder}, skipped", flush=True)
        return
    if _goes_on(folder, step.resume):
        print(f"== {name}: {folder} holds a run that did not finish, going on", flush=True)
        step = replace(step, resume="auto")
    logs = Path(config.output_dir) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    settings = logs / f"{FOLDERS[name]}.yaml"
    save_config(step, settings)
    command = [*launcher(config), MODULES[name], "--config", str(settings)]
    print(f"== {name}: {' '.join(command)}", flush=True)
    start = time.monotonic()
    code, tail = _tee(command, logs / f"{FOLDERS[name]}.log")
    if code == STOPPED_EXIT_CODE:
        print(f"== {name}: stopped; the same command goes on", flush=True)
        sys.exit(code)
    if code:
        print(f"\nerror: step {name} failed with exit code {code}: {' '.join(command)}", file=sys.stderr)
        if code in SIGNALS:
            print(SIGNALS[code], file=sys.stderr)
        print(f"its last lines (all in {logs / FOLDERS[name]}.log):", file=sys.stderr)
        print("".join(f"  {line}" for line in tail), end="", file=sys.stderr)
        sys.exit(code)
    print(f"== {name}: done in {time.monotonic() - start:.0f} s, model in {folder}", flush=True)


def _goes_on(folder: Path, resume: str) -> bool:
    """Whether a step goes on from its newest checkpoint: its folder holds a run, and the line names no other start.

    What the run itself began from, outside its folder, is no other: the same command goes on.
    """
    if not (folder / "config.yaml").exists():
        return False
    outside = not Path(resume).resolve().is_relative_to(folder.resolve())
    begun = outside and resume == read_config(folder / "config.yaml").get("resume")
    return begun or resume in ("never", "auto")


def _changed_keys(folder: Path, step: Any) -> list[str]:
    """Keys in which a step differs from the run that its folder holds; those that change no result do not count."""
    if not (folder / "config.yaml").exists():
        return []
    return changed_keys(read_config(folder / "config.yaml"), read_config(step))


def launcher(config: PipelineConfig) -> list[str]:
    """The words before a module's name that start it on the right processes."""
    options = config.launcher
    if options.hostfile is not None:
        deepspeed = shutil.which(
            "deepspeed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        )
        if deepspeed is None:
            raise UserError("launcher.hostfile needs the deepspeed command, it is not on PATH: pip install deepspeed")
        return [deepspeed, "--hostfile", options.hostfile, "--no_local_rank", "--module"]
    processes = options.num_processes or _gpus()
    if processes <= 1:
        return [sys.executable, "-m"]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _tee(command: list[str], log: Path) -> tuple[int, list[str]]:
    """Run a command, its output to the console and a file; the exit code and the last lines."""
    tail: deque[str] = deque(maxlen=20)
    root = str(Path(__file__).parent)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", STARTED_BY: str(os.getpid())}
    if not _gpus():
        environment = {**MALLOC_ENVIRONMENT, **environment}
    environment["PYTHONPATH"] = os.pathsep.join(part for part in (root, environment.get("PYTHONPATH")) if part)
    with log.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(  # a list of words, no shell  # nosec B603
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
        )
        assert process.stdout is not None
        with signals_passed_on(process) as asked:
            try:
                sinks: list[TextIO] = [sys.stdout, file]
                for line in process.stdout:
                    _pass_on(line, sinks)
                    tail.append(line)
            except KeyboardInterrupt:
                process.terminate()
                process.wait()
                raise
            code = process.wait()
        return STOPPED_EXIT_CODE if code and asked.stop else code, list(tail)


def _pass_on(line: str, sinks: list[TextIO]) -> None:
    """To the console and the log, as long as each takes it: a step goes on without them."""
    for sink in list(sinks):
        try:
            sink.write(line)
            sink.flush()
        except OSError:
            sinks.remove(sink)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sink.fileno())  # what it still holds must not fail at the end


if __name__ == "__main__":
    main()
