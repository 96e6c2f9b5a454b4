"""Regret of the planner on stored trials: how much slower is the placement that it chooses than the best measured one?

    python -m benchmarks.placement.regret

Trials of results/placement.zip that ran the same step of a small random model under several placements, on two cores of
a CPU, on one host and on two. The machines that ran them are gone, so the planner has the five numbers that
`hybrid-rlhf calibrate` measured on another machine of two cores, and each of them halved and doubled. Series that
ran beside other work on the machine, in which the same step took up to twice as long within an hour, are reported
separately.
"""

from __future__ import annotations

import ast
import json
import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from benchmarks.results import find
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.planning.device import Cluster
from hybrid_rlhf.planning.job import RLJob, StepLengths, read_job
from hybrid_rlhf.planning.machine import Machine
from hybrid_rlhf.planning.plans import StepPlan
from hybrid_rlhf.planning.step_time import StepTimer
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.placement import PlacedRoles, resolve_placement

CPU = Machine(
    "two cores",
    tflops=0.09,
    memory_gb_per_second=23,
    device_gib=8,
    link_gb_per_second=0.43,
    hosts_gb_per_second=1.0,
    host_link_gb_per_second=12,
    launch_microseconds=7.2,
    link_latency_microseconds=1200,
    hosts_latency_microseconds=250,
    cards_per_host=1,
    cores=2,
    network_source="measured",
    measured=True,
)
CABLES = {
    "bridge": CPU,
    "1 Gbit/s, 20 ms": replace(CPU, hosts_gb_per_second=0.12, hosts_latency_microseconds=20_000.0),
}
NUMBERS = ("tflops", "memory_gb_per_second", "launch_microseconds", "link_gb_per_second", "link_latency_microseconds")
SERIES = ("cpu", *(f"cpu_{number}" for number in range(2, 10)))
BUSY = ("cpu_6", "cpu_7", "cpu_8")
_PROMPT_TOKENS = 25.0
_ALL_ROWS = 10**6


@dataclass(frozen=True)
class Trial:
    """A placement, and the seconds of its step."""

    placement: str
    zero: int
    seconds: float
    tensor_parallel: int = 1


