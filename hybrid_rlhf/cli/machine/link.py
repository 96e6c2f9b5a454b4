"""Measures the link between ranks that the launcher starts, on this host or on those of a hostfile, for calibration."""

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
    from hybrid_rlhf.planning.calibration import Link

_MODULE = "hybrid_rlhf.cli.machine.link"
_LIMIT_SECONDS = 600.0


def measure_network(hostfile: str, folder: Path) -> Link:
    """The network between the hosts of a file, the first of which is this one.

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
    return measure_link(LauncherConfig(hostfile=hostfile), folder)


def measure_link(options: LauncherConfig, folder: Path) -> Link:
    """The link between all ranks of a launch.

    Args:
        options: the ranks.
        folder: for the measurements and the output of the ranks.

    Raises:
        UserError: if the ranks fail.
    """
    from hybrid_rlhf.planning.calibration import Link

    file = folder / "link.json"
    file.unlink(missing_ok=True)
    command = [*launcher(options), _MODULE, str(file)]
    end = tee(command, folder / "link.log", {**os.environ, **launcher_environment(options)})
    if end.code or not file.exists():
        reason = end.user_error or f"its ranks ended with exit code {end.code}: see their output above"
        where = f"from the first host of {options.hostfile}" if options.hostfile else "between ranks of this host"
        raise UserError(f"calibrate measures the link {where}, {reason}")
    return Link(*json.loads(file.read_text()))


def time_ranks(file: Path) -> None:
    """Measure on each rank; rank 0 writes the link."""
    from hybrid_rlhf.planning.calibration import time_link
    from hybrid_rlhf.runtime.world import close_world, init_world

    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    world = init_world(timeout_seconds=_LIMIT_SECONDS)
    link = time_link(world)
    if world.is_main:
        write_whole(file, json.dumps(link))
    world.barrier()
    close_world()


if __name__ == "__main__":
    with user_errors():
        time_ranks(Path(sys.argv[1]))
