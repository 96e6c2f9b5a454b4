"""Partial rollouts: a rollout ends when enough prompts are finished, and the others continue in the next one.

Ranks then do not idle until the longest completions end, and no token is sampled twice. A step trains on a constant
number of prompts. Each tensor-parallel group that samples finishes its share of them; it has as many prompts in flight
as it would sample otherwise, plus its share of the extra prompts. Which prompts finish depends on tokens alone
(`FinishedShare`), never on time or memory, so a run is reproducible and resumes bit for bit. It does depend on the
number of groups.

Tokens keep their log-probs and weight versions; keys and values of a carried completion are computed again with the
weights that continue it. A prompt keeps the random streams of the step in which it began.

Source: partial rollouts of Kimi k1.5 (arXiv 2501.12599, section 2.6), APRIL (arXiv 2509.18521), and AReaL's
interruptible generation (arXiv 2505.24298, section 4.1), whose correction of the loss is `algorithm.correction`.
Deviations: a rollout ends after a number of tokens, not of seconds; a prompt is carried for `max_lag` steps at most.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.engines.sampling_engine import SamplingEngine
from hybrid_rlhf.generation.sampling import Completion, FinishedShare, FinishReason, SamplingParams
from hybrid_rlhf.rl.batch import Episode, Rollout, with_prefix, without_prefix
from hybrid_rlhf.runtime.world import World

_CARRIED = "carried."
"""Prefix of the names of their tensors."""


@dataclass(frozen=True)
class AssignedPrompt:
    """A prompt that this rank samples."""

    place: int
    """Position in the order of the rollout's prompts, over all ranks."""
    row: Mapping[str, Any]
    params: SamplingParams
    recorded: bool
    """True if the experts of its completions are recorded, where the model has experts."""
    begun: Sequence[Completion] = ()
    """Its completions so far; empty before its first rollout."""
    greedy: bool = False
    """True for the greedy completion beside the samples of the prompt."""


@dataclass(frozen=True)
class PromptInFlight:
    """A prompt that has begun and that no step has trained on; the same on every rank."""

    row: int
    """Row in the data set."""
    step: int
    """Step in which it began; with `place` the key of its random streams."""
    place: int
    """Position among the prompts that began in that step."""
    group: int
    """Number of the tensor-parallel group that samples it."""


@dataclass(frozen=True)
class RolloutPart:
    """The share of this rank's group in a rollout."""

    carried: list[AssignedPrompt]
    """The prompts in flight of the group, one list for all rollouts, which use it one at a time, in the order of
    steps."""
    first: int
    """Place of the first prompt that begins in the rollout."""
    begins: Sequence[int]
    """Indices of the group's prompts among those that begin in the rollout."""
    prompts: int
    """Number of prompts that the group finishes and hands over."""
    overdue: frozenset[int]
    """Places of the prompts that the group must finish."""

    def join(self, new: Sequence[AssignedPrompt]) -> tuple[list[AssignedPrompt], FinishedShare]:
        """All prompts that the group samples, carried ones first, and the condition that ends the rollout."""
        self.carried.extend(new)
        required = [index for index, prompt in enumerate(self.carried) if prompt.place in self.overdue]
        return [*self.carried], FinishedShare(self.prompts, frozenset(required))

    def hand_over(
        self, prompts: Sequence[AssignedPrompt], samples: Sequence[list[Completion]]
    ) -> tuple[list[AssignedPrompt], list[list[Completion]]]:
        """The finished prompts of this rollout with their completions; the others stay in flight.

        If more are finished than the part takes, required prompts come first, then those that needed fewer tokens.
        """
        finished = [
            (prompt.place not in self.overdue, _added_tokens(prompt, of_prompt), prompt.place, index)
            for index, (prompt, of_prompt) in enumerate(zip(prompts, samples, strict=True))
            if all(completion.finish_reason is not None for completion in of_prompt)
        ]
        taken = sorted(index for *_, index in sorted(finished)[: self.prompts])
        self.carried[:] = [
            replace(prompt, begun=samples[index]) for index, prompt in enumerate(prompts) if index not in taken
        ]
        return [prompts[index] for index in taken], [samples[index] for index in taken]


