"""Losses on preferences by the name that `algorithm` gives; a file each, to be held against its paper."""

from hybrid_rlhf.algorithms.preference.cdpo import ConservativeDPO
from hybrid_rlhf.algorithms.preference.dpo import DPO
from hybrid_rlhf.algorithms.preference.hinge import Hinge
from hybrid_rlhf.algorithms.preference.ipo import IPO
from hybrid_rlhf.algorithms.preference.kto import KTO
from hybrid_rlhf.algorithms.preference.orpo import ORPO
from hybrid_rlhf.algorithms.preference.pairs import Answers, PairLoss
from hybrid_rlhf.algorithms.preference.simpo import SimPO

PAIR_LOSSES: dict[str, type[PairLoss]] = {
    "dpo": DPO,
    "cdpo": ConservativeDPO,
    "ipo": IPO,
    "hinge": Hinge,
    "simpo": SimPO,
    "orpo": ORPO,
}

__all__ = ["KTO", "PAIR_LOSSES", "Answers", "PairLoss"]
