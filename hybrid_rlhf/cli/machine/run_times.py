"""Times short RL runs for calibration, which is a lower layer than the training loop.

Tiny random models with one token per byte sample completions of a fixed number of tokens.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid_rlhf.planning.machines.runs import RunSizes, RunTimes
    from hybrid_rlhf.runtime.world import World

_NEW_TOKENS = 32
_PROMPT = "{:032}"
_STEPS = 8
_COLD_STEPS = 2
"""Number of steps of a run, and of its first steps, which are a warm-up."""
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def time_run(world: World, place: str, sizes: RunSizes) -> RunTimes:
    """Run PPO with all roles on all ranks. Every rank calls; only rank 0's times are valid.

    Args:
        world: world of the processes, which must not use it afterwards: a run closes its process group.
        place: folder for the model and the run, the same on all ranks; it must stay while the times are used.
        sizes: sizes of the run.
    """
    with _silence():
        return _timed_run(world, Path(place), sizes)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Context without standard output and error, also of compilers that DeepSpeed calls."""
    streams = (1, 2)
    saved = [os.dup(stream) for stream in streams]
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        for stream in streams:
            os.dup2(null, stream)
        yield
    finally:
        for before, stream in zip(saved, streams, strict=True):
            os.dup2(before, stream)
        for descriptor in (*saved, null):
            os.close(descriptor)


def _timed_run(world: World, folder: Path, sizes: RunSizes) -> RunTimes:
    from hybrid_rlhf.planning.machines.layers import save_timed_models
    from hybrid_rlhf.planning.machines.runs import RunTimes
    from hybrid_rlhf.rl.build import RL

    if world.is_main:
        folder.mkdir(parents=True)
        save_timed_models(folder, sizes.model, template=_TEMPLATE)
        rows = [json.dumps({"prompt": _PROMPT.format(place)}) for place in range(sizes.prompts * (_STEPS + 1))]
        (folder / "rows.jsonl").write_text("\n".join(rows))
    world.barrier()
    seconds = defaultdict(list)
    lengths = []

    def told(step: int, metrics: Mapping[str, Any]) -> None:
        if "time/other_seconds" in metrics:
            lengths.append(metrics["completions/mean_length"])
            for name in ("scoring", "training", "other", "step"):
                seconds[name].append(metrics[f"time/{name}_seconds"])

    run = RL(
        model=folder / "actor",
        data={"sources": [str(folder / "rows.jsonl")], "eval_fraction": 0.0, "cache_dir": str(folder / "cache")},
        reward=str(folder / "reward"),
        callbacks=[told],
        output_dir=str(folder / "run"),
        rollout={
            "prompts_per_step": sizes.prompts,
            "kv_cache_gib": 0.25,
            "max_prompt_tokens": 64,
            "sampling": {"max_new_tokens": _NEW_TOKENS},
        },
        train={"max_steps": _STEPS},
        logging={"sinks": []},
    )
    run.train()
    medians = {name: statistics.median(phase_seconds[_COLD_STEPS:]) for name, phase_seconds in seconds.items()}
    mean = statistics.fmean(lengths) if lengths else 0.0
    return RunTimes(run.config, float(len(_PROMPT.format(0))), mean, medians)
