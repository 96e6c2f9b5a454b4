"""The table of `hybrid-rlhf plan`: memory of each phase of a pipeline, and settings for the steps that do not fit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from hybrid_rlhf.configs.pipeline import PlanConfig, has_model
from hybrid_rlhf.planning.device import Device, own_device
from hybrid_rlhf.planning.engine_memory import MemoryUse
from hybrid_rlhf.planning.phase_memory import AnyStep, PhaseMemory
from hybrid_rlhf.planning.remedies import Remedy
from hybrid_rlhf.runtime.hostfile import process_count

_COLUMNS = ("weights", "gradients", "optimizer", "activations", "inference", "cache", "buffers")


def table(
    machine: Device,
    planned: Mapping[str, Sequence[PhaseMemory]],
    advised: Mapping[str, Sequence[Remedy]],
    *,
    single: bool = False,
) -> tuple[list[str], bool]:
    """The plan of the steps that would run.

    Args:
        machine: what they are planned for.
        planned: the phases of each step.
        advised: the remedies of the steps that do not fit.
        single: of one step, whose keys stand for themselves.

    Returns:
        the lines of the report, and whether everything fits.
    """
    host = "" if machine.host_bytes is None else f", {_gib(machine.host_bytes)} of host memory"
    width = max([18, *(len(phase.title) + 1 for phases in planned.values() for phase in phases)])
    lines = [
        f"memory plan in GiB per rank: {machine.ranks} x {machine.device.type} of {_gib(machine.device_bytes)}{host}",
        f"{'phase':{width}}" + "".join(f"{name:>12}" for name in (*_COLUMNS, "total", "host")) + "  fits",
    ]
    good = True
    for name, phases in planned.items():
        for phase in phases:
            lines.append(_line(phase, width))
            if phase.tower is not None:
                lines.append(f"{'  vision tower':{width}}{_columns(phase.tower, phase.part(phase.tower))}".rstrip())
        if misfits := [phase.title for phase in phases if not phase.fits]:
            good = False
            advice = _advice(advised.get(name, ()), prefix="" if single else f"{name}.")
            lines.append(f"  {name} does not fit as configured ({', '.join(misfits)}): {advice}")
    return lines, good


def starts_of(steps: Mapping[str, AnyStep], anew: Collection[str]) -> dict[str, str]:
    """Folders that steps will write, each with an existing model of the same shape.

    Args:
        steps: all steps, resolved, in the order of the pipeline.
        anew: names of the steps that will train even if their folders contain models.
    """
    starts: dict[str, str] = {}
    for name, step in steps.items():
        start = step.model.path
        if start is not None and (name in anew or not has_model(step.output_dir)):
            starts[step.output_dir] = starts.get(start, start)
    return starts


def this_machine(config: PlanConfig) -> Device:
    """This machine with the ranks that are planned for, or that a run would start."""
    gpus = torch.cuda.device_count()
    ranks = config.ranks or process_count(config.launcher)[0] or max(gpus, 1)
    return own_device(ranks, local=ranks if config.launcher.hostfile is None else max(gpus, 1))


def _advice(found: Sequence[Remedy], *, prefix: str) -> str:
    if not found:
        return "no known setting suffices, use a smaller model"
    ways = [
        f"on {each.ranks} ranks " * (each.ranks is not None)
        + (f"with {each.in_words(prefix)}" if each.settings else "as configured")
        for each in found
    ]
    return "it fits " + ", or ".join(ways)


def _line(phase: PhaseMemory, width: int) -> str:
    fits = "yes" if phase.fits else "NO"
    return f"{phase.title:{width}}{_columns(phase.need, phase.total)}  {fits} {phase.note}".rstrip()


def _columns(use: MemoryUse, total: float) -> str:
    values = [getattr(use, name) for name in _COLUMNS] + [total, use.host]
    return "".join(f"{_gib(value):>12}" for value in values)


def _gib(value: float) -> str:
    return f"{value / 2**30:.2f}"
