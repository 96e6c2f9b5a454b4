"""`hybrid-rlhf calibrate`: measure how fast this machine is, for the times of `hybrid-rlhf plan`."""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from hybrid_rlhf.configs.pipeline import CalibrateConfig
from hybrid_rlhf.runtime.command_line import command
from hybrid_rlhf.runtime.output import print_result

if TYPE_CHECKING:
    from hybrid_rlhf.planning.curves import MachineCurves


@command(CalibrateConfig)
def main(config: CalibrateConfig) -> None:
    """Measure unless this machine has stored curves, then the link between hosts if there are any; print the path."""
    from hybrid_rlhf.cli.machine.link import measure_link
    from hybrid_rlhf.planning.machines.calibration import calibrate, default_ranks
    from hybrid_rlhf.planning.machines.links import with_measured_link
    from hybrid_rlhf.planning.machines.stored import curves_file, save_curves

    ranks = config.ranks or default_ranks()
    start = time.monotonic()
    curves = _stored_curves(config, ranks)
    measured = curves is None or config.hostfile is not None
    if curves is None:
        from hybrid_rlhf.cli.machine.run_times import time_run

        curves = calibrate(ranks, time_run=time_run, quick=config.quick, show=print)
    if config.hostfile is not None:
        print(f"the link between the hosts of {config.hostfile}")
        with TemporaryDirectory(prefix="hybrid_rlhf_") as folder:
            curves = with_measured_link(curves, measure_link(config.hostfile, Path(folder)))
    if not measured:
        path = curves_file(ranks, config.cache_dir)
        text = f"this machine is measured: {path}; --renew true measures it again"
        print_result({"curves": path, "measured": False}, text)
        return
    path = save_curves(curves, ranks, config.cache_dir)
    seconds = time.monotonic() - start
    print_result({"curves": path, "measured": True, "seconds": seconds}, f"measured in {seconds:.0f} s: {path}")


def _stored_curves(config: CalibrateConfig, ranks: int) -> MachineCurves | None:
    """The curves of this machine, unless they are to be measured again."""
    from hybrid_rlhf.planning.machines.stored import curves_file, differences, read_curves, stored_key

    path = curves_file(ranks, config.cache_dir)
    if config.renew or not path.exists():
        return None
    if changed := differences(stored_key(path)):
        print(f"{path} differs in {', '.join(changed)}: measuring again")
        return None
    return read_curves(path)
