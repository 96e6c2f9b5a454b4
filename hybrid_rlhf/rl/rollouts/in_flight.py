"""Prompts in flight: what a rank samples, with the tokens so far, and their form in a checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from hybrid_rlhf.generation.batching.images import GivenImages
from hybrid_rlhf.generation.sampling import Completion, FinishReason, SamplingParams
from hybrid_rlhf.rl.sharing import with_prefix, without_prefix
from hybrid_rlhf.rl.types import Episode, Rollout
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
    """Its completions so far, one for each sample; empty if none has tokens."""
    greedy: bool = False
    """True for the greedy completion beside the samples of the prompt."""
    images: GivenImages = None
    """The images of a turn."""


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
    rollout = Rollout.of(episodes, [prompt.place for prompt, _ in mine])
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
        for row, (place, reason) in enumerate(zip(named["groups"].tolist(), reasons, strict=True)):
            begun[place].append(replace(_completion(rollout, row), finish_reason=reason))
    return begun


def _completion(rollout: Rollout, row: int) -> Completion:
    """One row of a rollout on the CPU."""
    alone = rollout.rows([row])
    mask = alone.response_mask
    routes = None if alone.routes is None or not len(alone.routes.experts) else alone.routes.experts.numpy()
    return Completion(
        alone.input_ids[mask].tolist(),
        alone.sampled_logprobs[mask].tolist(),
        None,
        alone.drawn_logprobs[mask].tolist(),
        alone.weight_versions[mask].tolist(),
        routes,
    )
