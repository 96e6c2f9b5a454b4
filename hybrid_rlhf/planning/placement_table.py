"""The planner's answer for an RL step: the best plan of each style, what it takes, and why the others lost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from hybrid_rlhf.configs.sections.placement import in_words
from hybrid_rlhf.engines.residency.rules import residency_table
from hybrid_rlhf.planning.costs import Costs
from hybrid_rlhf.planning.curves import MachineCurves
from hybrid_rlhf.planning.device import Cluster, Device
from hybrid_rlhf.planning.dotted_keys import with_settings
from hybrid_rlhf.planning.job import RLJob
from hybrid_rlhf.planning.phase_memory import longest_row
from hybrid_rlhf.planning.placed_memory import MemoryModel
from hybrid_rlhf.planning.plans import StepPlan
from hybrid_rlhf.planning.search import STYLES, Candidate, Search, SearchResult
from hybrid_rlhf.planning.step_time import PHASES
from hybrid_rlhf.runtime.placement import READS_ACTOR, Placement, role_label

_GIB = 2**30
_HALVINGS = 2
_DOUBLINGS = 2
"""Most halvings and doublings of train.micro_batch_tokens in a plan."""
_LEAST_GAIN = 0.01
"""Part of a step that larger micro-batches must save: smaller differences are in no prediction."""
_NOTED_IDLE = 0.15
"""Idle part of a phase from which it is named as a reason."""


@dataclass(frozen=True)
class PlacementAnswer:
    """Plans for an RL step on a machine."""

    job: RLJob
    curves: MachineCurves
    cluster: Cluster
    result: SearchResult
    configured: Candidate | None = None
    """The plan that the config is; none: the planner places the roles, or there was no config to compare with."""
    listed: int = 0
    """Plans to list beside the best of each style."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the plans have and the configured one does not, because nothing fits without them."""

    @property
    def others(self) -> list[Candidate]:
        """The fastest plans that are listed, without the best of each style."""
        known = [each.plan for each in self.result.ranked]
        return [each for each in self.result.fastest if each.plan not in known][: self.listed]

    @property
    def best(self) -> Candidate | None:
        """The fastest plan; none if none fits."""
        return self.result.best

    def lines(self, key: str = "rl.placement") -> list[str]:
        """The tables that a user reads; `key` sets the placement."""
        prefix = key.removesuffix("placement")
        lengths = self.job.lengths
        cluster = self.cluster
        new_tokens = lengths.mean_row - lengths.prompt_tokens
        hosts = f"{cluster.hosts} host{'s' * (cluster.hosts > 1)}"
        head = "".join(f"{name:>13}" for name in ("step", *PHASES, "idle", "GiB a rank"))
        lines = [
            f"placement plan in seconds of an RL step: {cluster.ranks} x {self.curves.machine} on {hosts}, "
            f"{self.curves.source} curves; {len(lengths.completions)} completions of {new_tokens:.0f} tokens in the "
            f"mean, prompts of {lengths.prompt_tokens:.0f}",
            f"{'plan':14}{head}",
        ]
        if cluster.hosts > 1:
            lines.insert(1, f"between hosts: {self._link()}")
        if self.configured is not None:
            style = self.configured.plan.placement.style
            lines += [_line("configured", self.configured), f"  {style}: {self.why(self.configured)}"]
        if self.given:
            lines.append(f"the plans below have {_options(self.given, prefix)}, without which none fits")
        for candidate in self.result.ranked:
            lines += [_line(candidate.plan.placement.style, candidate), f"  {self.why(candidate)}"]
        for candidate in self.others:
            settings = [f"{name}: {value}" for name, value in candidate.plan.settings(self.job.config).items()]
            lines.append(_line(candidate.plan.placement.style, candidate))
            lines.append(f"  {', '.join([_on_one_line(candidate.plan), *settings])}: {self.why(candidate)}")
        if self.best is not None:
            lines += ["", f"best plan: {self.best.plan.placement.style}", *_roles(self.best, self.job)]
            lines.append(f"  set it with {self.best_options(key)}")
        return lines

    def best_options(self, key: str) -> str:
        """The best plan as options of a command whose key `key` sets the placement."""
        assert self.best is not None
        settings = {**self.given, **self.best.plan.settings(self.job.config)}
        return f"--{key} '{_on_one_line(self.best.plan)}' {_options(settings, key.removesuffix('placement'))}".rstrip()

    def _link(self) -> str:
        """The link between hosts, and where its speed is from."""
        source = {
            "measured": "measured",
            "given": "as given",
            "data sheet": "the usual network of this machine, not measured; --link_gib_per_second sets it",
        }[self.curves.link_source]
        return f"{self.curves.link_gib_per_second:.4g} GiB/s per host and direction, {source}"

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
        if best is None or candidate.seconds <= best.seconds:
            return "fits, and no plan looked at is faster"
        assert best.time is not None
        slower = candidate.seconds / best.seconds - 1
        phases = candidate.time.phases
        others = best.time.phases
        most = max(PHASES, key=lambda phase: phases.get(phase, 0.0) - others.get(phase, 0.0))
        lost = phases.get(most, 0.0) - others.get(most, 0.0)
        reason = f"{slower:.1%} slower"
        if lost > 0.01 * best.seconds:
            reason += f": {most} takes {lost:.2f} s more"
        idle = {phase: candidate.time.idle(phase) for phase in phases}
        longest = max(idle, key=lambda phase: idle[phase] * phases[phase])
        if idle[longest] > _NOTED_IDLE:
            reason += f"; ranks are idle {idle[longest]:.0%} of {longest}"
        wire = candidate.time.wire_part("training")
        if wire > _NOTED_IDLE:
            reason += f"; communication is {wire:.0%} of training"
        return reason

    def to_dict(self) -> dict[str, Any]:
        """The same for programs; seconds and bytes."""
        return {
            "machine": self.curves.machine,
            "source": self.curves.source,
            "ranks": self.cluster.ranks,
            "hosts": self.cluster.hosts,
            "link_gib_per_second": self.curves.link_gib_per_second,
            "link_source": self.curves.link_source,
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
        }
        if time is not None:
            found |= {
                "step_seconds": time.step_seconds,
                "phase_seconds": time.phases,
                "idle_parts": {phase: time.idle(phase) for phase in time.phases},
                "rows_at_once": candidate.memory.rows_at_once,
            }
        given = {} if candidate is self.configured else self.given
        settings = {**given, **plan.settings(self.job.config)}
        return {**found, "settings": settings, "why": self.why(candidate)}


