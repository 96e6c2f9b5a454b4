"""Published settings, predicted: writes their section of docs/benchmarks/placement.md.

    python -m benchmarks.placement.published

DeepSpeed-Chat's table 1, OpenRLHF's table of paper v1, a run that ReaL's repository reports, ChatLearn's figure and its
claim of 300B + 300B, and the models of the placement paper. What a source does not state is assumed, and said so.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.placement.page import write_section
from benchmarks.placement.rules import without_communication
from benchmarks.placement.settings import Setting
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.planning.plans import StepPlan, style_of
from hybrid_rlhf.planning.search import STYLES, Candidate, Search
from hybrid_rlhf.runtime.placement import Placement, RolePlacement

DS_CHAT_ROWS, DS_CHAT_BATCH = 131_900, 1024
"""Query and answer pairs of DeepSpeed-Chat's table 1, and its largest batch."""
DS_CHAT_HOURS: dict[tuple[str, int], dict[str, float]] = {
    ("a100-40g", 8): {"opt-1.3b": 2.0, "opt-6.7b": 5.7, "opt-13b": 10.8, "opt-30b": 24 * 1.85},
    ("a100", 8): {"opt-1.3b": 1.4, "opt-6.7b": 4.1, "opt-13b": 9.0, "opt-30b": 18.0, "opt-66b": 24 * 2.1},
    ("a100", 64): {"opt-1.3b": 31 / 60, "opt-6.7b": 51 / 60, "opt-13b": 1.25, "opt-30b": 4.0, "opt-66b": 7.5},
}


@dataclass(frozen=True)
class Allocation:
    """A row of OpenRLHF's table: seconds for 1,024 prompts, and the GPUs of each role."""

    model: str
    ranks: int
    ds_chat_seconds: float
    openrlhf_seconds: float
    roles: Mapping[str, int]
    """GPUs of actor, critic, reference, reward model and sampler."""
    tensor_parallel: int
    """Of the sampler."""
    hybrid_tensor_parallel: int
    """Of DeepSpeed-Chat's hybrid engine."""


def _allocated(actor: int, critic: int, reference: int, reward: int, sampler: int) -> dict[str, int]:
    return {"actor": actor, "critic": critic, "reference": reference, "reward": reward, "sampler": sampler}


OPENRLHF = (
    Allocation("llama-7b", 16, 855.09, 471.11, _allocated(4, 4, 2, 2, 4), 1, 1),
    Allocation("llama-13b", 32, 1528.93, 608.93, _allocated(8, 8, 4, 4, 8), 1, 1),
    Allocation("llama-34b", 32, 3634.98, 1526.4, _allocated(8, 8, 4, 4, 8), 2, 8),
    Allocation("llama-70b", 32, 10407.0, 4488.53, _allocated(4, 4, 4, 4, 16), 4, 8),
)
CHATLEARN = (("llama-7b", 8, 2900.0, 3130.0, 6750.0), ("llama-70b", 32, 670.0, 840.0, 2590.0))
"""Model of actor and of reward, GPUs, and tokens per second of DeepSpeed-Chat, OpenRLHF and ChatLearn, by eye."""
PAPER_LORA_RANK = 128
"""LoRA dimension of the placement paper's released code."""


def main() -> None:
    """Predict all settings and write the section."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = [ds_chat(folder), openrlhf(folder), real(folder), chatlearn(folder), paper(folder)]
    write_section("published", "\n".join([HEAD, *parts]))


def ds_chat(folder: Path) -> str:
    """DeepSpeed-Chat's table 1: everything on all ranks."""
    lines = []
    for (machine, ranks), hours in DS_CHAT_HOURS.items():
        for actor, published in hours.items():
            setting = Setting(machine, ranks, actor, "opt-350m", DS_CHAT_BATCH, 256, 256)
            search = setting.search(folder)
            best = search.run(("flattening",)).ranked[0]
            steps = DS_CHAT_ROWS / DS_CHAT_BATCH
            shown = f"{ranks} x {machine} | {actor} | {published:.1f} h"
            lines.append(f"| {shown} | {_against(best, published * 3600, steps, 'h')} | {_plan(best)} |")
            _tell(lines)
    return DS_CHAT_TEXT + "\n".join(lines) + "\n"


