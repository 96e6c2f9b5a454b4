"""`placement: auto`: the planner's fastest placement that fits, and how wrong its prediction turns out to be.

The plan is made on the first rank, from the curves that `hybrid-rlhf calibrate` measured on this machine, from what a
run on several hosts measures between them, and from assumed lengths of the completions. After a few steps their lengths
replace the assumed ones, then the measured phases correct the curves. If another placement should now be faster, the
log says so with the command that resumes under it; the run itself keeps its placement.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.placement import is_automatic
from hybrid_rlhf.planning.costs import Costs
from hybrid_rlhf.planning.curves import MachineCurves
from hybrid_rlhf.planning.device import Device, own_device
from hybrid_rlhf.planning.dotted_keys import with_settings
from hybrid_rlhf.planning.job import RLJob, StepLengths, measured_lengths, read_job
from hybrid_rlhf.planning.machines.collectives import Times, time_collectives
from hybrid_rlhf.planning.machines.links import with_measured_link
from hybrid_rlhf.planning.machines.stored import load_curves
from hybrid_rlhf.planning.placed_memory import MemoryModel
from hybrid_rlhf.planning.placement_table import plan_placement, with_micro_batches
from hybrid_rlhf.planning.plans import StepPlan
from hybrid_rlhf.planning.prediction_errors import STEP, PredictionReport, memory_errors
from hybrid_rlhf.planning.search import Candidate
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.run import CONFIG_FILE
from hybrid_rlhf.runtime.world import World, shared_user_errors

LINK_SIZES = [2**8, 2**14, 2**18, 2**20, 2**22, 2**24]
"""Bytes that are exchanged to measure the link between hosts."""
_MEASURED_STEPS = 4
"""First steps that are compared; the first of them is left out, as caches are cold."""


@dataclass(frozen=True)
class MeasuredStep:
    """What a step took."""

    seconds: Mapping[str, float]
    """By phase and of the whole step; {}: it was not timed."""
    lengths: StepLengths
    """Lengths of what it sampled."""
    peaks: Sequence[Mapping[str, float]] = ()
    """GiB of each rank by phase, so far; (): they were not measured."""


def choose_placement(config: RLConfig, world: World) -> tuple[RLConfig, PlacementWatch | None]:
    """The config with the planner's placement in place of "auto", and on the first rank what compares its prediction
    with measurements; any other config as it is. Every rank calls.

    Raises:
        UserError: on every rank, when this machine has no curves, or no placement fits.
    """
    if not is_automatic(config.placement):
        return config, None
    watch = None
    choice: dict[str, Any] = {}
    several = world.size > world.local_size
    link = time_collectives(world, LINK_SIZES, local=world.local_size) if several else None
    with shared_user_errors(world):
        if world.is_main:
            watch = PlacementWatch.of(config, world, link=link)
            choice = {**watch.plan.settings(config), "placement": watch.plan.placement_setting()}
            for line in watch.answer.lines():
                logger.info("%s", line)
    chosen: RLConfig = with_settings(config, world.broadcast_object(choice))
    return chosen, watch


class PlacementWatch:
    """Compares times and memory of steps with the planner's."""

    def __init__(self, job: RLJob, curves: MachineCurves, machine: Device) -> None:
        """Ask the planner; its best plan runs.

        Raises:
            UserError: when no placement fits.
        """
        self.job = job
        self.curves = curves
        self.machine = machine
        self.answer = plan_placement(job, curves, machine)
        best = self.answer.best
        if best is None:
            why = self.answer.why(self.answer.result.ranked[0])
            raise UserError(
                f"placement auto needs a placement that fits, the nearest {why}: use more ranks, a smaller model, "
                "or settings that hybrid-rlhf plan names"
            )
        self.plan = best.plan
        self._memory = best.memory.phases
        self._predicted = _seconds(best)
        self._measured: list[MeasuredStep] = []

    @classmethod
    def of(cls, config: RLConfig, world: World, *, link: Times | None = None) -> PlacementWatch:
        """The watch of a run.

        Args:
            config: of the run.
            world: all of its ranks.
            link: what was measured between its hosts; none: it has one host.

        Raises:
            UserError: when this machine has no curves, or no placement fits.
        """
        curves = load_curves(config.data.cache_dir) or load_curves()
        if curves is None or curves.device != world.device.type:
            raise UserError(
                "placement auto needs measured curves of this machine, got none: run hybrid-rlhf calibrate, or name a "
                "placement"
            )
        if link is not None:
            curves = with_measured_link(curves, link)
        return cls(read_job(config, world.device), curves, own_device(world.size, local=world.local_size))

    def seconds(self, plan: StepPlan) -> dict[str, float]:
        """What a plan that fits is expected to take, by phase and of the whole step."""
        job = with_micro_batches(self.job, plan.micro_batch_tokens)
        costs = Costs(job, self.curves, self.machine.cluster)
        return _seconds(Candidate.of(costs, MemoryModel(job, self.machine), plan))

    def metrics(self, measured: MeasuredStep) -> dict[str, float]:
        """Predictions and their errors for a step."""
        report = self._compared(self._predicted, measured.seconds, measured.peaks)
        if measured.seconds:
            self._measured.append(measured)
            if len(self._measured) == _MEASURED_STEPS:
                self._conclude()
        return report.metrics()

    def _compared(
        self, predicted: Mapping[str, float], seconds: Mapping[str, float], peaks: Sequence[Mapping[str, float]]
    ) -> PredictionReport:
        return PredictionReport.of(predicted, seconds, memory=memory_errors(self._memory, peaks))

    def _conclude(self) -> None:
        """Log the errors, and what measured lengths and corrected curves say."""
        kept = self._measured[1:]
        assumed = self.job.lengths
        medians = {name: statistics.median(each.seconds.get(name, 0.0) for each in kept) for name in kept[0].seconds}
        # first the lengths, or the curves of decoding would be corrected for them
        rollout = self.job.config.rollout
        lengths = measured_lengths(
            [each.lengths for each in kept], prompts=rollout.prompts_per_step, per_prompt=rollout.sampling.n
        )
        self.job = replace(self.job, lengths=lengths)
        report = self._compared(self.seconds(self.plan), medians, kept[-1].peaks)
        logger.info(
            "placement: predicted and measured seconds of steps 2 to %d, for the measured completions of %.1f tokens "
            "in the mean; the plan assumed %.1f",
            _MEASURED_STEPS,
            statistics.fmean(lengths.completions),
            statistics.fmean(assumed.completions),
        )
        for line in report.lines():
            logger.info("%s", line)
        self.curves = self.curves.corrected(report.ratios())
        self.answer = plan_placement(self.job, self.curves, self.machine)
        best = self.answer.best
        if best is None or best.plan.placement == self.plan.placement:
            return
        logger.info(
            "placement: with these measurements %s is expected to take %.2f s a step, this one %.2f s: leave it, or "
            "stop the run and resume it with hybrid-rlhf rl --config %s/%s --resume auto %s",
            best.plan.placement.style,
            best.seconds,
            self.seconds(self.plan)[STEP],
            self.job.config.output_dir,
            CONFIG_FILE,
            self.answer.best_options("placement"),
        )


def _seconds(candidate: Candidate) -> dict[str, float]:
    assert candidate.time is not None, "a plan that fits"
    return {**candidate.time.phases, STEP: candidate.seconds}
