"""The planner's answer for an RL step: the best plan of each style, its time and memory, and why the others lost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from hybrid_rlhf.configs.sections.placement import in_words
from hybrid_rlhf.engines.residency.rules import residency_table
from hybrid_rlhf.planning.device import Cluster, Device
from hybrid_rlhf.planning.dotted_keys import as_options, with_settings
from hybrid_rlhf.planning.job import RLJob
from hybrid_rlhf.planning.machine import Machine
from hybrid_rlhf.planning.phase_memory import longest_row
from hybrid_rlhf.planning.placed_memory import MemoryModel
from hybrid_rlhf.planning.plans import StepPlan, style_of
from hybrid_rlhf.planning.search import Candidate, Search, SearchResult
from hybrid_rlhf.planning.step_time import PHASES, StepTimer
from hybrid_rlhf.runtime.placement import READS_ACTOR, Placement, role_label

_GIB = 2**30
_HALVINGS = 2
_DOUBLINGS = 2
"""Most halvings and doublings of train.micro_batch_tokens in a plan."""
_LEAST_GAIN = 0.01
"""Part of a step that larger micro-batches must save."""
_SOURCES = {
    "measured": "measured",
    "given": "as given",
    "data sheet": "the usual network of this machine, not measured; --link_gib_per_second sets it",
}


@dataclass(frozen=True)
class PlacementAnswer:
    """Plans for an RL step on a machine."""

    job: RLJob
    machine: Machine
    cluster: Cluster
    result: SearchResult
    configured: Candidate | None = None
    """The plan of the config; None: the planner places the roles, or there is no config to compare with."""
    listed: int = 0
    """Number of plans to list in addition to the best of each style."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the plans have and the configured one does not, because nothing fits without them."""

    @property
    def others(self) -> list[Candidate]:
        """The fastest plans that are listed, without the best of each style."""
        known = [each.plan for each in self.result.ranked]
        return [each for each in self.result.fastest if each.plan not in known][: self.listed]

    @property
    def best(self) -> Candidate | None:
        """The fastest plan; None if none fits."""
        return self.result.best

    @property
    def is_configured(self) -> bool:
        """True if no plan that was looked at is faster than the configured one. On one rank all placements are one."""
        own, best = self.configured, self.best
        if own is None or best is None or not own.fits:
            return False
        changes = {**self.given, **best.plan.settings(self.job.config)}
        same = self.cluster.ranks == 1 or own.plan.roles == best.plan.roles
        return own.seconds <= best.seconds or (same and not changes)

    def lines(self, key: str = "rl.placement") -> list[str]:
        """The tables that a user reads; `key` sets the placement."""
        prefix = key.removesuffix("placement")
        lengths, cluster, machine = self.job.lengths, self.cluster, self.machine
        new_tokens = lengths.mean_row - lengths.prompt_tokens
        hosts = f"{cluster.hosts} host{'s' * (cluster.hosts > 1)}"
        head = "".join(f"{name:>13}" for name in ("step", *PHASES, "GiB a rank"))
        what = "placement plan" if cluster.ranks > 1 else "plan"
        lines = [
            f"{what} in seconds of an RL step: {cluster.ranks} x {machine.name} on {hosts}, speeds "
            f"{'measured' if machine.measured else 'of the data sheet'}; {len(lengths.completions)} completions of "
            f"{new_tokens:.0f} tokens in the mean, prompts of {lengths.prompt_tokens:.0f}",
            f"{'plan':14}{head}",
        ]
        if cluster.hosts > 1:
            network = f"{machine.network_gib_per_second:.4g} GiB/s per host and direction"
            lines.insert(1, f"between hosts: {network}, {_SOURCES[machine.network_source]}")
        if self.configured is not None:
            style = self.configured.plan.placement.style
            lines += [_line("configured", self.configured), f"  {style}: {self.why(self.configured)}"]
        if self.given:
            lines.append(f"the plans below have {as_options(self.given, prefix)}, without which none fits")
        for candidate in self.result.ranked:
            lines += [_line(candidate.plan.placement.style, candidate), f"  {self.why(candidate)}"]
        for candidate in self.others:
            settings = [f"{name}: {value}" for name, value in candidate.plan.settings(self.job.config).items()]
            lines.append(_line(candidate.plan.placement.style, candidate))
            lines.append(f"  {', '.join([_on_one_line(candidate.plan), *settings])}: {self.why(candidate)}")
        if self.best is not None:
            lines += ["", f"best plan: {self.best.plan.placement.style}", *_roles(self.best, self.job)]
            options = as_options({**self.given, **self.best.plan.settings(self.job.config)}, prefix)
            placement = f"--{key} '{_on_one_line(self.best.plan)}' " * (cluster.ranks > 1)
            advice = f"set it with {placement}{options}".rstrip()
            lines.append(f"  {'the settings in use are as fast' if self.is_configured else advice}")
        return lines

    def why(self, candidate: Candidate) -> str:
        """Why a plan is the best, or lost."""
        misfit = candidate.memory.misfit
        best = self.best
        if misfit is not None:
            tried = "by ranks, ZeRO, offloading and micro-batches alone"
            room = misfit.tightest
            unit = "GiB of host memory" if room.of_host else "GiB"
            return (
                f"does not fit {'as configured' if candidate is self.configured else tried}: rank {misfit.ranks[0]}, "
                f"{misfit.name}, {room.needed / _GIB:.1f} of {room.available / _GIB:.1f} {unit}"
            )
        if candidate.time is None:
            return "fits; times with a copy of the critic are not predicted"
        if candidate is best:
            return "fits, and is the fastest"
        own = candidate is self.configured and self.is_configured
        if own or best is None or best.time is None or candidate.seconds <= best.seconds:
            return "fits, and no plan looked at is faster"
        lost = {phase: seconds - best.time.phases[phase] for phase, seconds in candidate.time.phases.items()}
        most = max(PHASES, key=lost.__getitem__)
        reason = f": {most} takes {lost[most]:.2f} s more" if lost[most] > 0.01 * best.seconds else ""
        return f"{candidate.seconds / best.seconds - 1:.1%} slower{reason}"

    def to_dict(self) -> dict[str, Any]:
        """The answer as JSON for programs, in seconds and bytes."""
        return {
            "machine": self.machine.name,
            "source": "measured" if self.machine.measured else "data sheet",
            "ranks": self.cluster.ranks,
            "hosts": self.cluster.hosts,
            "link_gib_per_second": self.machine.network_gib_per_second,
            "link_source": self.machine.network_source,
            "completions": len(self.job.lengths.completions),
            "mean_completion_tokens": self.job.lengths.mean_row - self.job.lengths.prompt_tokens,
            "prompt_tokens": self.job.lengths.prompt_tokens,
            "evaluated_plans": self.result.evaluated,
            "configured": None if self.configured is None else self._as_dict(self.configured),
            "plans": [self._as_dict(each) for each in self.result.ranked],
            "others": [self._as_dict(each) for each in self.others],
        }

    def _as_dict(self, candidate: Candidate) -> dict[str, Any]:
        plan = candidate.plan
        time = candidate.time
        given = {} if candidate is self.configured else self.given
        found: dict[str, Any] = {
            "style": plan.placement.style,
            "fits": candidate.fits,
            "roles": {
                name: {"ranks": in_words(role.ranks), "zero": role.zero, "tensor_parallel": role.tensor_parallel}
                for name, role in plan.roles.items()
            },
            "memory_bytes": [
                {"ranks": in_words(each.ranks), "phase": each.name, "bytes": each.total}
                for each in candidate.memory.phases
            ],
            "settings": {**given, **plan.settings(self.job.config)},
            "why": self.why(candidate),
        }
        if time is not None:
            found |= {"step_seconds": time.step_seconds, "phase_seconds": time.phases}
            found["rows_at_once"] = candidate.memory.rows_at_once
        return found


