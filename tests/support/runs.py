"""Runs as a user starts them: command lines, their environment, settings, and the commands of the documentation."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybrid_rlhf.configs.sections.run import LoggingConfig
from hybrid_rlhf.configs.sft import SFTConfig
from tests.support.steps import words

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def run_python(line: Sequence[str], **settings: str) -> subprocess.CompletedProcess[str]:
    """Python with these words, in the root of the repository, with these variables."""
    environment = {**ENVIRONMENT, **settings}
    return subprocess.run(
        [sys.executable, *line], capture_output=True, text=True, timeout=900, env=environment, cwd=ROOT
    )


def start_until(line: Sequence[str], text: str, **settings: Any) -> subprocess.Popen[str]:
    """Python with these words, started, once it has said a text; standard error comes with its output."""
    process: subprocess.Popen[str] = subprocess.Popen(
        [sys.executable, *line],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        **{"env": ENVIRONMENT, **settings},
    )
    assert process.stdout is not None
    lines = [""]
    while text not in lines[-1]:
        lines.append(process.stdout.readline())
        assert lines[-1] or process.poll() is None, "".join(lines)
    return process


def pipeline_line(output: Path, model: Path, rows: Path) -> list[str]:
    """The command line of two updates of each step."""
    line = f"train.py --base_model {model} --output_dir {output} --data.sources {rows}".split()
    for step in ("sft", "reward"):
        line += f"--{step}.train.global_batch_size 4 --{step}.train.max_steps 2 --{step}.data.max_length 64".split()
    for step in ("sft", "reward", "rl"):
        line += [f"--{step}.data.cache_dir", str(output.parent / "cache")]
    line += "--rl.rollout.prompts_per_step 4 --rl.rollout.sampling.max_new_tokens 6 --rl.train.max_steps 2".split()
    line += "--rl.rollout.max_prompt_tokens 48 --rl.actor.ema_decay 0.9 --rl.logging.samples_every 1".split()
    return line


def sft_line(output: Path, model: Path, rows: Path, *more: str) -> list[str]:
    """The command line of step 1 by itself."""
    line = _step_line("training/step1_sft/main.py", output, model, rows)
    return [*line, *words("--train.global_batch_size 4 --data.max_length 64 --logging.sinks []", *more)]


def rl_line(output: Path, model: Path, rows: Path, *more: str) -> list[str]:
    """The command line of two steps of step 3 by itself."""
    line = _step_line("training/step3_ppo/main.py", output, model, rows)
    line += "--rollout.prompts_per_step 4 --rollout.sampling.max_new_tokens 6".split()
    return [*line, *words("--train.max_steps 2 --data.eval_fraction 0", *more)]


def _step_line(script: str, output: Path, model: Path, rows: Path) -> list[str]:
    words = f"{script} --model.path {model} --data.sources {rows} --output_dir {output}"
    return [*words.split(), "--data.cache_dir", str(output.parent / "cache")]


def sft_config(folder: Path, resume: str = "never") -> SFTConfig:
    """Settings of a run in a folder."""
    return replace(SFTConfig(), output_dir=str(folder), resume=resume, logging=LoggingConfig(sinks=[]))
