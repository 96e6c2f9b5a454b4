"""What a step learns from: which completions, from how many prompts, and what becomes of the others."""

from __future__ import annotations

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


CPU = solo_world(torch.device("cpu"))


def completions_of(lengths: list[int], *, mark: list[int] | None = None, stopped: bool = True, **known: Any) -> Rollout:
    """Prompts of one token, that says which prompt it is, and responses of some lengths."""
    width = 1 + max(lengths)
    attention = torch.arange(width) < 1 + torch.tensor(lengths)[:, None]
    ids = torch.zeros(attention.shape, dtype=torch.long)
    ids[:, 0] = torch.tensor(mark or [0] * len(lengths))
    response = attention & (torch.arange(width) > 0)
    ended = torch.full((len(lengths),), stopped)
    return rollout_of(attention, response, input_ids=ids, sampled_logprobs=-1.0 * response, stopped=ended, **known)


class Scripted:
    """A sampler and a scorer whose scores are known: of prompt p all alike unless p is in `mixed`."""

    def __init__(self, mixed: set[int]) -> None:
        self.mixed = mixed
        self.sampled: list[tuple[int, int, list[int]]] = []
        self.fails_in_refills = False
        self.weight_version = 0
        self.world = CPU

    def assigned(self, prompts: Any, *, step: int, greedy: bool) -> list[tuple[Any, bool]]:
        return [(prompt, greedy) for prompt in prompts]

    def complete(self, mine: list[tuple[Any, bool]], waiting: list[Any], *, step: int) -> tuple[Rollout, list[Any]]:
        return self.sample([prompt for prompt, _ in mine], step=step, greedy=mine[0][1]), waiting

    def sample(self, prompts: Any, *, step: int, first: int = 0, greedy: bool, **more: Any) -> Rollout:
        marks = [prompt["input_ids"][0] for prompt in prompts]
        self.sampled.append((step, first, marks))
        if self.fails_in_refills and first:
            assert more == {"may_be_empty": True}
            return completions_of([1]).rows([])
        each = SAMPLES + greedy
        return completions_of(
            [2 + mark % 3 for mark in marks for _ in range(each)],
            mark=[m for m in marks for _ in range(each)],
            groups=torch.arange(len(marks)).repeat_interleave(each),
        )

    def score(self, prompts: Any, found: Rollout, *, first: int, greedy: bool, refill: bool) -> Rollout:
        count = len(found.input_ids)
        row = torch.arange(count)
        marks = found.input_ids[:, 0]
        mixed = torch.tensor([int(mark) in self.mixed for mark in marks])
        scores = torch.where(mixed, (row % SAMPLES).float(), 1.0)
        return replace(
            found,
            groups=first + row // SAMPLES,
            stopped=marks % 3 != 0,
            scores=scores,
            components={"x": scores},
            penalties=torch.zeros(count),
            metrics={"reward/x/mean": float(scores.mean()), "reward/x/dropped": 1.0},
        )


def collector(
    mixed: set[int], *, per_step: int = 4, name: str = "dapo", **changes: Any
) -> tuple[Collector, Scripted, RowStream]:
    config = replace(parse_config(RLConfig, ["--algorithm", name]).algorithm, **changes)
    scripted = Scripted(mixed)
    data = Dataset.from_list([{"input_ids": [row]} for row in range(ROWS)])
    stream = RowStream(ROWS, epochs=2, seed=1)
    algorithm = ALGORITHMS[name](config)
    roles: Any = scripted
    steps = StepStream(roles, prompts=data, stream=stream, per_step=per_step, total_steps=100)
    return Collector(steps, roles, algorithm), scripted, stream


