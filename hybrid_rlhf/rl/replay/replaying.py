"""A recorded step generated again: the run resumes in a scratch folder and stops at the step's rollout.

Resuming is exact (docs/reliability.md), and random streams have keys, so that the rollout is the recorded one bit for
bit, on the same machine with the same number of ranks.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.rules import require
from hybrid_rlhf.loop.non_finite import NonFiniteError
from hybrid_rlhf.rl.algorithms import Algorithm
from hybrid_rlhf.rl.build import PlacementChoice, rl_session
from hybrid_rlhf.rl.parts import RLSession
from hybrid_rlhf.rl.replay.recorded import RecordedStep
from hybrid_rlhf.rl.rollouts.advantages import NothingToLearn
from hybrid_rlhf.rl.rollouts.samples import sample_text, token_arrays, token_rows
from hybrid_rlhf.rl.trainer import RLTrainer
from hybrid_rlhf.rl.types import Batch
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.observability.token_records import TokenRecord


@dataclass(frozen=True)
class ReplayedSample:
    """A sample generated again."""

    index: int
    identical: bool
    """True if its tokens and their log-probs are the recorded ones, bit for bit; without token records, if its text
    is."""
    token_ids: list[int]
    """Tokens of the completion."""
    text: str
    logprobs: list[float | None]
    """Log-probs of the completion's tokens, as reported while sampling; None on observations."""
    prompt_length: int
    """Tokens before the completion."""
    first_difference: int | None
    """Position of the first token that differs, among those of prompt and completion; of the first character of `text`
    where only texts are compared."""
    compared: Literal["tokens", "text"]


@dataclass(frozen=True)
class ReplayedStep:
    """A step up to its rollout, with the models as they were then."""

    recorded: RecordedStep
    session: RLSession
    batch: Batch
    """This rank's rows."""
    texts: list[str]
    """Completions of all rows."""
    arrays: dict[str, np.ndarray]
    """Tokens of all rows, in the format of `TokenRecord.of`."""

    def sample(self, index: int) -> ReplayedSample:
        """A sample of the step beside its record.

        Raises:
            UserError: if there is no such sample.
        """
        row = self.recorded.sample(index)
        before = self.recorded.tokens(index)
        now = self.record(index)
        text = self.texts[index]
        if before is None:
            difference = _first_difference(row["completion"], text)
        else:
            difference = _first_difference(_sampled(before), _sampled(now))
        return ReplayedSample(
            index,
            difference is None,
            now.ids[now.prompt_length :],
            text,
            now.columns["logprobs"][now.prompt_length :],
            now.prompt_length,
            difference,
            "text" if before is None else "tokens",
        )

    def record(self, index: int) -> TokenRecord:
        """The tokens of a sample as they are generated now."""
        require(
            index < len(self.texts),
            f"step {self.recorded.step} has {len(self.texts)} samples when it is replayed, got index {index}: the "
            "run's data or settings have changed",
        )
        return TokenRecord.of(self.arrays, index)


@contextlib.contextmanager
def replayed_step(
    recorded: RecordedStep,
    scratch: Path,
    algorithm_class: type[Algorithm] | None = None,
    choose_placement: PlacementChoice | None = None,
) -> Iterator[ReplayedStep]:
    """Compute a recorded step again, from the nearest checkpoint before it. Every rank calls.

    Args:
        recorded: the step.
        scratch: an empty folder for the resumed run; the folder of the recorded run is only read.
        algorithm_class: the algorithm of a run with a custom one.
        choose_placement: `hybrid_rlhf.planning.automatic.choose_placement`, for a run with `placement: auto`.

    Raises:
        UserError: if the run cannot be resumed, or the step has no rollout when it is replayed.
    """
    config = recorded.resumed_config(scratch)
    with rl_session(config, algorithm_class=algorithm_class, choose_placement=choose_placement) as session:
        trainer = RLTrainer(session)
        lag = session.config.rollout.max_lag
        if lag and session.parts.sampler.outlives_steps and session.run.world.is_main:
            logger.warning(
                "rollout.max_lag %d with an environment, or with a sampler that works while the actor trains: time "
                "decides which weights sample a token, so the replay may differ from the record",
                lag,
            )
        with trainer.running():
            done = trainer.resume() or 0
            for step in range(done + 1, recorded.step + 1):
                session.run.watchdog.begin_step(step)
                if session.run.world.is_main:
                    logger.info("replay: step %d of %d", step - done, recorded.step - done)
                if step < recorded.step:
                    trainer.step(step)
            try:
                batch = trainer.batch(recorded.step)
            except (NothingToLearn, NonFiniteError) as error:
                raise UserError(
                    f"step {recorded.step} has samples in {recorded.folder} and none when it is replayed ({error}): "
                    "the run's data or settings have changed"
                ) from error
            rollout = batch.rollout
            index = rollout.numbered(session.run.world)
            texts = [sample_text(rollout, row, session.tokenizer) for row in range(len(rollout))]
            yield ReplayedStep(
                recorded,
                session,
                batch,
                index.bring(texts, everywhere=True),
                token_arrays(index.bring(token_rows(batch), everywhere=True)),
            )


def _sampled(record: TokenRecord) -> list[tuple[int, float | None]]:
    """Tokens with their log-probs."""
    return list(zip(record.ids, record.columns["logprobs"], strict=True))


def _first_difference(before: Sequence[Any], now: Sequence[Any]) -> int | None:
    pairs = enumerate(itertools.zip_longest(before, now, fillvalue=object()))
    return next((place for place, (old, new) in pairs if old != new), None)
