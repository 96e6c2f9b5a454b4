"""The part of an RL step outside its phases, timed in short runs: calibration itself lies below the loop.

A tiny random model with one token per byte samples completions of a fixed number of tokens; times of its phases are not
kept, as small models of several sizes are timed for these.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid_rlhf.runtime.world import World

_NEW_TOKENS = 32
_STEPS, _COLD_STEPS = 6, 2
"""Steps of a run, and the first of them, which warm up."""
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def time_loop(world: World, prompts: Sequence[int]) -> list[tuple[float, float]]:
    """(tokens of a rollout, seconds of a step outside its phases) of runs with so many prompts per step, on one rank.

    Args:
        world: of the process, which calls nothing of it afterwards.
        prompts: of a step of each run.
    """
    from hybrid_rlhf.placement.machines.layers import save_timed_model

    found = []
    with tempfile.TemporaryDirectory() as name, Path(os.devnull).open("w") as nowhere:
        folder = Path(name)
        save_timed_model(folder / "model", template=_TEMPLATE)
        for count in prompts:
            rows = [json.dumps({"prompt": f"{place:04}"}) for place in range(count * (_STEPS + 1))]
            (folder / "rows.jsonl").write_text("\n".join(rows))
            with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
                found.append(_timed_run(folder, count))
    return found


def _timed_run(folder: Path, prompts: int) -> tuple[float, float]:
    from hybrid_rlhf.rl.build import RL

    seconds, lengths = [], []

    def told(step: int, metrics: Mapping[str, Any]) -> None:
        if "time/other_seconds" in metrics:
            seconds.append(metrics["time/other_seconds"])
            lengths.append(metrics["completions/mean_length"] + len("0000"))

    RL(
        model=folder / "model",
        data={"sources": [str(folder / "rows.jsonl")], "eval_fraction": 0.0, "cache_dir": str(folder / "cache")},
        reward=_nothing,
        callbacks=[told],
        output_dir=str(folder / f"run{prompts}"),
        rollout={
            "prompts_per_step": prompts,
            "kv_cache_gib": 0.25,
            "max_prompt_tokens": 64,
            "sampling": {"max_new_tokens": _NEW_TOKENS},
        },
        train={"max_steps": _STEPS},
        logging={"sinks": []},
    ).train()
    return prompts * statistics.fmean(lengths), statistics.median(seconds[_COLD_STEPS:])


def _nothing(completions: Sequence[str], **columns: Any) -> list[float]:
    """A reward."""
    return [float(len(text)) for text in completions]
