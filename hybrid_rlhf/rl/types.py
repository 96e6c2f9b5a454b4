"""The tensors of an RL step that a rank holds, in host memory: a `Rollout`, and the `Batch` to learn from.

A rank holds all completions of some prompts (sharing.py); a micro-batch of them has the same type. Models take it from
the host, losses from their device. Recorded experts are stored separately from the other tensors, without padding and
for the completions that have them: they take a byte per mixture and expert, 384 for a token of Qwen3-30B-A3B.

Shapes: N completions of this rank, or of a micro-batch; T time, right-padded; E mixtures of experts, k experts per
token. A tensor describes the token at its own position: logprobs[n, t] of token t, values[n, t] of the state in which
token t is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from hybrid_rlhf.functional.masking import masked_sum
from hybrid_rlhf.generation.sampling import Completion
from hybrid_rlhf.rl.sharing import RowIndex, Rows, with_prefix, without_prefix
from hybrid_rlhf.runtime.world import World

ROUTER_AGREEMENT = "rollout/router_agreement"
DEPTHS = {"first": 0, "1k": 1024, "4k": 4096, "16k": 16384, "64k": 65536}
"""Number of tokens before the first token of each depth; a depth ends where the next begins."""


@dataclass(frozen=True)
class RolloutRoutes:
    """The experts of the first tokens of each completion, its prompt included."""

    experts: Tensor
    """[sum of lengths, E, k] int8 or int16 on the CPU, one completion after the other; -1: not recorded."""
    lengths: Tensor
    """[N] int64 on the CPU; 0 where nothing is recorded."""

    @classmethod
    def of(cls, recorded: Sequence[np.ndarray | None]) -> Self | None:
        """Routes of N completions, [tokens, E, k] or None each; None if none has any."""
        known = [torch.from_numpy(routes) for routes in recorded if routes is not None]
        if not known:
            return None
        lengths = [0 if routes is None else len(routes) for routes in recorded]
        return cls(torch.cat(known), torch.tensor(lengths))

    def padded(self, width: int) -> Tensor:
        """[N, width, E, k]; -1 where nothing is recorded."""
        known = torch.arange(width) < self.lengths[:, None]
        padded = torch.full((*known.shape, *self.experts.shape[1:]), -1, dtype=self.experts.dtype)
        padded[known] = self.experts
        return padded


@dataclass(frozen=True)
class RolloutImages:
    """The images of each completion and its prompt, by their digests (ImageReference)."""

    digests: Tensor
    """[sum of lengths, 16] uint8, those of one completion after the other."""
    lengths: Tensor
    """[N] int64, number of images."""

    @classmethod
    def of(cls, digests: Sequence[Sequence[str]]) -> Self | None:
        """The digests of N completions, in hexadecimal; None if there is no image."""
        lengths = torch.tensor([len(of_row) for of_row in digests])
        content = bytes.fromhex("".join(chain.from_iterable(digests)))
        return cls(torch.tensor([*content], dtype=torch.uint8).view(-1, 16), lengths) if content else None

    @property
    def of_rows(self) -> list[list[str]]:
        """The digests of each completion, in hexadecimal."""
        digests = iter([digest.tobytes().hex() for digest in self.digests.numpy()])
        return [list(islice(digests, length)) for length in self.lengths.tolist()]


@dataclass(frozen=True)
class TeacherPrompts:
    """The prompt with which a teacher reads each completion, in place of the actor's."""

    ids: Tensor
    """[sum of lengths] int64, those of one completion after the other."""
    lengths: Tensor
    """[N] int64."""


# Prefixes of the names of their tensors.
_ROUTES = "routes."
_IMAGES = "images."
_TEACHER_PROMPTS = "teacher_prompts."
_COMPONENTS = "components."


class SampledTokens(NamedTuple):
    """Number of tokens of all completions of a step, selected or not."""

    completions: list[int]
    """Response tokens of each completion; observations do not count."""
    total: int
    """Tokens of all prompts, completions and observations."""


class TrainedTokens(NamedTuple):
    """Number of tokens of all updates of a step."""

    computed: float
    """Real tokens, those that rows share once."""
    shared: float
    """Tokens that were not computed again, as rows share them."""
    passes: float
    """Passes over the step's completions."""


