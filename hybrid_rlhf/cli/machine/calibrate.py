"""`hybrid-rlhf calibrate`: measure how fast this machine is, for the times of `hybrid-rlhf plan`."""

from __future__ import annotations

import time

from hybrid_rlhf.configs.pipeline import CalibrateConfig
from hybrid_rlhf.runtime.command_line import command
from hybrid_rlhf.runtime.output import print_result


@command(CalibrateConfig)
def main(config: CalibrateConfig) -> None:
    """Measure unless this machine has stored curves, and print their path."""
    from hybrid_rlhf.cli.machine.run_times import time_run
    from hybrid_rlhf.planning.machines.calibration import calibrate, default_ranks
    from hybrid_rlhf.planning.machines.stored import curves_file, differences, read_curves, save_curves, stored_key

    ranks = config.ranks or default_ranks()
    path = curves_file(ranks, config.cache_dir)
    if path.exists() and not config.renew:
        changed = differences(stored_key(path))
        if not changed:
            read_curves(path)
            text = f"this machine is measured: {path}; --renew true measures it again"
            print_result({"curves": path, "measured": False}, text)
            return
        print(f"{path} differs in {', '.join(changed)}: measuring again")
    start = time.monotonic()
    curves = calibrate(ranks, time_run=time_run, quick=config.quick, show=print)
    path = save_curves(curves, ranks, config.cache_dir)
    seconds = time.monotonic() - start
    print_result({"curves": path, "measured": True, "seconds": seconds}, f"measured in {seconds:.0f} s: {path}")


if __name__ == "__main__":
    main()
