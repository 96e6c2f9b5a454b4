"""`hybrid-rlhf calibrate`: measure how fast this machine is, for the times of `hybrid-rlhf plan`."""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory

from hybrid_rlhf.configs.pipeline import CalibrateConfig, LauncherConfig
from hybrid_rlhf.runtime.command_line import command
from hybrid_rlhf.runtime.observability.logs import LOADING_LIBRARIES, logger
from hybrid_rlhf.runtime.output import print_result

_CPU_RANKS = 4
"""Ranks of a host without GPUs."""


@command(CalibrateConfig)
def main(config: CalibrateConfig) -> None:
    """Measure unless this machine has stored measurements, then the network between hosts if there are any; print the
    path."""
    logger.info(LOADING_LIBRARIES)
    import torch

    from hybrid_rlhf.cli.machine.link import measure_link, measure_network
    from hybrid_rlhf.planning.calibration import calibrate
    from hybrid_rlhf.planning.stored import load_machine, machine_path, save_machine

    ranks = config.ranks or torch.cuda.device_count() or _CPU_RANKS
    path = machine_path(ranks, config.cache_dir)
    start = time.monotonic()
    machine = None if config.renew else load_machine(config.cache_dir, ranks=ranks)
    if machine is not None and config.hostfile is None:
        text = f"this machine is measured: {path}; --renew true measures it again"
        print_result({"machine": path, "measured": False}, text)
        return
    with TemporaryDirectory(prefix="hybrid_rlhf_") as folder:
        if machine is None:
            link = None
            if ranks > 1:
                logger.info("measuring the link between %s ranks (1 of 2, both take less than a minute)", ranks)
                link = measure_link(LauncherConfig(num_processes=ranks), Path(folder))
            logger.info("measuring products, memory and launches%s", " (2 of 2)" * (ranks > 1))
            machine = calibrate(ranks, link)
        if config.hostfile is not None:
            logger.info("measuring the link between the hosts of %s", config.hostfile)
            machine = machine.with_measured_network(*measure_network(config.hostfile, Path(folder)))
    save_machine(machine, ranks, config.cache_dir)
    lines = [
        f"{machine.tflops:.4g} TFLOP/s of products, {machine.memory_gb_per_second:.4g} GB/s of memory",
        f"{machine.launch_microseconds:.3g} us for a launch",
        f"{machine.link_gb_per_second:.4g} GB/s and {machine.link_latency_microseconds:.3g} us between ranks",
        f"measured in {time.monotonic() - start:.0f} s: {path}",
    ]
    print_result({"machine": path, "measured": True, "seconds": time.monotonic() - start}, "\n".join(lines))
