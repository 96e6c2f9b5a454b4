"""Streaming rollouts on GPUs that are not here: steps of the recipes, simulated with the planner's costs.

    python -m benchmarks.streaming_simulated

Each sampling group decodes its completions with the planner's seconds of a decoding step for as many rows as it has;
trainers take the planner's seconds of all other phases. A step begins when all completions of its prompts are finished,
and the prompts of K further steps may be sampled meanwhile; a weight sync holds all samplers. Lengths are those that
the planner assumes for a recipe, with prompts in proportion to the GPUs. The synchronous loop and the policy lag of 1
are the planner's best plans.
"""

from __future__ import annotations

import heapq
import itertools
import math
import tempfile
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import yaml

from benchmarks import results
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.planning.costs import Costs
from hybrid_rlhf.planning.device import GPU_RESERVE_GIB, Device
from hybrid_rlhf.planning.job import modelled_lengths, read_job
from hybrid_rlhf.planning.machines.datasheets import DATA_SHEETS, modelled_curves
from hybrid_rlhf.planning.placed_memory import MemoryModel
from hybrid_rlhf.planning.plans import StepPlan
from hybrid_rlhf.planning.search import Candidate, Search
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.placement import Placement, RolePlacement
from tests.support.shapes import PUBLISHED, write_shape

RECIPES = Path(__file__).parents[1] / "recipes"
CASES = (
    ("qwen2.5-7b-grpo", None),
    ("qwen2.5-7b-grpo", 8192),
    ("qwen3-4b-grpo-lora", None),
    ("qwen3-30b-a3b-gspo", None),
)
"""Recipes, with the limit of completions; none: the recipe's."""
RANKS = (8, 128)
LAGS = (0, 1, 4)
MEAN_PART = 0.25
"""Mean length of completions as a part of the limit: a tail of four times the mean."""
SAMPLERS = (1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
"""Parts of the ranks that may sample."""
CONTEXTS = (512.0, 4096.0)
"""Mean tokens of a row between which the seconds of a decoding step are taken as linear."""
STEPS = 16
FIRST = 6
"""Steps before the steady state."""


class _Group:
    """A sampling group: rows that decode together, and completions that wait for room."""

    def __init__(self, rows_at_once: int, seconds: tuple[list[float], list[float]], prompt_tokens: float) -> None:
        self._rows_at_once = rows_at_once
        self._fixed, self._by_token = seconds
        self._prompt_tokens = prompt_tokens
        self._now = 0.0
        self._age = 0.0
        """Decoding steps so far."""
        self._waiting: deque[tuple[int, int]] = deque()
        self._active: list[tuple[float, int, float]] = []
        """Steps at which a row ends and began, and the number of its rollout."""
        self._begun = 0.0
        self._left: Counter[int] = Counter()
        """Unfinished completions of each rollout."""
        self.idle_seconds = 0.0

    def add(self, rollout: int, lengths: Sequence[int]) -> None:
        """Take completions of a rollout."""
        self._waiting.extend((rollout, length) for length in lengths)
        self._left[rollout] += len(lengths)
        self._fill()

    def finish(self, rollout: int) -> float:
        """Decode until a rollout is finished; returns the time."""
        while self._left[rollout]:
            self._advance(math.inf)
        return self._now

    def decode(self, until: float) -> None:
        """Decode until a time."""
        while self._active and self._now < until:
            self._advance(until)
        self.idle_seconds += max(0.0, until - self._now)
        self._now = max(self._now, until)

    def pause(self, seconds: float) -> None:
        """Decode nothing for a time."""
        self._now += seconds

    def _advance(self, until: float) -> None:
        """Decode until the next completion ends, or a time."""
        rows = len(self._active)
        tokens = self._prompt_tokens + self._age - self._begun / rows
        seconds = self._fixed[rows] + self._by_token[rows] * tokens
        end = self._now + (self._active[0][0] - self._age) * seconds
        if end > until:
            self._age += (until - self._now) / seconds
            self._now = until
            return
        self._now = end
        self._age = self._active[0][0]
        while self._active and self._active[0][0] <= self._age:
            _, rollout, begin = heapq.heappop(self._active)
            self._begun -= begin
            self._left[rollout] -= 1
        self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._active) < self._rows_at_once:
            rollout, length = self._waiting.popleft()
            heapq.heappush(self._active, (self._age + length, rollout, self._age))
            self._begun += self._age


