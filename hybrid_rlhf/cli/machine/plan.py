"""`hybrid-rlhf plan`: the memory of each phase of `hybrid-rlhf train`, and the fastest placement of the roles of RL.

`train --plan` prints the memory alone. Times need curves of the machine: those that `hybrid-rlhf calibrate` measured on
this one, or of a data sheet (`--machine h100`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from hybrid_rlhf.cli import train
from hybrid_rlhf.configs.parsing.command_line import user_errors
from hybrid_rlhf.configs.parsing.output import print_result
from hybrid_rlhf.configs.pipeline import PlanConfig
from hybrid_rlhf.configs.sections.rules import require

if TYPE_CHECKING:
    from hybrid_rlhf.memory.plan import PhaseMemory, Planner
    from hybrid_rlhf.placement.curves import MachineCurves
    from hybrid_rlhf.placement.tables import PlacementAnswer

_NO_CURVES = "times are not predicted: run hybrid-rlhf calibrate first, or name a machine, for example --machine h100"


def main(argv: Sequence[str] | None = None, *, prog: str | None = None) -> None:
    """Print the plan of the line that `train` would run; exit code 1 if a phase does not fit."""
    with user_errors():
        words = [*train.with_bare_plan(sys.argv[1:] if argv is None else argv), "--plan=true"]
        config, steps = train.pipeline(PlanConfig, words, prog=prog)
        from hybrid_rlhf.memory.report import planned_phases, table

        here = _as_configured(config)
        planner, planned = planned_phases(here, steps)
        answer = _placement(config, steps["rl"], planner) if "rl" in planned else None
        lines, fits = table(planner, planned, steps)
        if "rl" in planned:
            lines += ["", *([_NO_CURVES] if answer is None else answer.lines())]
        document = {"fits": fits, "memory": _memory(planned), "rl": None if answer is None else answer.to_dict()}
        print_result(document, "\n".join(lines))
        sys.exit(0 if fits else 1)


def _as_configured(config: PlanConfig) -> PlanConfig:
    """The config with the ranks and the memory of the machine that it names, as the memory plan reads them."""
    config = replace(config, ranks=None, plan_ranks=config.ranks or config.plan_ranks)
    if config.machine == "this":
        return config
    from hybrid_rlhf.placement.machines.datasheets import DATA_SHEETS

    gib = DATA_SHEETS[config.machine].device_gib
    return replace(config, machine="this", link_gib_per_second=None, plan_device_gib=gib)


def _placement(config: PlanConfig, rl: Any, planner: Planner) -> PlacementAnswer | None:
    """The placements of the RL step; none without curves of the machine."""
    curves = _curves(config)
    machine = planner.machine
    if curves is None or curves.device != machine.device.type:
        return None
    from hybrid_rlhf.engines.ds_config import read_overrides
    from hybrid_rlhf.placement.job import JobReader, default_lengths
    from hybrid_rlhf.placement.plans import Cluster
    from hybrid_rlhf.placement.tables import plan_placement

    hosts = config.hosts or -(-machine.ranks // curves.ranks_per_host)
    require(
        machine.ranks % hosts == 0,
        f"ranks must divide into equal hosts, got {machine.ranks} ranks and {hosts} hosts: give other --hosts",
    )
    lengths = default_lengths(rl, prompt_tokens=config.prompt_tokens, mean_tokens=config.completion_tokens)
    job = JobReader(machine.device, planner.shapes, planner.starts)(
        rl, lengths, overrides=read_overrides(rl.deepspeed_config)
    )
    cluster = Cluster(machine.ranks, machine.ranks // hosts)
    return plan_placement(job, curves, cluster, device_bytes=machine.device_bytes, host_bytes=machine.host_bytes)


def _curves(config: PlanConfig) -> MachineCurves | None:
    if config.machine == "this":
        from hybrid_rlhf.placement.machines.stored import load_curves

        return load_curves()
    from hybrid_rlhf.placement.machines.datasheets import DATA_SHEETS, modelled_curves

    return modelled_curves(DATA_SHEETS[config.machine], link_gib_per_second=config.link_gib_per_second)


def _memory(planned: Mapping[str, Sequence[PhaseMemory]]) -> list[dict[str, Any]]:
    """The memory plan for programs, in bytes."""
    return [
        {"step": name, "phase": phase.name, "fits": phase.fits, "total": phase.total, **asdict(phase.need)}
        for name, phases in planned.items()
        for phase in phases
    ]


if __name__ == "__main__":
    main()
