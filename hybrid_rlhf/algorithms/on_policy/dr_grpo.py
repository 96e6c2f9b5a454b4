"""Dr. GRPO: GRPO without the two divisions that favour some prompts and some lengths.

Source: Liu et al. 2025 (arXiv 2503.20783), section 3.2.

    A_i = R_i - mean(R),  loss = 1/G sum_i 1/max_new_tokens sum_t (clipped surrogate)

Both are settings of GRPO: ppo.group_deviation false, ppo.loss_normalisation fixed; the KL is off, as in the paper.
"""

from __future__ import annotations

from hybrid_rlhf.algorithms.on_policy.grpo import GRPO


class DrGRPO(GRPO):
    """GRPO by other defaults."""