class PartialRollouts:
    """The prompts in flight, and each group's share of a rollout; the same on every rank."""

    def __init__(self, config: RolloutConfig, engine: SamplingEngine, *, total_steps: int) -> None:
        """Take the rollout settings with `partial`, the engine that samples, and the number of steps of the run."""
        assert config.partial is not None
        self._per_step = config.prompts_per_step
        self.extra = config.extra_prompts
        self._max_lag = config.partial.max_lag
        self._groups, self._group = engine.groups
        self._total_steps = total_steps
        self._carried: list[AssignedPrompt] = []
        self._in_flight: dict[int, PromptInFlight] = {}
        """Prompts in flight by place, which is unique over the whole run."""
        self._loads = [0] * self._groups
        """Number of prompts of each group in flight after all rollouts that have begun."""
        self._tensors: dict[str, Tensor] = {}

    @property
    def any_in_flight(self) -> bool:
        """True if prompts are left for another step."""
        return any(self._loads)

    def wanted(self, step: int) -> int:
        """Number of prompts that begin in the rollout of a step, without those that no step would train on."""
        left = (self._total_steps - step + 1) * self._per_step
        return max(0, min(self._per_step + self.extra, left) - sum(self._loads))

    def begin(self, step: int, rows: Sequence[int], *, first: int) -> RolloutPart:
        """Register the rollout of a step. Every rank calls, in the order of steps.

        Args:
            step: number of the step.
            rows: data set rows of the prompts that begin in it.
            first: place of the first of them, greater than the places of all earlier prompts.
        """
        for index, row in enumerate(rows):
            group = index % self._per_step % self._groups
            self._in_flight[first + index] = PromptInFlight(row, step, index, group)
            self._loads[group] += 1
        last = sum(self._loads) <= self._per_step
        shares = [len(range(group, self._per_step, self._groups)) for group in range(self._groups)]
        finished = [load if last else min(load, share) for load, share in zip(self._loads, shares, strict=True)]
        self._loads = [load - done for load, done in zip(self._loads, finished, strict=True)]
        of_group = {place: prompt for place, prompt in self._in_flight.items() if prompt.group == self._group}
        return RolloutPart(
            self._carried,
            first,
            [place - first for place in of_group if place >= first],
            0 if self._group is None else finished[self._group],
            frozenset(place for place, prompt in of_group.items() if prompt.step <= step - self._max_lag),
        )

    def end(self, rollout: Rollout, world: World) -> tuple[list[int], Rollout]:
        """Remove the prompts of a finished rollout from those in flight. Every rank calls.

        Returns:
            their rows in the data set, and the rollout with their places among these rows in `groups`.
        """
        assert rollout.groups is not None
        places = rollout.numbered(world).gather(rollout.groups).unique()
        groups = torch.searchsorted(places, rollout.groups)
        return [self._in_flight.pop(place).row for place in places.tolist()], replace(rollout, groups=groups)

    def state_dict(self, world: World, *, sends: bool) -> dict[str, Any]:
        """The prompts in flight, for a checkpoint, after all rollouts that have begun. Every rank calls.

        Args:
            world: all ranks.
            sends: true if this rank is the first of a group that samples.
        """
        self._tensors, reasons = begun_state(self._carried * sends, world)
        return {
            "groups": self._groups,
            "prompts": [{"number": place, **asdict(prompt)} for place, prompt in self._in_flight.items()],
            "finish_reasons": reasons,
        }

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of this rank's carried completions, by name; call after `state_dict`."""
        return self._tensors

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        tensors: Sequence[Mapping[str, Tensor]],
        assigned: Callable[[int, PromptInFlight], AssignedPrompt],
    ) -> None:
        """Restore the state of a checkpoint; prompts are redistributed if the number of groups has changed.

        Args:
            state: result of `state_dict`.
            tensors: tensors of each rank in the checkpoint.
            assigned: returns the prompt to sample, from its place and the prompt in flight.
        """
        for index, entry in enumerate(state["prompts"]):
            prompt = PromptInFlight(**{name: value for name, value in entry.items() if name != "number"})
            if state["groups"] != self._groups:
                prompt = replace(prompt, group=index % self._groups)
            self._in_flight[entry["number"]] = prompt
            self._loads[prompt.group] += 1
        begun = restored_completions(tensors, state["finish_reasons"])
        self._carried[:] = [
            replace(assigned(place, prompt), begun=begun.get(place, []))
            for place, prompt in self._in_flight.items()
            if prompt.group == self._group
        ]


def begun_state(
    prompts: Sequence[AssignedPrompt], world: World
) -> tuple[dict[str, Tensor], list[list[FinishReason | None]]]:
    """Tensors of this rank's completions so far by name, and the finish reasons of each rank that has any, for a
    checkpoint. Every rank calls.

    Args:
        prompts: with places that are unique over all ranks.
        world: all ranks.
    """
    mine = [(prompt, completion) for prompt in prompts for completion in prompt.begun]
    episodes = [Episode.of(list(prompt.row["input_ids"]), completion) for prompt, completion in mine]
    places = torch.tensor([prompt.place for prompt, _ in mine], dtype=torch.long)
    rollout = replace(Rollout.of(episodes), groups=places)
    tensors = with_prefix(_CARRIED, rollout.tensors()) if mine else {}
    reasons = world.all_gather_objects([completion.finish_reason for _, completion in mine])
    return tensors, [of_rank for of_rank in reasons if of_rank]


def restored_completions(
    tensors: Sequence[Mapping[str, Tensor]], finish_reasons: Sequence[Sequence[FinishReason | None]]
) -> dict[int, list[Completion]]:
    """The completions so far of all ranks, by the places of their prompts, from the results of `begun_state`."""
    begun: dict[int, list[Completion]] = defaultdict(list)
    carried = [named for of_rank in tensors if (named := without_prefix(_CARRIED, of_rank))]
    for named, reasons in zip(carried, finish_reasons, strict=True):
        rollout = Rollout.from_tensors(named)
        for row, reason in enumerate(reasons):
            begun[int(named["groups"][row])].append(replace(_completion(rollout, row), finish_reason=reason))
    return begun


def _added_tokens(prompt: AssignedPrompt, completions: Sequence[Completion]) -> int:
    """The largest number of tokens that a rollout has added to a completion of a prompt."""
    begun = [len(completion.token_ids) for completion in prompt.begun] or [0] * len(completions)
    return max(len(now.token_ids) - before for now, before in zip(completions, begun, strict=True))


def _completion(rollout: Rollout, row: int) -> Completion:
    """One row of a rollout on the CPU."""
    mask = rollout.response_mask[row]
    routes = None
    if rollout.routes is not None and rollout.routes.lengths[row]:
        routes = rollout.routes.rows([row]).experts.numpy()
    return Completion(
        rollout.input_ids[row][mask].tolist(),
        rollout.sampled_logprobs[row][mask].tolist(),
        None,
        rollout.drawn_logprobs[row][mask].tolist(),
        rollout.weight_versions[row][mask].tolist(),
        routes,
    )