@dataclass(frozen=True)
class _Streamed:
    """A simulated run in its steady state."""

    step_seconds: float
    samplers_idle: float
    trainers_idle: float


def streamed(costs: Costs, candidate: Candidate, *, lag: int) -> _Streamed:
    """Simulate streaming with a separate sampler."""
    assert candidate.time is not None
    phases = candidate.time.phases
    sync = phases["weight_sync"]
    training = sum(seconds for phase, seconds in phases.items() if phase not in ("generation", "weight_sync"))
    count = len(candidate.plan.sampling_groups)
    rows = min(candidate.memory.rows_at_once, (1 + lag) * len(costs.job.lengths.completions))
    decoding = _decoding(costs, candidate.plan, rows)
    groups = [_Group(rows, decoding, costs.job.lengths.prompt_tokens) for _ in range(count)]
    admitted = 0
    trained = 0.0
    ends = [0.0]
    idle = [0.0]
    waited = [0.0]
    for step in range(STEPS):
        while admitted <= step + lag:
            lengths = np.random.default_rng(admitted).permutation(costs.job.lengths.completions).tolist()
            for place, group in enumerate(groups):
                group.add(admitted, lengths[place::count])
            admitted += 1
        start = max(trained, *(group.finish(step) for group in groups))
        idle.append(idle[-1] + max(0.0, start - trained))
        trained = start + training
        for group in groups:
            group.decode(trained)
            group.pause(sync)
        trained += sync
        ends.append(trained)
        waited.append(sum(group.idle_seconds for group in groups) / count)
    seconds = ends[-1] - ends[FIRST]
    return _Streamed(
        seconds / (STEPS - FIRST), (waited[-1] - waited[FIRST]) / seconds, (idle[-1] - idle[FIRST]) / seconds
    )


def _decoding(costs: Costs, plan: StepPlan, most_rows: int) -> tuple[list[float], list[float]]:
    """Seconds of a decoding step by number of rows, and those of each token of mean context besides."""
    rows = np.unique(np.geomspace(1, max(2, most_rows), 40).round())
    tables = []
    for context in CONTEXTS:
        compute, wire = costs.sampler(plan.sampling.tensor_parallel, 1).decode(rows, np.full_like(rows, context))
        tables.append(np.interp(np.arange(most_rows + 1), rows, compute + wire))
    by_token = (tables[1] - tables[0]) / (CONTEXTS[1] - CONTEXTS[0])
    return (tables[0] - CONTEXTS[0] * by_token).tolist(), by_token.tolist()


def searched(config: RLConfig, ranks: int) -> Search:
    """The planner of a recipe on so many H100."""
    rollout = config.rollout
    lengths = modelled_lengths(
        prompts=rollout.prompts_per_step,
        per_prompt=rollout.sampling.n,
        prompt_tokens=rollout.max_prompt_tokens / 2,
        mean_tokens=MEAN_PART * rollout.sampling.max_new_tokens,
        max_tokens=rollout.sampling.max_new_tokens,
    )
    curves = modelled_curves(DATA_SHEETS["h100"])
    job = read_job(config, torch.device("cuda"), lengths=lengths)
    device_bytes = (DATA_SHEETS["h100"].device_gib - GPU_RESERVE_GIB) * 2.0**30
    machine = Device(job.device, ranks, device_bytes, ranks_per_host=8)
    return Search(Costs(job, curves, machine.cluster), MemoryModel(job, machine))


