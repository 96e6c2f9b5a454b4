"""Prompts to experience: sample, score, log-probs, values, rewards, advantages.

Old log-probs come from the training forward over the very micro-batches of the first epoch, so that the first
mini-batch has ratio 1 exactly; with a single update they are that update's own. Rewards are InstructGPT's: the score at
the last response token, less a KL penalty a token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.algorithms.experience import Experience, Layout, Sequences, scatter_rows
from hybrid_rlhf.algorithms.rewards import Answers, Reward
from hybrid_rlhf.algorithms.score_scaling import ScoreScaling
from hybrid_rlhf.configs.batch_plan import MicroBatches
from hybrid_rlhf.configs.ppo import AlgorithmConfig, RolloutConfig
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.engines.hybrid import HybridEngine
from hybrid_rlhf.functional.advantages import gae, shaped_rewards
from hybrid_rlhf.functional.divergences import KL_ESTIMATORS
from hybrid_rlhf.functional.masking import masked_whiten
from hybrid_rlhf.generation.sampling import Completion, SamplingParams, derive_seed
from hybrid_rlhf.models.policy import values_before
from hybrid_rlhf.runtime.timers import Timers


@dataclass(frozen=True)
class Roles:
    """The four roles. No reference: the actor under its adapters."""

    actor: HybridEngine
    critic: ModelEngine
    reward: Reward
    reference: ModelEngine | None


@dataclass(frozen=True)
class Rated:
    """A rollout with its scores. Rows that the reward dropped are gone, so that nothing after counts them."""

    sequences: Sequences
    rows: list[int]
    """Of each sequence, its row in the rollout as it was sampled."""
    scores: Tensor
    """[N] float32, without penalties."""
    metrics: dict[str, float]
    """Of the reward's parts."""


@dataclass(frozen=True)
class Scored:
    """What the roles say of sequences: [N, T], scores [N]; float32, whole on every rank."""

    rated: Rated
    old_logprobs: Tensor
    ref_logprobs: Tensor
    old_values: Tensor
    penalties: Tensor
    """[N], to be subtracted."""

    @property
    def sequences(self) -> Sequences:
        """What was read."""
        return self.rated.sequences

    @property
    def scores(self) -> Tensor:
        """[N] without penalties."""
        return self.rated.scores

    @property
    def penalised(self) -> Tensor:
        """[N] scores with penalties."""
        return self.scores - self.penalties