def openrlhf(folder: Path) -> str:
    """OpenRLHF's table: its allocation of GPUs, and DeepSpeed-Chat's flattening under ZeRO-3."""
    lines = []
    for row in OPENRLHF:
        setting = Setting("a800", row.ranks, row.model, row.model, 1024, 1024, 1024, mini_batches=8)
        search = setting.search(folder)
        names = {"reward": search.costs.job.frozen[0].name}
        ranks: dict[str, tuple[int, ...]] = {}
        start = 0
        for name, count in row.roles.items():
            ranks[names.get(name, name)] = tuple(range(start, start + count))
            start += count
        separate = _fixed(search, ranks, offloads=True, tensor_parallel=row.tensor_parallel)
        everywhere = dict.fromkeys((name for name in ranks if name != "sampler"), tuple(range(row.ranks)))
        flat = _fixed(search, everywhere, offloads=True, tensor_parallel=row.hybrid_tensor_parallel)
        best = search.run().ranked[0]
        lines.append(
            f"| {row.model}, {row.ranks} | {row.ds_chat_seconds:.0f} s | {_against(flat, row.ds_chat_seconds, 1, 's')} "
            f"| {row.openrlhf_seconds:.0f} s | {_against(separate, row.openrlhf_seconds, 1, 's')} "
            f"| {row.ds_chat_seconds / row.openrlhf_seconds:.2f}x | {flat.seconds / separate.seconds:.2f}x "
            f"| {best.seconds:.0f} s, {_plan(best)} |"
        )
        _tell(lines)
    return OPENRLHF_TEXT + "\n".join(lines) + "\n"


def real(folder: Path) -> str:
    """The run of ReaL's issue 10: OpenRLHF with 34B and 7B on 32 GPUs."""
    setting = Setting("a100", 32, "llama-34b", "llama-7b", 512, 128, 128, mini_batches=4)
    search = setting.search(folder)
    best = search.run(("separation",)).ranked[0]
    assert best.time is not None
    published = {"generation": 5.25, "training": 51.01, "scoring": 19.40, "weight_sync": 8.34}
    lines = [f"| {phase} | {seconds:.1f} s | {best.time.phases[phase]:.1f} s |" for phase, seconds in published.items()]
    lines.append(f"| step | 94.9 s, with 10.9 s of data transfer | {best.seconds:.1f} s |")
    silent = without_communication(search.costs, best.plan, rows_at_once=best.memory.rows_at_once)
    lines.append(f"| step without communication (ReaL's costs) | | {silent:.1f} s |")
    lines.append(f"\nThe plan: {_plan(best)}.\n")
    _tell(lines)
    return REAL_TEXT + "\n".join(lines)


def chatlearn(folder: Path) -> str:
    """ChatLearn's figure, and its claim of 300B + 300B."""
    lines = []
    for model, ranks, ds, open_rlhf, own in CHATLEARN:
        best = Setting("a100", ranks, model, model, 1024, 512, 512).search(folder).run().ranked[0]
        speed = 1024 * 1024 / best.seconds
        lines.append(f"| {model}, {ranks} | {ds:.0f} | {open_rlhf:.0f} | {own:.0f} | {speed:.0f} | {_plan(best)} |")
        _tell(lines)
    big = [CHATLEARN_BIG]
    for ranks in (64, 128, 256, 512):
        setting = Setting("a100", ranks, "dense-300b", "dense-300b", 1024, 512, 512)
        found = setting.search(folder).run(("flattening", "interleaving", "separation")).ranked
        best = found[0]
        if best.time is None:
            misfit = best.memory.misfit
            assert misfit is not None
            total, there = misfit.total / 2**30, misfit.machine.device_bytes / 2**30
            big.append(f"| {ranks} | does not fit: {misfit.name} takes {total:.0f} of {there:.0f} GiB | |")
        else:
            big.append(f"| {ranks} | {best.seconds:.0f} s | {_plan(best)} |")
        _tell(big)
    return CHATLEARN_TEXT + "\n".join([*lines, *big]) + "\n"