def plan_placement(
    job: RLJob, machine: Machine, rank: Device, *, configured: Placement | None = None, listed: int = 0
) -> PlacementAnswer:
    """The plans for a job.

    Args:
        job: the work of a step.
        machine: the speed of a rank.
        rank: the number of ranks, and the memory that a run may use on each.
        configured: the placement of the config, to be compared with the best ones.
        listed: number of plans to list in addition to the best of each style.
    """

    def search_with(tokens: int | None) -> Search:
        config = job.config if tokens is None else with_settings(job.config, {"train.micro_batch_tokens": tokens})
        changed = replace(job, config=config)
        return Search(StepTimer(changed, machine, rank.cluster), MemoryModel(changed, rank), keep=listed + 1)

    smaller, larger = _micro_batches(job)
    result = search_with(None).run()
    for tokens in smaller:
        # smaller micro-batches only add time, unless they make room for what is offloaded or does not fit
        if result.best is not None and not result.best.plan.offloads:
            break
        styles = [each.plan.placement.style for each in result.ranked if each.time is None or each.plan.offloads]
        result = result.merged(search_with(tokens).run(styles))
    for tokens in larger:
        search = search_with(tokens)
        plans = [each for each in result.ranked if each.time is not None and not each.plan.offloads]
        tried = [(each, search.evaluate(each.plan)) for each in plans]
        kept = tuple(other for each, other in tried if other.seconds < (1 - _LEAST_GAIN) * each.seconds)
        result = result.merged(SearchResult(kept, len(tried), kept))
    own = None if configured is None else configured_plan(job, machine, rank, configured)
    return PlacementAnswer(job, machine, rank.cluster, result, own, listed)


