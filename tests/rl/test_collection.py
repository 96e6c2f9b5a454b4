"""What a step learns from: which completions, from how many prompts, and what becomes of the others."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from hybrid_rlhf.configs.algorithms import PPOConfig
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.algorithm import DynamicSamplingConfig, PenaltiesConfig
from hybrid_rlhf.configs.sections.training import MicroBatches
from hybrid_rlhf.data.loaders import RowStream
from hybrid_rlhf.models.packing.prefixes import SharedRows
from hybrid_rlhf.rl.algorithms import ALGORITHMS
from hybrid_rlhf.rl.mini_batches import MiniBatchPlanner
from hybrid_rlhf.rl.rollouts.advantages import NothingToLearn
from hybrid_rlhf.rl.rollouts.collector import Collector, _joined
from hybrid_rlhf.rl.rollouts.scoring import score_penalties
from hybrid_rlhf.rl.rollouts.stream import StepStream
from hybrid_rlhf.rl.types import Rollout
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.world import World, solo_world
from tests.support.ranks import run_ranks
from tests.support.rl import rollout_of

ROWS = 23
SAMPLES = 3
MIXED = {row for row in range(ROWS) if row % 3}


CPU = solo_world(torch.device("cpu"))


def completions_of(lengths: list[int], *, mark: list[int] | None = None, stopped: bool = True, **known: Any) -> Rollout:
    """Prompts of one token, that says which prompt it is, and responses of some lengths."""
    attention = torch.arange(1 + max(lengths)) < 1 + torch.tensor(lengths)[:, None]
    ids = torch.zeros(attention.shape, dtype=torch.long)
    ids[:, 0] = torch.tensor(mark or [0] * len(lengths))
    response = attention & (torch.arange(attention.shape[1]) > 0)
    return rollout_of(attention, response, input_ids=ids, stopped=torch.full((len(lengths),), stopped), **known)


class Scripted:
    """A sampler and a scorer whose scores are known: of prompt p all alike unless p is in `mixed`."""

    def __init__(self, mixed: set[int]) -> None:
        self.mixed = mixed
        self.sampled: list[tuple[int, int, list[int]]] = []
        self.fails_in_refills = False
        self.weight_version = 0
        self.world = CPU

    def assigned(self, prompts: Any, *, step: int, greedy: bool) -> list[Any]:
        return list(prompts)

    def complete(self, mine: list[Any], waiting: list[Any], *, step: int) -> tuple[Rollout, list[Any]]:
        return self.sample(mine, step=step), waiting

    def sample(self, prompts: Any, *, step: int, first: int = 0, **more: Any) -> Rollout:
        marks = [prompt["input_ids"][0] for prompt in prompts]
        self.sampled.append((step, first, marks))
        if self.fails_in_refills and first:
            assert more["may_be_empty"]
            return completions_of([1]).rows([])
        marks = [mark for mark in marks for _ in range(SAMPLES)]
        groups = torch.arange(len(prompts)).repeat_interleave(SAMPLES)
        return completions_of([2 + mark % 3 for mark in marks], mark=marks, groups=groups)

    def score(self, prompts: Any, found: Rollout, *, first: int, **_: Any) -> Rollout:
        row, marks = torch.arange(len(found)), found.input_ids[:, 0]
        mixed = torch.tensor([int(mark) in self.mixed for mark in marks])
        scores = torch.where(mixed, (row % SAMPLES).float(), 1.0)
        return replace(
            found,
            groups=first + row // SAMPLES,
            stopped=marks % 3 != 0,
            scores=scores,
            components={"x": scores},
            penalties=torch.zeros(len(found)),
            metrics={"reward/x/mean": float(scores.mean()), "reward/x/dropped": 1.0},
        )


def collector(
    mixed: set[int], *, per_step: int = 4, name: str = "dapo", **changes: Any
) -> tuple[Collector, Scripted, RowStream]:
    config = replace(parse_config(RLConfig, ["--algorithm", name]).algorithm, **changes)
    scripted: Any = Scripted(mixed)
    data, stream = Dataset.from_list([{"input_ids": [row]} for row in range(ROWS)]), RowStream(ROWS, epochs=2, seed=1)
    steps = StepStream(scripted, prompts=data, stream=stream, per_step=per_step, total_steps=100)
    return Collector(steps, scripted, ALGORITHMS[name](config)), scripted, stream


def test_dynamic_sampling_keeps_every_accepted_group_to_the_end_of_the_data() -> None:
    collect, scripted, stream = collector(MIXED, dynamic_sampling=DynamicSamplingConfig(max_refills=100))
    steps = []
    with contextlib.suppress(NothingToLearn):
        while stream.left:
            steps.append(collect.collect(len(steps) + 1))
    order = [mark for _, _, marks in scripted.sampled for mark in marks]
    assert sorted(order) == sorted([*range(ROWS)] * 2), "each prompt once an epoch"
    learned = [row for step in steps for row in step.prompt_rows[::SAMPLES].tolist()]
    assert learned == [mark for mark in order if mark in MIXED], "all of them, in their order"
    assert {len(step) // SAMPLES for step in steps[:-1]} == {4}, "full but for the last"
    for step in steps:
        assert torch.equal(step.input_ids[:, 0], step.prompt_rows)
        assert torch.equal(step.groups[::SAMPLES].sort().values, step.groups[::SAMPLES])
    firsts = [(step, first) for step, first, _ in scripted.sampled]
    assert len(set(firsts)) == len(firsts), "a refill has random streams of its own"
    assert steps[0].metrics["rollout/accepted_prompts"] < 1


def test_a_step_ends_after_so_many_refills_with_what_it_has() -> None:
    collect, scripted, stream = collector({0}, per_step=2, dynamic_sampling=DynamicSamplingConfig(max_refills=3))
    found = []
    while stream.left:
        before = len(scripted.sampled)
        try:
            found.append(len(collect.collect(1)))
        except NothingToLearn as told:
            assert "the scores of each prompt are equal" in str(told)
            assert told.metrics["rollout/accepted_prompts"] == 0 and told.metrics["objective/scores"] == 1.0
        assert len(scripted.sampled) - before <= 4
    assert found == [SAMPLES, SAMPLES], "prompt 0 of each epoch"


def test_an_environment_may_fail_in_all_episodes_of_a_refill() -> None:
    collect, scripted, _ = collector(MIXED, dynamic_sampling=DynamicSamplingConfig(max_refills=2))
    scripted.fails_in_refills = True
    found = collect.collect(1)
    assert len(scripted.sampled) == 3 and 0 < len(found) < 4 * SAMPLES, "it learns from what it has"
    assert {*found.prompt_rows.tolist()} < {*scripted.sampled[0][2]}  # type: ignore[union-attr]


def test_metrics_are_of_all_that_was_sampled() -> None:
    collect, scripted, _ = collector({row for row in range(ROWS) if row % 2}, name="raft")
    found = collect.collect(1)
    ((_, _, taken),) = scripted.sampled
    differing = [row for row in taken if row % 2]
    assert found.prompt_rows.tolist() == differing != [], "one of each prompt whose scores differ"  # type: ignore[union-attr]
    told = found.metrics
    assert told["rollout/chosen_scores"] > told["objective/scores"] == pytest.approx(told["reward/x/mean"])
    assert told["reward/x/dropped"] == 1.0
    assert told["completions/mean_length"] == sum(2 + row % 3 for row in taken) / len(taken)
    assert told["completions/clipped_ratio"] == sum(row % 3 == 0 for row in taken) / len(taken)
    assert told["rollout/frac_reward_zero_std"] == pytest.approx(1 - len(differing) / len(taken))


def joined_metrics(world: World) -> dict[str, float]:
    """Rank 1 has all rows of the first part, and one of the second."""
    sizes = [[], [2]] if world.rank == 0 else [[1, 2, 3], [2]]
    metrics = [{"a/mean": 1.0, "a/failures": 2.0}, {"a/mean": 4.0, "a/failures": 1.0}]
    parts = [
        replace(completions_of([1, *lengths]).rows([*range(1, len(lengths) + 1)]), metrics=of_part)
        for lengths, of_part in zip(sizes, metrics, strict=True)
    ]
    return dict(_joined(parts, world).metrics)


def test_metrics_of_joined_rows_count_the_rows_of_all_ranks(tmp_path: Path) -> None:
    """Each rank weighted the parts by its own rows."""
    assert run_ranks(joined_metrics, 2, tmp_path) == [{"a/mean": pytest.approx(11 / 5), "a/failures": 3.0}] * 2


def test_penalties_are_those_of_their_formulas() -> None:
    def penalties(config: PenaltiesConfig | None, lengths: list[int], *, stopped: bool = True) -> list[float]:
        rollout = completions_of(lengths, stopped=stopped)
        return score_penalties(rollout, config, max_new_tokens=10, scores_std=3.0).tolist()

    overlong = PenaltiesConfig(overlong_fraction=0.4, overlong=2.0)
    paper = [0 if n <= 6 else ((10 - 4) - n) / 4 for n in (1, 6, 7, 10)]  # DAPO, eq. 13
    assert penalties(overlong, [1, 6, 7, 10]) == pytest.approx([-2.0 * value for value in paper])
    assert penalties(PenaltiesConfig(missing_eos=0.5, length=0.25), [2, 4], stopped=False) == [1.0, 1.5]
    assert penalties(PPOConfig().penalties, [2, 4], stopped=False) == [3.0, 3.0], "a deviation of the scores"
    assert penalties(PPOConfig().penalties, [2, 4]) == [0.0, 0.0]


@pytest.mark.parametrize("micro", [MicroBatches(rows=1), MicroBatches(rows=4), MicroBatches(rows=None, tokens=12)])
def test_neighbours_stay_in_one_micro_batch(micro: MicroBatches) -> None:
    rollout = completions_of([1, 9, 2, 2, 7, 3, 5, 5, 1, 1])
    plan = MiniBatchPlanner(micro, seed=3, world=CPU).plan(rollout, mini_batches=2, together=2)
    parts = [part for rank in range(2) for part in plan.micro_batches(World(rank, 2, rank, 2, CPU.device))]
    pairs = [pair for part in parts for pair in zip(part[::2], part[1::2], strict=True) if pair != (None, None)]
    assert sorted(pairs) == [(row, row + 1) for row in range(0, 10, 2)]  # type: ignore[type-var]
    assert sum(plan.sequences) == 10 and sum(plan.tokens) == 36


def test_the_padding_of_neighbours_counts() -> None:
    """Rows of 8 and 2 tokens take 16 where padding is computed: two such pairs exceed 24, though they have 20."""
    rollout = completions_of([7, 1, 7, 1])
    for padded, parts in ((True, 2), (False, 1)):
        micro = MicroBatches(tokens=24, padded=padded)
        plan = MiniBatchPlanner(micro, seed=0, world=CPU).plan(rollout, together=2)
        assert len(plan.micro_batches(CPU)) == parts


def test_passes_without_gradient_have_larger_micro_batches() -> None:
    """Those of the updates, in which the actor reads its old log-probs, keep their size: their ratios begin at 1."""
    rollout = completions_of([7] * 16)
    plan = MiniBatchPlanner(MicroBatches(tokens=16, forward_factor=4), seed=0, world=CPU).plan(rollout, mini_batches=2)
    updates = [part for of_update in plan.mini_batches(CPU) for part in of_update]
    assert plan.micro_batches(CPU, as_trained=True) == updates and [len(part) for part in updates] == [2] * 8
    assert [len(part) for part in plan.micro_batches(CPU)] == [8] * 2


@pytest.mark.parametrize(("ranks", "tensor_parallel"), [(2, 2), (4, 2), (3, 1)])
def test_readers_without_sequence_parallelism_compute_every_row(ranks: int, tensor_parallel: int) -> None:
    """Inference weights compute rows alone; their ranks need not be a multiple of those that train a row together."""
    rollout = completions_of([1, 9, 2, 2, 7, 3])
    plan = MiniBatchPlanner(MicroBatches(rows=1, ranks=2), seed=3, world=CPU).plan(rollout)
    worlds = [World(rank, ranks, rank, ranks, CPU.device) for rank in range(0, ranks, tensor_parallel)]
    read = [row for world in worlds for part in plan.micro_batches(world, tensor_parallel) for row in part]
    assert sorted(row for row in read if row is not None) == [*range(6)]


def completions_of_prompts(prompts: int, each: int, *, prompt: int, longest: int, seed: int = 0) -> Rollout:
    """Completions of 1 to `longest` tokens, `each` of prompts of `prompt` tokens."""
    lengths = torch.randint(1, longest + 1, (prompts * each,), generator=torch.Generator().manual_seed(seed))
    real = torch.arange(prompt + longest) < (prompt + lengths)[:, None]
    groups = torch.arange(prompts).repeat_interleave(each)
    ids = torch.where(torch.arange(prompt + longest) < prompt, 5 + groups[:, None], torch.arange(len(groups))[:, None])
    rollout = rollout_of(real, real & (torch.arange(prompt + longest) >= prompt))
    return replace(rollout, input_ids=ids * real, groups=groups)


def tokens_computed(rollout: Rollout, rows: list[int | None]) -> int:
    """Tokens that a model computes of a micro-batch."""
    part = rollout.rows(rows)
    shared = SharedRows.of(part.input_ids, part.attention_mask)
    return int(part.lengths.sum()) if shared is None else len(shared.first)


@pytest.mark.parametrize("mini_batches", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("size", [{"tokens": 200}, {"tokens": 700}, {"rows": 5}])
def test_completions_of_a_prompt_are_neighbours_in_a_micro_batch(
    size: dict[str, Any], ranks: int, mini_batches: int
) -> None:
    """Limits hold with each prompt counted once, and a mini-batch has the rows that it has without."""
    rollout = completions_of_prompts(7, 8, prompt=40, longest=30)
    plans = []
    computed = []
    for shares in (False, True):
        micro = MicroBatches(**{"rows": None, **size}, shares_prefixes=shares)
        plans.append(MiniBatchPlanner(micro, seed=3, world=CPU).plan(rollout, mini_batches=mini_batches))
        by_rank = [plans[-1].mini_batches(World(rank, ranks, rank, ranks, CPU.device)) for rank in range(ranks)]
        assert len({len(parts) for of_rank in by_rank for parts in of_rank}) <= 2, "as many on each rank"
        parts = [part for of_rank in by_rank for mini_batch in of_rank for part in mini_batch]
        assert sorted(row for part in parts for row in part if row is not None) == [*range(56)]
        computed.append(sum(tokens_computed(rollout, part) for part in parts))
        for part in parts:
            assert len(part) <= size.get("rows", 56) and tokens_computed(rollout, part) <= size.get("tokens", 9999)
    assert [[*map(sorted, plan.rows)] for plan in plans][0] == [[*map(sorted, plan.rows)] for plan in plans][1]
    assert computed[1] < 0.75 * computed[0]


@pytest.mark.parametrize(("prompts", "divided"), [(8, 0), (6, 2), (2, 2)])
def test_mini_batches_have_whole_prompts(prompts: int, divided: int) -> None:
    """Else their completions would share nothing. Equal sizes divide some, and all where prompts are too few."""
    rollout = completions_of_prompts(prompts, 8, prompt=5, longest=9)
    planner = MiniBatchPlanner(MicroBatches(rows=4), seed=1, world=CPU)
    plans = [planner.plan(rollout, mini_batches=4, epoch=epoch).rows for epoch in range(2)]
    for rows in plans:
        assert [len(of_part) for of_part in rows] == [2 * prompts] * 4
        parts_of = [sum(any(row // 8 == prompt for row in part) for part in rows) for prompt in range(prompts)]
        assert sum(parts > 1 for parts in parts_of) == divided
        assert prompts == 2 or max(parts_of) <= 2
    assert plans[0] != plans[1], "shuffled in each epoch"


def test_a_step_of_the_gpu_page_has_8_micro_batches_for_28() -> None:
    """64 prompts of 150 tokens x 8 completions of 256, at 32,768 tokens in place of 8,192 (docs/benchmarks/gpu.md)."""
    real = torch.ones(512, 406, dtype=torch.bool)
    rollout = replace(rollout_of(real, real & (torch.arange(406) >= 150)), groups=torch.arange(64).repeat_interleave(8))
    counts = []
    for micro in (MicroBatches(tokens=8192), MicroBatches(tokens=32768, shares_prefixes=True, forward_factor=4)):
        plan = MiniBatchPlanner(micro, seed=0, world=CPU).plan(rollout, mini_batches=4)
        counts.append((sum(map(len, plan.mini_batches(CPU))), len(plan.micro_batches(CPU))))
    assert counts == [(28, 28), (8, 4)]


def test_a_prompt_is_computed_again_where_ranks_would_wait() -> None:
    """Three prompts on two ranks, or one."""
    for prompts in (1, 3):
        rollout = completions_of_prompts(prompts, 8, prompt=20, longest=60)
        micro = MicroBatches(tokens=4096, shares_prefixes=True)
        plan = MiniBatchPlanner(micro, seed=3, world=CPU).plan(rollout)
        loads = [
            sum(tokens_computed(rollout, part) for part in plan.micro_batches(World(rank, 2, rank, 2, CPU.device)))
            for rank in range(2)
        ]
        assert max(loads) < 1.2 * min(loads)


def test_short_prompts_change_no_micro_batch() -> None:
    """Of fewer tokens than a prefix has, or of a small part of them."""
    for prompt, longest in ((10, 5), (20, 1500)):
        rollout = completions_of_prompts(4, 4, prompt=prompt, longest=longest)
        plans = [
            MiniBatchPlanner(MicroBatches(tokens=2000, shares_prefixes=shares), seed=3, world=CPU).plan(rollout)
            for shares in (True, False)
        ]
        assert [*map(sorted, plans[0].micro_batches(CPU))] == [*map(sorted, plans[1].micro_batches(CPU))]


def test_a_model_that_computes_rows_alone_reads_as_many_tokens_at_a_time() -> None:
    rollout = completions_of_prompts(4, 8, prompt=100, longest=10)
    micro = MicroBatches(tokens=300, shares_prefixes=True)
    plan = MiniBatchPlanner(micro, seed=3, world=CPU).plan(rollout)
    lengths = plan.index.lengths
    for shares in (True, False):
        loads = [int(lengths[part].sum()) for part in plan.micro_batches(CPU, 1, shares)]
        assert (max(loads) > 300) == shares
