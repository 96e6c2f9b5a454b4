"""RL runs that train together in one process on each rank, each with an adapter of its own, on one base.

Each run has its own loop, folder and checkpoints, as if it were alone; see engines/adapters/base.py for what they
compute together. A run that fails on any rank ends alone, on all of them, and the others go on.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.engines.adapters.base import SharedBase
from hybrid_rlhf.rl.build import rl_session
from hybrid_rlhf.rl.trainer import RLTrainer
from hybrid_rlhf.runtime.agreement import OtherRankError, RankAgreement
from hybrid_rlhf.runtime.liveness.signals import STOPPED_EXIT_CODE, SignalRequests
from hybrid_rlhf.runtime.liveness.watchdog import EXIT_CODE
from hybrid_rlhf.runtime.observability.logs import logger, setup_logging
from hybrid_rlhf.runtime.run import SharedProcess
from hybrid_rlhf.runtime.world import World, close_world, init_world


def run_together(configs: Mapping[str, RLConfig]) -> None:
    """Train runs by name, from configs to saved adapters. Every rank calls.

    Raises:
        UserError: when all other runs have ended, for the runs with a user's mistake.
        SystemExit: after the checkpoints that SIGTERM or SIGINT requested; or when all other runs have ended, for one
            with any other error on another rank.
        Exception: when all other runs have ended, any other error of a run.
    """
    first = next(iter(configs.values()))
    timeout_seconds = max(config.faults.collective_timeout_seconds for config in configs.values())
    world = init_world(timeout_seconds=timeout_seconds)
    try:
        setup_logging(world, names_threads=True)
        process = SharedProcess(SignalRequests(), RankAgreement(world, timeout_seconds=timeout_seconds))
        base = SharedBase(
            process.agreement,
            micro_batch_tokens=max(config.train.tokens_on(world.device.type) for config in configs.values()),
            deterministic=first.deterministic,
        )
        functions = {name: partial(_train, config, base, process, world) for name, config in configs.items()}
        with process.signals.catch():
            ends = base.rendezvous.run(functions, base.compute)
    finally:
        close_world()
    _raise_failures(ends)


def _train(config: RLConfig, base: SharedBase, process: SharedProcess, world: World) -> None:
    try:
        with rl_session(config, base=base, process=process) as session:
            RLTrainer(session).train()
            session.save()
    except (UserError, OtherRankError) as error:
        if world.is_main:  # the error of one rank is raised on all
            logger.error("error: %s", error)
        raise
    except Exception as error:
        logger.error("%s: %s", type(error).__name__, error, exc_info=error)
        raise


def _raise_failures(ends: Mapping[str, BaseException | None]) -> None:
    """Raise one error for those of all runs; of several kinds the most severe one."""
    failures = {name: error for name, error in ends.items() if isinstance(error, Exception)}
    for error in failures.values():
        if not isinstance(error, UserError | OtherRankError):
            raise error
    if any(isinstance(error, OtherRankError) for error in failures.values()):
        raise SystemExit(EXIT_CODE)
    if failures:
        texts = "; ".join(f"{name}: {error}" for name, error in failures.items())
        raise UserError(f"{len(failures)} of {len(ends)} runs have failed, {texts}")
    if any(isinstance(error, SystemExit) and error.code for error in ends.values()):
        raise SystemExit(STOPPED_EXIT_CODE)