def configured_plan(job: RLJob, machine: Machine, rank: Device, placement: Placement) -> Candidate:
    """The plan of a job's config under a placement."""
    search = Search(StepTimer(job, machine, rank.cluster), MemoryModel(job, rank))
    style = style_of({name: role.ranks for name, role in placement.roles.items()}, rank.ranks)
    placement = replace(placement, style=style)
    return search.evaluate(StepPlan.of(job.config, placement))


def _micro_batches(job: RLJob) -> tuple[list[int], list[int]]:
    """Smaller and larger values of train.micro_batch_tokens to look at. A number of rows is kept."""
    train = job.config.train
    if train.micro_batch_size is not None:
        return [], []
    tokens = train.tokens_on(job.device.type)
    halves = [tokens // 2**power for power in range(1, _HALVINGS + 1)]
    doubles = [tokens * 2**power for power in range(1, _DOUBLINGS + 1)]
    return [half for half in halves if half >= longest_row(job.config.rollout)], doubles


def _on_one_line(plan: StepPlan) -> str:
    """The ranks of a plan, as the command line takes them."""
    setting = plan.placement_setting().as_given()
    given = yaml.safe_dump(setting, default_flow_style=True, sort_keys=False, width=math.inf).strip()
    return str(given).replace("'", '"')


def _line(name: str, candidate: Candidate) -> str:
    time = candidate.time
    values = ["-"] * (len(PHASES) + 1)
    if time is not None:
        values = [f"{seconds:.2f}" for seconds in (time.step_seconds, *(time.phases[phase] for phase in PHASES))]
    values.append(f"{candidate.memory.peak_bytes / _GIB:.2f}")
    return f"{name:14}" + "".join(f"{value:>13}" for value in values)


def _roles(candidate: Candidate, job: RLJob) -> list[str]:
    lines = [f"  {'role':20}{'ranks':>12}{'zero':>6}{'tensor parallel':>17}"]
    for name, role in candidate.plan.roles.items():
        lines.append(f"  {role_label(name):20}{in_words(role.ranks):>12}{role.zero:>6}{role.tensor_parallel:>17}")
    lines += [READS_ACTOR] * job.reads_own_reference
    for key, value in candidate.plan.settings(job.config).items():
        lines.append(f"  {key}: {str(value).lower()}")
    lines.append(f"  {'phase on ranks':28}" + f"{'GiB a rank':>12}  note")
    for each in candidate.memory.phases:
        where = f"{each.name} on {in_words(each.ranks)}"
        lines.append(f"  {where:28}{each.total / _GIB:>12.2f}  {each.note}".rstrip())
    return lines + residency_table(candidate.plan.residency(job))
