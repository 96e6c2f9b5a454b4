"""The placement of a run: what the user gives of it, and the rest filled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from hybrid_rlhf.configs.sections.placement.given import check_placement, read_ranks
from hybrid_rlhf.configs.sections.placement.roles import (
    CRITIC_COPY,
    PlacedRoles,
    Placement,
    RolePlacement,
    ZeroStage,
    in_words,
)
from hybrid_rlhf.configs.sections.rules import nearest_hint, require


def resolve_placement(given: str | Mapping[str, Any] | None, placed: PlacedRoles, *, ranks: int) -> Placement:
    """The placement of a run: what is given, and the rest filled in.

    Args:
        given: a style, roles with their ranks, or none for flattening.
        placed: the roles of the step.
        ranks: of the run.

    Raises:
        UserError: for a role that the step does not have, ranks that do not exist or must not be shared, or tensor
            parallelism that does not divide.
    """
    check_placement(given)
    roles = {} if given is None or isinstance(given, str) else {str(name): given[name] for name in given}
    style = (
        str(given)
        if isinstance(given, str)
        else str(roles.pop("style", "separation" if "sampler" in roles else "flattening"))
    )
    if "reward" in roles and "reward" not in placed.zero:  # all reward models
        shared = roles.pop("reward")
        roles = {name: shared for name in placed.rewards} | roles
        require(bool(placed.rewards), "placement.reward places reward models, the step has none: leave it out")
    names = (*placed.zero, *([CRITIC_COPY] if "critic" in placed.zero else []), "sampler")
    require(
        not placed.reads_actor or "reference" not in roles,
        "with LoRA the reference is the actor without its adapters, on the actor's ranks, got placement.reference: "
        "leave it out, or set reference.path",
    )
    for name in roles:
        require(
            name in names,
            f"placement.{name} must be a role of the step, which has {', '.join(names)}: "
            f"{nearest_hint(name, names, otherwise='give one of them')}",
        )
    own = {name: read_ranks(keys["ranks"], name) for name, keys in roles.items() if "ranks" in keys}
    for name, mine in own.items():
        require(
            mine[-1] < ranks,
            f"placement.{name}.ranks must be below the number of ranks, {ranks}, got {mine[-1]}: start more ranks or "
            "the missing hosts, or name others",
        )
    together = int(roles.get("sampler", {}).get("tensor_parallel", placed.tensor_parallel))
    with_actor = bool(roles.get("sampler", {}).get("with_actor"))
    filled = _filled(style, placed, own, ranks, together) | own
    if CRITIC_COPY in roles and CRITIC_COPY not in filled:
        require("sampler" in filled, "placement.critic_copy needs ranks, got none and no sampler's: give it some")
        filled[CRITIC_COPY] = filled["sampler"]
    _check_keys(roles, placed)
    placement = Placement(
        {name: _role(roles.get(name, {}), filled[name], placed.zero.get(name, 0)) for name in names if name in filled},
        "hybrid" if own else style,
        with_actor,
    )
    sampling = ["sampler"] * placement.separate_sampler + ["actor"] * (with_actor or not placement.separate_sampler)
    sized = {name: replace(placement[name], tensor_parallel=together) for name in sampling}
    placement = replace(placement, roles={**placement.roles, **sized})
    _check(placement, placed)
    return placement


def _role(keys: Mapping[str, Any], ranks: tuple[int, ...], zero: int) -> RolePlacement:
    """A role by what is given of it; `zero` is the stage of its config, which tensor parallelism takes the place of."""
    together = int(keys.get("tensor_parallel", 1))
    return RolePlacement(ranks, cast(ZeroStage, keys.get("zero", zero if together == 1 else 0)), together)


def _filled(
    style: str, placed: PlacedRoles, own: Mapping[str, tuple[int, ...]], ranks: int, together: int
) -> dict[str, tuple[int, ...]]:
    """Ranks of the roles by a style, given those of some."""
    whole = tuple(range(ranks))
    require(
        style == "flattening" or ranks > 1 or bool(own),
        f"placement {style} needs 2 ranks or more, got {ranks}: start more, or give flattening",
    )
    sampler = own.get("sampler")
    if style == "separation" and sampler is None:
        # a whole number of tensor-parallel groups, on half of the ranks at most
        free = [rank for rank in whole if rank not in own.get("actor", ())]
        count = len(free) if "actor" in own else ranks // 2 // together * together
        require(
            0 < count < ranks and count % together == 0,
            f"placement separation needs {_ranks_in_words(together)} for a "
            f"{'tensor-parallel ' * (together > 1)}sampler beside the actor's, got {_ranks_in_words(ranks)}: start "
            "more, or name placement.sampler.ranks",
        )
        sampler = tuple(free[len(free) - count :])
    found = {} if sampler is None else {"sampler": sampler}
    training = own.get("actor", tuple(rank for rank in whole if rank not in (sampler or ())))
    require(bool(training), f"placement.actor needs ranks, placement.sampler takes all {ranks}: leave it some")
    found |= {name: training for name in placed.zero if name in ("actor", "critic")}
    beside = whole if sampler is None else sampler
    frozen = [name for name in placed.frozen if name not in own]
    parts = min(len(frozen), len(beside)) if style == "interleaving" else 1
    for place, name in enumerate(frozen):
        part = place % max(parts, 1)
        found[name] = beside[part * len(beside) // parts : (part + 1) * len(beside) // parts]
    return found


def _check_keys(given: Mapping[str, Mapping[str, Any]], placed: PlacedRoles) -> None:
    for name, keys in given.items():
        together = keys.get("tensor_parallel", 1)
        require(
            "tensor_parallel" not in keys or name not in ("actor", "critic"),
            f"placement.{name} trains without tensor parallelism, got tensor_parallel {together}: leave it out, or "
            "give it to sampler or a frozen role",
        )
        require(
            name != CRITIC_COPY or "zero" not in keys,
            f"placement.critic_copy keeps inference weights, which ZeRO does not shard, got zero {keys.get('zero')}: "
            "give tensor_parallel, or leave it out",
        )
        require(
            together == 1 or not keys.get("zero"),
            f"placement.{name} is shared by tensor parallelism or by ZeRO, got tensor_parallel {together} and zero "
            f"{keys.get('zero')}: leave one out",
        )
        require(
            together == 1 or name != "reference" or not placed.refreshes_reference,
            f"reference.refresh_every writes to whole or ZeRO-sharded weights, got placement.reference.tensor_parallel "
            f"{together}: leave one out",
        )


def _check(placement: Placement, placed: PlacedRoles) -> None:
    sampler, actor = placement.sampler, placement["actor"]
    if placement.with_actor:
        _check_with_actor(placement, placed)
    for name, role in placement.roles.items():
        count, who = len(role.ranks), "sampler" if role is sampler else name
        known = [str(size) for size in range(1, count + 1) if count % size == 0]
        require(
            count % role.tensor_parallel == 0,
            f"tensor parallelism must divide the {_ranks_in_words(count)} of the {who}, got {role.tensor_parallel}: "
            f"use {'one of ' * (count > 1)}{', '.join(known)}{', or more ranks' * (count == 1)}",
        )
    for name in placed.frozen:
        require(
            placement[name].zero in (0, 3),
            f"placement.{name} is frozen, so ZeRO shards its weights (3) or nothing (0), got {placement[name].zero}: "
            "give one of them",
        )
    require(
        not placed.shares_base or placement["critic"].ranks == actor.ranks,
        "critic.share_base needs the critic on the actor's ranks, got others in placement: leave share_base or "
        "placement.critic out",
    )
    if CRITIC_COPY in placement.roles:
        shared = sorted({*placement[CRITIC_COPY].ranks} & {*placement["critic"].ranks})
        require(
            not shared,
            f"placement.critic_copy computes values on ranks without the critic, got {in_words(shared)} of its too: "
            "name others, or leave critic_copy out",
        )
    if not placement.separate_sampler:
        return
    shared = sorted({*sampler.ranks} & {*actor.ranks})
    require(
        not shared,
        f"placement.sampler has ranks of its own, got {in_words(shared)} of the actor's too: name others, or leave "
        "sampler out to sample on the actor's ranks",
    )
    if placed.policy_lag and "critic" in placement.roles:
        shared = sorted({*sampler.ranks} & {*placement["critic"].ranks})
        require(
            not shared,
            "rollout.async_sampling samples while the critic trains, got both on ranks "
            f"{in_words(shared)} in placement: name others for placement.critic",
        )


def _ranks_in_words(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def _check_with_actor(placement: Placement, placed: PlacedRoles) -> None:
    together, trains = placement.sampler.tensor_parallel, len(placement["actor"].ranks)
    require(
        placement.separate_sampler,
        "placement.sampler.with_actor shares rollouts between the actor's ranks and a sampler's, got no ranks of its "
        "own for the sampler: name placement.sampler.ranks",
    )
    require(
        not placed.policy_lag,
        "placement.sampler.with_actor samples on the actor's ranks while they do not train, got "
        f"rollout.async_sampling.policy_lag {placed.policy_lag}: leave one out",
    )
    require(
        trains % together == 0,
        f"placement.sampler.with_actor samples in groups of {together} on the actor's ranks too, got {trains} of them: "
        "give another tensor_parallel, or leave with_actor out",
    )