class Rollout:
    """Samples completions of prompts and has the roles score them."""

    def __init__(
        self,
        roles: Roles,
        *,
        sampling: RolloutConfig,
        algorithm: AlgorithmConfig,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: tuple[int, ...],
        micro_batches: MicroBatches,
        seed: int,
        timers: Timers,
    ) -> None:
        self._roles = roles
        self._config = sampling
        self._algorithm = algorithm
        self._tokenizer = tokenizer
        self._stop = stop_token_ids
        packs = all(
            role.packs for role in (roles.actor, roles.critic, roles.reward, roles.reference) if role is not None
        )
        self._micro_batches = replace(micro_batches, padded=not packs)
        self._seed = seed
        self._timers = timers
        self._world = roles.actor.world
        self.scaling = ScoreScaling(algorithm.score_scaling)

    def sample(self, prompts: Sequence[Mapping[str, Any]], *, step: int) -> Sequences:
        """Completions of all prompts, each group of ranks that generates together sampling its share.

        Args:
            prompts: rows with `input_ids`, the same on every rank.
            step: key of the random streams: prompt i of a step samples alike on any number of ranks.
        """
        world, config = self._world, self._config
        together = self._roles.actor.generation_world
        mine = range(world.rank // together.size, len(prompts), world.size // together.size)
        requests = [
            SamplingParams(
                max_new_tokens=config.max_new_tokens, temperature=config.temperature, top_p=config.top_p,
                top_k=config.top_k, n=config.samples_per_prompt, seed=derive_seed(self._seed, step, index),
            )
            for index in mine
        ]  # fmt: skip
        with self._roles.actor.inference(stop_token_ids=self._stop) as generation, self._timers("generation"):
            completions = generation.generate([prompts[i]["input_ids"] for i in mine], requests)
        told = dict(zip(mine, completions, strict=True)) if together.is_main else {}
        gathered = world.all_gather_objects(told)
        by_prompt = {index: samples for part in gathered for index, samples in part.items()}
        pairs = [(list(prompts[i]["input_ids"]), sample) for i in range(len(prompts)) for sample in by_prompt[i]]
        return _sequences(pairs, world.device)

    def layout(self, sequences: Sequences, *, step: int, epoch: int, mini_batches: int) -> Layout:
        """The mini-batches of an epoch, and this rank's micro-batches of them."""
        return Layout.plan(
            sequences,
            mini_batches=mini_batches,
            micro_batches=self._micro_batches,
            rank=self._world.rank,
            ranks=self._world.size,
            seed=(self._seed, step, epoch),
        )

    def rate(self, prompts: Sequence[Mapping[str, Any]], sequences: Sequences) -> Rated:
        """Let the reward read the sequences of prompts; what it drops is left out.

        Raises:
            UserError: on every rank, as the reward's parts say.
        """
        whole = self.layout(sequences, step=0, epoch=0, mini_batches=1)
        with self._timers("scoring"):
            report = self._roles.reward(
                sequences, whole.mini_batches[0], lambda: Answers.read(prompts, sequences, self._tokenizer)
            )
        rows = sorted({*range(len(sequences.input_ids))}.difference(report.dropped))
        if not report.dropped:
            return Rated(sequences, rows, report.scores, report.metrics)
        return Rated(sequences.rows(rows), rows, report.scores[rows], report.metrics)

    @torch.no_grad()
    def score(self, rated: Rated, layout: Layout) -> Scored:
        """Let actor, reference and critic read the sequences, in the micro-batches of a layout.

        The actor does not where a rollout makes one update: its log-probs come with that update's own forward, and
        until then the generator's stand for them.
        """
        sequences = rated.sequences
        shape = sequences.input_ids.shape
        device = self._world.device
        old, ref, values = (torch.zeros(shape, device=device) for _ in range(3))
        roles, temperature = self._roles, self._config.temperature
        reads_actor = not self._algorithm.updates_once
        with self._timers("scoring"):
            micro_batches = [micro for mini in layout.mini_batches for micro in mini]
            batches = [(indices, sequences.rows(indices)) for indices in micro_batches]
            with self._reference() as reference:
                for indices, batch in batches:
                    read = reference(batch.input_ids, batch.attention_mask, batch.response_mask, temperature)
                    scatter_rows(ref, indices, read[0])
            for indices, batch in batches:
                ids, mask = batch.input_ids, batch.attention_mask
                if reads_actor:
                    scatter_rows(old, indices, roles.actor(ids, mask, batch.response_mask, temperature)[0])
                scatter_rows(values, indices, values_before(roles.critic(ids, mask)))
            # Each row was filled by one rank and is zero on the others.
            for tensor in (old, ref, values):
                self._world.all_reduce(tensor)
        penalties = (
            self._algorithm.missing_eos_penalty * (~sequences.stopped)
            + self._algorithm.length_penalty * sequences.response_mask.sum(dim=1)
        ).float()
        return Scored(rated, old if reads_actor else sequences.sampled_logprobs, ref, values, penalties)

    def experience(self, scored: Scored, *, kl_coef: float) -> Experience:
        """Rewards, advantages and returns; computed alike on every rank."""
        algorithm, mask = self._algorithm, scored.sequences.response_mask
        rewards = shaped_rewards(
            scores=self.scaling(scored.scores) - scored.penalties,
            kl=KL_ESTIMATORS[algorithm.kl_estimator](scored.old_logprobs, ref_logprobs=scored.ref_logprobs),
            mask=mask,
            kl_coef=kl_coef if algorithm.kl_in == "reward" else 0.0,
            score_clip=algorithm.score_clip,
        )
        if algorithm.whiten_rewards:
            rewards = masked_whiten(rewards, mask=mask, shift_mean=False, unbiased=algorithm.whiten_unbiased)
        advantages, returns = gae(
            rewards, values=scored.old_values, mask=mask, gamma=algorithm.gamma, lam=algorithm.lam
        )
        if algorithm.whiten_advantages:
            advantages = masked_whiten(
                advantages, mask=mask, shift_mean=algorithm.whiten_shift_mean, unbiased=algorithm.whiten_unbiased
            )
        return Experience(
            scored.sequences, scored.old_logprobs, scored.ref_logprobs, scored.old_values, scored.penalised, rewards,
            advantages, returns,
        )  # fmt: skip

    @contextlib.contextmanager
    def _reference(self) -> Iterator[ModelEngine]:
        reference = self._roles.reference
        with self._roles.actor.reference() if reference is None else reference.on_device():
            yield self._roles.actor if reference is None else reference


def _sequences(pairs: Sequence[tuple[list[int], Completion]], device: torch.device) -> Sequences:
    """Prompts and completions [N] as right-padded tensors."""
    width = max(len(prompt) + len(completion.token_ids) for prompt, completion in pairs)
    shape = (len(pairs), width)
    ids = torch.zeros(shape, dtype=torch.long)
    attention, response = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    sampled, drawn = torch.zeros(2, *shape)
    for row, (prompt, completion) in enumerate(pairs):
        start, end = len(prompt), len(prompt) + len(completion.token_ids)
        ids[row, :end] = torch.tensor(prompt + completion.token_ids)
        attention[row, :end] = True
        response[row, start:end] = True
        sampled[row, start:end] = torch.tensor(completion.logprobs)
        drawn[row, start:end] = torch.tensor(completion.sampling_logprobs)
    stopped = torch.tensor([completion.finish_reason == "stop" for _, completion in pairs])
    return Sequences(*(x.to(device) for x in (ids, attention, response, sampled, drawn, stopped)))
