"""The parts of speculative decoding: which tokens are kept, where drafts come from, and when they are switched off."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rlhf.generation import Drafter, GenerationEngine, SamplingParams
from hybrid_rlhf.generation.batching.decode_batch import DecodeBatch, sampling_mode
from hybrid_rlhf.generation.batching.requests import Request
from hybrid_rlhf.generation.batching.sampler import Sampler
from hybrid_rlhf.generation.drafting.memory import CompletionMemory
from hybrid_rlhf.generation.drafting.places import DraftPlaces
from hybrid_rlhf.generation.drafting.sources import NGramDrafts, NGrams, PreviousDrafts
from hybrid_rlhf.generation.drafting.trial import KEPT_STEPS, MEASURED_STEPS, DraftTrial
from hybrid_rlhf.generation.sampling import uniform_stream
from hybrid_rlhf.runtime.world import solo_world
from tests.support.generation import PROMPTS, requests_for, token_ids_of
from tests.support.tiny import tiny_model

CPU = torch.device("cpu")


def test_tokens_are_kept_up_to_the_first_that_differs() -> None:
    requests = requests_for([SamplingParams(repetition_penalty=1.1)] * 4, prompt=(1, 3))
    table = DecodeBatch.of(requests, vocab_size=20, device=CPU)
    table.append(torch.tensor([10, 11, 12, 13]))
    places = DraftPlaces.of([[5, 6], [], [7, 7, 7], [8]], CPU)
    spread = places.spread(table)
    assert spread.token.tolist() == [10, 5, 6, 11, 12, 7, 7, 7, 13, 8]
    assert spread.position.tolist() == [2, 3, 4, 2, 2, 3, 4, 5, 2, 3]
    assert spread.drawn.tolist() == [1, 2, 3, 1, 1, 2, 3, 4, 1, 2]
    assert spread.uniform[:3].tolist() == requests[0].uniforms[1:4].tolist()
    assert spread.seen is not None and table.seen is not None
    seen = [set(row.nonzero().flatten().tolist()) - {1, 3} for row in spread.seen]
    assert seen == [{10}, {10, 5}, {10, 5, 6}, {11}, {12}, {12, 7}, {12, 7}, {12, 7}, {13}, {13, 8}]
    kept = places.accept(table, torch.tensor([5, 6, 9, 4, 7, 2, 7, 7, 9, 8]))
    assert kept.tolist() == [True, True, True, True, True, True, False, False, True, False]
    assert table.token.tolist() == [9, 4, 2, 9]
    assert table.drawn.tolist() == [4, 2, 3, 2] and table.position.tolist() == [5, 3, 4, 3]
    seen = [set(row.nonzero().flatten().tolist()) - {1, 3} for row in table.seen]
    assert seen == [{10, 5, 6, 9}, {11, 4}, {12, 7, 2}, {13, 9}]


def test_completions_with_drafts_have_the_frequencies_of_the_model() -> None:
    """Three tokens of a Markov chain, drafted at random: all 27 completions against the product of probabilities."""
    generator = torch.Generator().manual_seed(0)
    logits = 1.5 * torch.randn(3, 3, generator=generator)
    draws = 30_000
    requests = [Request((0,), row, SamplingParams(), frozenset(), uniform_stream(5, row, 8)) for row in range(draws)]
    table = DecodeBatch.of(requests, vocab_size=3, device=CPU)
    sampler = Sampler(3, sampling_mode(requests), solo_world(CPU))
    completions: list[list[int]] = [[] for _ in requests]
    table.token.zero_()
    for _ in range(3):
        drafts = torch.randint(0, 3, (draws, 2), generator=generator).tolist()
        places = DraftPlaces.of(drafts, CPU)
        placed = places.spread(table)
        drawn = sampler(logits[placed.token], placed).tokens
        kept = places.accept(table, drawn)
        for row, token in zip(places.rows[kept].tolist(), drawn[kept].tolist(), strict=True):
            completions[row].append(token)
    counts = Counter(tuple(tokens[:3]) for tokens in completions)
    probs = logits.softmax(dim=-1).double()
    statistic = 0.0
    for tokens in itertools.product(range(3), repeat=3):
        expected = draws * float(probs[0, tokens[0]] * probs[tokens[0], tokens[1]] * probs[tokens[1], tokens[2]])
        statistic += (counts[tokens] - expected) ** 2 / expected
    assert statistic < 26 + 4 * (2 * 26) ** 0.5, "4 deviations of chi-square"
    assert sum(map(len, completions)) > 3.5 * draws, "drafts are accepted"


@given(tokens=st.lists(st.integers(0, 3), max_size=60))
def test_the_longest_end_that_occurred_before_is_found(tokens: list[int]) -> None:
    """Against a search through everything; beyond the latest occurrences of two tokens, none is remembered."""
    ngrams = NGrams()
    grown: list[int] = []
    for token in tokens:
        grown.append(token)
        ngrams.add(grown, len(grown) - 1)
    places = [place for place in range(2, len(tokens)) if tokens[place - 2 : place] == tokens[-2:]][-8:]
    best, longest = None, 1
    for place in places:
        same = max(n for n in range(2, min(4, place) + 1) if tokens[place - n : place] == tokens[len(tokens) - n :])
        if same >= longest:
            best, longest = place, same
    found = ngrams.find(tokens)
    assert (None if found is None else found[1]) == best


def asked(prompt: Sequence[int], samples: int = 1) -> list[Request]:
    return [Request(prompt, 0, SamplingParams(), frozenset(), uniform_stream(0, i, 50)) for i in range(samples)]


def sample(source: NGramDrafts | PreviousDrafts, request: Request, *tokens: int) -> None:
    for token in tokens:
        request.append(token, -1.0, -1.0)
    source.observe(request)


def test_ngrams_come_from_the_prompt_the_row_itself_and_its_group() -> None:
    first, second = asked([1, 2, 3, 4, 5, 6], samples=2)
    source = NGramDrafts([first, second])
    sample(source, first, 2, 3)
    assert source.propose(first, 4) == [4, 5, 6], "of the prompt, to its end"
    sample(source, first, 9, 8, 7)
    assert source.propose(first, 4) == []
    sample(source, second, 9, 8)
    assert source.propose(second, 4) == [7], "of another sample"
    sample(source, second, 9, 8)
    assert source.propose(second, 4) == [9, 8, 9, 8], "of itself: a repetition goes on"
    for request in (first, second):
        sample(source, request, *range(50 - len(request.token_ids)))
    assert not source._groups and not source._sequences, "a group that has ended is forgotten"


def test_a_previous_completion_is_followed_left_and_found_again() -> None:
    first, second = asked([1, 2], samples=2)
    source = PreviousDrafts([first, second], {0: [[10, 11, 12, 13, 14, 15, 16], [20, 21, 22, 13, 30]]})
    sample(source, first, 10)
    assert source.propose(first, 3) == [11, 12, 13]
    sample(source, first, 11, 12)
    assert source.propose(first, 3) == [13, 14, 15]
    sample(source, first, 40)
    assert source.propose(first, 3) == [], "it left the completion"
    sample(source, first, 13, 14)
    assert source.propose(first, 3) == [15, 16], "where its last two tokens are"
    sample(source, second, 20)
    assert source.propose(second, 3) == [21, 22, 13], "the second sample begins with the second completion"
    sample(source, second, 11)
    assert source.propose(second, 3) == []
    sample(source, second, 12)
    assert source.propose(second, 3) == [13, 14, 15], "and goes on with the first"


def test_the_memory_of_completions_is_bounded_and_forgets_the_oldest() -> None:
    memory = CompletionMemory(most_tokens=20)
    for prompt in (1, 2, 3):
        memory.store([prompt, 5], [[7] * 3, [8] * 4])
    assert memory.recall([1, 5]) == [] and memory.recall([3, 5]) == [[7] * 3, [8] * 4]
    assert memory.tokens == 18 and len(memory) == 2
    memory.store([2, 5], [[9]])
    assert memory.recall([2, 5]) == [[9]] and memory.tokens == 12
    memory.store([4], [[6] * 30])
    assert memory.tokens == 0 and not len(memory), "what is larger than the memory is not kept"


class Clock:
    """Seconds that pass as the trial's owner says."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def trial_of(steps: int, *, drafted_seconds: float, tokens: int) -> tuple[DraftTrial, list[bool]]:
    """A trial of so many steps of 10 rows; a plain step takes a second."""
    clock = Clock()
    trial, kinds = DraftTrial(clock), []
    trial.begin()
    trial.record(rows=0, tokens=0, prefill=True, world=solo_world(CPU))
    for _ in range(steps):
        kinds.append(trial.drafting)
        clock.now += drafted_seconds if trial.drafting else 1.0
        trial.record(rows=10, tokens=tokens if trial.drafting else 10, prefill=False, world=solo_world(CPU))
    return trial, kinds


