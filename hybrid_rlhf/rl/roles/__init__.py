"""Actor, critic, reference and reward models of an RL step, each on its ranks.

Read `roles.py` (the roles as the other parts use them), `placing.py` (their ranks), `automatic.py` (the planner's
choice), `room.py` (the check of memory) and `building.py` (their engines).
"""

from hybrid_rlhf.rl.roles.automatic import MeasuredStep, PlacementWatch, choose_placement
from hybrid_rlhf.rl.roles.building import build_reward_alone, build_roles
from hybrid_rlhf.rl.roles.placing import log_placement, place_roles
from hybrid_rlhf.rl.roles.roles import Roles
from hybrid_rlhf.rl.roles.room import require_room

__all__ = [
    "MeasuredStep",
    "PlacementWatch",
    "Roles",
    "build_reward_alone",
    "build_roles",
    "choose_placement",
    "log_placement",
    "place_roles",
    "require_room",
]
