"""RL algorithms, one file each, to be compared with its paper.

Read `algorithm.py` (the interface: select, advantages, returns, loss), then `ppo.py` and `grpo.py`. ALGORITHMS maps the
names that `algorithm.name` takes.
"""

from hybrid_rlhf.rl.algorithms.algorithm import Algorithm
from hybrid_rlhf.rl.algorithms.cispo import CISPO
from hybrid_rlhf.rl.algorithms.gdpo import GDPO
from hybrid_rlhf.rl.algorithms.gmpo import GMPO
from hybrid_rlhf.rl.algorithms.grpo import DAPO, GRPO, DrGRPO
from hybrid_rlhf.rl.algorithms.gspo import GSPO
from hybrid_rlhf.rl.algorithms.online_dpo import OnlineDPO
from hybrid_rlhf.rl.algorithms.pass_at_k import PassAtK
from hybrid_rlhf.rl.algorithms.ppo import PPO
from hybrid_rlhf.rl.algorithms.raft import RAFT
from hybrid_rlhf.rl.algorithms.reinforce import Reinforce
from hybrid_rlhf.rl.algorithms.reinforce_pp import ReinforcePP, ReinforcePPBaseline
from hybrid_rlhf.rl.algorithms.remax import ReMax
from hybrid_rlhf.rl.algorithms.rloo import RLOO
from hybrid_rlhf.rl.algorithms.sapo import SAPO
from hybrid_rlhf.rl.algorithms.vapo import VAPO
from hybrid_rlhf.rl.algorithms.vespo import VESPO

ALGORITHMS: dict[str, type[Algorithm]] = {
    "ppo": PPO,
    "reinforce": Reinforce,
    "rloo": RLOO,
    "remax": ReMax,
    "reinforce_pp": ReinforcePP,
    "reinforce_pp_baseline": ReinforcePPBaseline,
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "dapo": DAPO,
    "gdpo": GDPO,
    "pass_at_k": PassAtK,
    "gspo": GSPO,
    "gmpo": GMPO,
    "cispo": CISPO,
    "sapo": SAPO,
    "vespo": VESPO,
    "vapo": VAPO,
    "online_dpo": OnlineDPO,
    "raft": RAFT,
}

__all__ = ["ALGORITHMS", "Algorithm"]
