"""The RL step on a rank whose measurements make decoding a million times slower, so that the planner moves it to
placements that sample on more ranks."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from unittest import mock

from torch.distributed import distributed_c10d

from hybrid_rlhf.cli import rl
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.engines.hybrid import HybridEngine
from hybrid_rlhf.planning import automatic
from hybrid_rlhf.planning.prediction_errors import PredictionReport
from hybrid_rlhf.rl.build import RLSession
from hybrid_rlhf.runtime import world


def main(line: Sequence[str]) -> None:
    """The step, moved after its second rollout; fails where the engines or groups of the first placement are left."""
    save = RLSession.save

    def checked_save(session: RLSession) -> None:
        roles = session.parts.roles
        mine = [role for role in (roles.actor, roles.critic, roles.reference) if isinstance(role, ModelEngine)]
        mine += [part._engine for part in roles.reward._components if hasattr(part, "_engine")]
        left = [each for each in gc.get_objects() if type(each) in (ModelEngine, HybridEngine) and each not in mine]
        assert not left, left
        known = {ranks for ranks, group in world._GROUPS.items() if group is not None}
        assert len(distributed_c10d._world.pg_map) <= len(known) + 2, "the world's group and DeepSpeed's clone of it"
        save(session)

    with (
        mock.patch.object(automatic, "_MEASURED_STEPS", 2),
        mock.patch.object(PredictionReport, "ratios", lambda self: {"decode": 1e6, "prefill": 1e6}),
        mock.patch.object(RLSession, "save", checked_save),
    ):
        rl.main(line)
