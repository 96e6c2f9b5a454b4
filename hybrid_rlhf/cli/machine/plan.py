"""`hybrid-rlhf plan`: the memory of each phase of `hybrid-rlhf train`, and the fastest placement of the roles of RL.

`plan sft`, `plan reward`, `plan preference` and `plan rl` take the line of that command in place of `train`'s; a config
file whose keys only one of them has needs no such word. The first row of the table of placements is the configured
`rl.placement`. Times need the speed of the machine, as `hybrid-rlhf calibrate` measured it on this one, or of a data
sheet (`--machine h100`).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_rlhf.cli import train
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.pipeline import STEPS, PipelineConfig, PlanConfig
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.placement import is_automatic
from hybrid_rlhf.configs.sections.rules import require
from hybrid_rlhf.runtime.command_line import changed_settings, parse_config, read_file, user_errors
from hybrid_rlhf.runtime.observability.logs import LOADING_LIBRARIES, log_to_stderr, logger
from hybrid_rlhf.runtime.output import print_result
from hybrid_rlhf.runtime.placement import Placement, placed_roles, resolve_placement

if TYPE_CHECKING:
    from hybrid_rlhf.planning.device import Device
    from hybrid_rlhf.planning.dotted_keys import Settings
    from hybrid_rlhf.planning.job import RLJob
    from hybrid_rlhf.planning.machine import Machine
    from hybrid_rlhf.planning.phase_memory import PhaseMemory
    from hybrid_rlhf.planning.placement_table import PlacementAnswer
    from hybrid_rlhf.planning.remedies import Remedy
    from hybrid_rlhf.planning.search import Candidate
    from hybrid_rlhf.planning.step_memory import Planner

_NOT_MEASURED = (
    "times are not predicted: run hybrid-rlhf calibrate first, or name a machine, for example --machine h100"
)

_PLANNED = (
    "actor.zero.stage",
    "critic.zero.stage",
    "actor.zero.offload_optimizer",
    "critic.zero.offload_optimizer",
    "rollout.tensor_parallel",
    "rollout.offload_frozen",
    "rollout.offload_states",
    "train.micro_batch_tokens",
)
"""Settings that a plan of placements determines."""
_OWN = {option.name for option in fields(PlanConfig)} - {option.name for option in fields(PipelineConfig)}
"""Options of the plan on the line of a single step; those of `launcher` are too."""


def main(argv: Sequence[str] | None = None, *, prog: str | None = None) -> None:
    """Print the plan of the line that `train` would run; exit code 1 if it does not fit as configured, or under
    `placement: auto` if no placement fits."""
    with user_errors(), log_to_stderr():
        words = list(sys.argv[1:] if argv is None else argv)
        name = words.pop(0) if words and words[0] in STEPS else _step_of_files(words)
        if name is None:
            config, steps = train.pipeline(PlanConfig, words, prog=prog)
        else:
            config, steps = _single(name, words, prog=prog)
        logger.info(LOADING_LIBRARIES)
        from hybrid_rlhf.planning.memory_table import table

        logger.info("planning %s", ", ".join(config.step_names))
        machine, rank = planned_machine(config, steps[config.step_names[-1]].data.cache_dir)
        planner = planner_of(config, steps, rank)
        steps, sizes = _sized(planner, {name: steps[name] for name in config.step_names}, machine)
        planned = {name: planner.phases(step) for name, step in steps.items()}
        planning = None if machine is None else _Placements(config, planner, machine)
        per_host = rank.cluster.ranks_per_host if machine is None else machine.ranks_per_host
        advised = _advised(planner, planned, steps, planning, per_host)
        answer = planning.answer(steps["rl"], advised.get("rl")) if "rl" in planned and planning is not None else None
        if answer is not None and answer.configured is None:
            planned["rl"] = [*answer.result.ranked[0].memory.phases]
        lines, fits = table(rank, planned, advised, single=name is not None)
        lines += sizes
        if "rl" in planned:
            key = "placement" if name is not None else "rl.placement"
            if answer is not None and answer.best is not None and not all(phase.fits for phase in planned["rl"]):
                lines.append(f"  rl also fits under the best plan below, {answer.best.plan.placement.style}")
            lines += ["", *([_NOT_MEASURED] if answer is None else answer.lines(key))]
        document = {"fits": fits, "memory": _memory(planned), "rl": None if answer is None else answer.to_dict()}
        print_result(document, "\n".join(lines))
        sys.exit(0 if fits else 1)


def planner_of(config: PlanConfig, steps: Mapping[str, Any], machine: Device) -> Planner:
    """The planner of a machine, for the steps that would run.

    Raises:
        UserError: for a local source that cannot be read.
    """
    from hybrid_rlhf.cli.runs.checks import check_sources
    from hybrid_rlhf.planning.memory_table import starts_of
    from hybrid_rlhf.planning.step_memory import Planner

    check_sources({name: steps[name] for name in config.step_names})
    # What train skips keeps its model; a step whose folder has another run's starts as its settings say.
    anew = [
        name
        for name in config.step_names
        if changed_settings(steps[name]) or not (Path(steps[name].output_dir) / "finished.json").exists()
    ]
    return Planner(machine, starts=starts_of(steps, anew))


def _sized(planner: Planner, steps: Mapping[str, Any], machine: Machine | None) -> tuple[dict[str, Any], list[str]]:
    """The steps with the sizes of micro-batches that runs take on a GPU, and a line on each that is not given."""
    from hybrid_rlhf.planning.micro_batches import has_size, with_micro_batches
    from hybrid_rlhf.runtime.observability.profiling import peak_flops

    sized = dict(steps)
    lines = []
    for name, step in steps.items():
        if planner.machine.device.type == "cuda" and not has_size(step):
            flops = peak_flops(planner.machine.device) if machine is None else machine.tflops * 1e12
            sized[name], why = with_micro_batches(step, planner, flops)
            lines.append(f"  {name}: train.micro_batch_tokens {sized[name].train.micro_batch_tokens:,}: {why}")
    return sized, lines


def _single(name: str, words: Sequence[str], *, prog: str | None) -> tuple[PlanConfig, dict[str, Any]]:
    """The plan of one step from its command line, which may also have options of the plan."""
    plan_words: list[str] = []
    rest: list[str] = []
    place = rest
    for word in words:
        if word.startswith("--"):
            key = word.removeprefix("--").partition("=")[0]
            place = plan_words if key in _OWN or key.partition(".")[0] == "launcher" else rest
        place.append(word)
    step: Any = parse_config(STEPS[name], rest, prog=None if prog is None else f"{prog} {name}")
    require(step.model.path is not None, f"a plan of {name} needs a model, got none: give --model.path")
    return parse_config(PlanConfig, [*plan_words, f"--steps={name}"], prog=prog), {name: step}


def _step_of_files(words: Sequence[str]) -> str | None:
    """The step whose settings the config files of a command line have; None for settings of `train`.

    Raises:
        UserError: when several steps have all their keys.
    """
    files = [after for word, after in itertools.pairwise(words) if word == "--config"]
    files += [word.removeprefix("--config=") for word in words if word.startswith("--config=")]
    keys = {key for file in files for key in read_file(file)}
    if not keys - {field.name for field in fields(PlanConfig)}:
        return None
    fitting = [name for name, kind in STEPS.items() if keys <= {field.name for field in fields(kind)}]
    if len(fitting) > 1:
        raise UserError(
            f"a plan of one step names it, {' and '.join(files)} may be of {', '.join(fitting)}: write for example "
            f"hybrid-rlhf plan {fitting[0]} --config {files[0]}"
        )
    return fitting[0] if fitting else None


def planned_machine(config: PlanConfig, cache_dir: str | None = None) -> tuple[Machine | None, Device]:
    """The machine that a config names, and the memory of a rank.

    Args:
        config: of the plan.
        cache_dir: folder where the measurements of this machine are looked for before the default one.

    Returns:
        the machine, or None if this one is not measured; and one of its ranks.
    """
    from hybrid_rlhf.planning.machine import sheet_of
    from hybrid_rlhf.planning.memory_table import this_machine
    from hybrid_rlhf.planning.stored import own_machine

    rank = this_machine(config)
    if config.machine == "this":
        machine = own_machine(cache_dir, rank.device)
        if machine is None:
            return None, rank
    else:
        machine = sheet_of(config.machine)
        rank = machine.rank(rank.ranks)
    if config.link_gib_per_second is not None:
        machine = machine.with_network(config.link_gib_per_second)
    hosts = config.hosts or -(-rank.ranks // machine.ranks_per_host)
    require(
        rank.ranks % hosts == 0,
        f"ranks must divide into equal hosts, got {rank.ranks} ranks and {hosts} hosts: give other --hosts",
    )
    return machine, replace(rank, ranks_per_host=rank.ranks // hosts)


def _advised(
    planner: Planner,
    planned: Mapping[str, Sequence[PhaseMemory]],
    steps: Mapping[str, Any],
    times: _Placements | None,
    ranks_per_host: int,
) -> dict[str, list[Remedy]]:
    """Remedies of the steps that do not fit, or larger changes; those of RL are ordered by their predicted time."""
    from hybrid_rlhf.planning.remedies import nearest, remedies

    advised = {}
    for name, phases in planned.items():
        if all(phase.fits for phase in phases):
            continue
        seconds = times.seconds if name == "rl" and times is not None else None
        advised[name] = remedies(planner, steps[name], seconds) or nearest(
            planner, steps[name], ranks_per_host=ranks_per_host, seconds=seconds
        )
    return advised


@dataclass(frozen=True)
class _Placements:
    """Placements of an RL step on a machine whose speed is known."""

    config: PlanConfig
    planner: Planner
    machine: Machine

    def answer(self, rl: RLConfig, advised: Sequence[Remedy] | None) -> PlacementAnswer:
        """The best plans of a step; if nothing fits, with the settings of a remedy that placements do not choose."""
        from hybrid_rlhf.planning.dotted_keys import with_settings
        from hybrid_rlhf.planning.placement_table import plan_placement
        from hybrid_rlhf.planning.search import SearchResult

        listed = self.config.candidates
        rank = self.planner.machine
        answer = plan_placement(self._job(rl), self.machine, rank, configured=self._placement(rl), listed=listed)
        settings = next((remedy.settings for remedy in advised or () if remedy.ranks is None), None)
        if answer.best is not None or settings is None:
            return answer
        unplanned = _unplanned(settings)
        found_plans = plan_placement(self._job(with_settings(rl, unplanned)), self.machine, rank, listed=listed)
        remedied = self._candidate(with_settings(rl, settings))
        result = found_plans.result.merged(SearchResult((remedied,), 1, (remedied,)))
        return replace(found_plans, result=result, configured=answer.configured, given=unplanned)

    def seconds(self, rl: RLConfig) -> float:
        """Predicted for a step as it is configured; infinite where its time cannot be predicted."""
        return self._candidate(rl).seconds

    def _candidate(self, rl: RLConfig) -> Candidate:
        from hybrid_rlhf.planning.placement_table import configured_plan

        rank = self.planner.machine
        placement = self._placement(rl) or resolve_placement(None, placed_roles(rl), ranks=rank.ranks)
        return configured_plan(self._job(rl), self.machine, rank, placement)

    def _placement(self, rl: RLConfig) -> Placement | None:
        """The configured placement; None if the planner places the roles."""
        if is_automatic(rl.placement):
            return None
        return resolve_placement(rl.placement, placed_roles(rl), ranks=self.planner.machine.ranks)

    def _job(self, rl: RLConfig) -> RLJob:
        from hybrid_rlhf.planning.job import default_lengths, read_job

        config = self.config
        planner = self.planner
        lengths = default_lengths(rl, prompt_tokens=config.prompt_tokens, mean_tokens=config.completion_tokens)
        return read_job(rl, planner.machine.device, lengths=lengths, starts=planner.starts)


def _unplanned(settings: Settings) -> Settings:
    """Settings of a remedy that a plan of placements does not determine, with the ZeRO stages that they require."""
    unplanned = {key: value for key, value in settings.items() if key not in _PLANNED}
    offloading = [key.removesuffix("offload_parameters") for key in unplanned if key.endswith(".offload_parameters")]
    return unplanned | {key: settings[key] for key in (f"{zero}stage" for zero in offloading) if key in settings}


def _memory(planned: Mapping[str, Sequence[PhaseMemory]]) -> list[dict[str, Any]]:
    """The memory plan for programs, in bytes."""
    return [
        {"step": name, "phase": phase.name, "ranks": phase.ranks_in_words or None}
        | {"fits": phase.fits, "total": phase.total}
        | asdict(phase.need)
        for name, phases in planned.items()
        for phase in phases
    ]


if __name__ == "__main__":
    main()
