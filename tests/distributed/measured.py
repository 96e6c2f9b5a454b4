"""The RL step on a rank of a CPU that has a peak for each timed phase, as a GPU has: the bytes of its live tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

from hybrid_rlhf.cli import rl
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.loop.report import content
from hybrid_rlhf.loop.report.memory import memory_by_phase
from hybrid_rlhf.planning.live_bytes import LiveBytes
from hybrid_rlhf.rl import build
from hybrid_rlhf.rl.roles import Roles
from hybrid_rlhf.runtime.observability.timers import Timers


def main(line: Sequence[str]) -> None:
    """The step; its report and metrics tell the peaks of all ranks."""
    counter, build_roles = LiveBytes("cpu"), build.build_roles

    def counted(*arguments: Any, **settings: Any) -> Roles:
        roles = build_roles(*arguments, **settings)
        frozen = [part._engine for part in roles.reward._components if hasattr(part, "_engine")]
        for engine in (roles.actor, roles.critic, roles.reference, *frozen):
            if isinstance(engine, ModelEngine):
                for parameter in engine.module.parameters():  # no operation made them: they are mapped from a file
                    counter.count(parameter.detach())
        return roles

    def note_peak(timers: Timers) -> None:
        for name in timers._open:
            timers._peaks[name] = max(timers._peaks.get(name, 0), counter.peak)
        counter.restart()

    with (
        mock.patch.object(build, "build_roles", counted),
        mock.patch.object(content, "memory_by_phase", memory_by_phase),
        mock.patch.object(Timers, "measures_memory", True),
        mock.patch.object(Timers, "_note_peak", note_peak),
        counter,
    ):
        rl.main(line)
