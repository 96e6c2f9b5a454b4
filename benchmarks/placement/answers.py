"""The planner's answers for machines by their data sheets, beside times that others published; as tables in Markdown.

    python -m benchmarks.placement.answers

PPO with critic, reward model and reference of the actor's size, unless a row says otherwise; gradient checkpointing.
Published: DeepSpeed-Chat's table 1 (hours for 131.9k pairs of 256 + 256 tokens in batches of 1,024), and the table of
OpenRLHF's paper v1 (arXiv 2405.11143; seconds for 1,024 prompts; 1,024 + 1,024 tokens and mini-batches of 128 are
assumed). The predictions are of this library on that hardware, not of the published systems.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.placement.settings import Setting
from hybrid_rlhf.planning.search import Candidate

MACHINES = {
    "one 24 GB card (RTX 4090), 1B": Setting("4090", 1, "llama-1b", "llama-1b", 64, 512, 1024, 400.0),
    "one 80 GB card (H100), 8B actor, 1B critic and reward": Setting(
        "h100", 1, "llama-8b", "llama-1b", 128, 512, 1024, 400.0
    ),
    "8 x 80 GB (H100), 8B": Setting("h100", 8, "llama-8b", "llama-8b", 512, 512, 1024, 400.0),
    "16 x 80 GB (A100), two hosts, 1 GiB/s between them, 8B": Setting(
        "a100", 16, "llama-8b", "llama-8b", 512, 512, 1024, 400.0, link_gib_per_second=1.0
    ),
    "64 x 80 GB (H100), 8 hosts, 70B": Setting("h100", 64, "llama-70b", "llama-70b", 1024, 512, 1024, 400.0),
    "256 x 80 GB (A100), 300B actor and reward": Setting("a100", 256, "dense-300b", "dense-300b", 1024, 512, 512),
}
_DS_CHAT_STEPS = 131_900 / 1024
_DS_CHAT_HOURS: dict[tuple[str, int], dict[str, float]] = {
    ("a100-40g", 8): {"opt-1.3b": 2.0, "opt-13b": 10.8},
    ("a100", 8): {"opt-1.3b": 1.4, "opt-6.7b": 4.1, "opt-30b": 18.0},
    ("a100", 64): {"opt-6.7b": 51 / 60, "opt-30b": 4.0, "opt-66b": 7.5},
}
_OPENRLHF_SECONDS = {("llama-7b", 16): 471.1, ("llama-13b", 32): 608.9, ("llama-70b", 32): 4488.5}


def main() -> None:
    """Print the tables."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print("| machine, models | best plan | predicted step | others |\n|---|---|---|---|")
        for what, setting in MACHINES.items():
            print(f"| {what} | {_answer(setting, folder)} |", flush=True)
        print("\n| published | machine, actor | published | predicted | plan |\n|---|---|---|---|---|")
        for line in _published(folder):
            print(line, flush=True)


def _published(folder: Path) -> Iterator[str]:
    for (machine, ranks), hours in _DS_CHAT_HOURS.items():
        for actor, published in hours.items():
            setting = Setting(machine, ranks, actor, "opt-350m", 1024, 256, 256)
            best = setting.search(folder).run(("flattening",)).ranked[0]
            predicted = best.seconds * _DS_CHAT_STEPS / 3600
            shown = f"{ranks} x {machine}, {actor} | {published:.1f} h | {predicted:.2f} h"
            yield f"| DeepSpeed-Chat | {shown} | {_plan(best)} |"
    for (model, ranks), seconds in _OPENRLHF_SECONDS.items():
        best = Setting("a800", ranks, model, model, 1024, 1024, 1024, mini_batches=8).search(folder).run().ranked[0]
        yield f"| OpenRLHF | {ranks} x a800, {model} | {seconds:.0f} s | {best.seconds:.0f} s | {_plan(best)} |"


def _answer(setting: Setting, folder: Path) -> str:
    """The best plan, its seconds, and how much slower the best of each other style is."""
    best, *others = setting.search(folder).run().ranked
    slower = [
        f"{each.plan.placement.style} {each.seconds / best.seconds - 1:.1%} slower"
        if each.fits
        else f"{each.plan.placement.style} does not fit"
        for each in others
    ]
    return f"{_plan(best)} | {best.seconds:.1f} s | {', '.join(slower) or 'none on one rank'}"


def _plan(candidate: Candidate) -> str:
    """A plan in a cell."""
    if candidate.time is None:
        return "does not fit"
    plan = candidate.plan
    roles = [
        f"{name} {len(role.ranks)}"
        + f" ZeRO-{role.zero}" * (role.zero > 0)
        + f" TP {role.tensor_parallel}" * (role.tensor_parallel > 1)
        for name, role in plan.roles.items()
        if name in ("actor", "critic", "sampler")
    ]
    offloads = ("offload_frozen", "offload_states", "offload_optimizer")
    return ", ".join([plan.placement.style, *roles, *(f"`{key}`" for key in offloads if getattr(plan, key))])


if __name__ == "__main__":
    main()
