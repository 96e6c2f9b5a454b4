"""What the algorithms are, as far as a config must know it: the roles they need, the defaults they bring, and the keys
that they read.

A name that `algorithm` gives lays its defaults under the user's files and overrides. The algorithms themselves are in
algorithms/, a file each; docs/algorithms.md shows this table. A key that a step would not read is refused where it is
given (configs/unread.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    once: bool = False
    """Whether its paper makes one update from a rollout, without a clip; the clip of others needs several to act."""
    clips: tuple[str, ...] = ("clip_low", "clip_high", "dual_clip")
    """Keys of `ppo` that bound the ratio in its loss."""
    discounts: bool = False
    """Whether a reward counts less for tokens long before it (ppo.gamma)."""
    deviation: bool = False
    """Whether advantages may be in units of their group's deviation (ppo.group_deviation)."""


_CRITIC_FREE = {"ppo.whiten_advantages": False}
_ONCE = {"ppo.mini_batches": 1}
_CHECKED = {"ppo.missing_eos_penalty": 0.0}
"""Of algorithms for answers that a program checks: one that never stops is wrong already."""
_GROUPS = {**_CRITIC_FREE, **_CHECKED, "rollout.samples_per_prompt": 8}

ON_POLICY: dict[str, OnPolicyTraits] = {
    "ppo": OnPolicyTraits(critic=True, discounts=True),
    "reinforce": OnPolicyTraits({**_CRITIC_FREE, **_ONCE}, once=True),
    "rloo": OnPolicyTraits({**_CRITIC_FREE, **_ONCE, "rollout.samples_per_prompt": 4}, completions=2, once=True),
    "remax": OnPolicyTraits({**_CRITIC_FREE, **_ONCE}, once=True),
    "reinforce_pp": OnPolicyTraits({"ppo.kl_coef": 0.01}, discounts=True),
    "reinforce_pp_baseline": OnPolicyTraits(
        {
            **_CHECKED, "rollout.samples_per_prompt": 8, "ppo.kl_coef": 0.01,
            "ppo.kl_in": "loss", "ppo.kl_estimator": "k2",
        }, completions=2, discounts=True,
    ),
    "grpo": OnPolicyTraits(
        {
            **_GROUPS, "ppo.kl_coef": 0.04, "ppo.kl_in": "loss", "ppo.kl_estimator": "k3",
            "ppo.loss_normalisation": "sequence",
        }, completions=2, deviation=True,
    ),
    "dr_grpo": OnPolicyTraits(
        {**_GROUPS, "ppo.kl_coef": 0.0, "ppo.group_deviation": False, "ppo.loss_normalisation": "fixed"},
        completions=2, deviation=True,
    ),
    "dapo": OnPolicyTraits(
        {
            **_GROUPS, "ppo.kl_coef": 0.0, "ppo.clip_high": 0.28, "ppo.dynamic_sampling": True,
            "ppo.overlong_fraction": 0.2,
        }, completions=2, deviation=True,
    ),
    "gspo": OnPolicyTraits(
        {
            **_GROUPS, "ppo.kl_coef": 0.0, "ppo.clip_low": 3e-4, "ppo.clip_high": 4e-4,
            "ppo.loss_normalisation": "sequence",
        }, completions=2, deviation=True,
    ),
    "cispo": OnPolicyTraits(
        {**_GROUPS, "ppo.kl_coef": 0.0, "ppo.clip_low": 1.0, "ppo.clip_high": 4.0}, completions=2, deviation=True,
        clips=("clip_low", "clip_high"),
    ),
    "online_dpo": OnPolicyTraits(
        {**_CRITIC_FREE, **_ONCE, "rollout.samples_per_prompt": 2, "ppo.kl_coef": 0.0}, completions=2, reference=True,
        pairs=True, once=True, clips=(),
    ),
    "raft": OnPolicyTraits(
        {
            **_CRITIC_FREE, **_ONCE, "rollout.samples_per_prompt": 8, "ppo.kl_coef": 0.0, "actor.optimizer.lr": 2e-5,
        }, completions=2, selects=True, once=True, clips=(),
    ),
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


@dataclass(frozen=True)
class KeyRule:
    """Keys that a step reads in some cases only. In others they are refused where given, and left out where saved."""

    keys: tuple[str, ...]
    """Dotted; one that ends in a point stands for a whole section."""
    read: Callable[[Any], bool]
    """Whether a config reads them."""
    otherwise: str
    """The error: {key} and {value} are what was given, {algorithm} the config's."""


def _unless(read: Callable[[Any], bool], why: str, *keys: str) -> KeyRule:
    return KeyRule(keys, read, why + ", got {key} {value}: leave it out")


def _among(trait: str, key: str) -> Callable[[Any], bool]:
    return lambda config: key in getattr(config.traits, trait)


_PAIRS = "algorithm {algorithm} learns from pairs, by DPO's loss"
_ENVIRONMENT = ("options", "max_turns", "max_turn_tokens", "max_observation_tokens", "timeout_seconds", "on_failure")
ON_POLICY_KEYS: tuple[KeyRule, ...] = (
    _unless(
        lambda c: c.traits.critic, "algorithm {algorithm} has no critic",
        "critic.", "ppo.lam", "ppo.value_clip", "ppo.critic_warmup_steps",
    ),
    _unless(lambda c: c.traits.critic, "algorithm {algorithm} compares whole completions", "ppo.whiten_rewards"),
    _unless(lambda c: c.traits.discounts, "algorithm {algorithm} does not discount", "ppo.gamma"),
    _unless(lambda c: c.traits.deviation, "algorithm {algorithm} has no groups' deviation", "ppo.group_deviation"),
    _unless(lambda c: c.traits.pairs, "algorithm {algorithm} does not learn from pairs", "ppo.beta"),
    _unless(
        lambda c: c.traits.selects, "algorithm {algorithm} selects no completions",
        "ppo.selected_per_prompt", "ppo.select_above",
    ),
    *(
        _unless(_among("clips", key), "the loss of algorithm {algorithm} has no such bound", f"ppo.{key}")
        for key in ("clip_low", "clip_high", "dual_clip")
    ),
    _unless(
        lambda c: not c.traits.pairs, _PAIRS,
        "ppo.mask_truncated", "ppo.whiten_advantages", "ppo.loss_normalisation", "ppo.sampler_correction",
    ),
    _unless(
        lambda c: not c.traits.selects, "algorithm {algorithm} learns alike from all that it selects",
        "ppo.whiten_advantages", "ppo.score_clip",
    ),
    _unless(lambda c: c.ppo.whiten_advantages, "ppo.whiten_advantages is off", "ppo.whiten_shift_mean"),
    _unless(
        lambda c: c.ppo.whiten_advantages or c.ppo.whiten_rewards,
        "ppo.whiten_advantages and ppo.whiten_rewards are off", "ppo.whiten_unbiased",
    ),
    _unless(
        lambda c: c.ppo.kl_coef > 0, "there is no KL penalty (ppo.kl_coef 0)",
        "ppo.kl_estimator", "ppo.kl_in", "ppo.kl_target", "ppo.kl_horizon",
    ),
    _unless(lambda c: c.ppo.kl_target is not None, "ppo.kl_coef stays (no ppo.kl_target)", "ppo.kl_horizon"),
    _unless(
        lambda c: c.uses_reference, "nothing asks for a reference (ppo.kl_coef 0)",
        "reference.", "ppo.reference_refresh_every",
    ),
    _unless(lambda c: c.ppo.dynamic_sampling, "ppo.dynamic_sampling is off", "ppo.max_refills"),
    _unless(lambda c: c.ppo.overlong_fraction > 0, "ppo.overlong_fraction is 0", "ppo.overlong_penalty"),
    _unless(
        lambda c: c.ppo.sampler_correction != "none", "ppo.sampler_correction is none", "ppo.sampler_correction_clip"
    ),
    _unless(
        lambda c: c.ppo.sampler_correction == "mask", "ppo.sampler_correction masks no token",
        "ppo.sampler_correction_low", "ppo.masked_tokens_count",
    ),
    _unless(
        lambda c: c.ppo.ptx_coef > 0, "there is no pretraining loss (ppo.ptx_coef 0)",
        "data.max_length", "data.ptx_sources",
    ),
    _unless(
        lambda c: c.environment.path is not None, "there is no environment (environment.path)",
        *(f"environment.{key}" for key in _ENVIRONMENT),
    ),
)  # fmt: skip
PREFERENCE_KEYS: tuple[KeyRule, ...] = (
    *(
        KeyRule(
            (f"loss.{key}",), _among("own_keys", key),
            f"{{key}} is read by algorithm {name} alone, got {{value}} with {{algorithm}}: leave it out, or take "
            f"--algorithm {name}",
        )
        for name, traits in PREFERENCE.items() for key in traits.own_keys
    ),
    _unless(lambda c: c.traits.reference, "algorithm {algorithm} asks no reference", "reference."),
)  # fmt: skip
SFT_KEYS: tuple[KeyRule, ...] = (
    _unless(lambda c: c.algorithm == "distill", "algorithm {algorithm} has no teacher", "distill."),
    _unless(lambda c: c.data.condition_buckets > 0, "data.condition_buckets is 0", "data.condition_template"),
)