def plan_placement(
    job: RLJob, curves: MachineCurves, machine: Device, *, configured: Placement | None = None, listed: int = 0
) -> PlacementAnswer:
    """The plans for a job.

    Args:
        job: what a step computes.
        curves: how fast the machine is.
        machine: its ranks, and the memory that a run may use.
        configured: the placement of the config, to be compared with the best ones.
        listed: how many plans are listed beside the best of each style.
    """

    def search_with(tokens: int | None, keep: int = 1) -> Search:
        changed = with_micro_batches(job, tokens)
        return Search(Costs(changed, curves, machine.cluster), MemoryModel(changed, machine), keep=keep)

    result = SearchResult((), 0, ())
    styles = list(STYLES)
    smaller, larger = _micro_batches(job)
    for tokens in smaller:
        result = result.merged(search_with(tokens, listed + 1).run(styles))
        # smaller micro-batches only add time, unless they make room for what is offloaded or does not fit
        if result.best is not None and not result.best.plan.offloads:
            break
        styles = [each.plan.placement.style for each in result.ranked if each.time is None or each.plan.offloads]
    for tokens in larger:
        result = result.merged(_faster(search_with(tokens), result))
    own = None if configured is None else configured_plan(job, curves, machine, configured)
    return PlacementAnswer(job, curves, machine.cluster, result, own, listed)


def configured_plan(job: RLJob, curves: MachineCurves, machine: Device, placement: Placement) -> Candidate:
    """The plan that a job's config is under a placement, with its memory measured exactly."""
    costs = Costs(job, curves, machine.cluster)
    return Candidate.of(costs, MemoryModel(job, machine, exact=True), StepPlan.of(job.config, placement))


def _faster(search: Search, found: SearchResult) -> SearchResult:
    """The best plans that are faster with the train.micro_batch_tokens of a search."""
    tried = [
        (each, search.evaluate(each.plan)) for each in found.ranked if each.time is not None and not each.plan.offloads
    ]
    kept = tuple(other for each, other in tried if other.seconds < (1 - _LEAST_GAIN) * each.seconds)
    return SearchResult(kept, len(tried), kept)


def with_micro_batches(job: RLJob, tokens: int | None) -> RLJob:
    """The job with another train.micro_batch_tokens; none: as configured."""
    if tokens is None:
        return job
    return replace(job, config=with_settings(job.config, {"train.micro_batch_tokens": tokens}))


def _micro_batches(job: RLJob) -> tuple[list[int | None], list[int]]:
    """Values of train.micro_batch_tokens to look at: the configured one (none) with smaller ones; and larger ones. A
    number of rows is kept."""
    train = job.config.train
    if train.micro_batch_size is not None:
        return [None], []
    tokens = train.tokens_on(job.device.type)
    longest = longest_row(job.config.rollout)
    halves = [tokens // 2**power for power in range(1, _HALVINGS + 1)]
    doubles = [tokens * 2**power for power in range(1, _DOUBLINGS + 1)]
    return [None, *(half for half in halves if half >= longest)], doubles


def _on_one_line(plan: StepPlan) -> str:
    """The ranks of a plan, as the command line takes them."""
    setting = plan.placement_setting().as_given()
    given = yaml.safe_dump(setting, default_flow_style=True, sort_keys=False, width=math.inf).strip()
    return str(given).replace("'", '"')


def _options(settings: Mapping[str, Any], prefix: str) -> str:
    """Settings as the command line takes them."""
    return " ".join(f"--{prefix}{name} {str(value).lower()}" for name, value in settings.items())


def _line(name: str, candidate: Candidate) -> str:
    memory = f"{candidate.memory.peak_bytes / _GIB:.2f}"
    if candidate.time is None:
        return f"{name:14}" + f"{'-':>13}" * (len(PHASES) + 2) + f"{memory:>13}"
    phases = [candidate.time.phases.get(phase, 0.0) for phase in PHASES]
    seconds = "".join(f"{value:>13.2f}" for value in (candidate.seconds, *phases))
    return f"{name:14}{seconds}{candidate.time.idle_part:>13.0%}{memory:>13}"


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