@dataclass
class Episode:
    """One sample of a prompt. Lists have an entry for each token after the prompt, unless stated otherwise."""

    prompt: list[int]
    token_ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    """True for tokens that the actor sampled, false for observations."""
    logprobs: list[float] = field(default_factory=list)
    drawn_logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    """Number of updates of the weights that sampled it."""
    turn_rewards: list[float] = field(default_factory=list)
    """Reward of each turn, at its last token."""
    routes: np.ndarray | None = None
    """[tokens of the prompt and all turns so far, mixtures, experts per token], as in Completion; recorded by the last
    turn, with the experts of earlier tokens as in the keys and values that it reads."""
    stopped: bool = False
    """True if the episode ended by itself, false if it was truncated."""
    failure: str | None = None
    """Why the environment failed; None without a failure."""
    cut_observations: int = 0
    """Number of observations that lost their middle."""
    sample: int | None = None
    """Index among the samples of its prompt, where an episode may have several sequences; otherwise None."""
    images: Sequence[str] = ()
    """Digests of the images of the prompt and of observations, in their order."""

    @classmethod
    def of(cls, prompt: list[int], completion: Completion, images: Sequence[str] = ()) -> Self:
        """A completion of one turn; `images` as above."""
        episode = cls(prompt, images=images)
        episode.add_turn(completion)
        episode.stopped = completion.finish_reason == "stop"
        return episode

    @property
    def ids(self) -> list[int]:
        """All tokens so far."""
        return self.prompt + self.token_ids

    def add_turn(self, completion: Completion) -> None:
        """Append a turn of the actor."""
        self.weight_versions += completion.weight_versions
        self.routes = completion.routes
        self._add(completion.token_ids, completion.logprobs, completion.sampling_logprobs, sampled=True)

    def add_observation(self, token_ids: Sequence[int]) -> None:
        """Append what the actor reads before its next turn."""
        zeros = [0.0] * len(token_ids)
        self.weight_versions += [0] * len(token_ids)
        self._add(token_ids, zeros, zeros, sampled=False)

    def add_reward(self, reward: float) -> None:
        """Add a reward to the last turn."""
        self.turn_rewards[-1] += reward

    def _add(
        self, token_ids: Sequence[int], logprobs: Sequence[float], drawn: Sequence[float], *, sampled: bool
    ) -> None:
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.drawn_logprobs += drawn
        self.sampled += [sampled] * len(token_ids)
        self.turn_rewards += [0.0] * len(token_ids)


