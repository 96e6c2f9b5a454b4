"""Actor, critic, reference, teacher and reward models of an RL step, each on its ranks.

Read `roles.py` (the roles as the other parts use them), `placing.py` (their ranks) and `building.py` (their engines).
"""

from hybrid_rlhf.rl.roles.building import build_reward_alone, build_roles
from hybrid_rlhf.rl.roles.placing import log_placement, place_roles
from hybrid_rlhf.rl.roles.roles import Roles

__all__ = [
    "Roles",
    "build_reward_alone",
    "build_roles",
    "log_placement",
    "place_roles",
]
