"""What a step learns from: which completions, from how many prompts, and what becomes of the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from datasets import Dataset

from hybrid_rlhf.algorithms.collection import Collector, NothingToLearn
from hybrid_rlhf.algorithms.experience import Experience, Layout, Sequences
from hybrid_rlhf.algorithms.on_policy import ON_POLICY_ALGORITHMS
from hybrid_rlhf.algorithms.scoring import Rated, score_penalties
from hybrid_rlhf.configs.batch_plan import MicroBatches
from hybrid_rlhf.configs.cli import parse_config
from hybrid_rlhf.configs.on_policy import AlgorithmConfig
from hybrid_rlhf.configs.ppo import PPOConfig
from hybrid_rlhf.data.loaders import RowStream

ROWS = 23
SAMPLES = 3


def sequences(lengths: list[int], *, mark: list[int] | None = None, stopped: bool = True) -> Sequences:
    """Prompts of one token, that says which prompt it is, and responses of some lengths."""
    width = 1 + max(lengths)
    attention = torch.arange(width) < 1 + torch.tensor(lengths)[:, None]
    ids = torch.zeros(attention.shape, dtype=torch.long)
    ids[:, 0] = torch.tensor(mark or [0] * len(lengths))
    response = attention & (torch.arange(width) > 0)
    logprobs = -1.0 * response
    ended = torch.full((len(lengths),), stopped)
    return Sequences(ids, attention, response, logprobs, logprobs, ended, torch.zeros_like(ids))


class Scripted:
    """A rollout whose scores are known: of prompt p all alike unless p is in `mixed`."""

    def __init__(self, mixed: set[int]) -> None:
        self.mixed = mixed
        self.sampled: list[tuple[int, int, list[int]]] = []
        self.sampler = self

    def sample(self, prompts: Any, *, step: int, first: int = 0, greedy: bool) -> Sequences:
        marks = [prompt["input_ids"][0] for prompt in prompts]
        self.sampled.append((step, first, marks))
        each = SAMPLES + greedy
        return sequences(
            [2 + mark % 3 for mark in marks for _ in range(each)], mark=[m for m in marks for _ in range(each)]
        )

    def rate(self, prompts: Any, found: Sequences, *, first: int, greedy: bool, refill: bool) -> Rated:
        count = len(found.input_ids)
        row = torch.arange(count)
        marks = found.input_ids[:, 0]
        mixed = torch.tensor([int(mark) in self.mixed for mark in marks])
        scores = torch.where(mixed, (row % SAMPLES).float(), 1.0)
        nothing = torch.zeros(count)
        return Rated(
            found,
            first + row // SAMPLES,
            scores,
            nothing,
            {"reward/x/mean": float(scores.mean()), "reward/x/dropped": 1.0},
        )


def collector(
    mixed: set[int], *, per_step: int = 4, name: str = "dapo", **changes: Any
) -> tuple[Collector, Scripted, RowStream]:
    config = replace(parse_config(PPOConfig, ["--algorithm", name]).ppo, **changes)
    rollout = Scripted(mixed)
    data = Dataset.from_list([{"input_ids": [row]} for row in range(ROWS)])
    stream = RowStream(ROWS, epochs=2, seed=1)
    algorithm = ON_POLICY_ALGORITHMS[name](config)
    whole = Collector(rollout, algorithm, prompts=data, stream=stream, per_step=per_step, total_steps=100)  # type: ignore[arg-type]
    return whole, rollout, stream


def test_dynamic_sampling_keeps_every_accepted_group_to_the_end_of_the_data() -> None:
    mixed = {row for row in range(ROWS) if row % 3}
    collect, rollout, stream = collector(mixed, max_refills=100)
    steps = []
    while stream.left:
        try:
            steps.append(collect.collect(len(steps) + 1))
        except NothingToLearn:
            break
    order = [mark for _, _, marks in rollout.sampled for mark in marks]
    assert sorted(order) == sorted([*range(ROWS)] * 2), "each prompt once an epoch"
    accepted = [mark for mark in order if mark in mixed]
    learned = [row for step in steps for row in step.prompts[::SAMPLES]]
    assert learned == accepted, "all of them, in their order"
    assert [len(step.prompts) // SAMPLES for step in steps[:-1]] == [4] * (len(steps) - 1), "full but for the last"
    for step in steps:
        assert step.chosen.sequences.input_ids[:, 0].tolist() == step.prompts
        assert torch.equal(step.chosen.prompts[::SAMPLES].sort().values, step.chosen.prompts[::SAMPLES])
    firsts = [(step, first) for step, first, _ in rollout.sampled]
    assert len(set(firsts)) == len(firsts), "a refill has random streams of its own"
    assert steps[0].metrics["rollout/accepted_prompts"] < 1


def test_a_step_ends_after_so_many_refills_with_what_it_has() -> None:
    collect, rollout, stream = collector({0}, per_step=2, max_refills=3)
    found = []
    while stream.left:
        before = len(rollout.sampled)
        try:
            found.append(len(collect.collect(1).prompts))
        except NothingToLearn as told:
            assert "scores of a prompt's are all alike" in str(told)
            assert told.metrics["rollout/accepted_prompts"] == 0 and told.metrics["objective/scores"] == 1.0
        assert len(rollout.sampled) - before <= 4
    assert found == [SAMPLES, SAMPLES], "prompt 0 of each epoch"


def test_metrics_are_of_all_that_was_sampled() -> None:
    collect, rollout, _ = collector({row for row in range(ROWS) if row % 2}, name="raft")
    found = collect.collect(1)
    assert len(rollout.sampled) == 1 and 0 < len(found.prompts) <= 4
    assert found.prompts == [row for row in rollout.sampled[0][2] if row % 2], "one of each prompt whose scores differ"
    told = found.metrics
    assert told["rollout/chosen_scores"] > told["objective/scores"] == pytest.approx(told["reward/x/mean"])
    assert told["reward/x/dropped"] == 1.0


def test_rated_rows_join_at_their_longest() -> None:
    parts = [
        Rated(
            sequences([1, 3]),
            torch.tensor([0, 0]),
            torch.tensor([1.0, 2.0]),
            torch.zeros(2),
            {"a/mean": 1.0, "a/failures": 2.0},
        ),
        Rated(
            sequences([5, 2, 2, 1]),
            torch.tensor([1, 1, 2, 2]),
            torch.ones(4),
            torch.zeros(4),
            {"a/mean": 4.0, "a/failures": 1.0},
        ),
    ]
    whole = Rated.joined(parts)
    assert whole.sequences.input_ids.shape == (6, 6)
    assert whole.sequences.lengths.tolist() == [2, 4, 6, 3, 3, 2]
    assert whole.metrics == {"a/mean": pytest.approx(3.0), "a/failures": 3.0}
    some = whole.select(torch.tensor([True, True, False, False, False, True]))
    assert len(whole.select(torch.zeros(6, dtype=torch.bool)).scores) == 0, "none is no mistake"
    assert some.sequences.input_ids.shape == (3, 4) and some.prompts.tolist() == [0, 0, 2]


def test_overlong_completions_are_punished_as_in_the_paper() -> None:
    lengths = [1, 6, 7, 8, 9, 10]
    config = AlgorithmConfig(overlong_fraction=0.4, overlong_penalty=2.0)
    found = score_penalties(sequences(lengths), config, max_new_tokens=10, scores_std=3.0)
    paper = [0 if n <= 6 else ((10 - 4) - n) / 4 for n in lengths]  # eq. 13
    torch.testing.assert_close(found, -2.0 * torch.tensor(paper))
    both = AlgorithmConfig(missing_eos_penalty=0.5, length_penalty=0.25)
    found = score_penalties(sequences([2, 4], stopped=False), both, max_new_tokens=10, scores_std=3.0)
    assert found.tolist() == [1.0, 1.5]


def test_a_completion_without_an_end_loses_a_deviation_of_the_scores() -> None:
    found = score_penalties(sequences([2, 4], stopped=False), AlgorithmConfig(), max_new_tokens=10, scores_std=3.0)
    assert found.tolist() == [3.0, 3.0]
    found = score_penalties(sequences([2, 4]), AlgorithmConfig(), max_new_tokens=10, scores_std=3.0)
    assert found.tolist() == [0.0, 0.0]


def test_a_stream_gives_each_row_once_an_epoch_and_goes_on_where_it_was() -> None:
    stream = RowStream(5, epochs=3, seed=7)
    taken = [stream.take(4) for _ in range(5)]
    assert [len(rows) for rows in taken] == [4, 4, 4, 3, 0] and stream.left == 0
    flat = [row for rows in taken for row in rows]
    epochs = [flat[i : i + 5] for i in (0, 5, 10)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs) and epochs[0] != epochs[1]
    again = RowStream(5, epochs=3, seed=7)
    again.take(6)
    later = RowStream(5, epochs=3, seed=7)
    later.load_state_dict(again.state_dict())
    assert later.take(20) == flat[6:]


def test_neighbours_stay_in_one_micro_batch() -> None:
    rows = sequences([1, 9, 2, 2, 7, 3, 5, 5, 1, 1])
    for micro in (MicroBatches(rows=1), MicroBatches(rows=4), MicroBatches(rows=None, tokens=12)):
        seen: list[int] = []
        for rank in range(2):
            layout = Layout.plan(rows, mini_batches=2, micro_batches=micro, rank=rank, ranks=2, seed=[3], together=2)
            for part in (part for mini in layout.mini_batches for part in mini):
                assert len(part) % 2 == 0
                for first, second in zip(part[::2], part[1::2], strict=True):
                    assert (first is None and second is None) or (second == first + 1 and first % 2 == 0)  # type: ignore[operator]
                seen += [row for row in part if row is not None]
            assert sum(layout.sizes) == 10 and sum(layout.counts) == 36
        assert sorted(seen) == list(range(10))


def test_experience_can_leave_rows_out() -> None:
    rows = sequences([1, 5, 3])
    values = torch.arange(18.0).view(3, 6)
    experience = Experience(rows, values, torch.tensor([1.0, 2.0, 3.0]), values, values, ref_logprobs=values)
    kept = experience.rows([0, 2])
    assert kept.scores.tolist() == [1.0, 3.0] and kept.sequences.lengths.tolist() == [2, 4]
    assert torch.equal(kept.ref_logprobs, values[[0, 2], :4]) and kept.old_values is None  # type: ignore[arg-type]
    again = Experience.from_tensors(kept.tensors(), torch.device("cpu"))
    assert again.old_values is None and torch.equal(again.advantages, kept.advantages)
