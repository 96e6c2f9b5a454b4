"""What the algorithms are, as far as a config must know it: the roles they need and the defaults they bring.

A name that `algorithm` gives lays its defaults under the user's files and overrides. The algorithms themselves are in
algorithms/, a file each; docs/algorithms.md shows this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

OnPolicyName = Literal[
    "ppo", "reinforce", "rloo", "remax", "reinforce_pp", "reinforce_pp_baseline", "grpo", "dr_grpo", "dapo", "gspo",
    "cispo", "online_dpo", "raft",
]  # fmt: skip


@dataclass(frozen=True)
class OnPolicyTraits:
    """What step 3 builds and samples for an algorithm."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of step 3's keys that differ from PPO's."""
    critic: bool = False
    """Whether it learns a critic."""
    completions: int = 1
    """Fewest completions of a prompt that it can learn from."""
    reference: bool = False
    """Whether it needs the reference even without a KL penalty."""
    selects: bool = False
    """Whether it learns from some completions of a prompt only."""
    pairs: bool = False
    """Whether it learns from pairs of completions, by a loss of its own."""


_CRITIC_FREE = {"ppo.whiten_advantages": False}
_GROUPS = {**_CRITIC_FREE, "rollout.samples_per_prompt": 8}

ON_POLICY: dict[str, OnPolicyTraits] = {
    "ppo": OnPolicyTraits(critic=True),
    "reinforce": OnPolicyTraits(_CRITIC_FREE),
    "rloo": OnPolicyTraits({**_CRITIC_FREE, "rollout.samples_per_prompt": 4}, completions=2),
    "remax": OnPolicyTraits(_CRITIC_FREE),
    "reinforce_pp": OnPolicyTraits({"ppo.kl_coef": 0.01}),
    "reinforce_pp_baseline": OnPolicyTraits(
        {
            "rollout.samples_per_prompt": 8, "ppo.kl_coef": 0.01, "ppo.kl_in": "loss", "ppo.kl_estimator": "k2",
        }, completions=2,
    ),
    "grpo": OnPolicyTraits(
        {
            **_GROUPS, "ppo.kl_coef": 0.04, "ppo.kl_in": "loss", "ppo.kl_estimator": "k3",
            "ppo.loss_normalisation": "sequence",
        }, completions=2,
    ),
    "dr_grpo": OnPolicyTraits(
        {**_GROUPS, "ppo.kl_coef": 0.0, "ppo.group_deviation": False, "ppo.loss_normalisation": "fixed"}, completions=2
    ),
    "dapo": OnPolicyTraits(
        {
            **_GROUPS, "ppo.kl_coef": 0.0, "ppo.clip_high": 0.28, "ppo.dynamic_sampling": True,
            "ppo.overlong_fraction": 0.2,
        }, completions=2,
    ),
    "gspo": OnPolicyTraits(
        {
            **_GROUPS, "ppo.kl_coef": 0.0, "ppo.clip_low": 3e-4, "ppo.clip_high": 4e-4,
            "ppo.loss_normalisation": "sequence",
        }, completions=2,
    ),
    "cispo": OnPolicyTraits(
        {**_GROUPS, "ppo.kl_coef": 0.0, "ppo.clip_low": 1.0, "ppo.clip_high": 4.0}, completions=2
    ),
    "online_dpo": OnPolicyTraits(
        {**_CRITIC_FREE, "rollout.samples_per_prompt": 2, "ppo.kl_coef": 0.0}, completions=2, reference=True, pairs=True
    ),
    "raft": OnPolicyTraits({**_GROUPS, "ppo.kl_coef": 0.0}, completions=2, selects=True),
}  # fmt: skip

PreferenceName = Literal["dpo", "cdpo", "ipo", "hinge", "simpo", "orpo", "kto"]


@dataclass(frozen=True)
class PreferenceTraits:
    """What preference training loads for an algorithm."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of its keys that differ from DPO's."""
    reference: bool = True
    """Whether its loss asks what a reference thinks."""
    labels: bool = False
    """Whether it learns from single answers that are good or bad; otherwise from pairs."""
    own_keys: tuple[str, ...] = ()
    """Keys of `loss` that it alone reads."""


PREFERENCE: dict[str, PreferenceTraits] = {
    "dpo": PreferenceTraits(),
    "cdpo": PreferenceTraits({"loss.label_smoothing": 0.1}, own_keys=("label_smoothing",)),
    "ipo": PreferenceTraits(),
    "hinge": PreferenceTraits(),
    "simpo": PreferenceTraits(
        {"loss.beta": 2.0, "loss.target_margin": 1.0}, reference=False, own_keys=("target_margin",)
    ),
    "orpo": PreferenceTraits({"loss.sft_coef": 1.0}, reference=False),
    "kto": PreferenceTraits(labels=True, own_keys=("desirable_weight", "undesirable_weight")),
}
