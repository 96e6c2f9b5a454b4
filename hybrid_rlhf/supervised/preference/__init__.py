"""Losses of preference learning, by the name of `algorithm`; one file each, to be compared with its paper.

Read `pair_loss.py` (the interface), `dpo.py`, then `objectives.py` and `reference.py` (log-probs of the reference).
"""

from hybrid_rlhf.supervised.preference.cdpo import ConservativeDPO
from hybrid_rlhf.supervised.preference.dpo import DPO
from hybrid_rlhf.supervised.preference.hinge import Hinge
from hybrid_rlhf.supervised.preference.ipo import IPO
from hybrid_rlhf.supervised.preference.kto import KTO
from hybrid_rlhf.supervised.preference.orpo import ORPO
from hybrid_rlhf.supervised.preference.pair_loss import PairLoss, PairSide
from hybrid_rlhf.supervised.preference.simpo import SimPO

PAIR_LOSSES: dict[str, type[PairLoss]] = {
    "dpo": DPO,
    "cdpo": ConservativeDPO,
    "ipo": IPO,
    "hinge": Hinge,
    "simpo": SimPO,
    "orpo": ORPO,
}

__all__ = ["KTO", "PAIR_LOSSES", "PairSide", "PairLoss"]