def paper(folder: Path) -> str:
    """The models of the placement paper: each style by itself, with all weights and with the authors' LoRA."""
    lines = []
    for model, ranks in (("llama-7b", 8), ("llama-13b", 16), ("llama-33b", 32), ("llama-65b", 64)):
        for link, rank in itertools.product((None, 3.0), (None, PAPER_LORA_RANK)):
            setting = Setting("a100", ranks, model, model, 512, 256, 480, link_gib_per_second=link, lora_rank=rank)
            if link is not None and ranks == 8:
                continue
            found = {each.plan.placement.style: each for each in setting.search(folder).run().ranked}
            fastest = min(found.values(), key=lambda each: each.seconds)
            cells = [_seconds(found.get(style)) for style in STYLES]
            gain = found["flattening"].seconds / fastest.seconds
            shown = "data sheet" if link is None else f"{link:.0f} GiB/s"
            learns = "all" if rank is None else f"LoRA {rank}"
            lines.append(f"| {model}, {ranks} | {learns} | {shown} | {' | '.join(cells)} | {gain:.2f}x |")
            _tell(lines)
    return PAPER_TEXT + "\n".join(lines) + "\n" + PAPER_END


def _fixed(search: Search, ranks: Mapping[str, tuple[int, ...]], *, offloads: bool, tensor_parallel: int) -> Candidate:
    """A given allocation under ZeRO-3, with the optimizer and frozen models on the host where `offloads`."""
    sampling = "sampler" if "sampler" in ranks else "actor"
    roles = {
        name: RolePlacement(of_role, 0 if name == "sampler" else 3, tensor_parallel if name == sampling else 1)
        for name, of_role in ranks.items()
    }
    plan = StepPlan(Placement(roles, style_of(ranks, search.costs.cluster.ranks)))
    return search.evaluate(replace(plan, offload_optimizer=offloads, offload_frozen=offloads))


def _against(candidate: Candidate, published: float, steps: float, unit: str) -> str:
    """Predicted, and over published."""
    if candidate.time is None:
        return "does not fit"
    predicted = candidate.seconds * steps
    shown = f"{predicted / 3600:.1f} h" if unit == "h" else f"{predicted:.0f} s"
    return f"{shown} ({predicted / published:.2f}x)"


def _seconds(candidate: Candidate | None) -> str:
    return "-" if candidate is None or candidate.time is None else f"{candidate.seconds:.1f} s"


def _plan(candidate: Candidate) -> str:
    return ", ".join(_words(candidate))


def _words(candidate: Candidate) -> Iterator[str]:
    """A plan in a cell."""
    plan = candidate.plan
    yield plan.placement.style
    for name, role in plan.roles.items():
        if name in ("actor", "sampler"):
            zero = f" ZeRO-{role.zero}" if name == "actor" else ""
            together = f" TP {role.tensor_parallel}" if role.tensor_parallel > 1 else ""
            yield f"{name} {len(role.ranks)}{zero}{together}"
    shown = ("rollout.tensor_parallel", "actor.zero.stage")
    yield from (f"`{key}`" for key in plan.settings(RLConfig()) if key not in shown)


def _tell(lines: list[str]) -> None:
    print(lines[-1], flush=True)


