"""The planner's answer for five machines: writes their section of docs/benchmarks/placement.md.

    python -m benchmarks.placement.machines

One 24 GB GPU, one 80 GB GPU, 8 x 80 GB, 16 x 80 GB on two hosts over a slow link, 64 x 80 GB; PPO with a critic, a
reward model and a reference of the actor's size, and completions with a long tail. Curves are modelled.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks.placement.page import write_section
from benchmarks.placement.settings import Setting
from hybrid_rlhf.planning.placement_table import PlacementAnswer

HEAD = """## The planner's answer for five machines

Written by `python -m benchmarks.placement.machines`. All curves are modelled from data sheets
(`hybrid_rlhf/planning/machines/datasheets.py`); no figure here is measured. PPO, one update per rollout, gradient
checkpointing, prompts of 512 tokens, completions of up to 1,024 tokens with a mean of 400 (log-normal). Critic, reward
model and reference have the actor's dimensions, except where a title says otherwise. Each table has the best plan of
each style, fastest first; below it, the best of all. The critic follows `actor.zero`.
"""
MACHINES = {
    "One 24 GB GPU (RTX 4090), 1B": Setting("4090", 1, "llama-1b", "llama-1b", 64, 512, 1024, 400.0),
    "One 80 GB GPU (H100), 8B actor, 1B critic and reward": Setting(
        "h100", 1, "llama-8b", "llama-1b", 128, 512, 1024, 400.0
    ),
    "Eight 80 GB GPUs (H100), 8B": Setting("h100", 8, "llama-8b", "llama-8b", 512, 512, 1024, 400.0),
    "Sixteen 80 GB GPUs (A100) on two hosts over a link of 1 GiB/s, 8B": Setting(
        "a100", 16, "llama-8b", "llama-8b", 512, 512, 1024, 400.0, link_gib_per_second=1.0
    ),
    "Sixty-four 80 GB GPUs (H100), 70B": Setting("h100", 64, "llama-70b", "llama-70b", 1024, 512, 1024, 400.0),
}


def main() -> None:
    """Search all machines and write the section."""
    parts = [HEAD]
    with tempfile.TemporaryDirectory() as folder:
        for name, setting in MACHINES.items():
            search = setting.search(Path(folder))
            start = time.perf_counter()
            result = search.run()
            seconds = time.perf_counter() - start
            answer = PlacementAnswer(search.costs.job, search.costs.curves, search.costs.cluster, result)
            table = "\n".join(answer.lines())
            parts.append(f"### {name}\n\n```\n{table}\n```\n")
            print(f"{name}: searched {result.evaluated} plans in {seconds:.1f} s")
    write_section("machines", "\n".join(parts))


if __name__ == "__main__":
    main()
