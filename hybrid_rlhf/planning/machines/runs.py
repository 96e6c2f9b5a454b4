"""What the loop of RL takes beyond its pieces, from short runs of it on one rank and on several.

Passes that are timed one after the other find their weights and activations in the processor's caches, and wait for no
other rank. In a run roles take turns, and the slowest rank decides. So calibration ends with real runs. Those on one
rank correct forwards and backwards, with fixed costs per read, update and token. Those on several ranks show how much
the ranks of a host slow each other down, and what an update takes beyond its collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.planning.costs import Costs
from hybrid_rlhf.planning.curves import Curve, MachineCurves
from hybrid_rlhf.planning.device import Cluster
from hybrid_rlhf.planning.job import RLJob, StepLengths, read_job
from hybrid_rlhf.planning.machines.fitting import SCALES, fit
from hybrid_rlhf.planning.machines.layers import TimedModel
from hybrid_rlhf.planning.plans import StepPlan, flattening
from hybrid_rlhf.planning.step_time import StepTime, step_time
from hybrid_rlhf.runtime.world import World

ALL_ROWS = 10**6
"""Memory lets all rows be decoded at once."""
_NOTHING = 1e-12
"""Factor of work that is left out."""
_WORK = "work"
"""Term of predicted work, whose cost is a factor."""
_SHARED = (1.0, 4.0)
"""Factors of the work of training on several ranks, at least and at most."""


@dataclass(frozen=True)
class RunSizes:
    """A run: its model, which is all roles, and prompts per step."""

    model: TimedModel
    prompts: int


@dataclass(frozen=True)
class RunTimes:
    """Times of a run without ZeRO, all roles on all ranks."""

    config: RLConfig
    prompt_tokens: float
    completion_tokens: float
    """Mean."""
    seconds: Mapping[str, float]
    """Median of a step's `scoring`, `training`, and what is in no phase, `other`; of the whole `step`."""

    @property
    def tokens(self) -> float:
        """Number of tokens of a rollout."""
        return self.config.rollout.prompts_per_step * (self.prompt_tokens + self.completion_tokens)


RunTimer = Callable[[World, str, RunSizes], RunTimes]
"""Makes a run in a folder; every rank of a world calls."""


def with_runs(curves: MachineCurves, runs: Sequence[tuple[int, RunTimes]]) -> MachineCurves:
    """The curves, corrected by runs on so many ranks each, of which some must be on one."""
    predicted = [_Prediction.of(times, ranks, curves) for ranks, times in runs]
    curves = _with_loop(curves, [run for run in predicted if run.ranks == 1])
    several = {run.ranks for run in predicted if run.ranks > 1}
    by_ranks = {ranks: [run for run in predicted if run.ranks == ranks] for ranks in sorted(several)}
    if curves.device == "cpu":
        alone = replace(curves, slowdown=Curve())
        shared = {
            ranks: median(run.times.seconds["scoring"] / run.seconds(alone, "scoring") for run in some)
            for ranks, some in by_ranks.items()
        }
        curves = replace(curves, slowdown=Curve.of([(1, 1.0), *shared.items()]))
    training = {
        ranks: _fit_training(curves, some, _SHARED, without=("forward", "backward")) for ranks, some in by_ranks.items()
    }
    curves = replace(
        curves,
        update=Curve.of([*curves.update.points, *((ranks, costs["update"]) for ranks, costs in training.items())]),
        shared_training=Curve.of([(1, 1.0), *((ranks, costs[_WORK]) for ranks, costs in training.items())]),
    )
    loop = {ranks: median(run.loop_ratio(curves) for run in some) for ranks, some in by_ranks.items()}
    return replace(curves, shared_loop=Curve.of([(1, 1.0), *loop.items()]))


