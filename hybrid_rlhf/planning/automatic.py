"""`placement: auto`: the planner's fastest placement that fits, from the measurements of `hybrid-rlhf calibrate`.

A run on several hosts measures the link between them first. The lengths of completions are assumed.
"""

from __future__ import annotations

from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.planning.calibration import Link, time_link
from hybrid_rlhf.planning.device import own_device
from hybrid_rlhf.planning.dotted_keys import with_settings
from hybrid_rlhf.planning.job import read_job
from hybrid_rlhf.planning.placement_table import PlacementAnswer, plan_placement
from hybrid_rlhf.planning.stored import own_machine
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.world import World, shared_user_errors


def choose_placement(config: RLConfig, world: World) -> RLConfig:
    """The config with the planner's placement in place of "auto". Every rank calls.

    Raises:
        UserError: on every rank, when this machine has no measurements, or no placement fits.
    """
    choice: dict[str, Any] = {}
    link = time_link(world) if world.size > world.local_size else None
    with shared_user_errors(world):
        if world.is_main:
            answer = automatic_answer(config, world, link=link)
            best = answer.best
            if best is None:
                raise UserError(
                    f"placement auto needs a placement that fits, the nearest {answer.why(answer.result.ranked[0])}: "
                    "use more ranks, a smaller model, or settings that hybrid-rlhf plan names"
                )
            choice = {**best.plan.settings(config), "placement": best.plan.placement_setting()}
            for line in answer.lines("placement"):
                logger.info("%s", line)
    chosen: RLConfig = with_settings(config, world.broadcast_object(choice))
    return chosen


def automatic_answer(config: RLConfig, world: World, *, link: Link | None = None) -> PlacementAnswer:
    """The planner's answer for a run.

    Args:
        config: config of the run.
        world: all ranks of the run.
        link: measured link between the hosts; None for one host.

    Raises:
        UserError: when this machine has no measurements.
    """
    machine = own_machine(config.data.cache_dir, world.device)
    if machine is None:
        raise UserError(
            "placement auto needs the measured speed of this machine, got none: run hybrid-rlhf calibrate, or name a "
            "placement"
        )
    if link is not None:
        machine = machine.with_measured_network(*link)
    return plan_placement(read_job(config, world.device), machine, own_device(world.size, local=world.local_size))
