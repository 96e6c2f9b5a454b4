"""On-policy algorithms by the name that `algorithm` gives; a file each, to be held against its paper."""

from hybrid_rlhf.algorithms.on_policy.algorithm import Estimate, Judged, OnPolicyAlgorithm, Tokens
from hybrid_rlhf.algorithms.on_policy.cispo import CISPO
from hybrid_rlhf.algorithms.on_policy.dapo import DAPO
from hybrid_rlhf.algorithms.on_policy.dr_grpo import DrGRPO
from hybrid_rlhf.algorithms.on_policy.grpo import GRPO
from hybrid_rlhf.algorithms.on_policy.gspo import GSPO
from hybrid_rlhf.algorithms.on_policy.online_dpo import OnlineDPO
from hybrid_rlhf.algorithms.on_policy.ppo import PPO
from hybrid_rlhf.algorithms.on_policy.raft import RAFT
from hybrid_rlhf.algorithms.on_policy.reinforce import Reinforce
from hybrid_rlhf.algorithms.on_policy.reinforce_pp import ReinforcePP, ReinforcePPBaseline
from hybrid_rlhf.algorithms.on_policy.remax import ReMax
from hybrid_rlhf.algorithms.on_policy.rloo import RLOO

ON_POLICY_ALGORITHMS: dict[str, type[OnPolicyAlgorithm]] = {
    "ppo": PPO,
    "reinforce": Reinforce,
    "rloo": RLOO,
    "remax": ReMax,
    "reinforce_pp": ReinforcePP,
    "reinforce_pp_baseline": ReinforcePPBaseline,
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "dapo": DAPO,
    "gspo": GSPO,
    "cispo": CISPO,
    "online_dpo": OnlineDPO,
    "raft": RAFT,
}

__all__ = ["ON_POLICY_ALGORITHMS", "Estimate", "Judged", "OnPolicyAlgorithm", "Tokens"]