HEAD = """## Published settings, predicted

Written by `python -m benchmarks.placement.published`. **Nothing under "predicted" was run**: it is a sum of curves that
are modelled from data sheets (`hybrid_rlhf/planning/machines/datasheets.py`: the parts of a peak that are achieved
are assumptions, the same in all tables and not fitted to any of them); nothing here was run. The predictions are of
this library's own loop and engine on that hardware, not of the published systems: a ratio below 1 says that the
planner expects this loop to take less time than the system published.
Steps that really ran, on emulated machines: [above](#emulated-machines).
"""
DS_CHAT_TEXT = """
### DeepSpeed-Chat, table 1

Step 3 alone: 131.9k pairs of 256 + 256 tokens, batches of 1,024 pairs, a critic and a reward model of 350M. Assumed:
one update per batch, gradient checkpointing, all weights trained. The plan is the best flattening.

| machine | actor | published | predicted (over published) | plan |
|---|---|---|---|---|
"""
OPENRLHF_TEXT = """
The predictions grow with models and shrink with ranks as the table does, at 0.14 to 0.34 of its times. What explains
the factor: DeepSpeed-Chat reports (figure 6) 24 to 48 TFLOP/s per GPU for generation and 63 to 110 for training, which
is 0.08 to 0.15 and 0.20 to 0.35 of the A100's peak, while the curves assume 0.65 for large products. The factor is
smallest where its memory was tightest (30B on 40 GB cards), which made its batches small.

### OpenRLHF, table of paper v1 (arXiv 2405.11143)

Seconds for 1,024 prompts, one PPO epoch, A800. GPUs per role and tensor parallelism are the paper's; ZeRO-3, Adam and
frozen models offloaded, as published for both. Assumed, because the sources at hand do not state them: 1,024 tokens of
prompt and 1,024 of completion, mini-batches of 128. For DeepSpeed-Chat's 7B a user measured 538 s instead of 855
(OpenRLHF issue 327).

| actor, GPUs | DeepSpeed-Chat | predicted flattening | OpenRLHF | with its GPUs | gain | predicted gain | best plan |
|---|---|---|---|---|---|---|---|
"""
REAL_TEXT = """
The predictions of OpenRLHF's allocation are 1.1 to 0.56 of what it published: a fourth to a half of the GPUs sample,
and their time is that of reading weights and cache, which any good engine reaches. Those of flattening are 0.23 to
0.07 of what DeepSpeed-Chat took, whose generation alone took 590 of the 855 s at 7B. The published gain is thus one
of engines (the authors name vLLM as the first reason, issue 296; by the user's measurement it is 1.14x at 7B): with
one engine on both sides, the planner expects this separation without a policy lag to lose, as most GPUs wait in
every phase.

### ReaL, issue 10: OpenRLHF with 34B and 7B on 32 GPUs

512 completions of 128 + 128 tokens, four mini-batches. Assumed: A100 of 80 GB; the GPUs of each role are the planner's
best separation, since the issue's are not in the sources at hand.

| phase | published | predicted |
|---|---|---|
"""
CHATLEARN_TEXT = """
### ChatLearn

Tokens per second, read by eye from `docs/images/perf.png`; lengths, batch and GPUs' kind are not given. Assumed: A100,
1,024 completions of 512 + 512 tokens, tokens of prompts and completions counted, one update. Without the lengths this
is a check of the order of magnitude, no more.

| actor + reward, GPUs | DeepSpeed-Chat | OpenRLHF | ChatLearn | predicted | plan |
|---|---|---|---|---|---|
"""
CHATLEARN_BIG = """
"600B-scale" (300B actor and 300B reward model): ChatLearn publishes neither GPUs nor time. A dense model of 93 layers,
hidden size 16,384 (assumed), PPO with critic and reference of the same size, 1,024 completions of 512 + 512 tokens:

| A100 of 80 GB | step | plan |
|---|---|---|"""
PAPER_TEXT = """
So four models of 300B can be trained by ZeRO-3 with offloading and tensor-parallel sampling within a host where the
table has a time, if the hosts have memory for what is offloaded, which these plans do not limit. Tensor parallelism
is searched within a host only; pipeline parallelism, which ChatLearn uses at this size through Megatron, is not
predicted.

### The placement paper (arXiv 2312.11819)

Its tables could not be read, only its claim of up to 11x and, from the released code, its models and 480 new tokens for
every completion. Assumed: 256 tokens of prompt, 512 completions, one update, critic and reward of the actor's size;
A100, once with the data sheet's network and once with a slow one. The released code sets LoRA of rank 128, so each
setting is predicted with all weights and with that. The last column is flattening over the best style.

| actor, GPUs | learns | between hosts | flattening | interleaving | separation | hybrid | gain |
|---|---|---|---|---|---|---|---|
"""
PAPER_END = """
Why about 2x to 3.5x, and not 11x. The released code's flattening is DeepSpeed-Chat's, under ZeRO-3 with
`inference_tp` 1 and its hybrid engine on or off; off, every rank gathers all weights for each of the 480 tokens. Here
one engine samples in all styles: it gathers the weights once per rollout, and flattening has the ZeRO
stage and the tensor parallelism that suit it best. What remains is the traffic of training and of the weight sync: no
gain over the data sheet's network, and two to three times over the slow one. LoRA makes all styles faster, as
gradients and optimizer states are those of adapters, and brings the gain no nearer to 11x: 13B then trains without
gathering weights, so little is left to gain; larger models still gather frozen weights over the slow link. Under LoRA
the reference is the actor without its adapters: only the reward model can be placed apart, so nothing is interleaved.
"""


if __name__ == "__main__":
    main()