def _with_loop(curves: MachineCurves, alone: Sequence[_Prediction]) -> MachineCurves:
    """With what runs on one rank take."""
    curves = replace(curves, loop=Curve.of((run.times.tokens, run.times.seconds["other"]) for run in alone))
    terms = [
        {_WORK: run.seconds(curves, "scoring")}
        | {call: run.calls(curves, call, "scoring") for call in ("read", "read_token")}
        for run in alone
    ]
    seconds = [run.times.seconds["scoring"] for run in alone]
    reads = _fit_work(terms, seconds, SCALES, known=[0.0] * len(alone))
    curves = replace(curves, corrections={**curves.corrections, "forward": reads.pop(_WORK)})
    updates = _fit_training(curves, alone, SCALES, without=("backward",), calls=("trained_token",))
    return replace(
        curves,
        corrections={**curves.corrections, "backward": updates[_WORK]},
        calls={**curves.calls, **reads, "trained_token": updates["trained_token"]},
        update=Curve.of([(1, updates["update"])]),
    )


def _fit_training(
    curves: MachineCurves,
    runs: Sequence[_Prediction],
    bounds: tuple[float, float],
    *,
    without: Sequence[str],
    calls: Sequence[str] = (),
) -> dict[str, float]:
    """Factor of some kinds of work in training, seconds per update, and of calls."""
    rests = [run.training(curves, without=without) for run in runs]
    terms = [
        {_WORK: run.training(curves) - rest, "update": run.updates(curves)}
        | {call: run.calls(curves, call, "training") for call in calls}
        for run, rest in zip(runs, rests, strict=True)
    ]
    return _fit_work(terms, [run.times.seconds["training"] for run in runs], bounds, known=rests)


def _fit_work(
    terms: Sequence[Mapping[str, float]],
    seconds: Sequence[float],
    bounds: tuple[float, float],
    *,
    known: Sequence[float],
) -> dict[str, float]:
    """Like `fit`, with the factor of predicted work within bounds: runs of small models may tell little of it, and
    large models are predicted with it."""
    low, high = bounds
    factor = min(high, max(low, fit(terms, seconds, known=known)[_WORK]))
    others = [{name: size for name, size in each.items() if name != _WORK} for each in terms]
    rest = [before + factor * each[_WORK] for before, each in zip(known, terms, strict=True)]
    return {_WORK: factor, **fit(others, seconds, known=rest)}


@dataclass(frozen=True)
class _Prediction:
    """What curves say of a run."""

    times: RunTimes
    ranks: int
    job: RLJob
    plan: StepPlan

    @classmethod
    def of(cls, times: RunTimes, ranks: int, curves: MachineCurves) -> _Prediction:
        """The job of a run, from its config."""
        lengths = StepLengths(
            times.prompt_tokens, (round(times.completion_tokens),) * times.config.rollout.prompts_per_step
        )
        job = read_job(times.config, torch.device(curves.device), lengths=lengths)
        return cls(times, ranks, job, StepPlan(flattening([*job.roles], ranks, zero={})))

    def seconds(self, curves: MachineCurves, phase: str) -> float:
        """Predicted seconds of a phase."""
        return self.step(curves).phases[phase]

    def step(self, curves: MachineCurves) -> StepTime:
        """The whole step."""
        costs = Costs(self.job, curves, Cluster(self.ranks, self.ranks))
        return step_time(costs, self.plan, rows_at_once=ALL_ROWS)

    def calls(self, curves: MachineCurves, name: str, phase: str) -> float:
        """How often a phase makes a call that takes a fixed time."""
        slow, none = (replace(curves, calls={**curves.calls, name: each}) for each in (1.0, 0.0))
        return self.seconds(slow, phase) - self.seconds(none, phase)

    def updates(self, curves: MachineCurves) -> float:
        """Number of updates of all roles in a step."""
        slow, none = (replace(curves, update=each) for each in (Curve.of([(1, 1.0)]), Curve()))
        return self.seconds(slow, "training") - self.seconds(none, "training")

    def training(self, curves: MachineCurves, *, without: Sequence[str] = ()) -> float:
        """Seconds of training without a fixed cost of updates, and without some kinds of work."""
        corrections = {**curves.corrections, **dict.fromkeys(without, _NOTHING)}
        return self.seconds(replace(curves, update=Curve(), corrections=corrections), "training")

    def loop_ratio(self, curves: MachineCurves) -> float:
        """What of a step is in no phase, over its prediction; ranks that wait for one another in any phase included."""
        predicted = self.step(curves)
        loop = predicted.phases["loop"]
        return max(1.0, (self.times.seconds["step"] - predicted.step_seconds + loop) / loop)
