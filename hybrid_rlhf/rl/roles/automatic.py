"""`placement: auto`: the planner's fastest placement that fits, and how wrong its prediction turns out to be.

The plan is made once, on the first rank, from the curves that `hybrid-rlhf calibrate` measured on this machine. After a
few steps the measured phases correct the curves, and the log says whether another placement would now be faster. The
run keeps its placement: a checkpoint resumes under any other.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.placement import AUTO
from hybrid_rlhf.engines.ds_config import read_overrides
from hybrid_rlhf.memory.plan import Device, own_device
from hybrid_rlhf.memory.shapes import Shapes
from hybrid_rlhf.placement.curves import MachineCurves
from hybrid_rlhf.placement.job import JobReader, RLJob, default_lengths
from hybrid_rlhf.placement.machines.stored import load_curves
from hybrid_rlhf.placement.plans import Cluster, StepPlan
from hybrid_rlhf.placement.report import STEP, PredictionReport
from hybrid_rlhf.placement.tables import PlacementAnswer, plan_placement
from hybrid_rlhf.runtime.observability.logs import LOGGER_NAME
from hybrid_rlhf.runtime.world import World, shared_user_errors

logger = logging.getLogger(LOGGER_NAME)
_MEASURED_STEPS = 4
"""First steps that are compared; the first of them is left out, as caches are cold."""


@dataclass(frozen=True)
class _PlannedSettings:
    """The plan as settings of the config, from the first rank to all."""

    placement: dict[str, dict[str, Any]]
    rollout: dict[str, Any]
    """Settings of the section rollout."""
    zero: dict[str, Any]
    """Of the section actor.zero."""


def choose_placement(config: RLConfig, world: World) -> tuple[RLConfig, PlacementWatch | None]:
    """The config with the planner's placement in place of "auto", and on the first rank what compares its prediction
    with measurements; any other config as it is. Every rank calls.

    Raises:
        UserError: on every rank, when this machine has no curves, or no placement fits.
    """
    if config.placement != AUTO:
        return config, None
    watch, choice = None, None
    with shared_user_errors(world):
        if world.is_main:
            watch = PlacementWatch(_PlanRequest.of(config, world))
            choice = _choice(watch.plan)
            for line in watch.answer.lines():
                logger.info("%s", line)
    choice = world.broadcast_object(choice)
    assert choice is not None
    rollout = replace(config.rollout, **choice.rollout)
    zero = replace(config.actor.zero, **choice.zero)
    return replace(config, placement=choice.placement, rollout=rollout, actor=replace(config.actor, zero=zero)), watch


@dataclass(frozen=True)
class _PlanRequest:
    """Input of the planner."""

    job: RLJob
    curves: MachineCurves
    cluster: Cluster
    machine: Device

    @classmethod
    def of(cls, config: RLConfig, world: World) -> _PlanRequest:
        """The request of a run.

        Raises:
            UserError: when this machine has no curves.
        """
        curves = load_curves(config.data.cache_dir) or load_curves()
        if curves is None or curves.device != world.device.type:
            raise UserError(
                "placement auto needs measured curves of this machine, got none: run hybrid-rlhf calibrate, or name a "
                "placement"
            )
        lengths = default_lengths(config, prompt_tokens=None, mean_tokens=None)
        job = JobReader(world.device, Shapes())(config, lengths, overrides=read_overrides(config.deepspeed_config))
        return cls(job, curves, Cluster(world.size, world.local_size), own_device(world.size, local=world.local_size))

    def answer(self, ratios: Mapping[str, float]) -> PlacementAnswer:
        """The planner's, with predictions corrected by measured / predicted of some kinds of work."""
        curves = self.curves.corrected(ratios)
        return plan_placement(
            self.job,
            curves,
            self.cluster,
            device_bytes=self.machine.device_bytes,
            host_bytes=self.machine.host_bytes,
        )


class PlacementWatch:
    """Compares the times of steps with the planner's."""

    def __init__(self, question: _PlanRequest) -> None:
        """Ask the planner; its best plan runs.

        Raises:
            UserError: when no placement fits.
        """
        self._question, self.answer = question, question.answer({})
        best = self.answer.best
        if best is None or best.time is None:
            why = self.answer.why(self.answer.result.ranked[0])
            raise UserError(
                f"placement auto needs a placement that fits, the nearest {why}: use more ranks, or a smaller model"
            )
        self.plan = best.plan
        self._predicted = {**best.time.phases, STEP: best.time.step_seconds}
        self._measured: list[dict[str, float]] = []

    def metrics(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """Predictions and their errors for a step.

        Args:
            seconds: measured, by phase and of the whole step; {} for a step that was not timed.
        """
        report = PredictionReport.of(self._predicted, seconds)
        if seconds:
            self._measured.append({**seconds})
            if len(self._measured) == _MEASURED_STEPS:
                self._conclude()
        return report.metrics()

    def _conclude(self) -> None:
        """Log the errors, and what the corrected curves say."""
        kept = self._measured[1:]
        medians = {name: statistics.median(each.get(name, 0.0) for each in kept) for name in kept[0]}
        report = PredictionReport.of(self._predicted, medians)
        for line in (f"placement: predicted and measured seconds of steps 2 to {_MEASURED_STEPS}", *report.lines()):
            logger.info("%s", line)
        best = self._question.answer(report.ratios()).best
        if best is not None and best.plan.placement.roles != self.plan.placement.roles:
            logger.info(
                "placement: with these measurements %s is expected to take %.2f s a step, this one %.2f s; set "
                "placement to %s and resume",
                best.plan.placement.style,
                best.seconds,
                medians[STEP],
                best.plan.placement_setting(),
            )


def _choice(plan: StepPlan) -> _PlannedSettings:
    """A plan as settings of a config."""
    rollout: dict[str, Any] = {"tensor_parallel": 1 if plan.separate else plan.sampling.tensor_parallel}
    rollout |= {key: True for key in ("offload_frozen", "offload_states") if getattr(plan, key)}
    return _PlannedSettings(
        plan.placement_setting(), rollout, {"offload_optimizer": True} if plan.offload_optimizer else {}
    )