def separate(search: Search, ranks: int, *, tensor_parallel: int) -> Iterator[Candidate]:
    """Plans with a sampler on a part of the ranks that fit."""
    for part in SAMPLERS:
        count = round(part * ranks / tensor_parallel) * tensor_parallel
        if not 0 < count < ranks:
            continue
        learners = tuple(range(ranks - count))
        roles = {name: RolePlacement(learners, 3) for name in search.costs.job.roles}
        roles["sampler"] = RolePlacement(tuple(range(ranks - count, ranks)), 0, tensor_parallel)
        candidate = search.evaluate(StepPlan(Placement(roles, "separation"), policy_lag=1))
        if candidate.time is not None:
            yield candidate


def recipe(name: str, new_tokens: int | None, ranks: int, folder: Path, *, lags: bool = False) -> RLConfig:
    """The RL section of a recipe, with prompts in proportion to the ranks and models of published dimensions."""
    content = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    section = content.get("rl", content)
    path = section.get("model", {}).get("path") or content["base_model"]
    assert path in PUBLISHED
    section["model"] = {**section.get("model", {}), "path": write_shape(path, folder / path.replace("/", "--"))}
    section.pop("launcher", None)
    section.setdefault("output_dir", "output")
    section["rollout"].pop("offload_states", None)
    section["rollout"].pop("routing_replay", None)
    section["rollout"]["prompts_per_step"] *= ranks // 8
    if new_tokens is not None:
        section["rollout"]["sampling"]["max_new_tokens"] = new_tokens
    if lags:
        section["placement"] = "separation"
        section["rollout"]["async_sampling"] = {"policy_lag": 1}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(section))
    return parse_config(RLConfig, ["--config", str(file)])


def main() -> None:
    """Simulate all cases, print the table and store it."""
    lines = [
        "| recipe | GPUs | kind | sampling GPUs | seconds per step | against the synchronous loop | samplers idle "
        "| trainers idle |",
        "|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as name:
        for (case, new_tokens), ranks in itertools.product(CASES, RANKS):
            for line in _rows(case, new_tokens, ranks, Path(name)):
                lines.append(line)
                print(line, flush=True)
    text = "\n".join(lines) + "\n"
    results.write("streaming", "simulated.txt", text)


def _rows(case: str, new_tokens: int | None, ranks: int, folder: Path) -> Iterator[str]:
    config = recipe(case, new_tokens, ranks, folder)
    synchronous = searched(config, ranks).run(("flattening",)).ranked[0].seconds
    shown = f"| {case}, {config.rollout.sampling.max_new_tokens} tokens | {ranks}"
    yield f"{shown} | synchronous, on all GPUs | {ranks} | {synchronous:.1f} | 1.00 | | |"
    lagged = recipe(case, new_tokens, ranks, folder, lags=True)
    search = searched(lagged, ranks)
    together = lagged.rollout.tensor_parallel
    plans = list(separate(search, ranks, tensor_parallel=together))
    if not plans:
        yield f"{shown} | a sampler of its own | - | does not fit | | | |"
        return
    fastest = min(plans, key=lambda plan: plan.seconds)
    count = len(fastest.plan.sampling.ranks)
    yield (
        f"{shown} | `async_sampling`, lag 1 | {count} | {fastest.seconds:.1f} "
        f"| {synchronous / fastest.seconds:.2f} | | |"
    )
    for lag in LAGS:
        runs = [(streamed(search.costs, plan, lag=lag), plan) for plan in plans]
        best, plan = min(runs, key=lambda run: run[0].step_seconds)
        yield (
            f"{shown} | streaming, lag {lag} | {len(plan.plan.sampling.ranks)} | {best.step_seconds:.1f} "
            f"| {synchronous / best.step_seconds:.2f} | {best.samplers_idle:.0%} | {abs(best.trainers_idle):.0%} |"
        )


if __name__ == "__main__":
    main()