@pytest.mark.parametrize(
    ("tokens", "drafted_seconds", "pays"), [(16, 1.5, True), (14, 1.5, False), (10, 0.5, False), (11, 0.5, True)]
)
def test_drafts_stay_on_if_a_row_keeps_more_tokens_in_the_same_time(
    tokens: int, drafted_seconds: float, pays: bool
) -> None:
    window = 1 + MEASURED_STEPS  # the first step after a change is not measured
    kept = KEPT_STEPS + pays
    trial, kinds = trial_of(3 * window + kept + 1, drafted_seconds=drafted_seconds, tokens=tokens)
    assert trial.pays == pays
    expected = [True] * window + [False] * window + [pays] * kept
    assert kinds[: len(expected)] == expected
    assert kinds[len(expected)], "measured again"


def test_times_of_prefills_and_of_pauses_between_calls_are_not_used() -> None:
    clock = Clock()
    trial = DraftTrial(clock)
    for call in range(2):
        trial.begin()
        clock.now += 1000
        for step in range(8):
            clock.now += 100.0 if step % 3 == 0 else 1.5 if trial.drafting else 1.0
            trial.record(rows=10, tokens=16 if trial.drafting else 10, prefill=step % 3 == 0, world=solo_world(CPU))
        assert trial.pays == (None if call == 0 else True)


def test_a_useless_draft_is_switched_off_in_the_run_and_tokens_stay() -> None:
    class Slow(Clock):
        """Each look at the clock is a second later."""

        def __call__(self) -> float:
            self.now += 1.0
            return self.now

    engine = GenerationEngine.from_model(tiny_model(), stop_token_ids=())
    params = SamplingParams(max_new_tokens=80, seed=1, n=2)
    expected = engine.generate(PROMPTS, params)
    drafter = Drafter("previous", clock=Slow())
    for prompt, samples in zip(PROMPTS, expected, strict=True):  # drafts begin at the second token, and are wrong
        drafter.remember([(prompt, [sample.token_ids[0], *([3] * 79)]) for sample in samples])
    before = engine.work
    assert token_ids_of(engine.generate(PROMPTS, params, drafter=drafter)) == token_ids_of(expected)
    assert drafter.trial is not None and drafter.trial.pays is False and not drafter.trial.drafting
    work = engine.work - before
    assert 0 < work.drafted <= (1 + MEASURED_STEPS) * 2 * len(PROMPTS) * 4 and work.accepted < 10