def test_dynamic_sampling_keeps_every_accepted_group_to_the_end_of_the_data() -> None:
    mixed = {row for row in range(ROWS) if row % 3}
    collect, scripted, stream = collector(mixed, dynamic_sampling=DynamicSamplingConfig(max_refills=100))
    steps = []
    while stream.left:
        try:
            steps.append(collect.collect(len(steps) + 1))
        except NothingToLearn:
            break
    order = [mark for _, _, marks in scripted.sampled for mark in marks]
    assert sorted(order) == sorted([*range(ROWS)] * 2), "each prompt once an epoch"
    accepted = [mark for mark in order if mark in mixed]
    learned = [row for step in steps for row in step.prompt_rows[::SAMPLES].tolist()]
    assert learned == accepted, "all of them, in their order"
    assert [len(step) // SAMPLES for step in steps[:-1]] == [4] * (len(steps) - 1), "full but for the last"
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
    collect, scripted, _ = collector(
        {row for row in range(ROWS) if row % 3}, dynamic_sampling=DynamicSamplingConfig(max_refills=2)
    )
    scripted.fails_in_refills = True
    found = collect.collect(1)
    assert len(scripted.sampled) == 3 and 0 < len(found) < 4 * SAMPLES, "it learns from what it has"
    assert {*found.prompt_rows.tolist()} < {*scripted.sampled[0][2]}  # type: ignore[union-attr]


def test_metrics_are_of_all_that_was_sampled() -> None:
    collect, scripted, _ = collector({row for row in range(ROWS) if row % 2}, name="raft")
    found = collect.collect(1)
    assert len(scripted.sampled) == 1 and 0 < len(found) <= 4
    taken = scripted.sampled[0][2]
    differing = [row for row in taken if row % 2]
    assert found.prompt_rows.tolist() == differing, "one of each prompt whose scores differ"  # type: ignore[union-attr]
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


def test_overlong_completions_are_punished_as_in_the_paper() -> None:
    lengths = [1, 6, 7, 8, 9, 10]
    config = PenaltiesConfig(overlong_fraction=0.4, overlong=2.0)
    found = score_penalties(completions_of(lengths), config, max_new_tokens=10, scores_std=3.0)
    paper = [0 if n <= 6 else ((10 - 4) - n) / 4 for n in lengths]  # eq. 13
    torch.testing.assert_close(found, -2.0 * torch.tensor(paper))
    both = PenaltiesConfig(missing_eos=0.5, length=0.25)
    found = score_penalties(completions_of([2, 4], stopped=False), both, max_new_tokens=10, scores_std=3.0)
    assert found.tolist() == [1.0, 1.5]


def test_a_completion_without_an_end_loses_a_deviation_of_the_scores() -> None:
    found = score_penalties(
        completions_of([2, 4], stopped=False), PPOConfig().penalties, max_new_tokens=10, scores_std=3.0
    )
    assert found.tolist() == [3.0, 3.0]
    found = score_penalties(completions_of([2, 4]), PPOConfig().penalties, max_new_tokens=10, scores_std=3.0)
    assert found.tolist() == [0.0, 0.0]


def test_neighbours_stay_in_one_micro_batch() -> None:
    rollout = completions_of([1, 9, 2, 2, 7, 3, 5, 5, 1, 1])
    for micro in (MicroBatches(rows=1), MicroBatches(rows=4), MicroBatches(rows=None, tokens=12)):
        seen: list[int] = []
        for rank in range(2):
            plan = MiniBatchPlanner(micro, seed=3, world=CPU).plan(rollout, mini_batches=2, together=2)
            for part in plan.micro_batches(World(rank, 2, rank, 2, torch.device("cpu"))):
                assert len(part) % 2 == 0
                for first, second in zip(part[::2], part[1::2], strict=True):
                    assert (first is None and second is None) or (second == first + 1 and first % 2 == 0)  # type: ignore[operator]
                seen += [row for row in part if row is not None]
            assert sum(plan.sequences) == 10 and sum(plan.tokens) == 36
        assert sorted(seen) == list(range(10))


def test_the_padding_of_neighbours_counts() -> None:
    """Rows of 8 and 2 tokens take 16 where padding is computed: two such pairs exceed 24, though they have 20."""
    rollout = completions_of([7, 1, 7, 1])
    for padded, parts in ((True, 2), (False, 1)):
        micro = MicroBatches(tokens=24, padded=padded)
        plan = MiniBatchPlanner(micro, seed=0, world=CPU).plan(rollout, together=2)
        assert len(plan.micro_batches(CPU)) == parts


@pytest.mark.parametrize(("ranks", "tensor_parallel"), [(2, 2), (4, 2), (3, 1)])
def test_readers_without_sequence_parallelism_compute_every_row(ranks: int, tensor_parallel: int) -> None:
    """Inference weights compute rows alone; their ranks need not be a multiple of those that train a row together."""
    rollout = completions_of([1, 9, 2, 2, 7, 3])
    plan = MiniBatchPlanner(MicroBatches(rows=1, ranks=2), seed=3, world=CPU).plan(rollout)
    seen: list[int] = []
    for rank in range(0, ranks, tensor_parallel):
        parts = plan.micro_batches(World(rank, ranks, rank, ranks, torch.device("cpu")), tensor_parallel)
        seen += [row for part in parts for row in part if row is not None]
    assert sorted(seen) == list(range(6))
