"""DAPO: GRPO with a higher upper clip, dynamic sampling, a loss a token, and a penalty on overlong completions.

Source: Yu et al. 2025 (arXiv 2503.14476): eq. 8 and 10 (clip-higher), eq. 11 (dynamic sampling), eq. 12 (the mean over
tokens), eq. 13 (overlong shaping), section 3.4 (overlong filtering).

Each is a setting that any algorithm may use (ppo.clip_high, ppo.dynamic_sampling, ppo.loss_normalisation,
ppo.overlong_fraction, ppo.mask_truncated); these are its defaults. Deviation: dynamic sampling asks for as many prompts
as are missing and learns from every group that it accepts; the paper oversamples and throws the surplus away.
"""

from __future__ import annotations

from hybrid_rlhf.algorithms.on_policy.grpo import GRPO


class DAPO(GRPO):
    """GRPO by other defaults."""
