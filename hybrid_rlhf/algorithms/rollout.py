"""Prompts to experience: sample, rate, select, log-probs, values, rewards, advantages.

Old log-probs come from the training forward over the very micro-batches of the first epoch, so that the first
mini-batch has ratio 1 exactly; with a single update they are that update's own. Rewards are InstructGPT's: the score at
the last response token, less a KL penalty a token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.algorithms.environments import Player
from hybrid_rlhf.algorithms.episodes import episode_metrics
from hybrid_rlhf.algorithms.experience import Experience, Layout, Sequences, scatter_rows
from hybrid_rlhf.algorithms.on_policy import Judged, OnPolicyAlgorithm
from hybrid_rlhf.algorithms.prompt_sampling import PromptSampler
from hybrid_rlhf.algorithms.rewards import Answers
from hybrid_rlhf.algorithms.roles import Roles
from hybrid_rlhf.algorithms.score_scaling import ScoreScaling
from hybrid_rlhf.algorithms.scoring import Rated, Scored, score_penalties
from hybrid_rlhf.configs.batch_plan import MicroBatches
from hybrid_rlhf.configs.rollout import RolloutConfig
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.functional.advantages import shaped_rewards
from hybrid_rlhf.functional.divergences import KL_ESTIMATORS
from hybrid_rlhf.functional.masking import masked_whiten
from hybrid_rlhf.models.policy import values_before
from hybrid_rlhf.runtime.timers import Timers


class Rollout:
    """Samples completions of prompts and has the roles score them."""

    def __init__(
        self,
        roles: Roles,
        *,
        sampling: RolloutConfig,
        algorithm: OnPolicyAlgorithm,
        reads_reference: bool = True,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: tuple[int, ...],
        micro_batches: MicroBatches,
        seed: int,
        timers: Timers,
        player: Player | None = None,
    ) -> None:
        self._roles, self._config, self._reads_reference = roles, sampling, reads_reference
        self._algorithm, self._tokenizer = algorithm, tokenizer
        self._micro_batches = replace(micro_batches, padded=not roles.packs)
        self._seed, self._timers = seed, timers
        self._world = roles.actor.world
        self.sampler = PromptSampler(
            roles.actor,
            sampling,
            stop_token_ids=stop_token_ids,
            seed=seed,
            timers=timers,
            tokenizer=tokenizer,
            player=player,
        )
        self.scaling = ScoreScaling(algorithm.config.score_scaling)

    def sample(
        self, prompts: Sequence[Mapping[str, Any]], *, step: int, first: int = 0, greedy: bool = False,
        shown_as: str | None = None,
    ) -> Sequences:  # fmt: skip
        """See PromptSampler."""
        return self.sampler.sample(prompts, step=step, first=first, greedy=greedy, shown_as=shown_as)

    def layout(
        self, sequences: Sequences, *, step: int = 0, epoch: int = 0, mini_batches: int = 1, together: int = 1
    ) -> Layout:
        """The mini-batches of an epoch, and this rank's micro-batches of them."""
        return Layout.plan(
            sequences,
            mini_batches=mini_batches,
            micro_batches=self._micro_batches,
            rank=self._world.rank,
            ranks=self._world.size,
            seed=(self._seed, step, epoch),
            together=together,
        )

    def rate(
        self, prompts: Sequence[Mapping[str, Any]], sequences: Sequences, *, first: int = 0, greedy: bool = False,
        refill: bool = False,
    ) -> Rated:  # fmt: skip
        """Let the reward read the sequences of prompts, equally many of each; what it drops is left out.

        Args:
            prompts: rows, the same on every rank.
            sequences: completions, neighbours those of one prompt.
            first: place in the step of the first prompt.
            greedy: whether the last of each prompt is greedy; a prompt without it is dropped.
            refill: of a rollout that has others, so that none need be left.

        Raises:
            UserError: on every rank, as the reward's parts say.
        """
        layout = self.layout(sequences)
        with self._timers("scoring"):
            report = self._roles.reward(
                sequences,
                layout.mini_batches[0],
                lambda: Answers.read(prompts, sequences, self._tokenizer),
                may_drop_all=refill,
            )
        count, device = len(sequences.input_ids), self._world.device
        kept = torch.ones(count, dtype=torch.bool, device=device)
        kept[report.dropped] = False
        each, row = count // len(prompts), torch.arange(count, device=device)
        scores = report.scores
        if sequences.turn_rewards is not None:
            scores = scores + sequences.turn_rewards.sum(dim=1)
        penalties = score_penalties(
            sequences, self._algorithm.config, max_new_tokens=self._config.max_new_tokens,
            scores_std=self.scaling.scaled_std(scores[kept]),
        )  # fmt: skip
        metrics = {**report.metrics, **episode_metrics(sequences)}
        whole = Rated(sequences, first + row // each, scores, penalties, metrics)
        if not greedy:
            return whole.select(kept)
        last = row % each == each - 1
        kept &= kept[last][row // each]
        return replace(whole.select(kept & ~last), greedy=whole.select(kept & last))

    @torch.no_grad()
    def score(self, rated: Rated, layout: Layout) -> Scored:
        """Let actor, reference and critic read the sequences, in the micro-batches of a layout.

        The actor does not where a rollout makes one update: its log-probs come with that update's own forward, and
        until then the generator's stand for them, unless older weights sampled and a KL to the reference needs the
        actor's own, or a loss divides by the tokens that a correction keeps.
        """
        sequences, roles, temperature = rated.sequences, self._roles, self._config.temperature
        micro_batches = [micro for mini in layout.mini_batches for micro in mini]
        batches = [(indices, sequences.rows(indices)) for indices in micro_batches]
        old, ref, values = sequences.sampled_logprobs, None, None
        with self._timers("scoring"):
            if self._reads_reference:
                with self._reference() as reference:
                    ref = self._read(batches, sequences, lambda batch: _logprobs(reference, batch, temperature))
            stale = bool(sequences.stale_updates(roles.actor.weight_version))
            if (stale and self._reads_reference) or self._algorithm.config.reads_old_logprobs:
                old = self._read(batches, sequences, lambda batch: _logprobs(roles.actor, batch, temperature))
            if (critic := roles.critic) is not None:
                values = self._read(
                    batches, sequences, lambda batch: values_before(critic(batch.input_ids, batch.attention_mask))
                )
        return Scored(rated, old, ref, values)

    def _read(
        self,
        batches: Sequence[tuple[list[int | None], Sequences]],
        whole: Sequences,
        read: Callable[[Sequences], Tensor],
    ) -> Tensor:
        """[N, T] what is read of each row, whole on every rank."""
        found = torch.zeros(whole.input_ids.shape, device=self._world.device)
        for indices, batch in batches:
            scatter_rows(found, indices, read(batch))
        return self._world.all_reduce(found)  # each row was filled by one rank and is zero on the others

    def experience(self, scored: Scored, *, kl_coef: float) -> Experience:
        """Rewards, advantages and returns; computed alike on every rank."""
        config, rated, mask = self._algorithm.config, scored.rated, scored.sequences.response_mask
        kl = torch.zeros_like(scored.old_logprobs)
        if scored.ref_logprobs is not None and config.kl_in == "reward":
            kl = KL_ESTIMATORS[config.kl_estimator](scored.old_logprobs, ref_logprobs=scored.ref_logprobs)
        scores = self.scaling(rated.scores) - rated.penalties
        earned = rated.sequences.turn_rewards
        rewards = shaped_rewards(
            scores=scores, kl=kl, mask=mask, kl_coef=kl_coef, score_clip=config.score_clip,
            earned=None if earned is None else self.scaling.share(earned),
        )  # fmt: skip
        if config.whiten_rewards:
            rewards = masked_whiten(rewards, mask=mask, shift_mean=False, unbiased=config.whiten_unbiased)
        estimate = self._algorithm.estimate(
            Judged(rewards, mask, rated.prompts, scored.old_values, self._greedy_scores(rated))
        )
        advantages = estimate.advantages
        if config.whiten_advantages:
            advantages = masked_whiten(
                advantages, mask=mask, shift_mean=config.whiten_shift_mean, unbiased=config.whiten_unbiased
            )
        return Experience(
            scored.sequences, scored.old_logprobs, rated.penalised, rewards, advantages, scored.ref_logprobs,
            scored.old_values, estimate.returns,
            None if config.score_clip is None else scores.abs() > config.score_clip,
        )  # fmt: skip

    def _greedy_scores(self, rated: Rated) -> Tensor | None:
        """[N] of the greedy completion of each one's prompt, as its own score is taken."""
        if (greedy := rated.greedy) is None:
            return None
        scores, most = self.scaling.scaled(greedy.scores) - greedy.penalties, self._algorithm.config.score_clip
        scores = scores if most is None else scores.clamp(-most, most)
        return scores[torch.searchsorted(greedy.prompts, rated.prompts)]

    @contextlib.contextmanager
    def _reference(self) -> Iterator[ModelEngine]:
        reference = self._roles.reference
        with self._roles.actor.reference() if reference is None else reference.on_device():
            yield self._roles.actor if reference is None else reference


def _logprobs(engine: ModelEngine, batch: Sequences, temperature: float) -> Tensor:
    logprobs: Tensor = engine(batch.input_ids, batch.attention_mask, batch.response_mask, temperature)[0]
    return logprobs
