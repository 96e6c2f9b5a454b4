"""Measures the link between the hosts of a hostfile, for calibration: ranks that the launcher starts on all of them."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid_rlhf.cli.runs.hosts import require_hosts
from hybrid_rlhf.cli.runs.processes import launcher, launcher_environment, tee
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.pipeline import LauncherConfig
from hybrid_rlhf.configs.sections.rules import require
from hybrid_rlhf.runtime.command_line import user_errors
from hybrid_rlhf.runtime.files.atomic import write_whole
from hybrid_rlhf.runtime.hostfile import SHARED_SECONDS, hosts_of

if TYPE_CHECKING:
    from hybrid_rlhf.planning.machines.collectives import Times

_MODULE = "hybrid_rlhf.cli.machine.link"
_LIMIT_SECONDS = 600.0


def measure_link(hostfile: str, folder: Path) -> Times:
    """Seconds of collectives over the hosts, and of transfers between two of them.

    Args:
        hostfile: the hosts, the first of which is this one.
        folder: for the measurements and the output of the ranks.

    Raises:
        UserError: if the hosts are not several with equally many ranks, or their ranks fail.
    """
    slots = hosts_of(hostfile)
    require(
        len(slots) > 1 and len({*slots.values()}) == 1,
        f"--hostfile must name several hosts with equally many slots, {hostfile} has "
        f"{', '.join(f'{host} slots={count}' for host, count in slots.items())}: change it",
    )
    require_hosts(hostfile, [], seconds=SHARED_SECONDS)
    options = LauncherConfig(hostfile=hostfile)
    file = folder / "link.json"
    command = [*launcher(options), _MODULE, str(file)]
    end = tee(command, folder / "link.log", {**os.environ, **launcher_environment(options)})
    if end.code or not file.exists():
        reason = end.user_error or f"its ranks ended with exit code {end.code}: see their output above"
        raise UserError(f"calibrate measures the link from the first host of {hostfile}, {reason}")
    times: Times = json.loads(file.read_text())
    return times


def time_link(file: Path) -> None:
    """Measure on each rank; rank 0 writes its times."""
    from hybrid_rlhf.planning.automatic import LINK_SIZES
    from hybrid_rlhf.planning.machines.collectives import time_collectives
    from hybrid_rlhf.runtime.world import close_world, init_world

    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    world = init_world(timeout_seconds=_LIMIT_SECONDS)
    times = time_collectives(world, LINK_SIZES, local=world.local_size)
    if world.is_main:
        write_whole(file, json.dumps(times))
    world.barrier()
    close_world()


if __name__ == "__main__":
    with user_errors():
        time_link(Path(sys.argv[1]))
