"""Episodes whose turns are decoded together: each waits until all others have taken theirs or have ended.

A turn's batch then does not depend on the time that environments take, so neither do the last bits of its log-probs:
a run repeats and resumes bit for bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from hybrid_rlhf.generation.batching.images import GivenImages
from hybrid_rlhf.generation.engine import GenerationEngine
from hybrid_rlhf.generation.open_batch import Deliver, PromptBatch, StreamedToken, Submission
from hybrid_rlhf.generation.sampling import Completion, SamplingParams, per_request
from hybrid_rlhf.rl.environments.episodes import EpisodeRunner
from hybrid_rlhf.rl.rollouts.in_flight import AssignedPrompt
from hybrid_rlhf.rl.types import Episode
from hybrid_rlhf.runtime.observability.timers import Timers
from hybrid_rlhf.runtime.world import World

_Asked = tuple[list[int], SamplingParams, GivenImages, bool]
"""Tokens of a turn, how it is sampled, its images, and true if the experts of tokens are recorded."""


@dataclass(eq=False)
class _Turns:
    """Answers the turns of one episode."""

    wake: Callable[[], None]
    records_routes: bool
    stop_token_ids: frozenset[int]
    max_positions: int | None
    asked: tuple[list[int], SamplingParams, GivenImages] | None = None
    """The turn that waits."""
    episode: Future[list[Episode]] = field(default_factory=Future)
    failure: BaseException | None = None
    _deliver: Deliver = lambda tokens: None

    def submit(self, batch: PromptBatch, deliver: Deliver) -> Submission:
        """Complete one prompt; its last token is delivered, with the completion."""
        (ids,) = batch.prompts
        (params,) = per_request(batch.sampling, 1)
        self._deliver = deliver
        self.asked = list(ids), params, batch.images[0]
        self.wake()
        return Submission({}, deliver)

    def answer(self, completion: Completion) -> None:
        """Deliver the turn."""
        self.asked = None
        last = completion.logprobs[-1], completion.sampling_logprobs[-1]
        self._deliver([StreamedToken(0, 0, completion.token_ids[-1], *last, completion.finish_reason, (), completion)])

    def cancel(self, submission: Submission) -> None:
        """Do nothing: a turn is decoded in one call."""


@dataclass
class LockStep:
    """Plays the episodes of a rollout."""

    generation: GenerationEngine
    runner: EpisodeRunner
    together: World
    """Ranks that share the model; the first one has the environments."""
    timers: Timers
    on_completed: Callable[[int], None]
    """Called during the rollout with the number of episodes that have ended since the last call."""
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def play(self, prompts: Sequence[AssignedPrompt]) -> list[list[Episode]]:
        """The n episodes of each prompt, on the first of the ranks that share the model.

        Where failures end the run, the others are incomplete once one has failed.
        """
        if not self.together.is_main:
            asked: list[_Asked] = []
            while asked := self.together.broadcast_object(asked):
                self._generate(asked)
            return [[] for _ in prompts]
        try:
            return self._play(prompts)
        finally:
            self.together.broadcast_object([])

    def _play(self, prompts: Sequence[AssignedPrompt]) -> list[list[Episode]]:
        turns: list[_Turns] = []
        stop, positions = self.generation.stop_token_ids, self.generation.max_positions
        for prompt in prompts:
            for sample in range(prompt.params.n):
                one = _Turns(self._wake, prompt.recorded and self.generation.records_routes, stop, positions)
                one.episode = self.runner.play(prompt.row, prompt.params, sample, one)
                one.episode.add_done_callback(lambda _: self._wake())
                turns.append(one)
        ended = 0
        while not all(one.episode.done() for one in turns):
            with self.timers("environment"), self._changed:
                self._changed.wait_for(lambda: all(one.episode.done() or one.asked is not None for one in turns))
            done = [one.episode.result() for one in turns if one.episode.done()]
            self.on_completed(len(done) - ended)
            ended = len(done)
            if self.runner.stops_on_failure and any(row.failure for rows in done for row in rows):
                break
            waiting = [(one, one.asked) for one in turns if one.asked is not None]
            if not waiting:
                break
            asked = self.together.broadcast_object([(*asked, one.records_routes) for one, asked in waiting])
            for (one, _), completion in zip(waiting, self._generate(asked), strict=True):
                one.answer(completion)
        results = iter(turns)
        return [
            [row for _ in range(prompt.params.n) for row in _ended(next(results).episode, prompt)] for prompt in prompts
        ]

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _generate(self, turns: Sequence[_Asked]) -> list[Completion]:
        with self.timers("generation"):
            completions = self.generation.generate(
                [ids for ids, *_ in turns],
                [params for _, params, *_ in turns],
                images=[images for *_, images, _ in turns],
                record_routes=[records for *_, records in turns],
                on_completed=lambda _: self.on_completed(0),
            )
        return [completion for (completion,) in completions]


def _ended(episode: Future[list[Episode]], prompt: AssignedPrompt) -> list[Episode]:
    """Sequences of an episode; one without tokens if it was not played to its end."""
    return [Episode(list(prompt.row["input_ids"]))] if episode.cancel() else episode.result()