@dataclass(frozen=True)
class Group:
    """Trials of the same step."""

    name: str
    hidden: int
    layers: int
    prompts: int
    new_tokens: int
    cluster: Cluster
    mini_batches: int
    trials: tuple[Trial, ...]
    machine: Machine = CPU
    algorithm: str = "ppo"

    def job(self, folder: Path) -> RLJob:
        """The step; the config of the model is written to a folder."""
        path = folder / f"{self.hidden}_{self.layers}"
        heads = max(1, self.hidden // 64)
        LlamaConfig(
            vocab_size=515,
            hidden_size=self.hidden,
            intermediate_size=3 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
        ).save_pretrained(path)
        words = f"--algorithm {self.algorithm} --model.path {path} --reward.components [{path}] --placement flattening "
        words += f"--algorithm.mini_batches {self.mini_batches} --rollout.prompts_per_step {self.prompts} "
        words += f"--rollout.max_prompt_tokens 64 --rollout.sampling.max_new_tokens {self.new_tokens}"
        more = "" if self.algorithm == "ppo" else " --algorithm.kl null"
        lengths = StepLengths(_PROMPT_TOKENS, (self.new_tokens,) * self.prompts)
        return read_job(parse_config(RLConfig, (words + more).split()), torch.device("cpu"), lengths=lengths)

    def predicted(self, job: RLJob, machine: Machine) -> list[float]:
        """Seconds of each trial."""
        timer = StepTimer(job, machine, self.cluster)
        return [timer(plan_of(trial, job, self.cluster), rows_at_once=_ALL_ROWS).step_seconds for trial in self.trials]

    def regret(self, predicted: Sequence[float]) -> float:
        """How much slower the trial with the least prediction is than the best one; 0: not at all."""
        chosen = self.trials[predicted.index(min(predicted))]
        return chosen.seconds / min(trial.seconds for trial in self.trials) - 1


def plan_of(trial: Trial, job: RLJob, cluster: Cluster) -> StepPlan:
    """The plan of a trial; frozen roles are gathered under ZeRO-3 too."""
    zero: dict[str, Any] = {
        name: trial.zero if role.is_trained else 3 * (trial.zero == 3) for name, role in job.roles.items()
    }
    given = parse_config(RLConfig, ["--placement", trial.placement]).placement
    roles = PlacedRoles(zero, tensor_parallel=trial.tensor_parallel)
    return StepPlan(resolve_placement(given, roles, ranks=cluster.ranks))


def groups() -> Iterator[Group]:
    """All steps with several stored placements."""
    for series in SERIES:
        yield from _groups_of(f"prediction_{series}")
    yield from _groups_of("hosts_cpu")
    yield _family()


def _groups_of(name: str) -> Iterator[Group]:
    """Those of a printed series."""
    case: tuple[str, ...] = ()
    found: dict[tuple[Any, ...], dict[tuple[str, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in (find("placement", f"placement_{name}.txt") or "").splitlines():
        if begin := re.match(r"(?:(.*): )?Case\((.*?)\)", line):
            case = begin.groups(default="")
        elif case and (step := re.match(r"step +[\d.]+ +([\d.]+) ", line)):
            call: Any = ast.parse(f"Case({case[1]})", mode="eval").body
            each = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
            sizes = [each[key] for key in ("hidden", "layers", "prompts", "new_tokens")]
            cluster = Cluster(each["ranks"], each["ranks"] // each.get("hosts", 1))
            key = (case[0], *sizes, cluster, each["mini_batches"])
            found[key][each["placement"], each["zero"]].append(float(step[1]))
            case = ()
    for (cable, *sizes), measured in found.items():
        # some were measured twice
        trials = tuple(Trial(*plan, statistics.fmean(seconds)) for plan, seconds in measured.items())
        if len(trials) > 1:
            yield Group(f"{name} {cable}".strip(), *sizes, trials, CABLES.get(cable, CPU))  # type: ignore[call-arg]


def _family() -> Group:
    """All placements of REINFORCE with a reward model on four ranks."""
    records = map(json.loads, (find("placement", "placement_exhaustive_measured.jsonl") or "").splitlines())
    trials = [
        Trial(
            json.dumps(record["placement"]),
            0,
            record["measured_seconds"],
            record["settings"].get("rollout.tensor_parallel", 1),
        )
        for record in records
        if not record["placement"].get("sampler", {}).get("with_actor")
    ]
    return Group("exhaustive", 256, 4, 32, 64, Cluster(4, 4), 1, tuple(trials), algorithm="reinforce")


def regrets(machines: Mapping[str, float] | None = None) -> dict[str, list[float]]:
    """Regrets by kind of trial.

    Args:
        machines: factors of numbers of the machine; None: 1.
    """
    found: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for group in groups():
            changes = {name: factor * getattr(group.machine, name) for name, factor in (machines or {}).items()}
            predicted = group.predicted(group.job(Path(folder)), replace(group.machine, **changes))
            busy = group.name.removeprefix("prediction_") in BUSY
            found["busy hours" if busy else "steady hours"].append(group.regret(predicted))
    return found


def main() -> None:
    """Print the distributions."""
    for name, factor in ((None, 1.0), *((name, factor) for name in NUMBERS for factor in (0.5, 2.0))):
        for kind, values in regrets({name: factor} if name else None).items():
            told = f"{name} x {factor:g}" if name else "as measured"
            most = sorted(values)[-3:]
            print(
                f"{told:32} {kind:14} {len(values):3} steps: median {statistics.median(values):.1%}, mean "
                f"{statistics.fmean(values):.1%}, largest {', '.join(f'{each:.1%}' for each in most)}"
            )


if __name__ == "__main__":
    main()