@dataclass(frozen=True)
class Rollout(Rows):
    """Prompts with their completions, and what the reward and the models computed for them.

    The sampler fills the tokens; rollouts/scoring.py adds scores, then log-probs and values.
    """

    input_ids: Tensor
    """[N, T] int64."""
    attention_mask: Tensor
    """[N, T] bool, true on real tokens."""
    response_mask: Tensor
    """[N, T] bool, true on what the actor sampled, stop tokens included; false on observations between its turns."""
    sampled_logprobs: Tensor
    """[N, T] float32, log-probs under the actor's full distribution, as reported by the generation engine."""
    drawn_logprobs: Tensor
    """[N, T] float32, log-probs under the distribution sampled from, which top_p or top_k may truncate."""
    stopped: Tensor
    """[N] bool, true if the completion ended by itself."""
    weight_versions: Tensor
    """[N, T] int64, number of updates of the weights that sampled the token; 0 where nothing was sampled."""
    groups: Tensor
    """[N] int64, place of the prompt in the step; completions of one prompt form a group."""
    turn_rewards: Tensor | None = None
    """[N, T] float32, reward of an environment for each turn, at its last token; None without an environment."""
    cut_observations: Tensor | None = None
    """[N] int64, number of observations that lost their middle; None without an environment."""
    samples: Tensor | None = None
    """[N] int64, index of the episode among those of its prompt, where an episode may have several sequences; None if
    each row is an episode."""
    prompt_rows: Tensor | None = None
    """[N] int64, row of the prompt in the data set."""
    scores: Tensor | None = None
    """[N] float32, scores of the reward, without penalties."""
    penalties: Tensor | None = None
    """[N] float32, subtracted from the scores, in their unit also where they are scaled later."""
    greedy_scores: Tensor | None = None
    """[N] float32, score of the greedy completion of the same prompt, where the algorithm asks for one."""
    greedy_penalties: Tensor | None = None
    """[N] float32, penalties of that greedy completion."""
    old_logprobs: Tensor | None = None
    """[N, T] float32, log-probs of the actor before the updates: from the training forward, or from the generation
    engine, if a rollout makes one update whose forward has not run yet."""
    ref_logprobs: Tensor | None = None
    """[N, T] float32, log-probs of the reference; None if they are not needed."""
    teacher_logprobs: Tensor | None = None
    """[N, T] float32, log-probs of the teacher; None without a teacher."""
    teacher_top: Tensor | None = None
    """[N, T, k] float32, the largest log-probs of the teacher in the place of each token; None if not needed."""
    teacher_tokens: Tensor | None = None
    """[N, T, k] int32, their tokens."""
    teachers: Tensor | None = None
    """[N] int64, number of the teacher of each completion; None if all have one."""
    teacher_prompts: TeacherPrompts | None = None
    """What the teacher reads before each completion; None: the prompt."""
    entropy: Tensor | None = None
    """[N, T] float32, entropy in nats of the actor's distribution before the updates; None if the actor does not read
    the rollout."""
    old_values: Tensor | None = None
    """[N, T] float32, values of the critic before the updates; None without a critic."""
    routes: RolloutRoutes | None = None
    """The experts that computed the tokens while sampling; None if not recorded, or no longer needed."""
    images: RolloutImages | None = None
    """The images of the rows; None if there are none."""
    learned: Tensor | None = None
    """[N] bool, true for completions that updates learn from; None: all."""
    components: Mapping[str, Tensor] = field(default_factory=dict)
    """[N] float32 by name, scores of the reward components before their weights; NaN where one does not apply."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of sampling and scoring."""
    index: RowIndex | None = None
    """The numbers of these rows among those of all ranks; None in a micro-batch, or if they are not numbered yet."""

    @classmethod
    def of(cls, episodes: Sequence[Episode], groups: Sequence[int], *, has_rewards: bool = False) -> Self:
        """Episodes [N] as right-padded tensors.

        Args:
            episodes: samples of prompts.
            groups: place of the prompt of each in the step.
            has_rewards: true if an environment gives rewards for turns.
        """
        lengths = [len(episode.ids) for episode in episodes]
        width = max(lengths, default=1)
        samples = [episode.sample for episode in episodes]

        def tensor(name: str, dtype: torch.dtype) -> Tensor:
            """[N, T] an attribute of each token after the prompt."""
            whole = torch.zeros(len(episodes), width, dtype=dtype)
            for row, episode in zip(whole, episodes, strict=True):
                values = getattr(episode, name)
                row[len(episode.prompt) :][: len(values)] = torch.tensor(values, dtype=dtype)
            return whole

        ids = tensor("token_ids", torch.long)
        for row, episode in zip(ids, episodes, strict=True):
            row[: len(episode.prompt)] = torch.tensor(episode.prompt, dtype=torch.long)
        return cls(
            ids,
            torch.arange(width) < torch.tensor(lengths, dtype=torch.long)[:, None],
            tensor("sampled", torch.bool),
            tensor("logprobs", torch.float32),
            tensor("drawn_logprobs", torch.float32),
            torch.tensor([episode.stopped for episode in episodes], dtype=torch.bool),
            tensor("weight_versions", torch.long),
            torch.tensor(groups, dtype=torch.long),
            tensor("turn_rewards", torch.float32) if has_rewards else None,
            torch.tensor([episode.cut_observations for episode in episodes], dtype=torch.long) if has_rewards else None,
            samples=None if None in samples or not samples else torch.tensor(samples),
            routes=RolloutRoutes.of([episode.routes for episode in episodes]),
            images=RolloutImages.of([episode.images for episode in episodes]),
        )

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are present, by name."""
        ragged = {
            f"{prefix}{name}": tensor
            for prefix, part in (
                (_ROUTES, self.routes),
                (_IMAGES, self.images),
                (_TEACHER_PROMPTS, self.teacher_prompts),
            )
            for name, tensor in ({} if part is None else vars(part)).items()
        }
        return _tensors_of(self) | ragged | with_prefix(_COMPONENTS, self.components)

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def lengths(self) -> Tensor:
        """[N] int64, real tokens."""
        return self.attention_mask.sum(dim=1)

    @property
    def padded_routes(self) -> Tensor | None:
        """[N, T, mixtures, experts per token] recorded experts, -1 where none is recorded; None without records."""
        return None if self.routes is None else self.routes.padded(self.input_ids.shape[1])

    @property
    def learned_mask(self) -> Tensor:
        """[N, T] bool, the response tokens of completions that updates learn from."""
        return self.response_mask if self.learned is None else self.response_mask & self.learned[:, None]

    @property
    def penalized_scores(self) -> Tensor:
        """[N] scores minus penalties."""
        assert self.scores is not None and self.penalties is not None
        return self.scores - self.penalties

    @property
    def kl(self) -> Tensor | None:
        """[N] KL to the reference of each completion, in nats (k1); None without a reference."""
        return self._kl_to(self.ref_logprobs)

    @property
    def teacher_kl(self) -> Tensor | None:
        """[N] KL to the teacher of each completion, in nats (k1); None without a teacher."""
        return self._kl_to(self.teacher_logprobs)

    def _kl_to(self, logprobs: Tensor | None) -> Tensor | None:
        if logprobs is None or self.old_logprobs is None:
            return None
        return masked_sum(self.old_logprobs - logprobs, mask=self.response_mask, dim=1)

    @property
    def begins(self) -> list[int]:
        """[N] tokens before the first response token; 0 without one."""
        return self.response_mask.int().argmax(dim=1).tolist()

    def as_taught(self) -> Rollout:
        """The rows as their teacher reads them: with its prompts before the first response token. Columns of tokens
        besides the masks are 0."""
        if self.teacher_prompts is None:
            return self
        prompts = self.teacher_prompts.ids.split(self.teacher_prompts.lengths.tolist())
        rows = zip(prompts, self.input_ids, self.response_mask, self.begins, self.lengths.tolist(), strict=True)
        episodes = [
            Episode(prompt.tolist(), ids[begin:length].tolist(), mask[begin:length].tolist())
            for prompt, ids, mask, begin, length in rows
        ]
        return Rollout.of(episodes, self.groups.tolist())

    @property
    def is_rewarded(self) -> bool:
        """True if reward components or an environment gave the scores; without them, all scores are 0."""
        return bool(self.components) or self.turn_rewards is not None

    @property
    def has_score(self) -> Tensor:
        """[N] bool, false where the reward has components of which none applies; the score is 0 there."""
        if self.turn_rewards is not None or not self.components:
            return torch.ones_like(self.stopped)
        return ~torch.stack([*self.components.values()]).isnan().all(dim=0)

    def episodes(self) -> tuple[Tensor, Tensor]:
        """The first row of each episode [E] int64, and the episode of each row [N] int64; E episodes."""
        rows = torch.arange(len(self), device=self.input_ids.device)
        if self.samples is None:
            return rows, rows
        keys, member = torch.stack([self.groups, self.samples]).unique(dim=1, return_inverse=True)
        first = torch.full((keys.shape[1],), len(self), device=rows.device)
        return first.scatter_reduce(0, member, rows, "amin"), member

    def sampler_differences(self, logprobs: Tensor) -> dict[str, Tensor]:
        """Absolute differences of log-probs [N, T] of training to those of the sampler, summed over the response tokens
        of each row at a depth, and their number, [N] each: "difference_DEPTH" in nats and "compared_DEPTH"."""
        mask = self.response_mask
        difference = torch.where(mask, (self.sampled_logprobs - logprobs).abs(), 0.0)
        columns = {}
        for name, (begin, end) in zip(DEPTHS, pairwise([*DEPTHS.values(), None]), strict=True):
            columns[f"difference_{name}"] = difference[:, begin:end].sum(dim=1)
            columns[f"compared_{name}"] = mask[:, begin:end].sum(dim=1)
        return columns

    def staleness(self, weight_version: int) -> Tensor:
        """Age of the sampled tokens of each row relative to a weight version, [N, 4] float64: the sum and the maximum
        of the updates since, the number of tokens with any, and 1 if older and newer weights sampled the row."""
        mask = self.response_mask
        updates = torch.where(mask, weight_version - self.weight_versions, 0)
        newest = torch.where(mask, self.weight_versions, -1).amax(dim=1, keepdim=True)
        carried = (mask & (self.weight_versions < newest)).any(dim=1)
        columns = [updates.sum(dim=1), updates.amax(dim=1), (updates > 0).sum(dim=1), carried]
        return torch.stack([column.double() for column in columns], dim=1)

    def select(self, chosen: Tensor) -> Rollout:
        """The rows where chosen [N] is true, not numbered."""
        if bool(chosen.all()):
            return replace(self, index=None)
        return self.rows(chosen.nonzero().flatten().tolist())

    def numbered(self, world: World) -> RowIndex:
        """The index of the rows, of which each rank has those that it holds. Every rank calls, with rows that are
        numbered or with rows that are not."""
        if self.index is not None:
            return self.index
        return RowIndex.of(self.groups, self.lengths, self.response_mask, world)

    def total(self, of_rows: Tensor) -> Tensor:
        """A sum over these rows, summed over the ranks that hold rows. Every rank calls; rows that are not numbered are
        all rows."""
        return of_rows if self.index is None else self.index.world.total(of_rows)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], metrics: Mapping[str, float] | None = None) -> Self:
        """The rollout that `tensors()` of another one describes."""
        separate = (_COMPONENTS, _ROUTES, _IMAGES, _TEACHER_PROMPTS)
        tensor_fields: dict[str, Any] = {name: t for name, t in tensors.items() if not name.startswith(separate)}
        routes = without_prefix(_ROUTES, tensors)
        digests = without_prefix(_IMAGES, tensors)
        teacher_prompts = without_prefix(_TEACHER_PROMPTS, tensors)
        return cls(
            **tensor_fields,
            routes=RolloutRoutes(**routes) if routes else None,
            images=RolloutImages(**digests) if digests else None,
            teacher_prompts=TeacherPrompts(**teacher_prompts) if teacher_prompts else None,
            components=without_prefix(_COMPONENTS, tensors),
            metrics=metrics or {},
        )


@dataclass(frozen=True)
class Batch(Rows):
    """The training data of a step's updates: a rollout with its rewards and advantages."""

    rollout: Rollout
    rewards: Tensor
    """[N, T] float32: the score less penalties at the last token, a KL penalty per token where it is in the reward."""
    advantages: Tensor
    """[N, T] float32."""
    returns: Tensor | None = None
    """[N, T] float32, targets of the critic; None without a critic."""
    clipped: Tensor | None = None
    """[N] bool, true if the score was clipped; None where scores are not clipped."""
    selected: Tensor | None = None
    """[N, T] bool, the tokens on which algorithm.entropy acts; None if it selects none."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of sampling, scoring and estimation."""

    def __len__(self) -> int:
        return len(self.rollout)

    @property
    def lengths(self) -> Tensor:
        """[N] int64, real tokens."""
        return self.rollout.lengths

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, for a checkpoint."""
        return _tensors_of(self) | with_prefix("rollout.", self.rollout.tensors())

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], metrics: Mapping[str, float]) -> Self:
        """The batch that `tensors()` of another one describes."""
        tensor_fields = {name: tensor for name, tensor in tensors.items() if not name.startswith("rollout.")}
        return cls(Rollout.from_tensors(without_prefix("rollout.", tensors)), **tensor_fields, metrics=metrics)


def _tensors_of(owner: Rollout | Batch) -> dict[str, Tensor]:
    """The fields that are tensors, by name; all have N rows."""
    return {name: value for name, value in vars(owner).items() if isinstance(value, Tensor)}
