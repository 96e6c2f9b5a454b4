"""Steps of PPO on two hosts, measured next to what the planner predicts from the measured link between them.

    hybrid-rlhf calibrate && python -m benchmarks.placement.hosts [--steps 5] [--json FILE]

The hosts are namespaces of this machine (tests/support/hosts.py, root); the link between them is measured as
`calibrate --hostfile` does. Once they are connected by a bridge alone, once by a cable of 1 Gbit/s
with a delay of 20 ms in each direction.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.placement.prediction import Case, medians, predict, prepare, summary
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.planning.machines.links import with_measured_link
from hybrid_rlhf.planning.machines.stored import load_curves
from hybrid_rlhf.planning.prediction_errors import PredictionReport
from tests.support.hosts import Network, network, why_no_hosts

CASES = (
    Case(128, 4, 32, 32, ranks=2, hosts=2),
    Case(256, 2, 32, 32, ranks=2, hosts=2),
    Case(128, 4, 32, 32, ranks=2, hosts=2, zero=2),
    Case(128, 4, 32, 32, ranks=2, hosts=2, zero=3),
    Case(128, 4, 32, 32, ranks=2, hosts=2, placement="separation"),
)
"""A rank per core of the machine: the planner counts the cores of each host, which namespaces share."""
CABLES: dict[str, dict[str, float] | None] = {"bridge": None, "1 Gbit/s, 20 ms": {"delay_ms": 20, "mbit": 1000}}


def main() -> None:
    """Run all cases over each cable, and print errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    curves = load_curves()
    if curves is None:
        raise UserError("predictions need curves of this machine, got none: run hybrid-rlhf calibrate")
    if (why := why_no_hosts()) is not None:
        raise UserError(f"the benchmark needs hosts: {why}")
    records = []
    with tempfile.TemporaryDirectory() as name, network(Path(name) / "hosts") as hosts:
        for cable, settings in CABLES.items():
            reports = []
            with hosts.long_cable("node2", **settings) if settings else contextlib.nullcontext():
                linked = with_measured_link(curves, hosts.link_times(Path(name)))
                for case in CASES:
                    folder = Path(name) / f"{len(records)}"
                    folder.mkdir()
                    line = prepare(folder, case)
                    measured = run_on_hosts(hosts, folder, line, case, steps=options.steps)
                    report = PredictionReport.of(predict(line, linked, case, measured), measured)
                    print(f"\n{cable}: {case}", *report.lines(), sep="\n", flush=True)
                    reports.append(report)
                    records.append({"cable": cable, "case": asdict(case), "measured": measured, **report.metrics()})
            print(f"{cable}, step ({len(reports)} runs):", summary(reports), flush=True)
    if options.json:
        options.json.write_text(json.dumps(records, indent=1))


def run_on_hosts(hosts: Network, folder: Path, line: Sequence[str], case: Case, *, steps: int) -> dict[str, float]:
    """Run on the hosts; see `medians`."""
    ranks = case.ranks // case.hosts
    meeting = [f"--nnodes={case.hosts}", f"--nproc-per-node={ranks}", "--master-addr=node1", "--master-port=29500"]
    step = ["-m", "hybrid_rlhf.cli.rl", *line, "--train.max_steps", str(steps + 2)]
    started = [
        host.start([sys.executable, "-m", "torch.distributed.run", *meeting, f"--node-rank={place}", *step])
        for place, host in enumerate(hosts.hosts)
    ]
    for process in started:
        output = process.communicate()[0]
        if process.returncode:
            raise RuntimeError(output[-2000:])
    return medians(folder)


if __name__ == "__main__":
    main()
